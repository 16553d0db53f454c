//! A GPU without its use, to plan what the model can have.

use gpush_api::{Gpu, GpuState};

/// Returns the GPU as if nothing used it: ready, without processes, leases, cordons and instances. A plan for it is
/// refused only if the model cannot have the layout.
#[must_use]
pub fn as_if_idle(gpu: &Gpu) -> Gpu {
    let mut gpu = gpu.clone();
    (gpu.state, gpu.stale, gpu.overridden, gpu.processes_known) = (GpuState::Ready, false, None, true);
    gpu.processes.clear();
    gpu.leases.clear();
    gpu.cordons.clear();
    gpu.mps_daemons.clear();
    if let Some(mig) = &mut gpu.mig {
        mig.instances.clear();
    }
    gpu
}
