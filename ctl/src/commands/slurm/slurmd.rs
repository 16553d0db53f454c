//! The slurmd whose hook this process is.

use gpush_core::slurm::GpuPlugin;
use gpush_host::proc;

/// Returns the GPU plugin of the slurmd whose hook this process is. Returns `None` if this slurmd is
/// not known or cannot be examined.
pub(super) fn gpu_plugin() -> Option<GpuPlugin> {
    let slurmd = slurmd()?;
    GpuPlugin::in_maps(&std::fs::read_to_string(format!("/proc/{slurmd}/maps")).ok()?)
}

/// Returns the pid of slurmd.
fn slurmd() -> Option<u32> {
    // In a container, slurmd can be process 1.
    let ancestors: Vec<u32> = proc::ancestors(std::process::id()).chain([1]).collect();
    let named = |name: &str| ancestors.iter().copied().find(|pid| proc::name(*pid) == name);
    // With `PrologFlags=RunInJob` (24.11), slurmstepd starts Prolog. slurmd is not an ancestor of slurmstepd.
    named("slurmd").or_else(|| named("slurmstepd").and_then(|_| only_slurmd()))
}

/// Returns the only process of root that has the name of slurmd. Returns `None` if there are several.
fn only_slurmd() -> Option<u32> {
    let pids = proc::pids().filter_map(|pid| u32::try_from(pid).ok());
    let mut slurmds = pids.filter(|pid| proc::name(*pid) == "slurmd" && proc::owner(*pid) == Some(0));
    slurmds.next().filter(|_| slurmds.next().is_none())
}
