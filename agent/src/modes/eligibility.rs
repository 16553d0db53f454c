//! Checks whether a GPU accepts new leases. docs/states.md shows in which states a GPU does.

use gpush_api::{ApiError, Code, Gpu, GpuIndex, GpuState, GpuUuid};

use crate::state::{Reason, State, words};

/// Returns why a GPU does not accept new leases.
pub(crate) fn refusal(gpu: &Gpu, label: &str) -> Option<ApiError> {
    let index = gpu.index;
    let (what, code, hint) = match gpu.state {
        GpuState::Ready => return None,
        GpuState::Cordoned => {
            ("is cordoned", Code::Conflict, format!("`gpushctl gpu uncordon {index}` ends the cordon (administrator)"))
        }
        GpuState::Changing => {
            ("is being changed", Code::Conflict, "repeat the request when the operation has ended".to_owned())
        }
        GpuState::Degraded => ("is degraded", Code::Conflict, show(index)),
        GpuState::Held => {
            let hint = "`gpushctl status` shows the command that releases the GPU, such as `gpushctl recover` \
                (administrator)";
            ("is held", Code::Conflict, hint.to_owned())
        }
        GpuState::Maintenance => {
            let hint =
                "repeat the request when maintenance has ended: `gpushctl maintenance leave` (administrator) ends it";
            ("is in maintenance", Code::Conflict, hint.to_owned())
        }
        GpuState::Unknown => ("is in an unknown state", Code::Unavailable, show(index)),
        GpuState::Lost => ("is lost", Code::GpuLost, show(index)),
    };
    let mut error = ApiError::new(code, format!("{label} is not available: GPU {index} {what}")).hint(hint);
    error.causes.clone_from(&gpu.reasons);
    Some(if gpu.state == GpuState::Lost { error } else { error.retryable() })
}

fn show(index: GpuIndex) -> String {
    format!("`gpushctl gpu show {index}` shows its state")
}

/// Checks that no operation is changing a GPU.
///
/// # Errors
/// If an operation is changing the GPU. The error names the operation.
pub(crate) fn not_changing(state: &State, index: GpuIndex, uuid: &GpuUuid) -> Result<(), ApiError> {
    let host = state.now();
    let reasons = host.gpu(uuid).map(|gpu| gpu.reasons.as_slice()).unwrap_or_default();
    let holder = reasons.iter().find_map(|reason| match reason {
        Reason::Changing { holder } => Some(holder),
        _ => None,
    });
    holder.map_or(Ok(()), |holder| Err(words::changed_by(index, uuid, holder)))
}
