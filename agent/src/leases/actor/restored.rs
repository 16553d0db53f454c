//! Requests that were queued when an earlier gpushd ended. They keep their places in the queue. Their clients reconnect
//! with the idempotency keys of the requests.
//!
//! ```text
//! recorded as queued ─► a place in the order of arrival, before any request is served
//!                         │ resolved once the GPUs are known: it waits like any other request
//!                         ▼
//!                       away ─┬─ client reconnects ─► the client gets the result, or waits for it
//!                             └─ not within `RECONNECT_TIME`, or the request has no key ─► cancelled
//! ```
//!
//! Until the client reconnects, gpushd resolves its request with the rights of an ordinary user. In three cases gpushd
//! must wait for the client: a request of root exceeds the limits of users, the lease is bound to a scope or cgroup, or
//! the lease is for a Slurm job. Meanwhile the request keeps its place, but reserves nothing.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gpush_api::{ApiError, Code, LeaseBinding, LeaseId, LeaseState};
use gpush_core::lease::machine::{Event, State};
use gpush_host::{peer::Peer, proc};
use gpush_store::{LeaseRecord, StoreError};
use jiff::Timestamp;
use tokio::{
    sync::{OwnedMutexGuard, oneshot},
    time::Instant,
};

use super::{Actor, Joined, LeaseClient, LeaseCommand, PendingRequest, Rejoin, input::wait_until};
use crate::{
    leases::{
        Leases,
        job_terms::JobTerms,
        pending::PendingGrant,
        request::{Resolved, resolve},
    },
    requests::caller::{Caller, Viewer},
    state::{Observed, OpenLease},
};

/// Time within which clients must reconnect after the start of gpushd.
const RECONNECT_TIME: Duration = Duration::from_secs(30);

/// Puts queued requests back into the queue: those that arrived before the time `before`, or all of them if `before` is
/// `None`. Call this function before each restored operation is queued, so that leases and operations keep one order of
/// arrival. Also call it before gpushd serves any request. `overtaken` comes from [`overtaken_before`].
pub(crate) fn restore_places(leases: &Leases, before: Option<Timestamp>, overtaken: &BTreeMap<LeaseId, u32>) {
    let table = leases.handles.context.state.leases();
    let queued = table.open.values().filter(|lease| lease.state.name() == LeaseState::Queued);
    for lease in queued.filter(|lease| before.is_none_or(|before| lease.record.created_at <= before)) {
        // An earlier call may have started the task of the lease, and the lease may have ended since.
        if leases.actors.get(lease.id()).is_some() || leases.handles.context.state.leases().get(lease.id()).is_none() {
            continue;
        }
        let mut actor = Actor::of_open_lease(leases, OpenLease::clone(lease));
        let inbox = Arc::new(actor.inbox.clone());
        let overtaken = overtaken.get(&lease.id()).copied().unwrap_or_default();
        actor.place = Some(leases.handles.scheduler.restore_lease(lease.id(), overtaken, inbox));
        actor.client = LeaseClient::Away { until: Instant::now() + RECONNECT_TIME };
        actor.wait_until = wait_until(lease);
        actor.spawn();
    }
}

/// Reconnects a client to the request that an earlier gpushd had queued for it. Returns `None` if no request with
/// this id still waits for its client.
///
/// # Errors
/// If the request cannot be met any more, or the GPUs are not known yet.
pub(in crate::leases) async fn rejoin(
    leases: &Leases,
    caller: &Caller,
    id: LeaseId,
    job: Option<&JobTerms>,
    lock: &mut Option<OwnedMutexGuard<()>>,
) -> Result<Option<PendingGrant>, ApiError> {
    let Some(inbox) = leases.actors.get(id) else { return Ok(None) };
    let ((reply, answer), (joined, result)) = (oneshot::channel(), oneshot::channel());
    let (caller, job) = (caller.clone(), job.cloned());
    let rejoin = Rejoin { caller, job, lock: lock.take(), reply, joined };
    if let Err(unsent) = inbox.send(LeaseCommand::Rejoin(Box::new(rejoin))) {
        if let LeaseCommand::Rejoin(rejoin) = *unsent {
            *lock = rejoin.lock;
        }
        return Ok(None);
    }
    match result.await {
        Ok(Joined::Yes) => Ok(Some(PendingGrant::new(leases, &inbox, answer))),
        Ok(Joined::NotAway(returned)) => {
            *lock = returned;
            Ok(None)
        }
        Ok(Joined::Failed(error)) => Err(error),
        // The lease has just ended, or gpushd is stopping.
        Err(_) => Err(ending_error(id)),
    }
}

/// Returns how often later requests have overtaken each queued request: the number of later leases that were granted. This
/// also counts leases on GPUs that the request cannot use, and misses leases whose records were deleted.
pub(crate) async fn overtaken_before(leases: &Leases) -> BTreeMap<LeaseId, u32> {
    let table = leases.handles.context.state.leases();
    let queued = table.open.values().filter(|lease| lease.state.name() == LeaseState::Queued);
    let ids: Vec<LeaseId> = queued.map(|lease| lease.id()).collect();
    if ids.is_empty() {
        return BTreeMap::new();
    }
    let counted = leases.handles.context.store.read(move |view| {
        let count = |id: &LeaseId| Ok((*id, u32::try_from(view.granted_after(*id)?).unwrap_or(u32::MAX)));
        ids.iter().map(count).collect::<Result<BTreeMap<_, _>, StoreError>>()
    });
    // Without the counts, the requests only reserve later.
    counted.await.unwrap_or_else(|error| {
        tracing::warn!("cannot read how often queued requests were overtaken: {error}");
        BTreeMap::new()
    })
}

impl Actor {
    /// Cancels a restored request whose client can no longer reconnect. Called at the start of the task.
    pub(super) async fn cancel_if_abandoned(&mut self) {
        let (LeaseClient::Away { .. }, Some(lease)) = (&self.client, &self.lease) else { return };
        if has_ended(&lease.record) || !has_key(&self.leases, &lease.record).await {
            self.client = LeaseClient::None;
            self.apply(Event::Released);
        }
    }

    /// Resolves the request of an earlier gpushd without its client, if this is possible. Resolves any other request again
    /// if the config has changed, so that no request is granted that the rules and quotas do not allow any more.
    pub(super) async fn resolve(&mut self, seen: &Observed) {
        let (State::Queued { .. }, Some(place), Some(lease)) = (self.state, &self.place, &self.lease) else { return };
        let record = lease.record.clone();
        if let Some(request) = &self.request {
            if Arc::ptr_eq(&request.resolved.demand.config, &seen.host.config) {
                return;
            }
            let (caller, job) = (request.resolved.caller.clone(), request.resolved.job.clone());
            match resolved(&self.leases, &caller, &record, seen, job.as_ref()).await {
                Ok(resolved) => self.use_new_rules(resolved),
                // For example, the name service does not answer. The scheduler asks again.
                Err(error) if error.retryable => place.clear_demand(),
                Err(error) => {
                    self.refusal = Some(error.cause("the config has changed while the request waited"));
                    self.apply(Event::Refused);
                }
            }
            return;
        }
        if !is_resolved_without_its_client(&record) {
            return;
        }
        let caller = as_user(&self.leases, &record).await;
        if let Ok(resolved) = resolved(&self.leases, &caller, &record, seen, None).await {
            self.set_request(resolved, caller.viewer);
        }
    }

    /// Returns whether the request waits and is not resolved yet.
    fn is_unresolved(&self) -> bool {
        self.place.is_some() && self.request.is_none()
    }

    /// Replaces what the request asks for. Its client, key and binding stay the same.
    fn use_new_rules(&mut self, new: Resolved) {
        let (Some(place), Some(request)) = (&self.place, &mut self.request) else { return };
        place.set_demand(&new.demand, request.viewer);
        let bound = request.resolved.bound.clone();
        request.resolved = Resolved { bound, ..new };
    }

    /// Sets the resolved request, or replaces it.
    fn set_request(&mut self, resolved: Resolved, viewer: Viewer) {
        if let Some(place) = &self.place {
            place.set_demand(&resolved.demand, viewer);
        }
        // The key is already recorded.
        self.request = Some(PendingRequest { resolved, viewer, key: None, has_key: true });
    }

    /// Connects the client of the request again.
    pub(super) async fn rejoin(&mut self, rejoin: Rejoin) {
        let Rejoin { caller, job, lock, reply, joined } = rejoin;
        let (LeaseClient::Away { .. }, Some(lease)) = (&self.client, &self.lease) else {
            let _the_client_may_be_gone = joined.send(Joined::NotAway(lock));
            return;
        };
        let record = lease.record.clone();
        let found = match self.leases.handles.context.readings.host().await {
            Ok(seen) => resolved(&self.leases, &caller, &record, &seen, job.as_ref()).await,
            Err(error) => Err(ApiError { retryable: true, ..error }),
        };
        match found {
            Ok(resolved) => self.set_request(resolved, caller.viewer),
            // The client and its rights are known now. Only a temporary error keeps the request in the queue.
            Err(error) if self.is_unresolved() => {
                if !error.retryable {
                    self.client = LeaseClient::None;
                    self.apply(Event::Refused);
                    self.execute_effects().await;
                }
                let _the_client_may_be_gone = joined.send(Joined::Failed(error));
                return;
            }
            // The request waits already, with the rights of an ordinary user.
            Err(_) => {}
        }
        self.client = LeaseClient::Waits { reply, _lock: lock };
        let _the_client_may_be_gone = joined.send(Joined::Yes);
        if matches!(self.state, State::Active | State::Releasing(_)) && !self.moving.is_running() {
            self.answer_grant(Ok(()));
        }
    }
}

/// Returns whether gpushd can resolve a request without its client. A binding to a scope or cgroup needs the client's
/// process, and only Slurm's hooks know the data of a job.
fn is_resolved_without_its_client(record: &LeaseRecord) -> bool {
    match record.binding {
        LeaseBinding::Process { .. } | LeaseBinding::Time | LeaseBinding::None => true,
        LeaseBinding::Scope { .. } | LeaseBinding::Cgroup { .. } | LeaseBinding::Job { .. } => false,
    }
}

/// Returns the caller of a recorded request. The caller gets the rights of an ordinary user.
async fn as_user(leases: &Leases, record: &LeaseRecord) -> Caller {
    let uid = record.asked_by.uid;
    let groups = leases.handles.context.users.names().groups_of(uid).await.ok().flatten().unwrap_or_default();
    let pid = record.asked_by.pid;
    let start = match record.binding {
        // If another process has the pid now, its start time differs.
        LeaseBinding::Process { pid: bound, start } if bound == pid => start,
        _ => pid.and_then(proc::start),
    };
    // The record does not say whether root was in a container. If the recorded process does not show it, gpushd assumes
    // that root was.
    let is_recorded = matches!(record.binding, LeaseBinding::Process { pid: bound, start: Some(_) } if bound == pid);
    let is_on_this_host =
        uid != 0 || is_recorded && pid.is_some_and(|pid| proc::start(pid) == start && proc::is_on_this_host(pid));
    let peer = Peer { uid, pid, start, groups, is_on_this_host };
    Caller::with_viewer(peer, Viewer::User(uid), leases.handles.context.users.accounts().last(uid))
}

/// Resolves a recorded request again.
///
/// # Errors
/// If the request cannot be met any more, or the recorded process has ended.
async fn resolved(
    leases: &Leases,
    caller: &Caller,
    record: &LeaseRecord,
    seen: &Observed,
    job: Option<&JobTerms>,
) -> Result<Resolved, ApiError> {
    let gpus = seen.gpus(Viewer::Log);
    let resolved = resolve(leases, caller, record.request.clone(), &seen.host, &gpus, job).await?;
    check_process(&record.binding, &resolved.demand.new.binding)?;
    Ok(resolved)
}

/// Checks that another process does not have the pid of the recorded binding.
///
/// # Errors
/// If it has.
fn check_process(recorded: &LeaseBinding, resolved: &LeaseBinding) -> Result<(), ApiError> {
    match (recorded, resolved) {
        (LeaseBinding::Process { pid: Some(pid), start }, LeaseBinding::Process { pid: Some(now), start: since })
            if pid == now && start != since =>
        {
            let message = format!("the lease cannot be bound to process {pid}: that process has ended");
            Err(ApiError::new(Code::Conflict, message).hint("request a lease for a process that runs"))
        }
        _ => Ok(()),
    }
}

/// Returns whether the process that a lease is bound to has ended.
fn has_ended(record: &LeaseRecord) -> bool {
    match record.binding {
        LeaseBinding::Process { pid: Some(pid), start } => proc::start(pid) != start,
        LeaseBinding::Process { pid: None, .. }
        | LeaseBinding::Scope { .. }
        | LeaseBinding::Cgroup { .. }
        | LeaseBinding::Job { .. }
        | LeaseBinding::Time
        | LeaseBinding::None => false,
    }
}

/// Returns whether the request has an idempotency key, with which its client can reconnect. Returns `true` if the keys
/// cannot be read.
async fn has_key(leases: &Leases, record: &LeaseRecord) -> bool {
    let (uid, number) = (record.asked_by.uid, record.id.0);
    leases.handles.context.store.read(move |view| view.has_answer_with(uid, number)).await.unwrap_or(true)
}

/// Returns the error for a repeated request whose lease is still queued but already about to end.
pub(in crate::leases) fn ending_error(id: LeaseId) -> ApiError {
    ApiError::new(Code::Unavailable, format!("lease {id} of this request is about to end"))
        .hint("send the request again")
        .retryable()
}

/// Returns whether a repeated request is executed again, because its lease ended in the queue without a grant.
pub(in crate::leases) fn may_be_repeated(record: &LeaseRecord) -> bool {
    record.state == LeaseState::Ended && record.granted_at.is_none() && record.operation.is_none()
}

#[cfg(test)]
mod tests {
    use gpush_api::EndReason;

    use super::*;
    use crate::state::leases::tests::record;

    fn bound(binding: LeaseBinding) -> LeaseRecord {
        LeaseRecord { binding, ..record(1, 1000, "GPU-0") }
    }

    /// gpushd does not know the process of the client, so it must not bind the lease to a cgroup or a scope.
    #[test]
    fn request_that_needs_its_client_is_not_resolved_without_it() {
        let job = LeaseBinding::Job {
            cluster: "c".to_owned(),
            job: 7,
            node: "n".to_owned(),
            restart: 0,
            leader: None,
            cgroup: None,
            name: None,
            account: None,
        };
        for (binding, expected) in [
            (LeaseBinding::Process { pid: Some(7), start: Some(1) }, true),
            (LeaseBinding::Time, true),
            (LeaseBinding::None, true),
            (LeaseBinding::Scope { unit: None, cgroup: None }, false),
            (LeaseBinding::Cgroup { cgroup: None, pid: None, start: None }, false),
            (job, false),
        ] {
            assert_eq!(is_resolved_without_its_client(&bound(binding.clone())), expected, "{binding:?}");
        }
    }

    #[test]
    fn request_of_an_ended_process_is_abandoned() {
        let own = std::process::id();
        let process = |pid, start| has_ended(&bound(LeaseBinding::Process { pid, start }));
        let start = proc::start(own);
        assert!(start.is_some() && !process(Some(own), start));
        assert!(process(Some(own), start.map(|start| start + 1)), "another process has the pid now");
        assert!(process(Some(u32::MAX / 2), start));
        assert!(!process(None, None) && !has_ended(&bound(LeaseBinding::Time)));
    }

    #[test]
    fn repeated_request_runs_again_only_if_it_never_got_a_lease() {
        let ended =
            || LeaseRecord { state: LeaseState::Ended, reason: Some(EndReason::TimedOut), ..record(1, 1000, "GPU-0") };
        assert!(may_be_repeated(&ended()));
        assert!(!may_be_repeated(&LeaseRecord { granted_at: Some(Timestamp::UNIX_EPOCH), ..ended() }));
        assert!(!may_be_repeated(&record(1, 1000, "GPU-0")), "the lease is active");
    }

    /// Fault: gpushd restarted, and meanwhile another process of the user got the pid of the process of a queued request.
    /// gpushd bound the lease to that process.
    #[test]
    fn restored_request_is_not_bound_to_another_process_with_the_same_pid() {
        let process = |pid, start| LeaseBinding::Process { pid: Some(pid), start: Some(start) };
        check_process(&process(7, 1), &process(7, 1)).unwrap();
        // The client has reconnected from another process, or gets another binding now.
        check_process(&process(7, 1), &process(8, 2)).unwrap();
        check_process(&process(7, 1), &LeaseBinding::Scope { unit: None, cgroup: None }).unwrap();
        check_process(&LeaseBinding::Time, &process(7, 2)).unwrap();
        let error = check_process(&process(7, 1), &process(7, 2)).unwrap_err();
        assert_eq!((error.code, error.retryable), (Code::Conflict, false));
    }
}
