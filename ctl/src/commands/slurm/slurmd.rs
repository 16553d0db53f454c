//! The slurmd that started a hook.

use gpush_core::slurm::GpuPlugin;
use gpush_host::proc;

/// Maximum number of processes between slurmd and gpushctl.
const MOST_ANCESTORS: usize = 32;

/// Returns the GPU plugin of the slurmd that started this process. Returns `None` if no ancestor is
/// slurmd, or if slurmd cannot be examined.
pub(super) fn gpu_plugin() -> Option<GpuPlugin> {
    let mut pid = std::process::id();
    for _ in 0..MOST_ANCESTORS {
        pid = proc::parent(pid).filter(|parent| *parent > 0)?;
        if proc::name(pid) == "slurmd" {
            return GpuPlugin::in_maps(&std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()?);
        }
    }
    None
}
