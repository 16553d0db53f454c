//! What the service manager is told, by a thread of its own: one that does not listen (a wedged
//! PID 1, a full socket) must not hold up the agent.

use std::sync::{
    OnceLock,
    mpsc::{SyncSender, TrySendError, sync_channel},
};

use sd_notify::NotifyState;

/// Sentences that may wait. A manager that has not listened to so many has no use for more.
const MOST_WAITING: usize = 64;

/// A sentence.
#[derive(Debug)]
pub enum Notification {
    /// It is being served.
    Ready,
    /// It ends.
    Stopping,
    /// For `systemctl status`.
    Status(String),
    /// It is alive.
    Alive,
}

impl Notification {
    fn send(&self) -> std::io::Result<()> {
        let state = match self {
            Self::Ready => NotifyState::Ready,
            Self::Stopping => NotifyState::Stopping,
            Self::Status(status) => NotifyState::Status(status),
            Self::Alive => NotifyState::Watchdog,
        };
        sd_notify::notify(false, &[state])
    }
}

static THREAD: OnceLock<Option<SyncSender<Notification>>> = OnceLock::new();

/// Tells the service manager, if there is one, in the order of the calls. Never blocks.
pub fn send(what: Notification) {
    let Some(thread) = THREAD.get_or_init(start) else { return };
    match thread.try_send(what) {
        Ok(()) => {}
        Err(TrySendError::Full(what)) => tracing::warn!("the service manager does not listen: {what:?} is not said"),
        Err(TrySendError::Disconnected(_)) => {}
    }
}

/// How often the service manager wants to hear that we are alive, halved; `None` when it does not.
pub fn watchdog_period() -> Option<std::time::Duration> {
    let mut within_us = 0;
    let wanted = sd_notify::watchdog_enabled(false, &mut within_us) && within_us > 1;
    wanted.then(|| std::time::Duration::from_micros(within_us) / 2)
}

fn start() -> Option<SyncSender<Notification>> {
    std::env::var_os("NOTIFY_SOCKET")?;
    let (sender, said) = sync_channel::<Notification>(MOST_WAITING);
    let spoken = std::thread::Builder::new().name("notify".to_owned()).spawn(move || {
        for what in said {
            if let Err(error) = what.send() {
                tracing::warn!("the service manager can't be told {what:?}: {error}");
            }
        }
    });
    match spoken {
        Ok(_) => Some(sender),
        Err(error) => {
            tracing::error!("the service manager can't be told anything: {error}");
            None
        }
    }
}
