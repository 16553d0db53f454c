//! Notifications to the service manager (`sd_notify(3)`).
//!
//! A separate thread sends the notifications. So the program does not block if the service manager does
//! not read, for example because PID 1 hangs.

use std::{
    sync::{
        OnceLock,
        mpsc::{SyncSender, TrySendError, sync_channel},
    },
    time::Duration,
};

use sd_notify::NotifyState;

/// Maximum number of queued notifications. If the queue is full, further notifications are not necessary, because the
/// service manager does not read them.
const MOST_WAITING: usize = 64;

/// A notification.
#[derive(Debug)]
pub enum Notification {
    /// The program answers requests.
    Ready,
    /// The program has begun to stop.
    Stopping,
    /// A status line for `systemctl status`.
    Status(String),
    /// Keep-alive for the watchdog.
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

/// Queues a notification to the service manager, if there is one. Notifications are sent in the order of the calls.
/// Never blocks.
pub fn send(notification: Notification) {
    let Some(thread) = THREAD.get_or_init(start) else { return };
    match thread.try_send(notification) {
        Ok(()) => {}
        Err(TrySendError::Full(lost)) => {
            tracing::warn!("the service manager does not read its notification socket, so {lost:?} was not sent");
        }
        Err(TrySendError::Disconnected(_)) => {}
    }
}

/// Returns the interval between two [`Notification::Alive`]: half the watchdog's timeout. Returns `None` without a
/// watchdog.
pub fn watchdog_period() -> Option<Duration> {
    let mut timeout_us = 0;
    let is_enabled = sd_notify::watchdog_enabled(false, &mut timeout_us) && timeout_us > 1;
    is_enabled.then(|| Duration::from_micros(timeout_us) / 2)
}

/// Returns whether pid 1 started this process as a service that sends notifications.
pub fn is_service() -> bool {
    std::env::var_os("NOTIFY_SOCKET").is_some() && nix::unistd::getppid().as_raw() == 1
}

fn start() -> Option<SyncSender<Notification>> {
    std::env::var_os("NOTIFY_SOCKET")?;
    let (sender, waiting) = sync_channel::<Notification>(MOST_WAITING);
    let thread = std::thread::Builder::new().name("notify".to_owned()).spawn(move || {
        for notification in waiting {
            if let Err(error) = notification.send() {
                tracing::warn!("cannot send {notification:?} to the service manager: {error}");
            }
        }
    });
    match thread {
        Ok(_) => Some(sender),
        Err(error) => {
            tracing::error!("cannot notify the service manager: {error}");
            None
        }
    }
}
