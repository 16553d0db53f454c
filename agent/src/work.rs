//! Which GPUs take new work: shares now, leases once there are some. docs/states.md has the table.

use std::time::Duration;

use gpush_api::{ApiError, Code, Gpu, GpuState};

use crate::{agent::Agent, caller::Viewer};

/// How long a request for work waits for an operation on its GPU to end: most take less.
const OPERATION: Duration = Duration::from_secs(2);

/// Waits until no operation changes a GPU, for a while.
pub(crate) async fn at_rest(agent: &Agent, uuid: &str) {
    let _it_lasts = tokio::time::timeout(OPERATION, agent.operations.rests(uuid)).await;
}

/// The GPUs as they were seen last, without asking the driver; none when they never were.
pub(crate) fn known(agent: &Agent, viewer: Viewer) -> Vec<Gpu> {
    agent.readings.known().map(|host| host.gpus(viewer)).unwrap_or_default()
}

/// Refuses new work on a GPU that is in no state for it, by what was seen of it last.
///
/// # Errors
/// When nobody gets anything of it now.
pub(crate) async fn admits(agent: &Agent, viewer: Viewer, uuid: &str, label: &str) -> Result<(), ApiError> {
    if known(agent, viewer).is_empty() {
        // Just begun.
        agent.readings.host().await?;
    }
    let gpus = known(agent, viewer);
    let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == uuid) else {
        return Err(ApiError::new(Code::Unavailable, format!("{label} can't be had: its GPU was not seen yet"))
            .hint("`gpushctl status` shows the GPUs")
            .retryable());
    };
    refusal(gpu, label).map_or(Ok(()), Err)
}

/// Why a GPU takes no new work.
pub(crate) fn refusal(gpu: &Gpu, label: &str) -> Option<ApiError> {
    let index = gpu.index;
    let (what, code, hint) = match gpu.state {
        GpuState::Ready => return None,
        GpuState::Cordoned => {
            ("is cordoned", Code::Conflict, format!("`gpushctl gpu uncordon {index}` opens it again"))
        }
        GpuState::Changing => ("is being changed", Code::Conflict, "ask again when the operation has ended".to_owned()),
        GpuState::Degraded => ("is degraded", Code::Conflict, show(index)),
        GpuState::Held => ("is held", Code::Conflict, "`gpushctl recover`, or a reboot, ends that".to_owned()),
        GpuState::Maintenance => {
            let hint = "ask again when it is over: `gpushctl maintenance leave` ends it";
            ("is in maintenance", Code::Conflict, hint.to_owned())
        }
        GpuState::Unknown => ("is in a state that is not known", Code::Unavailable, show(index)),
        GpuState::Lost => ("is lost", Code::GpuLost, show(index)),
    };
    let mut error = ApiError::new(code, format!("{label} can't be had: GPU {index} {what}")).hint(hint);
    error.causes.clone_from(&gpu.reasons);
    Some(if gpu.state == GpuState::Lost { error } else { error.retryable() })
}

fn show(index: u32) -> String {
    format!("`gpushctl gpu show {index}` says how it is")
}
