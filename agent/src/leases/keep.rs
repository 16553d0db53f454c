//! Requests to keep a lease although it is unused. For its holder and administrators, also for the lease of a Slurm job.

use gpush_api::{ApiError, Code, Lease, LeaseKeep, LeaseKeepRequest, LeaseState};
use gpush_usage::{
    idle::{Keep, KeepError},
    moment::Moment,
};
use jiff::{SignedDuration, Timestamp};

use super::{
    Leases,
    actor::{ChangeError, RequestedChange},
    change::{change, find, is_repeated},
    rule_policies::idle_policy,
    show,
};
use crate::requests::{caller::Caller, idempotency::Key};

/// Keeps an active lease for a time. A later keep replaces an earlier one.
///
/// # Errors
/// If the lease is not active, if another user holds it, if the time is longer than the config allows, if the reason is not
/// valid, or if the keep cannot be recorded.
pub(crate) async fn keep(
    leases: &Leases,
    caller: &Caller,
    text: &str,
    request: LeaseKeepRequest,
    key: Option<Key>,
) -> Result<Lease, ApiError> {
    let lease = match find(leases, caller, text, "keep").await {
        Ok(lease) => lease,
        Err(Ok(ended)) => return Err(not_active(&ended)),
        Err(Err(error)) => return Err(error),
    };
    if request.reason.chars().any(char::is_control) {
        return Err(ApiError::new(Code::BadRequest, "the reason contains control characters")
            .hint("write the reason on one line"));
    }
    let policy = idle_policy(&leases.handles.context.state.now(), &lease.record);
    let now = Timestamp::now();
    let moment = Moment { boot: 0, monotonic_ms: 0, wall_ms: now.as_millisecond() };
    let for_ms = request.duration_s.saturating_mul(1000);
    let kept = Keep::new(&policy, moment, for_ms, &request.reason).map_err(|error| refused(text, error))?;
    if request.duration_s == 0 {
        return Err(
            ApiError::new(Code::BadRequest, "a duration must be at least 1 second").hint("write 90s, 15m or 2h")
        );
    }
    if is_repeated(leases, key.as_ref()).await? {
        return show::one(leases, caller.viewer, text).await;
    }
    let span = SignedDuration::from_millis(i64::try_from(for_ms).unwrap_or(i64::MAX));
    let until = now.checked_add(span).unwrap_or(Timestamp::MAX);
    let by = caller.actor(leases.handles.context.users.user(caller.uid()).await);
    let keep = LeaseKeep { by, reason: kept.reason, at: now, until };
    match change(leases, caller, (text, "keep"), key, RequestedChange::Keep(keep)).await {
        Ok((_, Ok(()))) => show::one(leases, caller.viewer, text).await,
        Ok((_, Err(ChangeError::Inactive))) => Err(not_active(&show::one(leases, caller.viewer, text).await?)),
        Ok((_, Err(error))) => Err(error.into()),
        Err(Ok(ended)) => Err(not_active(&ended)),
        Err(Err(error)) => Err(error),
    }
}

fn refused(lease: &str, error: KeepError) -> ApiError {
    let message = format!("cannot keep lease {lease}: {error}");
    match error {
        KeepError::TooLong { most_ms: 0 } => {
            let message = format!("cannot keep lease {lease}: the config does not let holders keep unused leases");
            ApiError::new(Code::BadRequest, message).hint("an administrator can set `max_keep` under [idle]")
        }
        KeepError::TooLong { most_ms } => {
            let most = gpush_core::duration::format(std::time::Duration::from_millis(most_ms));
            ApiError::new(Code::BadRequest, message)
                .hint(format!("write `--for {most}`, and keep the lease again later"))
        }
        KeepError::NoReason | KeepError::LongReason => {
            ApiError::new(Code::BadRequest, message).hint("say in a few words why the lease must stay")
        }
    }
}

fn not_active(lease: &Lease) -> ApiError {
    let error = ApiError::new(Code::Conflict, format!("cannot keep lease {}: it is {}", lease.id, lease.state));
    error.hint(match lease.state {
        LeaseState::Queued | LeaseState::Granting => {
            format!("wait until `gpushctl lease show {}` shows that the lease is active", lease.id)
        }
        LeaseState::Active | LeaseState::Releasing | LeaseState::Ended => {
            "request another lease with `gpushctl lease request`".to_owned()
        }
    })
}
