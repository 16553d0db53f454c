//! Signals: the first SIGTERM stops the agent gracefully, the second one at once.
//!
//! The second must work even if the agent hangs, so it does not pass through the runtime: signal-hook's handler
//! ends the process directly, as the signal's default action would.
//!
//! Some programs send two signals for one request: `timeout` signals its child and then the child's group. So a
//! second signal counts only some time after the first.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use nix::sys::signal::{SigSet, Signal as Blocked};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator,
};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Time after the first signal in which another one counts as the same request.
const ONE_WISH: Duration = Duration::from_millis(100);

/// Whether a stop was requested before [`Signals`] listened.
pub(crate) type Early = Arc<AtomicBool>;

/// Makes a second SIGTERM or SIGINT end the process at once, and remembers the first. SIGHUP has no effect yet,
/// because the config is about to be read.
pub(crate) fn arm() -> std::io::Result<Early> {
    let early = Early::default();
    let asked = Arc::new(AtomicBool::new(false));
    // A signal that arrives during the registration of its first handler would be lost, so signals are blocked
    // until all handlers are registered.
    let mut blocked = SigSet::empty();
    [Blocked::SIGTERM, Blocked::SIGINT, Blocked::SIGHUP].into_iter().for_each(|one| blocked.add(one));
    blocked.thread_block()?;
    for number in [SIGTERM, SIGINT] {
        signal_hook::flag::register(number, Arc::clone(&early))?;
    }
    signal_hook::flag::register(SIGHUP, Arc::default())?;
    for number in [SIGTERM, SIGINT] {
        signal_hook::flag::register_conditional_default(number, Arc::clone(&asked))?;
    }
    let mut signals = iterator::Signals::new([SIGTERM, SIGINT])?;
    blocked.thread_unblock()?;
    let first = move || {
        if signals.forever().next().is_some() {
            thread::sleep(ONE_WISH);
            asked.store(true, Ordering::SeqCst);
        }
    };
    thread::Builder::new().name("signals".to_owned()).spawn(first)?;
    Ok(early)
}

/// A request by signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Asked {
    /// SIGTERM or SIGINT.
    Stop,
    /// SIGHUP: read the config again.
    Reload,
}

/// The signals as they arrive, within the runtime.
#[derive(Debug)]
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    early: Early,
}

impl Signals {
    /// Starts listening.
    pub(crate) fn listen(early: Early) -> std::io::Result<Self> {
        Ok(Self {
            early,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for the next one.
    pub(crate) async fn next(&mut self) -> Asked {
        // Each handler sets it, so that signals before this call are not lost.
        if self.early.swap(false, Ordering::SeqCst) {
            return Asked::Stop;
        }
        tokio::select! {
            _ = self.terminate.recv() => Asked::Stop,
            _ = self.interrupt.recv() => Asked::Stop,
            _ = self.hangup.recv() => Asked::Reload,
        }
    }
}
