//! Slurm jobs: their cgroup denies the GPUs that need a lease and do not belong to Slurm.
//!
//! On cgroup v2, all jobs of a node are in a scope of slurmstepd in `system.slice`. Slurm's `ConstrainDevices` denies a job
//! only GPUs that gres.conf lists. So the scope denies the others, if their rules enforce leases. systemd keeps the list of
//! a transient unit until the unit ends. gpushd therefore sets the list for each new scope, for example after a
//! boot. gpushd does not change a list that an administrator has set.

use std::{collections::BTreeSet, path::Path, sync::Arc};

use gpush_api::{EnforcedUnit, GpuIndex, LeaseOwner};
use gpush_core::{
    config::Rule,
    lease::access::{AllowedDevice, GPU_MAJOR, job_devices, session_devices},
};
use gpush_host::{
    cgroup, device_files, proc, subtask,
    systemd::{self, Lasts, Manager, UnitDevices},
};

use crate::state::{GpuSnapshot, HostState};

/// How the name of slurmstepd's scope ends. The name of the node may precede it: `n1_slurmstepd.scope`.
pub(super) const SCOPE: &str = "slurmstepd.scope";

/// Returns the minor numbers of the GPUs that Slurm jobs must not open. Returns `None` if gpushd does not know the GPUs.
pub(super) fn denied_gpus(host: &HostState) -> Option<BTreeSet<u32>> {
    (!host.gpus.is_empty()).then(|| denied(host).map(|gpu| gpu.gpu.minor).collect())
}

/// Returns the indexes of these GPUs.
pub(super) fn denied_indexes(host: &HostState) -> Vec<GpuIndex> {
    denied(host).map(|gpu| gpu.gpu.index).collect()
}

fn denied(host: &HostState) -> impl Iterator<Item = &GpuSnapshot> {
    let is_denied =
        |rule: &Rule| rule.lease.is_some_and(|terms| terms.is_enforced() && terms.owner != LeaseOwner::Slurm);
    let of_rule = move |position: usize| host.config.rules.get(position).is_some_and(is_denied);
    host.gpus.iter().map(Arc::as_ref).filter(move |gpu: &&GpuSnapshot| gpu.rule.is_some_and(&of_rule))
}

/// Denies these GPUs to the jobs; with none, opens the scopes that gpushd has limited. Returns the limited scopes. Logs the
/// processes of jobs that have opened these GPUs before: they keep them open.
///
/// # Errors
/// If systemd refuses.
pub(super) async fn limit(
    manager: &Manager,
    proc: &Path,
    denied: &BTreeSet<u32>,
) -> Result<Vec<EnforcedUnit>, systemd::Error> {
    let mut limited = Vec::new();
    for unit in manager.running(&format!("*{SCOPE}")).await? {
        let devices = match manager.devices(&unit).await {
            // The scope has ended.
            Err(error) if error.is_not_loaded() => continue,
            devices => devices?,
        };
        let is_own = is_own(&devices);
        if denied.is_empty() {
            if is_own && is_changed(manager.open_devices(&unit, Lasts::UntilBoot).await)? {
                tracing::info!("`DeviceAllow=` of {unit} no longer denies GPUs to Slurm jobs");
            }
            continue;
        }
        let wanted = job_devices(denied);
        let is_of_administrator = !is_own && is_limited(&devices);
        if !is_of_administrator && !is_list(&devices, &wanted) {
            if !is_changed(manager.set_devices(&unit, Lasts::UntilBoot, &wanted).await)? {
                continue;
            }
            tracing::info!("`DeviceAllow=` of {unit} denies Slurm jobs the GPUs with minor numbers {denied:?} now");
            report_open(proc, &unit, denied.clone()).await;
        }
        let denies_gpus = !is_of_administrator || devices.denies_minors(denied);
        limited.push(EnforcedUnit { unit, denies_gpus, set_by_gpush: !is_of_administrator });
    }
    Ok(limited)
}

/// Returns whether systemd has changed a scope; `false` if the scope has ended meanwhile.
fn is_changed(answer: Result<(), systemd::Error>) -> Result<bool, systemd::Error> {
    match answer {
        Ok(()) => Ok(true),
        Err(error) if error.is_not_loaded() => Ok(false),
        Err(error) => Err(error),
    }
}

/// Logs the processes of a scope that have one of these GPUs open.
async fn report_open(proc_dir: &Path, unit: &str, denied: BTreeSet<u32>) {
    let (proc_dir, scope) = (proc_dir.to_owned(), format!("/system.slice/{unit}"));
    let found = subtask::blocking(move || {
        let denied: Vec<u32> = denied.into_iter().collect();
        let holders = device_files::holders(&proc_dir, &denied, &[]).unwrap_or_default();
        let is_of_job = |pid: &u32| proc::cgroups(*pid).is_some_and(|text| cgroup::contains(&scope, &text));
        holders.into_iter().filter_map(|one| one.pid).filter(is_of_job).collect::<Vec<u32>>()
    });
    let pids = found.await.unwrap_or_default();
    if !pids.is_empty() {
        tracing::warn!(
            "Slurm jobs have opened GPUs that need a lease, and keep them until their processes end: {pids:?}"
        );
    }
}

/// Returns why Slurm jobs may open the denied GPUs; `None` if they may not.
pub(super) fn unlimited(limited: &[EnforcedUnit]) -> Option<String> {
    let open = limited.iter().find(|unit| !unit.denies_gpus)?;
    Some(format!(
        "`DeviceAllow=` of {}, which an administrator has set, does not deny the GPUs whose rules enforce leases",
        open.unit
    ))
}

fn is_list(devices: &UnitDevices, wanted: &[AllowedDevice]) -> bool {
    let patterns: BTreeSet<String> = wanted.iter().map(|device| device.pattern()).collect();
    devices.allowed.iter().cloned().collect::<BTreeSet<_>>() == patterns
}

/// Returns whether the scope may not open all devices.
fn is_limited(devices: &UnitDevices) -> bool {
    !devices.allowed.is_empty() || matches!(devices.policy.as_str(), "closed" | "strict")
}

/// Returns whether gpushd has set the list, for any GPUs.
fn is_own(devices: &UnitDevices) -> bool {
    let gpu = format!("/dev/char/{GPU_MAJOR}:");
    let (gpus, others): (Vec<&String>, Vec<&String>) =
        devices.allowed.iter().partition(|pattern| pattern.starts_with(&gpu));
    let others: BTreeSet<String> = others.into_iter().cloned().collect();
    !gpus.is_empty() && others == session_devices().iter().map(|device| device.pattern()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn devices(allowed: &[AllowedDevice]) -> UnitDevices {
        let allowed = allowed.iter().rev().map(|device| device.pattern()).collect();
        UnitDevices { policy: "closed".to_owned(), allowed }
    }

    #[test]
    fn own_list_of_jobs_is_recognized_for_any_gpus() {
        let (one, two) = (job_devices(&[1].into()), job_devices(&[1, 2].into()));
        assert!(is_own(&devices(&one)) && is_own(&devices(&two)));
        assert!(is_list(&devices(&one), &one) && !is_list(&devices(&one), &two));
        assert!(!is_own(&devices(&session_devices())) && !is_own(&UnitDevices::default()));
        assert!(!is_own(&devices(&one[1..one.len() - 1])), "an administrator has changed the list");
        let policy = |policy: &str| UnitDevices { policy: policy.to_owned(), ..UnitDevices::default() };
        assert!(is_limited(&devices(&one)) && is_limited(&policy("closed")) && is_limited(&policy("strict")));
        assert!(!is_limited(&policy("auto")));
    }
}
