//! What `gpushctl enforce on` changes on this host, and what it does not reach.

use gpush_api::{ApiError, Code, EnforcementEffect, EnforcementPlan, EnforcementReach, GpuIndex, LeaseBinding};
use gpush_host::systemd::Manager;

use super::{
    gpus_by_rule, host_part, named,
    sessions::{self, SessionProcess},
    slurm_jobs,
};
use crate::state::{HostState, context::HostContext};

/// Services that start containers, in which users can be root.
const CONTAINERS: [&str; 4] = ["docker.service", "containerd.service", "crio.service", "podman.service"];

/// Slurm's daemon of a node.
const SLURMD: &str = "slurmd.service";

/// Services of systemd itself, which have users but run no programs of users.
const OF_SYSTEMD: [&str; 2] = ["systemd-", "dbus"];

/// The way of an administrator to the GPUs.
const SHELL: &str = "use `gpushctl enforce shell -- COMMAND` (administrator), or `systemd-run --pipe COMMAND`";

/// Maximum number of processes or units of one kind in a plan.
const MOST: usize = 16;

/// Returns the plan for this host.
///
/// # Errors
/// If systemd does not answer.
pub(super) async fn of_host(manager: &Manager, context: &HostContext) -> Result<EnforcementPlan, ApiError> {
    let read = async {
        let version = manager.version().await?;
        let units = host_part::read(manager).await?;
        Ok((version, units, manager.services_of_users().await?, running(manager).await?))
    };
    let (version, units, services, running) = read.await.map_err(|error| host_part::failed(&error))?;
    let host = context.state.now();
    let mut effects = vec![effect(
        "root in login sessions",
        EnforcementReach::Denied,
        "`nvidia-smi` of root fails in a login session: the session decides, not the user",
        Some(SHELL),
    )];
    effects.extend(sessions::processes(context).await.iter().take(MOST).map(of_process));
    effects.extend(session_leases(&host));
    effects.extend(gpus_without_enforcement(&host));
    for unit in units.iter().filter(|unit| unit.unit != host_part::SESSIONS) {
        effects.push(effect(
            &unit.unit,
            EnforcementReach::Denied,
            "its jobs cannot open GPUs, also those of root",
            Some("in the crontab of root, write `systemd-run --wait --pipe COMMAND`"),
        ));
    }
    let is_of_host =
        |unit: &str| units.iter().any(|own| own.unit == unit) || OF_SYSTEMD.iter().any(|own| unit.starts_with(own));
    for (unit, user) in services.iter().filter(|(unit, _)| !is_of_host(unit)).take(MOST) {
        let command =
            format!("`systemctl set-property {unit} DevicePolicy=closed` denies it all GPUs and other devices");
        let text = format!("its programs run as {user}, and can open all GPUs, as before");
        effects.push(effect(unit, EnforcementReach::NotCovered, &text, Some(&command)));
    }
    for unit in sessions::services_with_sessions().await {
        let text = "login sessions run in this service, and can open all GPUs";
        effects.push(effect(unit, EnforcementReach::NotCovered, text, Some("enable pam_systemd for the service")));
    }
    for unit in running {
        if unit == SLURMD {
            effects.extend(of_slurm_jobs(&host));
            continue;
        }
        let text = "users who may start containers can open all GPUs in them";
        effects.push(effect(
            unit,
            EnforcementReach::NotCovered,
            text,
            Some("only permit trusted users to start containers"),
        ));
    }
    Ok(EnforcementPlan { unsupported: host_part::unsupported(version), effects })
}

/// Returns the services of [`CONTAINERS`], and [`SLURMD`], that run.
async fn running(manager: &Manager) -> Result<Vec<&'static str>, gpush_host::systemd::Error> {
    let mut found = Vec::new();
    for unit in CONTAINERS.into_iter().chain([SLURMD]) {
        if !manager.running(unit).await?.is_empty() {
            found.push(unit);
        }
    }
    Ok(found)
}

/// Returns the error if graphical sessions use a GPU.
pub(super) async fn graphical_sessions(context: &HostContext) -> Option<ApiError> {
    let processes = sessions::processes(context).await;
    let graphical: Vec<String> = processes.iter().filter(|one| one.is_graphical).take(MOST).map(describe).collect();
    let error = ApiError::new(Code::Conflict, "graphical sessions use a GPU, and would not start again without it")
        .hint("end these sessions, or run `gpushctl enforce on --force` (administrator)");
    (!graphical.is_empty()).then(|| graphical.into_iter().fold(error, ApiError::cause))
}

fn describe(process: &SessionProcess) -> String {
    let uid = process.uid.map_or_else(|| "an unknown user".to_owned(), |uid| format!("uid {uid}"));
    format!("pid {} ({}) of {uid}", process.pid, process.command)
}

fn of_process(process: &SessionProcess) -> EnforcementEffect {
    if process.is_graphical {
        let text = "it shows a picture with the GPU, and cannot start again";
        return effect(&describe(process), EnforcementReach::Blocks, text, Some("end its session first"));
    }
    let text = "it can use the GPUs that it has open, but cannot open a GPU again";
    effect(&describe(process), EnforcementReach::Denied, text, Some("start it again with `gpushctl run -- COMMAND`"))
}

/// Returns the leases whose programs run in login sessions.
fn session_leases(host: &HostState) -> Option<EnforcementEffect> {
    let is_in_session = |binding: &LeaseBinding| match binding {
        LeaseBinding::Cgroup { cgroup, .. } => cgroup.as_ref().is_some_and(|path| path.starts_with("/user.slice/")),
        LeaseBinding::Process { .. } | LeaseBinding::Time | LeaseBinding::None => true,
        LeaseBinding::Scope { .. } | LeaseBinding::Job { .. } => false,
    };
    let leases = host.leases.open.values().filter(|lease| is_in_session(&lease.record.binding));
    let ids: Vec<String> = leases.take(MOST).map(|lease| lease.id().to_string()).collect();
    let hint = "their holders start programs with `gpushctl run -- COMMAND` instead";
    (!ids.is_empty()).then(|| {
        let text = "programs of these leases that run in login sessions cannot open GPUs";
        effect(&format!("leases {}", ids.join(", ")), EnforcementReach::Denied, text, Some(hint))
    })
}

/// Returns the GPUs that sessions can open only through a lease, although their rules do not enforce leases.
fn gpus_without_enforcement(host: &HostState) -> Option<EnforcementEffect> {
    let (_, others): (_, Vec<GpuIndex>) = gpus_by_rule(host);
    let text = "login sessions cannot open these GPUs either, because all GPUs have one major number";
    let hint = "programs get them with `gpushctl run -- COMMAND`; a GPU without a rule, or of mode unmanaged, is not reachable";
    (!others.is_empty()).then(|| effect(&named(&others), EnforcementReach::Denied, text, Some(hint)))
}

/// Returns what jobs can open, on a node of Slurm.
fn of_slurm_jobs(host: &HostState) -> Vec<EnforcementEffect> {
    let denied = slurm_jobs::denied_gpus(host).unwrap_or_default();
    let gpus = host.gpus.iter().filter(|gpu| denied.contains(&gpu.gpu.minor));
    let named = named(&gpus.map(|gpu| gpu.gpu.index).collect::<Vec<_>>());
    let text = format!("jobs cannot open {named}, whose rules enforce leases and have no `owner = \"slurm\"`");
    let hint = "write `owner = \"slurm\"` into the rules of the GPUs that gres.conf lists";
    let covered = (!denied.is_empty()).then(|| effect(SLURMD, EnforcementReach::Denied, &text, Some(hint)));
    let which = if denied.is_empty() { "all GPUs" } else { "all other GPUs" };
    let text = format!("programs of jobs can open {which}, unless Slurm denies it");
    let hint = "set `ConstrainDevices=yes` in cgroup.conf, and list the GPUs of Slurm in gres.conf; for the others, write \
                `lease = \"enforced\"` into their rules";
    covered.into_iter().chain([effect(SLURMD, EnforcementReach::NotCovered, &text, Some(hint))]).collect()
}

fn effect(subject: &str, reach: EnforcementReach, effect: &str, hint: Option<&str>) -> EnforcementEffect {
    EnforcementEffect { subject: subject.to_owned(), reach, effect: effect.to_owned(), hint: hint.map(str::to_owned) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graphical_process_blocks() {
        let process =
            |is_graphical| SessionProcess { pid: 7, uid: Some(1000), command: "Xorg".to_owned(), is_graphical };
        assert_eq!(describe(&process(true)), "pid 7 (Xorg) of uid 1000");
        assert_eq!(of_process(&process(true)).reach, EnforcementReach::Blocks);
        assert_eq!(of_process(&process(false)).reach, EnforcementReach::Denied);
    }
}
