//! Signals: the first SIGTERM stops gpushd gracefully, the second one stops it at once.
//!
//! The second SIGTERM must work even if gpushd hangs. So it does not go through the async runtime: signal-hook's
//! handler ends the process directly, as the default action of the signal would.
//!
//! Some programs send two signals for one request: `timeout` signals its child and then the child's
//! process group. So gpushd ignores a second signal that arrives shortly after the first.

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

/// A second signal within this time counts as the same request.
const SAME_REQUEST: Duration = Duration::from_millis(100);

/// Whether SIGTERM or SIGINT arrived before [`Signals`] started to listen.
pub(crate) type EarlyStop = Arc<AtomicBool>;

/// Registers handlers: the first SIGTERM or SIGINT is stored, a second one ends the process at once. SIGHUP has no
/// effect yet, because gpushd has not read the config at this point.
pub(crate) fn register() -> std::io::Result<EarlyStop> {
    let early = EarlyStop::default();
    let asked = Arc::new(AtomicBool::new(false));
    // Block signals until all handlers are registered. Otherwise a signal could be lost while its first handler is
    // being registered.
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
            thread::sleep(SAME_REQUEST);
            asked.store(true, Ordering::SeqCst);
        }
    };
    thread::Builder::new().name("signals".to_owned()).spawn(first)?;
    Ok(early)
}

/// A request that arrived as a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SignalRequest {
    /// SIGTERM or SIGINT.
    Stop,
    /// SIGHUP: read the config again.
    Reload,
}

/// Receives signals within the runtime.
#[derive(Debug)]
pub(crate) struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
    early: EarlyStop,
}

impl Signals {
    pub(crate) fn listen(early: EarlyStop) -> std::io::Result<Self> {
        Ok(Self {
            early,
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for the next request.
    pub(crate) async fn next(&mut self) -> SignalRequest {
        // The handlers of `register` also set `early`, so a signal that arrived before this call is not lost.
        if self.early.swap(false, Ordering::SeqCst) {
            return SignalRequest::Stop;
        }
        tokio::select! {
            _ = self.terminate.recv() => SignalRequest::Stop,
            _ = self.interrupt.recv() => SignalRequest::Stop,
            _ = self.hangup.recv() => SignalRequest::Reload,
        }
    }
}
