//! Shows on a GPU which operations wait for it, and the progress of the operation that changes it.

use gpush_api::{Gpu, GpuUuid, Operation};

use super::Engine;
use crate::state::{HostState, Reason};

/// Extends the reasons of a GPU: adds the operations that wait for the GPU, and the progress of the operation that is
/// changing the GPU.
pub(crate) fn add_progress(engine: &Engine, host: &HostState, gpu: &mut Gpu) {
    gpu.reasons.extend(waiting_for(engine, &gpu.uuid));
    let reasons = host.gpu(&gpu.uuid).map(|gpu| gpu.reasons.as_slice()).unwrap_or_default();
    let changing = reasons.iter().position(|reason| matches!(reason, Reason::Changing { .. }));
    let Some(reason) = changing.and_then(|at| gpu.reasons.get_mut(at)) else { return };
    let Some(progress) = engine.operations.progress(&gpu.uuid) else { return };
    *reason += &if progress.rolling_back {
        ": its steps are being rolled back".to_owned()
    } else {
        format!(": {} of {} steps are done", progress.done, progress.total)
    };
}

/// Returns one sentence for each operation that waits for a GPU.
pub(super) fn waiting_for(engine: &Engine, uuid: &GpuUuid) -> Vec<String> {
    let sentence = |operation: &Operation| {
        let plan = operation.plans.iter().find(|plan| plan.gpu_uuid == *uuid)?;
        Some(format!("operation {} waits in the queue (desired: {})", operation.id, plan.end_state()))
    };
    engine.operations.waiting(sentence)
}
