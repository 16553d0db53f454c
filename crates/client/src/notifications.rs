//! Waits that the client reports to its user.

use std::time::Duration;

/// Waiting for the next gpushd while a gpushd refuses changes because it is stopping.
pub(crate) struct RestartWait {
    /// Maximum time from the first refusal.
    pub(crate) most: Duration,
    /// Time from the first refusal until `tell` is called.
    pub(crate) silence: Duration,
    /// Notifies the user that the client waits. `None` after the notification.
    pub(crate) tell: Option<Box<dyn Fn() + Send + Sync>>,
}

impl std::fmt::Debug for RestartWait {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RestartWait").field("most", &self.most).finish_non_exhaustive()
    }
}

/// The notification about a slow answer, which is sent only once.
pub(crate) struct Slow {
    pub(crate) after: Duration,
    /// The argument is the time limit for the answer.
    pub(crate) tell: Box<dyn Fn(Duration) + Send + Sync>,
}

impl std::fmt::Debug for Slow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Slow").field("after", &self.after).finish_non_exhaustive()
    }
}
