//! Cordons that an administrator sets and clears.
//!
//! `gpushctl gpu drain` sets a cordon and waits until no process is left on the GPU. A cordon
//! changes nothing in the driver, so gpushd needs no operation for it. [`crate::state`] handles the
//! cordons that gpushd sets itself.

use gpush_api::{ApiError, Change as Reported, GpuUuid};
use gpush_store::{AuditEvent, ConditionKind, NewCondition, Scope};

use crate::{
    requests::request::Request,
    state::{Change, Commits, HostState},
};

/// Cause of a cordon that an administrator has set.
const ADMIN: &str = "admin";

/// Cordons a GPU. Replaces an earlier cordon of an administrator, but keeps the reason of the
/// earlier cordon if the request has no reason.
///
/// # Errors
/// If the change cannot be recorded.
pub(crate) async fn set(commits: &Commits, host: &HostState, uuid: GpuUuid, request: Request) -> Result<(), ApiError> {
    let cordons = host.gpu(&uuid).map(|gpu| gpu.gpu.cordons.clone()).unwrap_or_default();
    let before = cordons.into_iter().find(|cordon| cordon.cause == ADMIN);
    let given = request.reason.clone().filter(|reason| !reason.is_empty());
    let new = NewCondition {
        scope: Scope::Gpu(uuid.clone()),
        kind: ConditionKind::Cordon,
        cause: ADMIN.to_owned(),
        reason: given.or_else(|| before.map(|cordon| cordon.reason)).unwrap_or_default(),
        by: Some(request.by.clone()),
    };
    tracing::info!(gpu = uuid.as_str(), uid = request.by.uid, "cordoned: {}", new.reason);
    let reported = change_event("gpu.cordon", &uuid, &request);
    commits
        .change(
            Change::Set(new),
            reported,
            request.recorded(uuid.to_string(), |reason| AuditEvent::GpuCordon { cause: None, reason }),
        )
        .await
}

/// Clears all cordons of a GPU.
///
/// # Errors
/// If the change cannot be recorded.
pub(crate) async fn clear(commits: &Commits, uuid: GpuUuid, request: Request) -> Result<(), ApiError> {
    let change = Change::Clear(Scope::Gpu(uuid.clone()), ConditionKind::Cordon, None);
    tracing::info!(gpu = uuid.as_str(), uid = request.by.uid, "uncordoned");
    let reported = change_event("gpu.uncordon", &uuid, &request);
    commits
        .change(change, reported, request.recorded(uuid.to_string(), |reason| AuditEvent::GpuUncordon { reason }))
        .await
}

fn change_event(action: &str, uuid: &GpuUuid, request: &Request) -> Reported {
    Reported {
        action: action.to_owned(),
        object: uuid.to_string(),
        by: Some(request.by.clone()),
        reason: request.reason.clone(),
        gpu_uuids: vec![uuid.clone()],
    }
}
