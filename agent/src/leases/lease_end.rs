//! Ends leases: watches their bindings, and waits for their remaining processes.
//!
//! ```text
//! active ──► releasing ──► probe ─┬─ nothing left ─► end recorded ─► capacity free
//!                            ▲    └─ processes left: recorded as releasing ─► a pidfd, or the next probe
//!                            └──────────────────────────────────────────────────┘
//! ```
//!
//! Each open lease has one task. The task waits until the binding of the lease ends: until the process has ended, or
//! the cgroup is empty. While the lease is releasing, the task waits for the processes of the lease instead, by their
//! pidfds. When a process ends, the task asks the driver and the MPS daemon again which processes are left. If a
//! process has no pidfd, or gpushd already watches its maximum number of processes ([`Awaited`]), the task asks at
//! intervals. If gpushd cannot read a process or a cgroup, the lease does not end.

use std::{
    sync::{Arc, OnceLock},
    time::{Duration, Instant},
};

use gpush_api::{AtLeaseEnd, EndReason, LeaseBinding, LeaseId, LeaseMember, LeaseState};
use gpush_core::lease::machine::{self, Effect, EndProcesses, Event};
use gpush_host::{
    cgroup,
    pidfd::{Awaited, PidFd},
    proc, subtask,
};
use gpush_store::{LeaseRecord, NewAudit};
use jiff::Timestamp;
use nix::sys::signal::Signal;
use tokio::{sync::watch, task::JoinHandle};

use super::{
    Leases, dynamic, expiry, job,
    processes::{self, RemainingProcesses},
    queue, restored, scope,
};
use crate::{mps, state::OpenLease, tasks::TaskName};

/// First and longest pause between two probes of a releasing lease. gpushd probes at once if a process of the lease
/// ends.
const PROBE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(5));

/// Longest pause between two probes while the driver or an MPS daemon does not answer.
const UNKNOWN: Duration = Duration::from_secs(1);

/// Pause between two attempts to record the end of a lease.
const RETRY: Duration = Duration::from_secs(1);

/// Maximum number of processes whose pidfds gpushd watches for one releasing lease.
const MOST_AWAITED: usize = 64;

/// Returns the current time, in the form that the state machine of leases uses.
fn now() -> machine::Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

/// Returns the time from SIGTERM to SIGKILL, for a revocation that does not set it.
pub(super) fn grace(leases: &Leases) -> Duration {
    Duration::from_secs(leases.handles.state.config().processes.grace_s.into())
}

/// Starts the tasks that serve all leases until gpushd stops: they end expired leases, and serve the queue.
pub(crate) fn spawn(leases: &Leases) -> Vec<JoinHandle<()>> {
    let (tasks, leases) = (&leases.handles.tasks, || leases.clone());
    let (expiry, lost, restored, queue) = (leases(), leases(), leases(), leases());
    vec![
        tasks.spawn(TaskName::LeaseExpiry, move || expiry::expire(expiry.clone())),
        tasks.spawn(TaskName::LostLeases, move || expiry::end_lost(lost.clone())),
        tasks.spawn_for(TaskName::RestoredRequests, "an earlier gpushd", move || restored::expire(restored.clone())),
        tasks.spawn(TaskName::LeaseQueue, move || queue::run(queue.clone())),
    ]
}

/// Takes over the leases of an earlier gpushd.
pub(crate) fn take_over(leases: &Leases) {
    let open: Vec<Arc<OpenLease>> = leases.handles.state.leases().open.values().cloned().collect();
    for lease in open {
        match lease.state.name() {
            // The module `restored` has already put the lease back into the queue.
            LeaseState::Queued => {}
            LeaseState::Active | LeaseState::Releasing => {
                if let Some(at) = lease.record.revocation.as_ref().and_then(|revocation| revocation.processes_end_at) {
                    let notice = Duration::try_from(at.duration_since(Timestamp::now())).unwrap_or_default();
                    apply(leases, lease.id(), Event::Revoked(Some(EndProcesses { notice, grace: grace(leases) })));
                }
                watch(leases, lease.id());
            }
            // The recovery of the lease's operation makes the lease active or ends it.
            LeaseState::Granting => watch(leases, lease.id()),
            LeaseState::Ended => {}
        }
    }
}

/// Applies an event to a lease, and returns what gpushd must do. Returns an empty list if the lease has ended.
pub(super) fn apply(leases: &Leases, id: LeaseId, event: Event) -> Vec<Effect> {
    leases.handles.state.change_leases(|table| {
        let Some(lease) = table.get_mut(id) else { return Vec::new() };
        let (state, effects) = machine::step(lease.state, event, now());
        lease.state = state;
        if let machine::State::Ended(_) = state {
            lease.queue = None;
        }
        effects
    })
}

/// Begins to end a lease. Returns `false` if the lease was not active.
pub(super) async fn begin_end(leases: &Leases, id: LeaseId, event: Event) -> bool {
    let effects = apply(leases, id, event);
    let begins = effects.contains(&Effect::WatchProcesses);
    if effects.contains(&Effect::CloseAdmission)
        && let Some(lease) = leases.handles.state.leases().open.get(&id)
    {
        mps::admit(&leases.handles.mps, &lease.record.members).await;
    }
    watch(leases, id);
    begins
}

/// Ends a lease whose client disconnected before gpushd sent the answer.
pub(super) async fn end_unused(leases: &Leases, id: LeaseId) {
    begin_end(leases, id, Event::Released).await;
}

/// Starts the task that watches a lease. If the task already exists, wakes it.
pub(super) fn watch(leases: &Leases, id: LeaseId) {
    let mut watched = leases.watchers();
    if let Some(changed) = watched.get(&id) {
        changed.send_replace(());
        return;
    }
    let changed = watched.entry(id).or_default().clone();
    drop(watched);
    let (tasks, leases) = (leases.handles.tasks.clone(), leases.clone());
    tasks.spawn_for(TaskName::LeaseWatch, format!("lease {id}"), move || {
        let (leases, mut changed) = (leases.clone(), changed.subscribe());
        async move {
            let stopping = leases.handles.stopping.clone();
            let _stopped = stopping.run_until_cancelled(watch_until_end(&leases, id, &mut changed)).await;
            leases.watchers().remove(&id);
        }
    });
}

/// Watches a lease until it ends.
async fn watch_until_end(leases: &Leases, id: LeaseId, changed: &mut watch::Receiver<()>) {
    loop {
        let Some(lease) = leases.handles.state.leases().open.get(&id).cloned() else { return };
        match lease.state.name() {
            LeaseState::Active => tokio::select! {
                () = binding_ends(leases, &lease) => {
                    tracing::info!(lease = %id, "lease {id}: the process that it is bound to has ended, or its cgroup \
                        is empty");
                    let effects = apply(leases, id, Event::BindingEnded);
                    if effects.contains(&Effect::CloseAdmission) {
                        mps::admit(&leases.handles.mps, &lease.record.members).await;
                    }
                }
                _ = changed.changed() => {}
            },
            LeaseState::Releasing => return wait_for_processes(leases, id, changed).await,
            LeaseState::Granting => {
                dynamic::wait_until_decided(leases, id).await;
                // Wake the waiting tasks: either the lease now has an end time, or its capacity is free.
                leases.ends_changed.send_replace(());
                leases.capacity_freed();
            }
            LeaseState::Queued => drop(changed.changed().await),
            LeaseState::Ended => return,
        }
    }
}

/// Waits until the binding of a lease has ended. Never returns if the binding cannot end, for example if the lease only
/// has an end time.
async fn binding_ends(leases: &Leases, lease: &OpenLease) {
    match &lease.record.binding {
        // The scope is still being created, so it may be empty. When the scope has been created, gpushd wakes this
        // task.
        LeaseBinding::Scope { .. } if leases.scopes_in_creation().contains(&lease.id()) => std::future::pending().await,
        LeaseBinding::Scope { cgroup: Some(cgroup), .. }
        | LeaseBinding::Cgroup { cgroup: Some(cgroup), pid: None, .. } => cgroup::wait_until_empty(cgroup).await,
        LeaseBinding::Cgroup { cgroup: Some(cgroup), pid: Some(pid), start } => tokio::select! {
            () = cgroup::wait_until_empty(cgroup) => {}
            () = process_ends(lease.id(), *pid, *start) => {}
        },
        LeaseBinding::Process { pid: Some(pid), start } => process_ends(lease.id(), *pid, *start).await,
        LeaseBinding::Scope { cgroup: None, .. }
        | LeaseBinding::Cgroup { cgroup: None, .. }
        | LeaseBinding::Process { pid: None, .. }
        | LeaseBinding::Job { .. }
        | LeaseBinding::Time
        | LeaseBinding::None => std::future::pending().await,
    }
}

/// Waits until the process to which a lease is bound has ended.
async fn process_ends(id: LeaseId, pid: u32, start: Option<u64>) {
    let mut is_logged = false;
    loop {
        // The pidfd is opened before the start times are compared, so the pidfd refers to the
        // process with this start time.
        let opened = Awaited::open(pid).and_then(|process| Ok((process, proc::try_start(pid)?)));
        match opened {
            Ok((Some(process), found)) if found == start => return process.wait_until_ended().await,
            Ok(_) => return,
            // gpushd cannot watch the process, for example because too many files are open. Check the process again
            // later.
            Err(error) => {
                if !std::mem::replace(&mut is_logged, true) {
                    tracing::warn!(lease = %id, pid, "cannot watch the process that lease {id} is bound to: {error}");
                }
                tokio::time::sleep(UNKNOWN).await;
                if proc::try_start(pid).is_ok_and(|found| found != start) {
                    return;
                }
            }
        }
    }
}

/// Returns whether the config rule of a GPU of the lease says that gpushd ends the processes of the lease when the
/// lease ends.
pub(super) fn rule_ends_processes(leases: &Leases, record: &LeaseRecord) -> bool {
    let host = leases.handles.state.now();
    let terms = |member: &LeaseMember| host.config.rules.get(host.gpu(&member.gpu)?.rule?)?.lease;
    record.members.iter().filter_map(terms).any(|terms| terms.at_end == AtLeaseEnd::End)
}

/// Waits until no process of a releasing lease is left, then records the end of the lease.
async fn wait_for_processes(leases: &Leases, id: LeaseId, changed: &mut watch::Receiver<()>) {
    let (mut pause, mut logged) = (PROBE.0, Logged::default());
    loop {
        let Some(lease) = leases.handles.state.leases().open.get(&id).cloned() else { return };
        if lease.state.reason() == Some(EndReason::Expired) && rule_ends_processes(leases, &lease.record) {
            // Gives no notice, because the holder knew the end time of the lease. A repeated `Expired` event has no
            // further effect.
            apply(leases, id, Event::Expired(Some(EndProcesses { notice: Duration::ZERO, grace: grace(leases) })));
        }
        let left = processes::remaining_processes(leases, &lease).await;
        if let Some(why) = left.unknown() {
            logged.unread(id, &why);
        }
        let mut effects = apply(leases, id, Event::Probed(left.remaining));
        while let Some(reason) = effects.iter().find_map(recorded_end) {
            match write_end(leases, &lease, reason).await {
                Ok(()) => {
                    apply(leases, id, Event::EndRecorded);
                    mps::admit(&leases.handles.mps, &lease.record.members).await;
                    leases.capacity_freed();
                    return;
                }
                Err(error) => {
                    logged.end_failed(id, &error);
                    apply(leases, id, Event::EndNotRecorded);
                    tokio::time::sleep(RETRY).await;
                    effects = apply(leases, id, Event::Tick);
                }
            }
        }
        record_releasing(leases, &lease, &left, &mut logged).await;
        end_processes(leases, id, &lease, &left).await;
        let is_known = [left.remaining.bound, left.remaining.driver, left.remaining.daemon].iter().all(Option::is_some);
        let longest = if is_known { PROBE.1 } else { UNKNOWN };
        pause = pause.min(longest);
        let due = leases.handles.state.leases().open.get(&id).and_then(|lease| lease.state.due());
        let due = due.map_or(Duration::MAX, |due| due.saturating_sub(now()));
        let mut ended = std::pin::pin!(one_ends(left.pids().collect()));
        tokio::select! {
            () = &mut ended => pause = PROBE.0,
            _ = changed.changed() => {}
            () = tokio::time::sleep(pause.min(due)) => pause = (pause * 2).min(longest),
        }
    }
}

fn recorded_end(effect: &Effect) -> Option<EndReason> {
    match effect {
        Effect::RecordEnd(reason) => Some(*reason),
        _ => None,
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

/// Logged failures: changes of a lease that could not be recorded, and processes that could not be
/// read. Each failure is logged once, not at each attempt.
#[derive(Debug, Default)]
struct Logged {
    releasing: bool,
    end: bool,
    unread: bool,
}

impl Logged {
    fn end_failed(&mut self, id: LeaseId, error: &gpush_store::StoreError) {
        if !std::mem::replace(&mut self.end, true) {
            tracing::error!("cannot record the end of lease {id}; gpushd tries again until it succeeds: {error}");
        }
    }

    fn unread(&mut self, id: LeaseId, why: &str) {
        if !std::mem::replace(&mut self.unread, true) {
            tracing::warn!("lease {id} cannot end yet, because gpushd cannot read all processes: {why}");
        }
    }

    fn releasing_failed(&mut self, id: LeaseId, error: &gpush_store::StoreError) {
        if !std::mem::replace(&mut self.releasing, true) {
            tracing::error!(
                "cannot record that lease {id} is releasing; gpushd tries again until it succeeds: {error}"
            );
        }
    }
}

/// Records that a lease is releasing, and which processes it waits for.
async fn record_releasing(leases: &Leases, lease: &OpenLease, left: &RemainingProcesses, logged: &mut Logged) {
    let id = lease.id();
    if lease.record.state == LeaseState::Active
        && let Some(reason) = lease.state.reason()
    {
        let written = leases.handles.store.write_ending(move |tx| {
            let record = tx.release_lease(id, reason)?;
            tx.audit(ended_by_gpushd(&record, "lease.release", reason.name()))?;
            Ok(record)
        });
        match written.await {
            Ok(record) => leases.handles.state.change_leases(|table| {
                if let Some(lease) = table.get_mut(id) {
                    lease.set_record(record);
                }
            }),
            // If gpushd restarts before the release is recorded, the lease is active again, and the next gpushd begins
            // again to end it.
            Err(error) => logged.releasing_failed(id, &error),
        }
    }
    let pids: Vec<u32> = left.pids().collect();
    // Use a blocking thread, because both functions read each process from /proc.
    let read = left.clone();
    let described = subtask::blocking(move || (read.words(), read.is_unattributed())).await;
    let Some((words, unattributed)) = described else { return };
    if lease.waits_for != words || lease.left != pids || lease.unattributed != unattributed {
        leases.handles.state.change_leases(|table| {
            if let Some(lease) = table.get_mut(id) {
                (lease.waits_for, lease.left, lease.unattributed) = (words, pids, unattributed);
            }
        });
    }
}

/// Sends the signal that is due now, if any, to the processes of a lease.
async fn end_processes(leases: &Leases, id: LeaseId, lease: &OpenLease, left: &RemainingProcesses) {
    let signal = apply(leases, id, Event::Tick).into_iter().find_map(|effect| match effect {
        Effect::Terminate => Some(Signal::SIGTERM),
        Effect::Kill => Some(Signal::SIGKILL),
        _ => None,
    });
    let killed = leases.handles.state.leases().open.get(&id).is_some_and(|lease| match lease.state {
        machine::State::Releasing(releasing) => releasing.ending == machine::ProcessEnding::Killed,
        _ => false,
    });
    // After the first SIGKILL, also kill processes that started later.
    let Some(signal) = signal.or(killed.then_some(Signal::SIGKILL)) else { return };
    // All runs of a requeued job have the same cgroup. If a later run has a lease, the processes may belong to that
    // run, so send no signal.
    if job::is_superseded(&leases.handles.state.leases(), lease) {
        return;
    }
    for pid in &left.own {
        let process = match PidFd::open(*pid) {
            Ok(Some(process)) => process,
            Ok(None) => continue,
            Err(error) => {
                tracing::warn!(lease = %id, pid, "lease {id}: cannot send {signal}: {error}");
                continue;
            }
        };
        // If the pid was reused since the probe, the process of the pidfd started after the probe. Do not signal such a
        // process now: the next probe decides whether it belongs to the lease.
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
    if signal == Signal::SIGKILL {
        // Kill the whole scope, because its processes may have started other processes since the probe.
        scope::kill(leases, &lease.record).await;
    }
}

async fn write_end(leases: &Leases, lease: &OpenLease, reason: EndReason) -> Result<(), gpush_store::StoreError> {
    let id = lease.id();
    let written = leases.handles.store.write_ending(move |tx| {
        let record = tx.end_lease(id, reason)?;
        tx.audit(ended_by_gpushd(&record, "lease.end", reason.name())).map(|_| ())
    });
    written.await?;
    super::log::change(&leases.handles.state, &lease.record, format!("ended: {reason}"));
    Ok(())
}

fn ended_by_gpushd(record: &LeaseRecord, action: &str, result: &str) -> NewAudit {
    NewAudit {
        by: None,
        action: action.to_owned(),
        object: record.id.to_string(),
        result: result.to_owned(),
        detail: serde_json::json!({ "uid": record.holder.uid, "user": record.holder.user }),
    }
}

/// Records the end of a lease that was never granted, and removes the lease from the open leases.
pub(super) async fn record_end(leases: &Leases, id: LeaseId, reason: EndReason) {
    let event = match reason {
        EndReason::TimedOut => Event::WaitTimedOut,
        EndReason::Revoked => Event::Revoked(None),
        _ => Event::Released,
    };
    let Some(lease) = leases.handles.state.leases().open.get(&id).cloned() else { return };
    if lease.state.name() != LeaseState::Queued {
        begin_end(leases, id, event).await;
        return;
    }
    let mut logged = Logged::default();
    while let Err(error) = write_end(leases, &lease, reason).await {
        logged.end_failed(id, &error);
        tokio::select! {
            () = leases.handles.stopping.cancelled() => break,
            () = tokio::time::sleep(RETRY) => {}
        }
    }
    apply(leases, id, event);
}
