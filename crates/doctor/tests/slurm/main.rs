//! A host whose Slurm is configured for gpush. Each test creates one fault there, and expects its
//! finding.

mod devices;
mod plants;

use std::{fs, os::unix::fs::PermissionsExt};

use gpush_api::{ApiError, Code, Gpu, GpuIndex, LeaseOwner, LeaseTerms, Mode, RuleView};
use gpush_core::preset;
use gpush_doctor::{Agent, Area, Finding, Host, Severity, examine};
use tempfile::TempDir;

const SLURM_CONF: &str = "/etc/slurm/slurm.conf";

const HEALTHY: &str = "ClusterName=ci
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup,task/affinity
JobAcctGatherType=jobacct_gather/cgroup
JobAcctGatherParams=UsePss,DisableGPUAcct
GresTypes=gpu
PrologFlags=Alloc,Contain
PrologEpilogTimeout=60
Prolog=/etc/slurm/prolog.d/*
Epilog=/usr/share/gpush/slurm/epilog
TaskProlog=/usr/share/gpush/slurm/task-prolog
Include nodes.conf
";

const NODES: &str = "NodeName=n[1-4] CPUs=16 Gres=gpu:h100:2\n";

struct Planted {
    root: TempDir,
    /// The GPUs that gpushd knows.
    gpus: Vec<Gpu>,
    rules: Vec<RuleView>,
}

impl Planted {
    fn healthy() -> Self {
        let host = Self {
            root: tempfile::tempdir().expect("a temporary directory"),
            gpus: gpus(2),
            rules: vec![rule("all", LeaseOwner::Slurm, &[0, 1])],
        };
        host.write("proc/sys/kernel/hostname", "n1.example.org\n");
        host.write(SLURM_CONF, HEALTHY);
        host.write("etc/slurm/nodes.conf", NODES);
        host.write("etc/slurm/gres.conf", "AutoDetect=off\nNodeName=n[1-4] Name=gpu Type=h100 File=/dev/nvidia[0-1]\n");
        host.write("etc/slurm/cgroup.conf", "CgroupPlugin=autodetect\nConstrainDevices=yes # GPUs\n");
        host.write("etc/pam.d/sshd", "account required pam_slurm_adopt.so\n");
        for minor in 0..2 {
            host.write(&format!("dev/nvidia{minor}"), "");
            host.gpu(minor, minor);
        }
        host.write("usr/bin/gpushctl", "");
        for (path, text) in [
            ("etc/slurm/prolog.d/50-gpush", "#!/bin/sh\nexec /usr/bin/gpushctl slurm prolog\n"),
            ("usr/share/gpush/slurm/epilog", "#!/usr/bin/gpushctl slurm epilog\n# No shell.\n"),
            ("usr/share/gpush/slurm/task-prolog", "#!/usr/bin/gpushctl slurm task-prolog --dir /run/x\n"),
        ] {
            host.write(path, text);
            host.mode(path, 0o755);
        }
        host.write("srv/gpush.toml", RULES);
        host.slurmd();
        host
    }

    fn gpu(&self, address: u32, minor: u32) {
        let path = format!("proc/driver/nvidia/gpus/0000:0{}:00.0/information", address + 1);
        self.write(&path, &format!("Model: \t\t NVIDIA H100\nDevice Minor: \t {minor}\n"));
    }

    /// Adds the process of slurmd.
    fn slurmd(&self) {
        self.write("proc/900/comm", "slurmd\n");
        self.write("proc/900/status", "Name:\tslurmd\nUid:\t0\t0\t0\t0\n");
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.root.path().join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().expect("a file is in a directory")).expect("a directory");
        fs::write(path, text).expect("a file");
    }

    fn mode(&self, path: &str, mode: u32) {
        fs::set_permissions(self.root.path().join(path), fs::Permissions::from_mode(mode)).expect("a mode");
    }

    fn remove(&self, path: &str) {
        fs::remove_file(self.root.path().join(path)).expect("it was there");
    }

    /// Replaces a text in slurm.conf.
    fn change(&self, from: &str, to: &str) {
        assert!(HEALTHY.contains(from), "{from}");
        self.write(SLURM_CONF, &HEALTHY.replace(from, to));
    }

    fn findings(&self) -> Vec<Finding> {
        let (version, gpus, rules) = ("1.0".to_owned(), self.gpus.clone(), self.rules.clone());
        let agent = Agent::Reached {
            own: version.clone(),
            version,
            troubles: Vec::new(),
            gpus,
            rules,
            config_path: Some(CONFIG.into()),
            has_memory_limits: false,
        };
        examine(&Host::at(self.root.path()), &agent, &[Area::Slurm])
    }

    /// Expects one finding with this text in its message and this command in its hint.
    #[track_caller]
    fn finds(&self, severity: Severity, message: &str, hint: &str) {
        let findings = self.findings();
        let [finding] = findings.as_slice() else { panic!("not one: {findings:#?}") };
        assert_eq!((finding.area, finding.severity), (Area::Slurm, severity), "{finding:#?}");
        assert!(finding.message.contains(message), "{finding:#?}");
        assert!(finding.hint.as_ref().is_some_and(|text| text.contains(hint)), "{finding:#?}");
    }
}

const RULES: &str = "[[gpu]]\nmatch = [\"0-1\"]\nmode = \"mig\"\nlayout = \"none\"\nowner = \"slurm\"\n";

/// The config file that gpushd uses.
const CONFIG: &str = "/srv/gpush.toml";

/// Whole GPUs.
fn gpus(count: usize) -> Vec<Gpu> {
    let mut gpus = preset::gpus("dgx-h100").expect("a preset");
    gpus.truncate(count);
    gpus.iter_mut().for_each(|gpu| gpu.mig = None);
    gpus
}

/// A rule whose leases have this owner.
fn rule(name: &str, owner: LeaseOwner, claims: &[u32]) -> RuleView {
    RuleView {
        name: name.to_owned(),
        selectors: claims.iter().map(u32::to_string).collect(),
        mode: Mode::Exclusive,
        layout: None,
        mps: None,
        timeslice: None,
        lease: Some(LeaseTerms { owner, ..LeaseTerms::default() }),
        access: None,
        claims: claims.iter().copied().map(GpuIndex).collect(),
    }
}

#[test]
fn suitable_slurm_has_one_ok() {
    let findings = Planted::healthy().findings();
    assert_eq!(findings.len(), 1, "{findings:#?}");
    assert_eq!(findings[0].severity, Severity::Ok);
    assert!(findings[0].message.contains(SLURM_CONF), "{findings:#?}");
}

#[test]
fn host_without_slurm_is_ok_unless_a_rule_says_slurm() {
    let host = Planted::healthy();
    host.remove("etc/slurm/slurm.conf");
    host.finds(Severity::Problem, "no slurm.conf", "gpushctl config reload");
    host.write("srv/gpush.toml", "");
    let findings = host.findings();
    assert_eq!((findings.len(), findings[0].severity), (1, Severity::Ok), "{findings:#?}");
}

#[test]
fn missing_hooks_are_found() {
    for (line, key) in [
        ("Prolog=/etc/slurm/prolog.d/*\n", "Prolog does"),
        ("Epilog=/usr/share/gpush/slurm/epilog\n", "Epilog does"),
        ("TaskProlog=/usr/share/gpush/slurm/task-prolog\n", "TaskProlog does"),
    ] {
        let host = Planted::healthy();
        host.change(line, "");
        host.finds(Severity::Problem, key, "scontrol reconfigure");
        // If the config assigns no GPU to Slurm, jobs can work without gpush.
        host.write("srv/gpush.toml", "[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n");
        host.finds(Severity::Warning, key, "/usr/share/gpush/slurm/");
    }
    let host = Planted::healthy();
    host.write("etc/slurm/prolog.d/50-gpush", "#!/bin/sh\nexit 0\n");
    host.finds(Severity::Problem, "Prolog does not run gpush", "prolog");
}

/// Fault: a script that follows the hint of the finding "Prolog does not run gpush" still had this
/// finding.
#[test]
fn script_that_calls_the_packaged_hook_runs_gpush() {
    let host = Planted::healthy();
    host.write("usr/share/gpush/slurm/prolog", "#!/usr/bin/gpushctl slurm prolog\n");
    for line in ["/usr/share/gpush/slurm/prolog || exit 1", "hook=\"/usr/share/gpush/slurm/prolog\"; exec \"$hook\""] {
        host.write("etc/slurm/prolog.d/50-gpush", &format!("#!/bin/sh\n{line}\n"));
        assert_eq!(host.findings()[0].severity, Severity::Ok, "{line}: {:#?}", host.findings());
    }
    host.write("etc/slurm/prolog.d/50-gpush", "#!/bin/sh\n  # /usr/share/gpush/slurm/prolog\n");
    host.finds(Severity::Problem, "Prolog does not run gpush", "scontrol reconfigure");
    host.write("etc/slurm/prolog.d/50-gpush", "#!/bin/sh\n/usr/share/gpush/slurm/prolog\n");
    host.write("usr/share/gpush/slurm/prolog", "#!/opt/gpush/gpushctl slurm prolog\n");
    host.finds(
        Severity::Problem,
        "slurm/prolog runs /opt/gpush/gpushctl, which does not exist",
        "gpushctl slurm prolog",
    );
    host.remove("usr/share/gpush/slurm/prolog");
    host.finds(Severity::Problem, "Prolog does not run gpush", "scontrol reconfigure");
}

/// Fault: a pattern matched only if it had one `*`, in its last part.
#[test]
fn patterns_of_hooks_match_as_in_glob_3() {
    let host = Planted::healthy();
    let matches = |pattern: &str| {
        host.change("prolog.d/*", pattern);
        host.findings()[0].severity == Severity::Ok
    };
    for pattern in ["prolog.d/??-gpush", "prolog.d/[0-9]*", "prolog.d/*-*", "prolog.?/50**", "*.d/[^a-z]0-gpush"] {
        assert!(matches(pattern), "{pattern}: {:#?}", host.findings());
    }
    for pattern in ["prolog.d/?-gpush", "prolog.d/[!0-9]*", "*-gpush", "prolog.d/[5", "**/50-gpush/x"] {
        assert!(!matches(pattern), "{pattern}");
    }
    // Hidden files do not match, and names with special characters do.
    host.write("etc/slurm/prolog.d/.hidden", "not executable");
    assert!(matches("prolog.d/*"));
    host.write("etc/slurm/[x/prolog", "#!/bin/sh\n/usr/bin/gpushctl slurm prolog\n");
    host.mode("etc/slurm/[x/prolog", 0o755);
    assert!(matches("[x/prolog"));
}

#[test]
fn file_that_slurmd_cannot_run_is_found() {
    let host = Planted::healthy();
    host.write("etc/slurm/prolog.d/README", "text");
    host.finds(Severity::Problem, "prolog.d/README is not executable", "chmod 755 /etc/slurm/prolog.d/README");
    host.mode("etc/slurm/prolog.d/README", 0o755);
    assert_eq!(host.findings()[0].severity, Severity::Ok);
}

/// Fault: if TaskProlog could not run, the doctor reported that Slurm drains the node. In fact,
/// only the task fails.
#[test]
fn task_prolog_that_is_not_executable_fails_tasks() {
    let host = Planted::healthy();
    host.mode("usr/share/gpush/slurm/task-prolog", 0o644);
    host.finds(Severity::Problem, "TaskProlog fails, and so does each task", "chmod 755");
}

/// Fault: the doctor compared PrologEpilogTimeout only with the deadline in the config, not with
/// the option `--deadline` of a script.
#[test]
fn deadline_of_a_script_is_compared_with_slurms_timeout() {
    let host = Planted::healthy();
    for option in ["--deadline 90s", "--deadline=1m30s"] {
        host.write("usr/share/gpush/slurm/epilog", &format!("#!/usr/bin/gpushctl slurm epilog {option}\n"));
        host.finds(Severity::Problem, "before gpush gives up", "PrologEpilogTimeout=95");
        assert!(host.findings()[0].causes[0].contains("--deadline in /usr/share/gpush/slurm/epilog is 90s"));
    }
    host.write("usr/share/gpush/slurm/epilog", "#!/usr/bin/gpushctl slurm epilog --deadline 30s\n");
    assert_eq!(host.findings()[0].severity, Severity::Ok);
    let check_first =
        "#!/bin/sh\n[ -x /usr/bin/gpushctl ] || exit 0\nexec /usr/bin/gpushctl slurm epilog --deadline 90s\n";
    host.write("usr/share/gpush/slurm/epilog", check_first);
    host.finds(Severity::Problem, "before gpush gives up", "PrologEpilogTimeout=95");
    // An option in a comment of the script has no effect.
    let comment =
        "#!/bin/sh\n# exec /usr/bin/gpushctl slurm epilog --deadline 90s\nexec /usr/bin/gpushctl slurm epilog\n";
    host.write("usr/share/gpush/slurm/epilog", comment);
    assert_eq!(host.findings()[0].severity, Severity::Ok);
    // The option `--deadline` of a script replaces the deadline of the config.
    let config =
        "[slurm]\ndeadline = \"300s\"\n\n[[gpu]]\nmatch = [\"0-1\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";
    host.write("srv/gpush.toml", config);
    host.finds(Severity::Problem, "before gpush gives up", "PrologEpilogTimeout=305");
    let with_option = |command: &str| format!("#!/usr/bin/gpushctl slurm {command} --deadline 50s\n");
    host.write("usr/share/gpush/slurm/epilog", &with_option("epilog"));
    host.finds(Severity::Problem, "before gpush gives up", "PrologEpilogTimeout=305");
    host.write("etc/slurm/prolog.d/50-gpush", &with_option("prolog"));
    assert_eq!(host.findings()[0].severity, Severity::Ok, "{:#?}", host.findings());
}

/// Fault: the doctor found nothing, although gpushd refused every job.
#[test]
fn dynamic_layout_of_slurms_gpus_is_found() {
    let host = Planted::healthy();
    let rule = "[[gpu]]\nmatch = [\"0-1\"]\nmode = \"mig\"\nlayout = \"dynamic\"\nowner = \"slurm\"\n";
    host.write("srv/gpush.toml", rule);
    host.finds(Severity::Warning, "gpushd refuses every job on the GPUs of rule 1", "gpushctl config reload");
}

/// Fault: the doctor ignored `SLURM_CONF`, which the hooks use.
#[test]
fn slurm_conf_of_the_environment_is_examined() {
    let host = Planted::healthy();
    let examined = |path: &str| {
        let slurm_conf = Host::at(host.root.path()).with_slurm_conf(Some(path.to_owned()));
        let agent = Agent::Unreachable(ApiError::new(Code::Unreachable, "gpushd does not run"));
        examine(&slurm_conf, &agent, &[Area::Slurm])
    };
    // A gpushd that does not answer cannot name its config file.
    host.write("etc/gpush/config.toml", RULES);
    host.write("opt/slurm/etc/slurm.conf", &HEALTHY.replace("PrologEpilogTimeout=60\n", ""));
    let findings = examined("/opt/slurm/etc/slurm.conf");
    assert!(findings.iter().any(|one| one.causes == ["/opt/slurm/etc/slurm.conf has no PrologEpilogTimeout"]));
    let findings = examined("/opt/slurm/etc/other.conf");
    assert!(findings[0].causes[0].ends_with("looked for /opt/slurm/etc/other.conf"), "{findings:#?}");
}

/// Regression test: the doctor found nothing, although Slurm drained the node with an empty reason.
#[test]
fn script_of_a_gpushctl_that_does_not_exist_is_found() {
    for text in [
        "#!/opt/gpush/gpushctl slurm prolog\n",
        "#!/bin/sh\n# /usr/bin/gpushctl slurm prolog\n\"/opt/gpush/gpushctl\" slurm prolog\nexit 0\n",
    ] {
        let host = Planted::healthy();
        host.write("etc/slurm/prolog.d/50-gpush", text);
        host.finds(Severity::Problem, "/opt/gpush/gpushctl, which does not exist", "#!/usr/bin/gpushctl slurm prolog");
        host.write("opt/gpush/gpushctl", "");
        assert_eq!(host.findings()[0].severity, Severity::Ok);
    }
}

#[test]
fn script_whose_first_line_gpushctl_cannot_read_is_found() {
    for line in ["--socket /run/x slurm prolog", "slurm epilog", "slurm"] {
        let host = Planted::healthy();
        host.write("etc/slurm/prolog.d/50-gpush", &format!("#!/usr/bin/gpushctl {line}\n# slurm prolog\n"));
        host.finds(Severity::Problem, "Prolog does not run gpush", "/usr/share/gpush/slurm/prolog");
    }
}

/// Faults: the doctor warned about `NoHold`, `RunInJob` and `ForceRequeueOnFail`, and did not warn
/// about `DeferBatch`.
#[test]
fn prolog_flags_that_run_prolog_late_are_found() {
    let host = Planted::healthy();
    // The expected values are what `scontrol show config` says for each flag.
    for (flag, has_alloc, has_contain) in [
        ("Alloc", true, false),
        ("contain", true, true),
        ("NoHold", true, false),
        ("Alloc,Serial", true, false),
        ("X11", true, true),
        ("RunInJob", true, true),
        ("ForceRequeueOnFail", true, false),
        ("Serial", false, false),
        ("DeferBatch", false, false),
    ] {
        host.change("Alloc,Contain", flag);
        let messages: Vec<String> = host.findings().into_iter().map(|finding| finding.message).collect();
        let has = |text: &str| messages.iter().any(|message| message.contains(text));
        assert_eq!(has("Prolog does not run when a job is allocated"), !has_alloc, "{flag}: {messages:?}");
        assert_eq!(has("pam_slurm_adopt cannot"), !has_contain, "{flag}: {messages:?}");
    }
    host.change("PrologFlags=Alloc,Contain\n", "");
    host.write("etc/pam.d/sshd", "account required pam_slurm_adopt.so\n");
    assert_eq!(host.findings().len(), 2);
    host.change("Alloc,Contain", "Alloc");
    host.finds(Severity::Warning, "pam_slurm_adopt cannot", "PrologFlags=Contain");
    host.write("etc/pam.d/sshd", "# account required pam_slurm_adopt.so\n");
    host.finds(Severity::Warning, "log in with ssh", "pam_slurm_adopt.so");
}

#[test]
fn timeouts_are_compared_with_the_deadline_of_the_hooks() {
    let host = Planted::healthy();
    host.change("PrologEpilogTimeout=60\n", "");
    host.finds(Severity::Warning, "without a time limit", "PrologEpilogTimeout=60");
    host.change("PrologEpilogTimeout=60", "PrologEpilogTimeout=45");
    host.finds(Severity::Problem, "before gpush gives up", "PrologEpilogTimeout=50");
    host.change("PrologEpilogTimeout=60", "PrologEpilogTimeout=50");
    assert_eq!(host.findings()[0].severity, Severity::Ok);
}

#[test]
fn missing_device_constraints_are_found() {
    let host = Planted::healthy();
    host.write("etc/slurm/cgroup.conf", "#ConstrainDevices=yes\n");
    host.finds(Severity::Warning, "GPUs that Slurm did not allocate", "/etc/slurm/cgroup.conf");
    let host = Planted::healthy();
    host.change("task/cgroup,task/affinity", "task/affinity");
    host.finds(Severity::Warning, "GPUs that Slurm did not allocate", "TaskPlugin=task/cgroup");
    let host = Planted::healthy();
    host.change("proctrack/cgroup", "proctrack/linuxproc");
    host.finds(Severity::Warning, "cannot be attributed", "ProctrackType=proctrack/cgroup");
}

#[test]
fn accounting_that_keeps_the_driver_open_is_found() {
    let host = Planted::healthy();
    host.change("UsePss,DisableGPUAcct", "UsePss");
    host.finds(Severity::Warning, "keeps the driver open", "JobAcctGatherParams=DisableGPUAcct");
    host.change("JobAcctGatherType=jobacct_gather/cgroup\nJobAcctGatherParams=UsePss,DisableGPUAcct\n", "");
    assert_eq!(host.findings()[0].severity, Severity::Ok);
}

#[test]
fn shard_with_mps_is_found() {
    let host = Planted::healthy();
    host.write("etc/slurm/nodes.conf", "NodeName=n1 Gres=gpu:h100:2,mps:200,shard:8(S:0)\n");
    host.change("GresTypes=gpu", "GresTypes=gpu,mps,shard");
    host.finds(Severity::Problem, "gres/mps and gres/shard", "restart slurmctld");
}
