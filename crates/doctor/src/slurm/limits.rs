//! Settings of slurm.conf and cgroup.conf: flags, timeouts, and settings that isolate jobs from
//! each other.

use gpush_api::Mode;
use gpush_core::{
    config::Config,
    slurm::{KeyValue, lines},
};

use super::{files::Files, hooks};
use crate::{Area, Finding, Host};

/// Flags of `PrologFlags` with which slurmd runs Prolog when a job is allocated. `scontrol show
/// config` of Slurm 22.05 and 24.11 confirms this effect for each flag. `Serial` and `DeferBatch`
/// alone do not have the effect.
const ALLOC: [&str; 6] = ["Alloc", "Contain", "NoHold", "X11", "RunInJob", "ForceRequeueOnFail"];

/// Flags that create the step `extern`.
const CONTAIN: [&str; 3] = ["Contain", "X11", "RunInJob"];

/// Time in seconds that slurmd needs before and after the run of a hook.
const MARGIN_S: u32 = 5;

pub(super) fn examine(host: &Host, files: &Files, config: &Config, has_owner: bool) -> Vec<Finding> {
    let path = &files.path;
    let mut findings = Vec::new();
    let mut warn = |message: &str, cause: String, hint: String| {
        findings.push(Finding::warning(Area::Slurm, message, hint).cause(cause));
    };
    let has_flag = |flags: &[&str]| flags.iter().any(|flag| files.has("PrologFlags", flag));
    if !has_flag(&ALLOC) {
        warn(
            "Prolog does not run when a job is allocated",
            "PrologFlags has neither Alloc nor a flag that implies it, so Slurm runs only Epilog for an allocation \
             without a job step"
                .into(),
            format!("set PrologFlags=Alloc in {path}, then restart slurmctld and slurmd"),
        );
    }
    if files.get("ProctrackType").is_some_and(|plugin| plugin != "proctrack/cgroup") {
        warn(
            "processes that remain after a job cannot be attributed to the job",
            format!("ProctrackType is {}, not proctrack/cgroup", files.get("ProctrackType").unwrap_or_default()),
            format!("set ProctrackType=proctrack/cgroup in {path}, then restart slurmd on drained nodes"),
        );
    }
    let constrains = constrains_devices(host, files);
    if !constrains || !files.has("TaskPlugin", "task/cgroup") {
        let cause = if constrains { "TaskPlugin lacks task/cgroup" } else { "cgroup.conf lacks ConstrainDevices=yes" };
        warn(
            "jobs can open GPUs that Slurm did not allocate to them",
            cause.into(),
            format!(
                "set ConstrainDevices=yes in {} and TaskPlugin=task/cgroup in {path}, then restart slurmd",
                files.sibling("cgroup.conf")
            ),
        );
    }
    let changes_gpus = config.rules.iter().any(|rule| rule.mode == Mode::Mig);
    let gathers = files.get("JobAcctGatherType").is_some_and(|plugin| plugin != "jobacct_gather/none");
    if changes_gpus && gathers && !files.has("JobAcctGatherParams", "DisableGPUAcct") {
        warn(
            "slurmstepd keeps the driver open while jobs run, so MIG layouts cannot be changed during that time",
            format!("JobAcctGatherType is {}", files.get("JobAcctGatherType").unwrap_or_default()),
            format!("set JobAcctGatherParams=DisableGPUAcct in {path}, then restart slurmd"),
        );
    }
    let sshd = host.read("etc/pam.d/sshd").unwrap_or_default();
    let adopts = lines(&sshd).iter().any(|line| line.text.contains("pam_slurm_adopt"));
    if adopts && !has_flag(&CONTAIN) {
        warn(
            "pam_slurm_adopt cannot put ssh sessions into jobs",
            "pam_slurm_adopt needs the job step `extern`, which PrologFlags=Contain creates".into(),
            format!("set PrologFlags=Contain in {path}, then restart slurmctld and slurmd"),
        );
    } else if has_owner && !adopts && host.has("etc/pam.d/sshd") {
        warn(
            "users who log in with ssh can open GPUs outside of their jobs",
            "/etc/pam.d/sshd does not use pam_slurm_adopt".into(),
            "install pam_slurm_adopt and add `account required pam_slurm_adopt.so` to /etc/pam.d/sshd".into(),
        );
    }
    findings.extend(timeout(host, files, config));
    findings
}

fn constrains_devices(host: &Host, files: &Files) -> bool {
    let text = host.read(files.sibling("cgroup.conf")).unwrap_or_default();
    let pairs: Vec<KeyValue> = lines(&text).iter().filter_map(|line| line.pairs().ok()).flatten().collect();
    pairs
        .iter()
        .rev()
        .find(|pair| pair.is("ConstrainDevices"))
        .is_some_and(|pair| pair.value.eq_ignore_ascii_case("yes"))
}

/// Checks that a hook gives up before Slurm ends it. If Slurm ends a hook, Slurm drains the node,
/// even with `agent_down = "pass"`.
fn timeout(host: &Host, files: &Files, config: &Config) -> Option<Finding> {
    let of_config = || {
        let seconds = u32::try_from(config.slurm.deadline.as_secs()).unwrap_or(u32::MAX);
        (seconds, "slurm.deadline of gpush's config".to_owned())
    };
    let deadlines = hooks::deadlines(host, files).into_iter().map(|(script, option)| match option {
        Some(seconds) => (seconds, format!("--deadline in {script}")),
        None => of_config(),
    });
    let (deadline, source) = deadlines.max_by_key(|(seconds, _)| *seconds).unwrap_or_else(of_config);
    let path = &files.path;
    let set =
        files.get("PrologEpilogTimeout").and_then(|value| value.parse::<u32>().ok()).filter(|value| *value < 65534);
    let needed = deadline.saturating_add(MARGIN_S);
    match set {
        None => {
            let message = "a Prolog or Epilog that hangs keeps its node busy without a time limit";
            let hint = format!("set PrologEpilogTimeout={} in {path}, then run `scontrol reconfigure`", needed.max(60));
            Some(Finding::warning(Area::Slurm, message, hint).cause(format!("{path} has no PrologEpilogTimeout")))
        }
        Some(limit) if limit < needed => {
            let message = "Slurm ends Prolog and Epilog before gpush gives up, and Slurm then drains the node";
            let cause = format!("PrologEpilogTimeout is {limit}s, and {source} is {deadline}s");
            let hint = format!("set PrologEpilogTimeout={needed} or more in {path}, then run `scontrol reconfigure`");
            Some(Finding::problem(Area::Slurm, message, hint).cause(cause))
        }
        Some(_) => None,
    }
}
