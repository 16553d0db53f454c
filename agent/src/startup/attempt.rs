//! Applies the desired layout to one GPU, and classifies the outcome.
//!
//! ```text
//! begin ─► refused ─┬─ another operation has claimed the GPU ─────► Busy     nothing was touched
//!   │               ├─ the driver, or the GPU, does not answer ───► NotYet   nothing was touched
//!   │               └─ the plan: impossible, in use ──────────────► Never    nothing was touched
//!   └────► operation ─┬─ done ────────────────────────────────────► Given
//!                     ├─ cancelled by a caller ───────────────────► Cancelled
//!                     └─ rolled back, failed ─────────────────────► Failed   instances were touched
//! ```

use std::time::Duration;

use gpush_api::{ApiError, Code, Gpu, LayoutSource, OperationState, PlanRequest};

use super::Handles;
use crate::{
    apply::{self, Order},
    caller::{Caller, Viewer},
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
    /// The operation began, but failed.
    Failed(ApiError),
    /// The attempt did not begin, because gpushd is stopping.
    Stopping,
}

/// Applies the layout of a GPU's override or rule. If this needs an operation, waits for the end of the operation.
pub(super) async fn apply_layout(handles: &Handles, kind: &str, gpu: &Gpu) -> LayoutResult {
    let request = PlanRequest { gpus: vec![gpu.uuid.clone()], layout: LayoutSource::Wanted };
    let caller = Caller::agent();
    let begun = tokio::select! {
        biased;
        () = handles.stopping.cancelled() => return LayoutResult::Stopping,
        begun = apply::begin(&handles.engine, &caller, Order::new(kind, request.clone())) => begun,
    };
    let mut operation = match begun {
        Ok(operation) => operation,
        Err(_) if handles.stopping.is_cancelled() => return LayoutResult::Stopping,
        Err(error) => {
            if error.code == Code::Blocked {
                name_holders(handles, &request).await;
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
        (_, Some(error)) => LayoutResult::Failed(error),
        (_, None) => LayoutResult::Failed(ApiError::new(Code::Internal, format!("operation {} failed", operation.id))),
    }
}

/// Logs the processes that block the layout. Only the log names them, because every user may read health.
async fn name_holders(handles: &Handles, request: &PlanRequest) {
    let Ok(plans) = handles.planner.plan(Viewer::Log, request).await else { return };
    for plan in plans.plans {
        for cause in plan.error.iter().flat_map(|error| &error.causes) {
            tracing::warn!(gpu = plan.uuid, "{cause}");
        }
    }
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
        Code::BadRequest
        | Code::UnknownProfile
        | Code::LayoutImpossible
        | Code::Blocked
        | Code::Unsupported
        | Code::ConfigInvalid => LayoutResult::Never(error),
    }
}

/// Logs why a GPU does not have its layout.
pub(super) fn log(gpu: &Gpu, error: &ApiError) {
    tracing::error!(gpu = gpu.uuid, "{}", words::one_line(error));
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
