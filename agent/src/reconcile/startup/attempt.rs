//! Applies the desired layout to one GPU, and classifies the outcome.
//!
//! ```text
//! begin ─► refused ─┬─ another operation has claimed the GPU ─────► Busy     nothing was touched
//!   │               ├─ the driver, or the GPU, does not answer ───► NotYet   nothing was touched
//!   │               ├─ the plan: in use ──────────────────────────► InUse    nothing was touched
//!   │               └─ the plan: impossible ──────────────────────► Never    nothing was touched
//!   └────► operation ─┬─ done ────────────────────────────────────► Given
//!                     ├─ cancelled by a caller ───────────────────► Cancelled
//!                     ├─ refused by the driver: in use ───────────► InUse    services were stopped and started
//!                     └─ rolled back, failed ─────────────────────► Failed   instances were touched
//! ```

use std::time::Duration;

use gpush_api::{ApiError, Code, Gpu, Holder, LayoutSource, LeaseUse, OperationState, PlanRequest, Process, Refusal};

use super::StartupHandles;
use crate::{
    operations::apply::{self, Order},
    requests::caller::{Caller, Viewer},
    state::words,
};

/// Maximum time of one wait for a change of a running operation. After this time, gpushd waits again.
const FOLLOW: Duration = Duration::from_secs(60);

/// The outcome of an attempt.
#[derive(Debug)]
pub(super) enum LayoutResult {
    /// The GPU has its layout.
    Given,
    /// Another operation has claimed the GPU, for a plan, a change, or a reset together with other GPUs. This attempt
    /// changed nothing.
    Busy(ApiError),
    /// A user cancelled the operation.
    Cancelled(ApiError),
    /// The change was refused, and will be refused again until a user changes something. Nothing was changed.
    Never(ApiError),
    /// The change was refused, but may succeed later. Nothing was changed.
    NotYet(ApiError),
    /// The GPU is in use, so its layout can be applied later.
    InUse(InUse),
    /// The operation began, but failed.
    Failed(ApiError),
    /// The attempt did not begin, because gpushd is stopping.
    Stopping,
}

/// Why a GPU in use did not get its layout.
#[derive(Debug, Clone)]
pub(super) struct InUse {
    /// The error. It does not name processes.
    pub(super) error: ApiError,
    /// The holders of the GPU, with all details.
    pub(super) holders: Vec<Holder>,
    /// Whether an operation began, and the driver refused one of its steps.
    pub(super) has_begun: bool,
}

impl InUse {
    /// Returns the error with the command that lists the holders, instead of the holders. The error stays while gpushd
    /// tries again, and the holders can change meanwhile.
    pub(super) fn error_without_holders(&self, gpu: &Gpu) -> ApiError {
        let mut error = self.error.clone();
        if !self.holders.is_empty() {
            error.causes.clear();
        }
        // The error of a refused step has a hint with this command.
        if !self.holders.is_empty() && !self.has_begun {
            let list = format!("`gpushctl gpu holders {}` lists the processes", gpu.index);
            error.hint = Some(error.hint.map_or_else(|| list.clone(), |hint| format!("{list}; {hint}")));
        }
        error
    }
}

/// Applies the layout of a GPU's override or rule. If this needs an operation, waits for the end of the operation.
pub(super) async fn apply_layout(handles: &StartupHandles, kind: &str, gpu: &Gpu) -> LayoutResult {
    let request = PlanRequest { gpus: vec![gpu.uuid.to_string()], layout: LayoutSource::Wanted };
    let caller = Caller::agent();
    let begun = tokio::select! {
        biased;
        () = handles.context.stopping.cancelled() => return LayoutResult::Stopping,
        begun = apply::begin(&handles.engine, &caller, Order::new(kind, request.clone())) => begun,
    };
    let mut operation = match begun {
        Ok(operation) => operation,
        Err(_) if handles.context.stopping.is_cancelled() => return LayoutResult::Stopping,
        Err(error) => {
            if error.code == Code::Blocked {
                let holders = users(handles, &request).await;
                return LayoutResult::InUse(InUse { error, holders, has_begun: false });
            }
            return refused(error);
        }
    };
    while !operation.state.is_final() {
        operation = match handles.operations.wait(&operation.id, operation.revision, FOLLOW).await {
            Ok(operation) => operation,
            Err(error) => return LayoutResult::NotYet(error),
        };
    }
    match (operation.state, operation.error) {
        (OperationState::Done, _) => LayoutResult::Given,
        (_, Some(error)) if error.code == Code::Cancelled => LayoutResult::Cancelled(error),
        // After a failed rollback, the GPU is degraded, so gpushd does not try again as for a GPU in use.
        (OperationState::RolledBack, Some(error)) if error.code == Code::Blocked => {
            let holders = holders(handles, gpu).await;
            LayoutResult::InUse(InUse { error, holders, has_begun: true })
        }
        (_, Some(error)) => LayoutResult::Failed(error),
        (_, None) => LayoutResult::Failed(ApiError::new(Code::Internal, format!("operation {} failed", operation.id))),
    }
}

/// Returns the processes and leases because of which the plan was refused.
async fn users(handles: &StartupHandles, request: &PlanRequest) -> Vec<Holder> {
    let Ok(plans) = handles.planner.plan(Viewer::Log, request).await else { return Vec::new() };
    plans.plans.into_iter().filter_map(|plan| plan.refusal).flat_map(users_in).collect()
}

/// Returns the processes and leases in a refusal.
fn users_in(refusal: Refusal) -> Vec<Holder> {
    // A holder without a pid is described by its command.
    let lease = |lease: LeaseUse| Holder { command: Some(lease.to_string()), ..Holder::default() };
    let process = |process: Process| {
        let Process { pid, uid, user, command, .. } = process;
        Holder { pid, uid, user, command, ..Holder::default() }
    };
    match refusal {
        Refusal::Held { holders, leases } => holders.into_iter().chain(leases.into_iter().map(lease)).collect(),
        Refusal::Blocked { blockers } => {
            let each = blockers.into_iter().flat_map(|blocker| {
                let leases: Vec<Holder> = blocker.leases.into_iter().map(lease).collect();
                blocker.holders.into_iter().map(process).chain(leases).collect::<Vec<_>>()
            });
            each.collect()
        }
        Refusal::UnknownProfile { .. }
        | Refusal::NoSuchPlacement { .. }
        | Refusal::PlacementsOverlap { .. }
        | Refusal::TooMany { .. }
        | Refusal::TooManySlices { .. }
        | Refusal::NoEngine { .. }
        | Refusal::NoArrangement { .. }
        | Refusal::ComputeDoesNotFit { .. }
        | Refusal::Reboot { .. }
        | Refusal::NoMig => Vec::new(),
    }
}

/// Returns what has the GPU open.
pub(super) async fn holders(handles: &StartupHandles, gpu: &Gpu) -> Vec<Holder> {
    handles.planner.holders(std::slice::from_ref(&gpu.uuid)).await.unwrap_or_default()
}

/// Returns the outcome that belongs to a refusal.
fn refused(error: ApiError) -> LayoutResult {
    match error.code {
        // A retryable conflict ends when the other operation ends. Any other conflict stays until a user changes
        // something.
        Code::Conflict if error.retryable => LayoutResult::Busy(error),
        Code::Conflict => LayoutResult::Never(error),
        // Try again later: a lost GPU may return after a reset, and must then still get its layout.
        Code::DriverUnavailable
        | Code::DriverError
        | Code::DriverTimeout
        | Code::GpuLost
        | Code::Resetting
        | Code::Cancelled
        | Code::Denied
        | Code::NotFound
        | Code::Unavailable
        | Code::Stopping
        | Code::Unreachable
        | Code::TimedOut
        | Code::Internal => LayoutResult::NotYet(error),
        // The caller handles a GPU in use before it calls this function.
        Code::Blocked => LayoutResult::NotYet(error),
        Code::BadRequest | Code::UnknownProfile | Code::LayoutImpossible | Code::Unsupported | Code::ConfigInvalid => {
            LayoutResult::Never(error)
        }
    }
}

/// Logs why a GPU does not have its layout.
pub(super) fn log(gpu: &Gpu, error: &ApiError) {
    tracing::error!(gpu = gpu.uuid.as_str(), "{}", words::one_line(error));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Case: another operation has claimed the GPU. The layout stays due, because that operation may end without a
    /// change: its plan is refused, or it only resets this GPU together with another GPU.
    #[test]
    fn retryable_conflict_leaves_the_layout_due() {
        let conflict = || ApiError::new(Code::Conflict, "GPU 0 is being changed by an operation that is being planned");
        assert!(matches!(refused(conflict().retryable()), LayoutResult::Busy(_)));
        assert!(matches!(refused(conflict()), LayoutResult::Never(_)));
    }
}
