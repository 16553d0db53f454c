//! Requests that change a lease: release, renewal and revocation. The task of the lease records each change before gpushd
//! answers.

use std::{sync::Arc, time::Duration};

use gpush_api::{
    ApiError, Code, EndReason, LONGEST_LEASE_S, Lease, LeaseRenewRequest, LeaseRevokeRequest, LeaseState,
    text::local_time,
};
use gpush_core::lease::machine::EndProcesses;
use jiff::Timestamp;
use tokio::sync::oneshot;

use super::{
    Leases,
    actor::{ChangeError, ChangeRequest, LeaseCommand, NOTICE, RequestedChange, expires_at},
    renewal, show,
};
use crate::{
    requests::{
        caller::{Caller, Viewer},
        idempotency::Key,
        request::reason,
    },
    state::{OpenLease, leases::to_api},
};

/// Returns whether the caller may change the leases of `holder`: an administrator, the holder, and the owner of the holder's
/// subordinate uid.
///
/// # Errors
/// If `holder` may be a subordinate uid of the caller, and the name service does not answer.
async fn may_change(leases: &Leases, caller: &Caller, holder: u32) -> Result<bool, ApiError> {
    if caller.viewer.is_admin() || caller.holds(holder) {
        return Ok(true);
    }
    show::owns(leases, caller.uid(), holder).await
}

/// Finds a lease that has not ended and that the caller may change. Returns `Err(Ok(lease))` if the lease has ended.
pub(super) async fn find(
    leases: &Leases,
    caller: &Caller,
    text: &str,
    what: &str,
) -> Result<Arc<OpenLease>, Result<Lease, ApiError>> {
    let id = show::id(text).map_err(Err)?;
    if let Some(lease) = leases.handles.context.state.leases().open.get(&id).cloned() {
        return match may_change(leases, caller, lease.record.holder.uid).await.map_err(Err)? {
            true => match show::job_denied(&lease.record, caller, what).filter(|_| what != "keep") {
                Some(denied) => Err(Err(denied)),
                None => Ok(lease),
            },
            false => Err(Err(show::denied(&lease, caller, what))),
        };
    }
    let record = match leases.handles.context.store.read(move |view| view.lease(id)).await {
        Ok(Some(record)) => record,
        Ok(None) => return Err(Err(show::unknown(id))),
        Err(error) => return Err(Err(error.into())),
    };
    match may_change(leases, caller, record.holder.uid).await {
        Ok(true) => Err(Ok(to_api(&record, Viewer::Log))),
        // Users do not see ended leases of other users.
        Ok(false) => Err(Err(caller.rank_unknown(&format!("{what} lease {id}")).unwrap_or_else(|| show::unknown(id)))),
        Err(unknown) => Err(Err(unknown)),
    }
}

/// Finds a lease as [`find`] does, and lets the task of the lease make a change. If the lease has ended meanwhile, finds
/// it again.
pub(super) async fn change(
    leases: &Leases,
    caller: &Caller,
    (text, what): (&str, &str),
    key: Option<Key>,
    change: RequestedChange,
) -> Result<(Arc<OpenLease>, Result<(), ChangeError>), Result<Lease, ApiError>> {
    let by = caller.actor(leases.handles.context.users.user(caller.uid()).await);
    let mut tasks = leases.actors.watch();
    loop {
        // Mark changes as seen before the checks, so that a change during the checks ends the wait below.
        tasks.mark_unchanged();
        let lease = find(leases, caller, text, what).await?;
        let (reply, changed) = oneshot::channel();
        let request = ChangeRequest { change: change.clone(), by: Some(by.clone()), key: key.clone(), reply };
        let sent = leases.actors.get(lease.id()).is_some_and(|inbox| inbox.send(LeaseCommand::Change(request)).is_ok());
        if sent && let Ok(changed) = changed.await {
            return Ok((lease, changed));
        }
        if leases.handles.context.stopping.is_cancelled() {
            return Err(Err(ApiError::stopping("gpushd is stopping")));
        }
        // The task of the lease has just ended, or begins.
        let _changed = tasks.changed().await.is_ok();
    }
}

impl From<ChangeError> for ApiError {
    fn from(error: ChangeError) -> Self {
        match error {
            ChangeError::Inactive => Self::new(Code::Conflict, "the lease is not active"),
            ChangeError::Kept => Self::new(Code::Conflict, "the lease is kept, although it is unused"),
            ChangeError::MayBeUsed => Self::new(Code::Conflict, "a process of the lease has just started"),
            ChangeError::Unrecorded(error) => error.into(),
            ChangeError::OperationRuns(error) => error,
        }
    }
}

/// Returns whether an earlier request with this idempotency key was executed.
pub(super) async fn is_repeated(leases: &Leases, key: Option<&Key>) -> Result<bool, ApiError> {
    match key {
        Some(key) => leases.handles.idempotency.is_done(key).await,
        None => Ok(false),
    }
}

/// Releases a lease. A lease that is releasing or has ended is returned unchanged.
///
/// # Errors
/// If there is no lease with this id, if another user holds it, or if the release cannot be recorded.
pub(crate) async fn release(leases: &Leases, caller: &Caller, text: &str, key: Option<Key>) -> Result<Lease, ApiError> {
    release_and_end(leases, caller, text, key, None).await
}

/// Does the same as [`release`]. `end` says when the remaining processes of the lease must end.
///
/// # Errors
/// As [`release`].
pub(super) async fn release_and_end(
    leases: &Leases,
    caller: &Caller,
    text: &str,
    key: Option<Key>,
    end: Option<EndProcesses>,
) -> Result<Lease, ApiError> {
    match change(leases, caller, (text, "release"), key, RequestedChange::Release { end }).await {
        Ok((lease, changed)) => {
            changed?;
            lease_after_change(leases, caller, &lease).await
        }
        Err(ended) => ended,
    }
}

/// Returns a lease after a change. Before that, waits briefly for the end of the lease: a lease without processes ends
/// within this time, and is then shown as ended.
async fn lease_after_change(leases: &Leases, caller: &Caller, lease: &OpenLease) -> Result<Lease, ApiError> {
    /// Maximum time that gpushd waits for the end of the lease before it answers.
    const SOON: Duration = Duration::from_millis(200);
    let id = lease.id();
    let mut snapshots = leases.handles.context.state.watch();
    let ended = snapshots.wait_for(|host| !host.leases.open.contains_key(&id));
    let _may_be_releasing = tokio::time::timeout(SOON, ended).await.is_ok();
    show::one(leases, caller.viewer, &id.to_string()).await
}

/// Sets a new end time for an active lease.
///
/// # Errors
/// If the lease is not active, if another user holds it, if the quota does not allow the duration, if an earlier request
/// waits for the capacity of the lease, or if the new end time cannot be recorded.
pub(crate) async fn renew(
    leases: &Leases,
    caller: &Caller,
    text: &str,
    request: LeaseRenewRequest,
    key: Option<Key>,
) -> Result<Lease, ApiError> {
    let lease = match find(leases, caller, text, "renew").await {
        Ok(lease) => lease,
        Err(Ok(ended)) => return Err(not_active(&ended)),
        Err(Err(error)) => return Err(error),
    };
    if !(1..=LONGEST_LEASE_S).contains(&request.duration_s) {
        return Err(ApiError::new(Code::BadRequest, "a duration must be 1 second to 52 weeks")
            .hint("write 90s, 15m, 1h30m or 2d"));
    }
    if is_repeated(leases, key.as_ref()).await? {
        return show::one(leases, caller.viewer, text).await;
    }
    super::request::check_duration(leases, caller, &lease, request.duration_s).await?;
    if lease.state.name() != LeaseState::Active {
        return Err(not_active(&lease.to_api(caller.viewer)));
    }
    let expires_at = expires_at(Some(request.duration_s));
    if !caller.viewer.is_admin() {
        renewal::check(&leases.handles.context.state.leases(), &lease, expires_at, Timestamp::now())?;
    }
    match change(leases, caller, (text, "renew"), key, RequestedChange::Renew { expires_at }).await {
        Ok((_, Ok(()))) => show::one(leases, caller.viewer, text).await,
        Ok((_, Err(ChangeError::Inactive))) => Err(not_active(&show::one(leases, caller.viewer, text).await?)),
        Ok((_, Err(error))) => Err(error.into()),
        Err(Ok(ended)) => Err(not_active(&ended)),
        Err(Err(error)) => Err(error),
    }
}

fn not_active(lease: &Lease) -> ApiError {
    let error = ApiError::new(Code::Conflict, format!("cannot renew lease {}: it is {}", lease.id, lease.state));
    error.hint(match lease.state {
        LeaseState::Queued | LeaseState::Granting => {
            format!("wait until `gpushctl lease show {}` shows that the lease is active", lease.id)
        }
        LeaseState::Active | LeaseState::Releasing | LeaseState::Ended => {
            "request another lease with `gpushctl lease request`".to_owned()
        }
    })
}

/// Returns the error for a revocation of an ended lease. It says when and why the lease has ended.
fn ended_already(lease: &Lease) -> ApiError {
    let why = lease.reason.map_or("ended", EndReason::name).replace('_', " ");
    let at = lease.ended_at.map_or_else(String::new, |at| format!(" at {}", local_time(at)));
    ApiError::new(Code::Conflict, format!("lease {} has ended already: {why}{at}", lease.id))
        .hint(format!("see `gpushctl lease show {}`", lease.id))
}

/// Revokes a lease for an administrator.
///
/// # Errors
/// If the request is not valid, if there is no lease with this id, if it has ended, or if the revocation cannot be
/// recorded.
pub(crate) async fn revoke(
    leases: &Leases,
    caller: &Caller,
    text: &str,
    request: LeaseRevokeRequest,
    key: Option<Key>,
) -> Result<Lease, ApiError> {
    let words = reason(&request.reason)?;
    if is_repeated(leases, key.as_ref()).await? {
        return show::one(leases, caller.viewer, text).await;
    }
    let end = end_of_processes(&request, leases.grace())?;
    match change(leases, caller, (text, "revoke"), key, RequestedChange::Revoke { reason: words, end }).await {
        Ok((lease, changed)) => {
            changed?;
            lease_after_change(leases, caller, &lease).await
        }
        Err(Ok(ended)) => Err(ended_already(&ended)),
        Err(Err(error)) => Err(error),
    }
}

/// Returns when a revocation ends the processes of the lease; `None` if it does not end them. `grace` is the grace period
/// of a request that names none.
fn end_of_processes(request: &LeaseRevokeRequest, grace: Duration) -> Result<Option<EndProcesses>, ApiError> {
    let times = [request.notice_s, request.grace_s];
    if times.into_iter().flatten().any(|seconds| seconds > LONGEST_LEASE_S) {
        return Err(ApiError::new(Code::BadRequest, "the notice and the grace period must be at most 52 weeks")
            .hint("write 90s, 15m, 1h30m or 2d"));
    }
    if !request.end && times.iter().any(Option::is_some) {
        return Err(ApiError::new(Code::BadRequest, "a notice or grace period needs `end`").hint("add `--end`"));
    }
    Ok(request.end.then(|| EndProcesses {
        notice: request.notice_s.map_or(NOTICE, Duration::from_secs),
        grace: request.grace_s.map_or(grace, Duration::from_secs),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::leases::tests::record;

    /// Fault: a lease was released long ago. An attempt to revoke it still succeeded, and looked like a release.
    #[test]
    fn revocation_of_an_ended_lease_says_how_it_ended() {
        let mut ended = record(1, 1000, "GPU-0");
        ended.state = LeaseState::Ended;
        (ended.reason, ended.ended_at) = (Some(EndReason::TimedOut), Some(Timestamp::UNIX_EPOCH));
        let error = ended_already(&to_api(&ended, Viewer::Admin));
        let ended_at = local_time(Timestamp::UNIX_EPOCH);
        assert_eq!(error.message, format!("lease L1 has ended already: timed out at {ended_at}"));
        assert_eq!((error.code, error.hint.as_deref()), (Code::Conflict, Some("see `gpushctl lease show L1`")));
    }

    #[test]
    fn revocation_ends_processes_only_if_the_request_says_so() {
        let grace = Duration::from_secs(30);
        let end = |end, notice_s, grace_s| {
            let request = LeaseRevokeRequest { reason: "r".to_owned(), end, notice_s, grace_s };
            end_of_processes(&request, grace).map(|end| end.map(|end| (end.notice, end.grace)))
        };
        let seconds = Duration::from_secs;
        assert_eq!(end(false, None, None), Ok(None));
        assert_eq!(end(true, None, None), Ok(Some((NOTICE, grace))));
        assert_eq!(end(true, Some(0), Some(5)), Ok(Some((Duration::ZERO, seconds(5)))));
        assert_eq!(end(true, Some(LONGEST_LEASE_S), None), Ok(Some((seconds(LONGEST_LEASE_S), grace))));
        for refused in
            [end(false, Some(5), None), end(false, None, Some(5)), end(true, Some(LONGEST_LEASE_S + 1), None)]
        {
            assert!(refused.is_err());
        }
    }

    #[test]
    fn hint_of_a_refused_renewal_depends_on_the_lease_state() {
        let hint = |state| {
            let lease = gpush_store::LeaseRecord { state, ..record(1, 1000, "GPU-0") };
            not_active(&to_api(&lease, Viewer::Admin)).hint.unwrap()
        };
        for state in [LeaseState::Queued, LeaseState::Granting] {
            assert!(hint(state).contains("`gpushctl lease show L1`"), "{state}");
        }
        for state in [LeaseState::Releasing, LeaseState::Ended] {
            assert!(hint(state).contains("`gpushctl lease request`"), "{state}");
        }
    }
}
