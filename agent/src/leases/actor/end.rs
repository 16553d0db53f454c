//! The end of a releasing lease: probes for its processes, and signals for them.
//!
//! ```text
//! releasing ──► probe ─┬─ nothing left ─► end recorded ─► capacity free
//!                 ▲    └─ processes left: recorded as releasing ─► a pidfd, the next probe, or the time of a signal
//!                 └──────────────────────────────────────────────────────┘
//! ```
//!
//! A probe asks the driver and the MPS daemon which processes are left. gpushd watches these processes by their pidfds,
//! and probes again when one ends. In addition, gpushd probes at intervals of up to 5 s, because it cannot watch every
//! process ([`Awaited`]). If gpushd cannot read a process or a cgroup, the lease does not end. gpushd
//! only signals processes that a probe has just found.

use std::time::Duration;

use gpush_api::{AtLeaseEnd, EndReason, LeaseMember};
use gpush_core::lease::machine::{EndProcesses, Event, State};
use gpush_host::{
    pidfd::{Awaited, PidFd},
    proc, subtask,
};
use gpush_store::LeaseRecord;
use nix::sys::signal::Signal;
use tokio::time::Instant;

use super::{Actor, Background};
use crate::{
    leases::{
        Leases,
        processes::{self, RemainingProcesses},
        scope,
    },
    modes::mps,
};

/// First and longest pause between two probes of a releasing lease. gpushd probes at once if a process of the lease
/// ends.
const PROBE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(5));

/// Longest pause between two probes while the driver or an MPS daemon does not answer.
const UNKNOWN: Duration = Duration::from_secs(1);

/// Maximum number of processes whose pidfds gpushd watches for one releasing lease.
const MOST_AWAITED: usize = 64;

/// The result of a probe.
#[derive(Debug)]
pub(super) struct Probe {
    left: RemainingProcesses,
    /// What the lease waits for, one sentence each.
    words: Vec<String>,
    is_unattributed: bool,
}

/// Failures that are logged once, not at each attempt.
#[derive(Debug, Default)]
pub(super) struct Logged {
    pub(super) releasing: bool,
    pub(super) end: bool,
    unread: bool,
}

/// The end of a lease in progress.
#[derive(Debug, Default)]
pub(super) struct EndProgress {
    pub(super) probe: Background<Probe>,
    /// Waits until one of the processes that the last probe found has ended.
    pub(super) process_end: Background<()>,
    /// The pause before the next probe.
    pause: Duration,
    /// Time of the next probe; `None` if no probe is needed.
    next: Option<Instant>,
    /// What the last probe found.
    left: RemainingProcesses,
    /// Time of the next attempt to record the end.
    pub(super) retry: Option<Instant>,
    pub(super) logged: Logged,
}

impl EndProgress {
    /// Returns the processes of the lease that the last probe found, and that have not ended. A process that started later
    /// has the pid of an ended one.
    pub(super) fn left_own(&self) -> std::collections::BTreeSet<u32> {
        let is_found = |pid: &u32| gpush_host::proc::start(*pid).is_some_and(|start| start <= self.left.read_at);
        self.left.own.iter().copied().filter(is_found).collect()
    }

    /// Returns the time of the next probe. `signal` is the time until the next signal, before which gpushd also probes.
    pub(super) fn next_probe(&self, signal: Option<Duration>) -> Option<Instant> {
        if self.probe.is_running() {
            return None;
        }
        let signal = signal.map(|left| Instant::now() + left);
        [self.next, signal].into_iter().flatten().min()
    }

    /// Returns whether a probe is due.
    pub(super) fn is_due(&self, is_signal_due: bool) -> bool {
        !self.probe.is_running() && (is_signal_due || self.next.is_some_and(|next| next <= Instant::now()))
    }
}

impl Actor {
    /// Starts a probe for the processes of the lease, unless one runs.
    pub(super) fn start_probe(&mut self) {
        self.ending.process_end.stop();
        self.end_expired_processes();
        let (State::Releasing(_), Some(lease)) = (self.state, &self.lease) else { return };
        if self.ending.probe.is_running() {
            return;
        }
        let (leases, lease, is_moving) = (self.leases.clone(), lease.clone(), self.moving.is_running());
        self.ending.next = None;
        self.ending.probe.start(async move {
            let left = processes::remaining_processes(&leases, &lease, is_moving).await;
            // Use a blocking thread, because both functions read each process from /proc.
            let read = left.clone();
            let described = subtask::blocking(move || (read.words(), read.is_unattributed())).await;
            let (words, is_unattributed) = described.unwrap_or_default();
            Probe { left, words, is_unattributed }
        });
    }

    /// Starts a probe, and does not wait long for the next one: the driver may still list a process that has just ended.
    pub(super) fn probe_soon(&mut self) {
        self.ending.pause = Duration::ZERO;
        self.start_probe();
    }

    /// If the lease has expired, and its rule says so, ends its processes. Gives no notice, because the holder knew the end
    /// time of the lease.
    fn end_expired_processes(&mut self) {
        let (State::Releasing(releasing), Some(lease)) = (self.state, &self.lease) else { return };
        if releasing.reason == EndReason::Expired && self.leases.rule_ends_processes(&lease.record) {
            self.apply(Event::EndProcesses(EndProcesses { notice: Duration::ZERO, grace: self.leases.grace() }));
        }
    }

    /// Takes over the result of a probe.
    pub(super) fn probed(&mut self, probe: Probe) {
        let Probe { left, words, is_unattributed } = probe;
        let Some(lease) = &mut self.lease else { return };
        if let Some(why) = left.unknown()
            && !std::mem::replace(&mut self.ending.logged.unread, true)
        {
            let id = lease.id();
            tracing::warn!("lease {id} cannot end yet, because gpushd cannot read all processes: {why}");
        }
        let pids: Vec<u32> = left.pids().collect();
        if !left.remaining.is_none() {
            (lease.waits_for, lease.left, lease.unattributed) = (words, pids.clone(), is_unattributed);
        }
        let has_changed = left.pids().ne(self.ending.left.pids());
        let is_known = left.remaining.is_known();
        let remaining = left.remaining;
        self.ending.left = left;
        self.apply(Event::Probed(remaining));
        if !matches!(self.state, State::Releasing(_)) || remaining.is_none() {
            return;
        }
        // The processes that the probe has just found get the signal that is due.
        self.apply(Event::Tick);
        let longest = if is_known { PROBE.1 } else { UNKNOWN };
        let doubled = if has_changed { PROBE.0 } else { self.ending.pause * 2 };
        self.ending.pause = doubled.clamp(PROBE.0, longest);
        self.ending.next = Some(Instant::now() + self.ending.pause);
        self.ending.process_end.start(one_ends(pids));
    }

    /// Sends a signal to the processes of the lease.
    pub(super) async fn signal(&mut self, signal: Signal) {
        let Some(lease) = &self.lease else { return };
        let (leases, id, left) = (&self.leases, lease.id(), &self.ending.left);
        for pid in &left.own {
            let process = match PidFd::open(*pid) {
                Ok(Some(process)) => process,
                Ok(None) => continue,
                Err(error) => {
                    tracing::warn!(lease = %id, pid, "lease {id}: cannot send {signal}: {error}");
                    continue;
                }
            };
            // If the pid was reused since the probe, the process of the pidfd started after the probe. Do not signal such
            // a process now: the next probe decides whether it belongs to the lease.
            let is_found_process = proc::start(*pid).is_some_and(|start| start <= left.read_at);
            if !is_found_process || proc::owner(*pid) != Some(lease.record.holder.uid) {
                continue;
            }
            if signal == Signal::SIGKILL {
                // Ask MPS to end the client first: if a client is killed while it computes, the MPS server may end too.
                mps::terminate(&leases.handles.mps, *pid).await;
            }
            match process.signal(signal) {
                Ok(()) => tracing::info!(lease = %id, pid, "lease {id}: sent {signal} to process {pid}"),
                Err(error) => {
                    tracing::warn!(lease = %id, pid, "lease {id}: cannot send {signal} to process {pid}: {error}");
                }
            }
        }
        // While systemd moves the caller, the connection to systemd is in use. The next probe sends SIGKILL again.
        if signal == Signal::SIGKILL && !self.moving.is_running() {
            // Kill the whole scope, because its processes may have started other processes since the probe.
            scope::kill(leases, &lease.record).await;
        }
    }
}

impl Leases {
    /// Returns the time from SIGTERM to SIGKILL, for a revocation that does not set it.
    pub(in crate::leases) fn grace(&self) -> Duration {
        self.handles.context.state.config().processes.grace
    }

    /// Returns whether the config rule of a GPU of the lease says that gpushd ends the processes of the lease when the
    /// lease ends.
    pub(super) fn rule_ends_processes(&self, record: &LeaseRecord) -> bool {
        let host = self.handles.context.state.now();
        let terms = |member: &LeaseMember| host.config.rules.get(host.gpu(&member.gpu_uuid)?.rule?)?.lease;
        record.members.iter().filter_map(terms).any(|terms| terms.at_end == AtLeaseEnd::End)
    }
}

/// Waits until one of these processes ends. Never returns if none of them can be watched.
async fn one_ends(pids: Vec<u32>) {
    let mut watched = tokio::task::JoinSet::new();
    for pid in pids.into_iter().take(MOST_AWAITED) {
        match Awaited::open(pid) {
            Ok(Some(process)) => drop(watched.spawn(async move { process.wait_until_ended().await })),
            // The process has already ended, but the driver may still list it briefly.
            Ok(None) => {}
            // Watch no further processes now: the next probe reads all processes again.
            Err(error) => {
                tracing::debug!(pid, "cannot watch a process: {error}");
                break;
            }
        }
    }
    if subtask::next(&mut watched).await.is_none() {
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use futures_util::FutureExt;

    use super::*;

    fn probe() -> Probe {
        Probe { left: RemainingProcesses::default(), words: Vec::new(), is_unattributed: false }
    }

    #[tokio::test(start_paused = true)]
    async fn probe_is_due_at_its_time_or_with_a_signal() {
        let mut ending = EndProgress::default();
        let second = Duration::from_secs(1);
        assert_eq!((ending.next_probe(None), ending.is_due(false), ending.is_due(true)), (None, false, true));
        ending.next = Some(Instant::now() + 2 * second);
        assert_eq!(ending.next_probe(Some(second)), Some(Instant::now() + second), "the signal comes first");
        assert_eq!(ending.next_probe(Some(3 * second)), ending.next);
        assert!(!ending.is_due(false));
        tokio::time::advance(2 * second).await;
        assert!(ending.is_due(false));
    }

    #[tokio::test(start_paused = true)]
    async fn only_one_probe_runs_at_a_time() {
        let mut ending = EndProgress { next: Some(Instant::now()), ..EndProgress::default() };
        let (done, result) = tokio::sync::oneshot::channel::<Probe>();
        ending.probe.start(async { result.await.unwrap_or_else(|_| probe()) });
        assert!(ending.probe.finished().now_or_never().is_none());
        assert_eq!((ending.next_probe(Some(Duration::ZERO)), ending.is_due(true)), (None, false));
        done.send(probe()).unwrap();
        assert!(ending.probe.finished().now_or_never().is_some() && ending.is_due(false));
    }

    #[tokio::test]
    async fn wait_ends_with_the_first_process_that_ends() {
        let start = || Command::new("/bin/cat").stdin(Stdio::piped()).spawn().unwrap();
        let (mut stays, mut goes) = (start(), start());
        let mut waiting = Box::pin(one_ends(vec![stays.id(), goes.id()]));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(goes.stdin.take());
        waiting.await;
        goes.wait().unwrap();
        assert!(one_ends(vec![goes.id()]).now_or_never().is_none(), "a process that has ended cannot be watched");
        drop(stays.stdin.take());
        stays.wait().unwrap();
    }
}
