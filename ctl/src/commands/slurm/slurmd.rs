//! The slurmd that started a hook.

use gpush_core::slurm::GpuPlugin;
use gpush_host::proc;

/// Returns the GPU plugin of the slurmd that started this process. Returns `None` if no ancestor is
/// slurmd, or if slurmd cannot be examined.
pub(super) fn gpu_plugin() -> Option<GpuPlugin> {
    // In a container, slurmd can be process 1.
    let slurmd = proc::ancestors(std::process::id()).chain([1]).find(|pid| proc::name(*pid) == "slurmd")?;
    GpuPlugin::in_maps(&std::fs::read_to_string(format!("/proc/{slurmd}/maps")).ok()?)
}
