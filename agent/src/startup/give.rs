//! One GPU given the layout that is wanted of it, and what came of it.
//!
//! ```text
//! begin ─► refused ─┬─ another operation has the GPU ────────────► Theirs
//!   │               ├─ the driver, or a GPU that is not there ───► NotYet   nothing was touched
//!   │               └─ the plan: impossible, in use ─────────────► Never    nothing was touched
//!   └────► operation ─┬─ done ───────────────────────────────────► Given
//!                     └─ rolled back, failed ────────────────────► Failed   instances were touched
//! ```

use std::time::Duration;

use gpush_api::{ApiError, Code, Gpu, LayoutSource, OperationState, PlanRequest};

use super::Handles;
use crate::{
    apply::{self, Order},
    caller::{Caller, Viewer},
    state::words,
};

/// How often an operation that goes on is looked at again.
const FOLLOW: Duration = Duration::from_secs(60);

/// What came of it.
#[derive(Debug)]
pub(super) enum Outcome {
    /// It has its layout.
    Given,
    /// Somebody else is changing it, and that is what they want of it.
    Theirs(ApiError),
    /// Refused for a reason that lasts until somebody changes something; nothing was touched.
    Never(ApiError),
    /// Refused for a reason that may pass by itself; nothing was touched.
    NotYet(ApiError),
    /// It was tried, and failed on the way.
    Failed(ApiError),
    /// Not begun, since the agent stops.
    Stopping,
}

/// Gives a GPU the layout of its override, or of its rule. An operation that was begun is followed to its end.
pub(super) async fn give(handles: &Handles, kind: &str, gpu: &Gpu) -> Outcome {
    let request = PlanRequest { gpus: vec![gpu.uuid.clone()], layout: LayoutSource::Wanted };
    let caller = Caller::agent();
    let begun = tokio::select! {
        biased;
        () = handles.stopping.cancelled() => return Outcome::Stopping,
        begun = apply::begin(&handles.engine, &caller, Order::new(kind, request.clone())) => begun,
    };
    let mut operation = match begun {
        Ok(operation) => operation,
        Err(_) if handles.stopping.is_cancelled() => return Outcome::Stopping,
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
            Err(error) => return Outcome::NotYet(error),
        };
    }
    match (operation.state, operation.error) {
        (OperationState::Done, _) => Outcome::Given,
        // Somebody does not want it.
        (_, Some(error)) if error.code == Code::Cancelled => Outcome::Theirs(error),
        (_, Some(error)) => Outcome::Failed(error),
        (_, None) => Outcome::Failed(ApiError::new(Code::Internal, format!("operation {} failed", operation.id))),
    }
}

/// Names in the log who is in the way: what everybody reads in health does not.
async fn name_holders(handles: &Handles, request: &PlanRequest) {
    let Ok(plans) = handles.planner.plan(Viewer::Log, request).await else { return };
    for plan in plans.plans {
        for cause in plan.error.iter().flat_map(|error| &error.causes) {
            tracing::warn!(gpu = plan.uuid, "{cause}");
        }
    }
}

/// What a refusal comes to.
fn refused(error: ApiError) -> Outcome {
    match error.code {
        // One that has the GPU for now; the others stay until somebody does something.
        Code::Conflict if error.retryable => Outcome::Theirs(error),
        Code::Conflict => Outcome::Never(error),
        // A GPU that is lost comes back with a reset, and its layout is due then as now.
        Code::DriverUnavailable
        | Code::DriverError
        | Code::DriverTimeout
        | Code::GpuLost
        | Code::Resetting
        | Code::Cancelled
        | Code::Denied
        | Code::NotFound
        | Code::Unavailable
        | Code::Unreachable
        | Code::TimedOut
        | Code::Internal => Outcome::NotYet(error),
        Code::BadRequest
        | Code::UnknownProfile
        | Code::LayoutImpossible
        | Code::Blocked
        | Code::Unsupported
        | Code::ConfigInvalid => Outcome::Never(error),
    }
}

/// Says in the log why a GPU has not got its layout.
pub(super) fn log(gpu: &Gpu, error: &ApiError) {
    tracing::error!(gpu = gpu.uuid, "{}", words::in_full(error));
}
