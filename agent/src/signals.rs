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

use nix::sys::signal::{SigSet, Signal as Blocked};
use signal_hook::{
    consts::{SIGHUP, SIGINT, SIGTERM},
    iterator,
};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// How soon after the first signal another is the same wish.
const ONE_WISH: Duration = Duration::from_millis(100);

/// Whether somebody asked to stop before [`Signals`] listened.
pub(crate) type Early = Arc<AtomicBool>;

/// Makes a second SIGTERM or SIGINT end the process at once, and remembers the first. A SIGHUP means nothing
/// yet: the config is about to be read.
pub(crate) fn arm() -> std::io::Result<Early> {
    let early = Early::default();
    let asked = Arc::new(AtomicBool::new(false));
    // A signal that arrives while its first handler is being registered is lost. So it waits until all of them are.
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
    early: Early,
}

impl Signals {
    /// Starts to listen.
    pub(crate) fn listen(early: Early) -> std::io::Result<Self> {
        Ok(Self {
            early,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// The next one.
    pub(crate) async fn next(&mut self) -> Asked {
        // Set by each of them, so that none is lost that came before anybody listened.
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
