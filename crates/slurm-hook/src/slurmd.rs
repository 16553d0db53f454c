//! Finds out about the slurmd that runs this hook.

use gpush_core::slurm::GpuPlugin;
use gpush_host::proc;

/// Returns the GPU plugin that the slurmd of this hook has loaded. Returns `None` if the plugin cannot be determined.
pub(crate) fn gpu_plugin() -> Option<GpuPlugin> {
    // Add process 1, because in a container it can be slurmd.
    let ancestors: Vec<u32> = proc::ancestors(std::process::id()).chain([1]).collect();
    let named = |name: &str| ancestors.iter().copied().find(|pid| proc::name(*pid) == name);
    match (named("slurmd"), named("slurmstepd")) {
        (Some(slurmd), _) => GpuPlugin::in_maps(&maps(slurmd)?),
        // With `PrologFlags=RunInJob` (24.11), slurmstepd starts Prolog, and slurmd is not one of its parents. So check
        // all slurmd processes.
        (None, Some(_)) => GpuPlugin::agreed(slurmds().filter_map(maps)),
        (None, None) => None,
    }
}

/// Returns the processes of root that have the name of slurmd.
fn slurmds() -> impl Iterator<Item = u32> {
    let pids = proc::pids().unwrap_or_default().into_iter().filter_map(|pid| u32::try_from(pid).ok());
    pids.filter(|pid| proc::name(*pid) == "slurmd" && proc::owner(*pid) == Some(0))
}

fn maps(pid: u32) -> Option<String> {
    std::fs::read_to_string(format!("/proc/{pid}/maps")).ok()
}
