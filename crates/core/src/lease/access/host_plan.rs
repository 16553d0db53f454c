//! What `gpushctl enforce on` changes on a host, and what it does not reach: the answer of `gpushctl enforce plan`.

use gpush_api::{EnforcedUnit, EnforcementEffect, EnforcementPlan, EnforcementReach, GpuIndex, LeaseId};

/// The slice that contains all login sessions.
pub const SESSIONS: &str = "user.slice";

/// Services that start containers, in which users can be root.
pub const CONTAINERS: [&str; 4] = ["docker.service", "containerd.service", "crio.service", "podman.service"];

/// Slurm's daemon of a node.
pub const SLURMD: &str = "slurmd.service";

/// Services of systemd itself, which have users but run no programs of users.
const OF_SYSTEMD: [&str; 2] = ["systemd-", "dbus"];

/// How an administrator uses a GPU.
const SHELL: &str = "use `gpushctl enforce shell -- COMMAND` (administrator), or `systemd-run --pipe COMMAND`";

/// Maximum number of processes or units of one kind in a plan.
const MOST: usize = 16;

/// A process of a login session that has a GPU open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionProcess {
    /// Process id.
    pub pid: u32,
    /// User; `None` if the process has just ended.
    pub uid: Option<u32>,
    /// Name of the program.
    pub command: String,
    /// Whether the process shows a picture with the GPU: it has the display part of the driver open.
    pub is_graphical: bool,
}

/// What is known about a host before `gpushctl enforce on`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HostFacts {
    /// Why the host cannot enforce leases; `None` if it can.
    pub unsupported: Option<String>,
    /// `user.slice`, and the services of cron and at that run.
    pub units: Vec<EnforcedUnit>,
    /// Services whose `User=` is not root: unit and user.
    pub services: Vec<(String, String)>,
    /// Services in whose cgroups login sessions are.
    pub services_with_sessions: Vec<String>,
    /// Services of [`CONTAINERS`], and [`SLURMD`], that run.
    pub runtimes: Vec<String>,
    /// Processes of login sessions that have a GPU open.
    pub processes: Vec<SessionProcess>,
    /// Leases whose programs run in login sessions.
    pub session_leases: Vec<LeaseId>,
    /// Whether the host has nodes in `/dev/dri`.
    pub has_graphics_nodes: bool,
    /// GPUs whose rules do not enforce leases.
    pub other_gpus: Vec<GpuIndex>,
    /// GPUs whose rules enforce leases, and that do not belong to Slurm.
    pub denied_to_jobs: Vec<GpuIndex>,
}

/// Returns the plan for a host. On a host that cannot enforce leases, nothing changes.
#[must_use]
pub fn host_plan(host: &HostFacts) -> EnforcementPlan {
    if host.unsupported.is_some() {
        return EnforcementPlan { unsupported: host.unsupported.clone(), ..EnforcementPlan::default() };
    }
    let mut effects = vec![effect(
        "root in login sessions",
        EnforcementReach::Denied,
        "`nvidia-smi` of root fails in a login session: the session decides, not the user",
        SHELL,
    )];
    effects.extend(host.processes.iter().take(MOST).map(of_process));
    effects.extend(session_leases(host));
    effects.extend(gpus_without_enforcement(host));
    for unit in host.units.iter().filter(|unit| unit.unit != SESSIONS) {
        effects.push(effect(
            &unit.unit,
            EnforcementReach::Denied,
            "its jobs cannot open GPUs, also those of root",
            "in the crontab of root, write `systemd-run --wait --pipe COMMAND`",
        ));
    }
    let is_of_host = |unit: &str| {
        host.units.iter().any(|own| own.unit == unit) || OF_SYSTEMD.iter().any(|own| unit.starts_with(own))
    };
    for (unit, user) in host.services.iter().filter(|(unit, _)| !is_of_host(unit)).take(MOST) {
        let command =
            format!("`systemctl set-property {unit} DevicePolicy=closed` denies it all GPUs and other devices");
        let text = format!("its programs run as {user}; `enforce on` does not change which GPUs they can open");
        effects.push(effect(unit, EnforcementReach::NotCovered, &text, &command));
    }
    for unit in &host.services_with_sessions {
        let text = "login sessions run in this service, and can open all GPUs";
        effects.push(effect(unit, EnforcementReach::NotCovered, text, "enable pam_systemd for the service"));
    }
    for unit in &host.runtimes {
        if unit == SLURMD {
            effects.extend(slurm_jobs(host));
            continue;
        }
        let text = "users who may start containers can open all GPUs in them";
        effects.push(effect(unit, EnforcementReach::NotCovered, text, "only permit trusted users to start containers"));
    }
    if host.has_graphics_nodes {
        let text = "it stays open for graphics and video; CUDA needs a node of /dev/nvidia* too";
        let hint = "the mode and the group of its nodes decide who may open them";
        effects.push(effect("/dev/dri", EnforcementReach::NotCovered, text, hint));
    }
    let changes = host.units.iter().filter(|unit| !unit.denies_gpus).map(|unit| unit.unit.clone()).collect();
    EnforcementPlan { unsupported: None, changes, effects }
}

impl SessionProcess {
    /// Describes the process: `pid 7 (Xorg) of uid 1000`.
    #[must_use]
    pub fn describe(&self) -> String {
        let uid = self.uid.map_or_else(|| "an unknown user".to_owned(), |uid| format!("uid {uid}"));
        format!("pid {} ({}) of {uid}", self.pid, self.command)
    }
}

fn of_process(process: &SessionProcess) -> EnforcementEffect {
    if process.is_graphical {
        let text = "it shows a picture with the GPU, and cannot start again";
        return effect(&process.describe(), EnforcementReach::Blocks, text, "end its session first");
    }
    let text = "it can use the GPUs that it has open, but cannot open a GPU again";
    effect(&process.describe(), EnforcementReach::Denied, text, "start it again with `gpushctl run -- COMMAND`")
}

/// Returns the effect on leases whose programs run in login sessions.
fn session_leases(host: &HostFacts) -> Option<EnforcementEffect> {
    let ids: Vec<String> = host.session_leases.iter().take(MOST).map(LeaseId::to_string).collect();
    let text = "programs of these leases that run in login sessions cannot open GPUs";
    let hint = "their holders start programs with `gpushctl run -- COMMAND` instead";
    (!ids.is_empty()).then(|| effect(&format!("leases {}", ids.join(", ")), EnforcementReach::Denied, text, hint))
}

/// Returns the effect on GPUs that sessions can open only through a lease, although their rules do not enforce leases.
fn gpus_without_enforcement(host: &HostFacts) -> Option<EnforcementEffect> {
    let text = "login sessions cannot open these GPUs either, because all GPUs have one major number";
    let hint = "programs get them with `gpushctl run -- COMMAND`; a GPU without a rule, or of mode unmanaged, is not reachable";
    (!host.other_gpus.is_empty()).then(|| effect(&named(&host.other_gpus), EnforcementReach::Denied, text, hint))
}

/// Returns the effects on the jobs of a node of Slurm.
fn slurm_jobs(host: &HostFacts) -> Vec<EnforcementEffect> {
    if host.denied_to_jobs.is_empty() {
        let text = "programs of jobs can open all GPUs, unless Slurm denies it";
        let hint = "set `ConstrainDevices=yes` in cgroup.conf, and list all GPUs of the host in gres.conf";
        return vec![effect(SLURMD, EnforcementReach::NotCovered, text, hint)];
    }
    let named = named(&host.denied_to_jobs);
    let denied = format!("jobs cannot open {named}, whose rules enforce leases and have no `owner = \"slurm\"`");
    let owner = "write `owner = \"slurm\"` into the rules of the GPUs that gres.conf lists";
    let open = "programs of jobs can open all other GPUs, unless Slurm denies it";
    let constrain = "set `ConstrainDevices=yes` in cgroup.conf, and list the GPUs of Slurm in gres.conf";
    vec![
        effect(SLURMD, EnforcementReach::Denied, &denied, owner),
        effect(SLURMD, EnforcementReach::NotCovered, open, constrain),
    ]
}

/// Formats GPU indexes: `GPU 3`, or `GPUs 0, 2`.
#[must_use]
pub fn named(gpus: &[GpuIndex]) -> String {
    let names: Vec<String> = gpus.iter().map(GpuIndex::to_string).collect();
    format!("GPU{} {}", if names.len() == 1 { "" } else { "s" }, names.join(", "))
}

fn effect(subject: &str, reach: EnforcementReach, effect: &str, hint: &str) -> EnforcementEffect {
    EnforcementEffect { subject: subject.to_owned(), reach, effect: effect.to_owned(), hint: Some(hint.to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn graphical_process_blocks() {
        let process =
            |is_graphical| SessionProcess { pid: 7, uid: Some(1000), command: "Xorg".to_owned(), is_graphical };
        assert_eq!(process(true).describe(), "pid 7 (Xorg) of uid 1000");
        assert_eq!(of_process(&process(true)).reach, EnforcementReach::Blocks);
        assert_eq!(of_process(&process(false)).reach, EnforcementReach::Denied);
    }

    #[test]
    fn only_units_that_do_not_deny_the_gpus_change() {
        let unit = |unit: &str, denies_gpus| EnforcedUnit { unit: unit.to_owned(), denies_gpus, set_by_gpush: true };
        let units = vec![unit(SESSIONS, true), unit("cron.service", false)];
        let plan = host_plan(&HostFacts { units, ..HostFacts::default() });
        assert_eq!(plan.changes, ["cron.service"]);
    }
}
