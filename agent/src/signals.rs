//! Signals: the first SIGTERM asks the agent to stop, the second one ends it.
//!
//! The second must work even when the agent is wedged, so it does not pass through the runtime:
//! signal-hook's handler ends the process itself, as the signal would have without us.
//!
//! Some ask once by two signals: `timeout` signals its child and then the group that the child is in.
//! So a second one counts from a moment after the first on.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use signal_hook::{
    consts::{SIGINT, SIGTERM},
    iterator,
};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// How soon after the first signal another is the same wish.
const ONE_WISH: Duration = Duration::from_millis(100);

/// Makes a second SIGTERM or SIGINT end the process at once.
pub(crate) fn arm() -> std::io::Result<()> {
    let asked = Arc::new(AtomicBool::new(false));
    for number in [SIGTERM, SIGINT] {
        signal_hook::flag::register_conditional_default(number, Arc::clone(&asked))?;
    }
    let mut signals = iterator::Signals::new([SIGTERM, SIGINT])?;
    let first = move || {
        if signals.forever().next().is_some() {
            thread::sleep(ONE_WISH);
            asked.store(true, Ordering::SeqCst);
        }
    };
    thread::Builder::new().name("signals".to_owned()).spawn(first).map(drop)
}

/// What somebody asked for by signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// SIGTERM or SIGINT.
    Stop,
    /// SIGHUP: read the config again.
    Reload,
}

/// The signals as they come, within the runtime.
#[derive(Debug)]
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    /// Starts to listen.
    pub(crate) fn listen() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The next one.
    pub(crate) async fn next(&mut self) -> Asked {
        tokio::select! {
            _ = self.terminate.recv() => Asked::Stop,
            _ = self.interrupt.recv() => Asked::Stop,
            _ = self.hangup.recv() => Asked::Reload,
        }
    }
}
