//! Tests of every finding. Each test starts with a healthy host below a directory, and creates one
//! fault there.

mod service;

use std::{
    fs,
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::Command,
};

use gpush_api::{ApiError, Code};
use gpush_doctor::{Agent, Area, Finding, Host, Severity, examine};
use tempfile::TempDir;

/// A healthy host in a temporary directory.
struct Planted(TempDir);

impl Planted {
    fn healthy() -> Self {
        let host = Self(tempfile::tempdir().expect("a temporary directory"));
        host.write("proc/sys/kernel/osrelease", "5.10.0-30-amd64\n");
        fs::create_dir_all(host.0.path().join("run/systemd/system")).expect("a directory");
        host.program("usr/bin/systemctl", "#!/bin/sh\necho 'systemd 247 (247.3-7)'\n");
        host.write("sys/module/nvidia/version", "550.163.01\n");
        host.write("proc/driver/nvidia/gpus/0000:01:00.0/information", "Model: NVIDIA A100\n");
        host.write("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.550.163.01", "");
        let link = host.0.path().join("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1");
        symlink("libnvidia-ml.so.550.163.01", link).expect("a link");
        for node in ["nvidiactl", "nvidia0", "nvidia-uvm"] {
            host.write(&format!("dev/{node}"), "");
            host.mode(&format!("dev/{node}"), 0o666);
        }
        for program in ["nvidia-cuda-mps-control", "nvidia-cuda-mps-server"] {
            host.write(&format!("usr/bin/{program}"), "\u{0}550.163.01\u{0}");
        }
        for socket in ["gpushd.sock", "admin.sock"] {
            host.write(&format!("run/gpush/{socket}"), "");
        }
        host.mode("run/gpush/gpushd.sock", 0o666);
        host.write("etc/gpush/config.toml", "[[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n");
        host.mode("etc/gpush/config.toml", 0o644);
        host.write("sys/fs/selinux/enforce", "0");
        host
    }

    fn write(&self, path: &str, text: &str) {
        let path = self.0.path().join(path);
        fs::create_dir_all(path.parent().expect("a file is in a directory")).expect("a directory");
        fs::write(path, text).expect("a file");
    }

    /// Creates an executable file with this script. `cp` writes the file: if the test process wrote it, a child of
    /// another test could inherit the open file, and `exec` would then fail with ETXTBSY.
    fn program(&self, path: &str, script: &str) {
        self.write("script", script);
        self.mode("script", 0o755);
        let (from, to) = (self.0.path().join("script"), self.0.path().join(path));
        fs::create_dir_all(to.parent().expect("a file is in a directory")).expect("a directory");
        assert!(Command::new("cp").arg(from).arg(to).status().expect("cp runs").success());
    }

    /// Plants a `systemctl` that shows these properties of a unit, one on each line.
    fn unit(&self, unit: &str, properties: &str) {
        self.write(&format!("units/{unit}"), properties);
        let units = self.0.path().join("units");
        let script = format!(
            "#!/bin/sh\nfor last; do :; done\nif [ \"$1\" = show ]; then cat \"{}/$last\"; else echo 'systemd 247'; fi\n",
            units.display()
        );
        self.program("usr/bin/systemctl", &script);
    }

    /// Returns the findings of an area that are not ok.
    fn bad(&self, area: Area, agent: &Agent) -> Vec<Finding> {
        let findings = examine(&Host::at(self.0.path()), agent, &[area]);
        findings.into_iter().filter(|finding| finding.severity != Severity::Ok).collect()
    }

    fn mode(&self, path: &str, mode: u32) {
        fs::set_permissions(self.0.path().join(path), fs::Permissions::from_mode(mode)).expect("a mode");
    }

    fn remove(&self, path: &str) {
        let path: &Path = &self.0.path().join(path);
        let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
        removed.expect("it was there");
    }

    fn process(&self, pid: u32, name: &str, cgroup: &str, environment: &str) {
        self.write(&format!("proc/{pid}/comm"), name);
        self.write(&format!("proc/{pid}/cgroup"), cgroup);
        self.write(&format!("proc/{pid}/environ"), environment);
        self.owner(pid, 0);
    }

    /// Sets the uid of a process.
    fn owner(&self, pid: u32, uid: u32) {
        let ids = format!("{uid}\t{uid}\t{uid}\t{uid}");
        self.write(&format!("proc/{pid}/status"), &format!("Uid:\t{ids}\nGid:\t{ids}\nGroups:\t\n"));
    }

    fn examine(&self, agent: &Agent) -> Vec<Finding> {
        // Only tests that run as root can check owners: without root, all files belong to the test's user.
        examine(&Host::at(self.0.path()), agent, &Area::ALL)
    }
}

fn healthy_agent() -> Agent {
    answered("1.0", Vec::new())
}

/// gpushd with this version, and with these errors in its health.
fn answered(version: &str, troubles: Vec<ApiError>) -> Agent {
    let (version, own) = (version.to_owned(), "1.0".to_owned());
    Agent::Reached {
        version,
        own,
        troubles,
        gpus: Vec::new(),
        rules: Vec::new(),
        config_path: None,
        has_memory_limits: false,
    }
}

fn is_root() -> bool {
    nix::unistd::geteuid().is_root()
}

#[test]
fn healthy_host_has_no_findings_but_ok() {
    if !is_root() {
        return println!("SKIPPED a healthy host: its config belongs to root");
    }
    let findings = Planted::healthy().examine(&healthy_agent());
    let bad: Vec<&Finding> = findings.iter().filter(|finding| finding.severity != Severity::Ok).collect();
    assert!(bad.is_empty(), "{bad:#?}");
    let areas: Vec<Area> = findings.iter().map(|finding| finding.area).collect();
    assert!(Area::ALL.iter().all(|area| areas.contains(area)) && areas.is_sorted(), "{areas:?}");
}

#[test]
fn every_planted_fault_is_found_with_a_command() {
    let none = |_: &Planted| {};
    let reached = healthy_agent;
    type Plant<'p> = &'p dyn Fn(&Planted);
    let plants: &[(Area, Severity, &str, Plant, Agent)] = &[
        (
            Area::System,
            Severity::Problem,
            "Linux 4.18.0-553.el8 is too old",
            &|h| h.write("proc/sys/kernel/osrelease", "4.18.0-553.el8"),
            reached(),
        ),
        (
            Area::System,
            Severity::Problem,
            "systemd 239 is too old",
            &|h| h.program("usr/bin/systemctl", "#!/bin/sh\necho 'systemd 239 (239-82.el8)'\n"),
            reached(),
        ),
        (Area::System, Severity::Warning, "systemd is not running", &|h| h.remove("run/systemd"), reached()),
        (Area::Driver, Severity::Problem, "kernel module is not loaded", &|h| h.remove("sys/module/nvidia"), reached()),
        (
            Area::Driver,
            Severity::Problem,
            "nouveau",
            &|h| {
                h.remove("sys/module/nvidia");
                h.write("sys/module/nouveau/x", "");
            },
            reached(),
        ),
        (
            Area::Driver,
            Severity::Problem,
            "the driver library has version 550.163.01, but the loaded kernel module has version 535.183.01",
            &|h| h.write("sys/module/nvidia/version", "535.183.01"),
            reached(),
        ),
        (
            Area::Driver,
            Severity::Problem,
            "libnvidia-ml.so.1 is not installed",
            &|h| h.remove("usr/lib/x86_64-linux-gnu"),
            reached(),
        ),
        (Area::Devices, Severity::Problem, "/dev/nvidiactl is missing", &|h| h.remove("dev/nvidiactl"), reached()),
        (
            Area::Devices,
            Severity::Problem,
            "device nodes are missing: there are 0 for 1 GPU",
            &|h| h.remove("dev/nvidia0"),
            reached(),
        ),
        (Area::Devices, Severity::Warning, "/dev/nvidia-uvm is missing", &|h| h.remove("dev/nvidia-uvm"), reached()),
        (
            Area::Devices,
            Severity::Warning,
            "/dev/nvidia-caps is missing",
            &|h| h.write("proc/driver/nvidia-caps/mig-minors", "config 1"),
            reached(),
        ),
        (Area::Devices, Severity::Warning, "not every user may open", &|h| h.mode("dev/nvidia0", 0o660), reached()),
        (
            Area::Mps,
            Severity::Problem,
            "nvidia-cuda-mps-server is not installed",
            &|h| h.remove("usr/bin/nvidia-cuda-mps-server"),
            reached(),
        ),
        (
            Area::Mps,
            Severity::Warning,
            "the MPS programs have version 535.309.01",
            &|h| h.write("usr/bin/nvidia-cuda-mps-control", "\u{0}535.309.01\u{0}"),
            reached(),
        ),
        (
            Area::Managers,
            Severity::Problem,
            "nvidia-mig-manager",
            &|h| h.write("sys/fs/cgroup/system.slice/nvidia-mig-manager.service/x", ""),
            reached(),
        ),
        (
            Area::Managers,
            Severity::Warning,
            "DCGM has the GPUs open",
            &|h| h.process(7, "nv-hostengine", "", ""),
            reached(),
        ),
        (
            Area::Managers,
            Severity::Warning,
            "the device plugin of Kubernetes",
            &|h| h.process(7, "nvidia-device-p", "", ""),
            reached(),
        ),
        (
            Area::Managers,
            Severity::Warning,
            "a pod of nvidia-mig-manager",
            &|h| h.process(7, "nvidia-mig-mana", "", ""),
            reached(),
        ),
        (
            Area::Managers,
            Severity::Warning,
            "gpushd did not start",
            &|h| h.process(7, "nvidia-cuda-mps", "0::/user.slice", "CUDA_MPS_PIPE_DIRECTORY=/tmp/x\u{0}A=b"),
            reached(),
        ),
        (
            Area::Agent,
            Severity::Problem,
            "not there",
            &none,
            Agent::Unreachable(
                ApiError::new(Code::Unavailable, "gpushd is not there").hint("`systemctl start gpushd`"),
            ),
        ),
        (
            Area::Agent,
            Severity::Warning,
            "gpushd has version 0.9, but gpushctl has version 1.0",
            &none,
            answered("0.9", Vec::new()),
        ),
        (
            Area::Agent,
            Severity::Warning,
            "GPU 3 is degraded",
            &none,
            answered("1.0", vec![ApiError::new(Code::Conflict, "GPU 3 is degraded")]),
        ),
        (
            Area::Agent,
            Severity::Problem,
            "/run/gpush/admin.sock is missing",
            &|h| h.remove("run/gpush/admin.sock"),
            reached(),
        ),
        (
            Area::Agent,
            Severity::Problem,
            "/run/gpush/gpushd.sock and /run/gpush/admin.sock are missing",
            &|h| h.remove("run/gpush"),
            reached(),
        ),
        (
            Area::Agent,
            Severity::Problem,
            "the database was lost",
            &none,
            answered("1.0", vec![ApiError::new(Code::Unavailable, "the database was lost")]),
        ),
        (
            Area::Agent,
            Severity::Warning,
            "only root may connect to /run/gpush/gpushd.sock (mode 0600)",
            &|h| h.mode("run/gpush/gpushd.sock", 0o600),
            reached(),
        ),
        (
            Area::Agent,
            Severity::Warning,
            "gpushd.socket is not enabled",
            &|h| h.unit("gpushd.socket", "LoadState=loaded\nUnitFileState=disabled\nActiveState=active\n"),
            reached(),
        ),
        (
            Area::Agent,
            Severity::Warning,
            "gpush-ready.service is masked",
            &|h| h.unit("gpush-ready.service", "LoadState=masked\nUnitFileState=masked\nActiveState=inactive\n"),
            reached(),
        ),
        (
            Area::Config,
            Severity::Problem,
            "/etc/gpush/config.toml is a directory, not a file",
            &|h| {
                h.remove("etc/gpush/config.toml");
                h.write("etc/gpush/config.toml/x", "");
            },
            reached(),
        ),
        (
            Area::Disk,
            Severity::Problem,
            "/var/lib/gpush is not a directory",
            &|h| h.write("var/lib/gpush", ""),
            reached(),
        ),
        (
            Area::Config,
            Severity::Problem,
            "is not a valid config",
            &|h| h.write("etc/gpush/config.toml", "[[gpu]]\nmatch = [\"0\"]\nmode = \"mpz\"\n"),
            reached(),
        ),
        (
            Area::Config,
            Severity::Problem,
            "can be changed by users",
            &|h| h.mode("etc/gpush/config.toml", 0o666),
            reached(),
        ),
        (
            Area::Security,
            Severity::Warning,
            "SELinux is enforcing",
            &|h| h.write("sys/fs/selinux/enforce", "1"),
            reached(),
        ),
        (
            Area::Security,
            Severity::Warning,
            "an AppArmor profile confines gpushd",
            &|h| h.write("sys/kernel/security/apparmor/profiles", "/usr/sbin/gpushd (enforce)"),
            reached(),
        ),
    ];
    for (area, severity, part, plant, agent) in plants {
        let host = Planted::healthy();
        plant(&host);
        let findings = host.examine(agent);
        let found = findings.iter().find(|finding| finding.message.contains(part));
        let found = found.unwrap_or_else(|| panic!("{part} is not found: {findings:#?}"));
        assert_eq!((found.area, found.severity), (*area, *severity), "{found:#?}");
        assert!(found.hint.as_ref().is_some_and(|hint| !hint.is_empty()), "{found:#?}");
    }
    println!("{} planted faults found", plants.len());
}

#[test]
fn mps_daemons_of_gpushd_are_not_foreign() {
    let host = Planted::healthy();
    host.process(7, "nvidia-cuda-mps", "0::/gpush.slice/gpush-mps.slice/gpushd-mps@0.service", "");
    host.process(8, "nvidia-cuda-mps", "0::/", "CUDA_MPS_PIPE_DIRECTORY=/run/gpush-mps/0/p1\u{0}");
    let findings = host.examine(&healthy_agent());
    let managers: Vec<&Finding> = findings.iter().filter(|finding| finding.area == Area::Managers).collect();
    assert!(managers.iter().all(|finding| finding.severity == Severity::Ok), "{managers:#?}");
}

/// Without systemd, the cgroup does not name gpushd's units, and gpushd may use another directory.
#[test]
fn mps_processes_without_systemd_are_not_foreign() {
    let host = Planted::healthy();
    host.remove("run/systemd");
    let own = "CUDA_MPS_PIPE_DIRECTORY=/srv/gpushd/mps/g5d1b03a2/1\u{0}";
    host.write("srv/gpushd/mps/g5d1b03a2/spec.json", "{}");
    host.process(7, "nvidia-cuda-mps", "0::/", own);
    host.write("proc/7/cmdline", "/usr/bin/nvidia-cuda-mps-control\u{0}-f\u{0}");
    host.process(8, "nvidia-cuda-mps", "0::/", own);
    host.write("proc/8/cmdline", "nvidia-cuda-mps-server\u{0}");
    assert_eq!(host.bad(Area::Managers, &healthy_agent()), []);
    // The pipe directory of another daemon, and one of gpushd's daemons whose directory is gone.
    host.process(9, "nvidia-cuda-mps", "0::/", "CUDA_MPS_PIPE_DIRECTORY=/tmp/mps\u{0}");
    host.process(10, "nvidia-cuda-mps", "0::/", "CUDA_MPS_PIPE_DIRECTORY=/tmp/mps\u{0}");
    host.write("proc/10/cmdline", "nvidia-cuda-mps-server\u{0}");
    let found = host.bad(Area::Managers, &healthy_agent());
    assert_eq!(found.len(), 1, "only the daemon, not its server: {found:#?}");
    assert!(found[0].causes[0].starts_with("pid 9, "), "{found:#?}");
}

/// Fault: a user's daemon was not reported if its environment named the directory of gpushd's daemons, or if the user
/// had given its cgroup the name of a unit.
#[test]
fn mps_daemon_of_a_user_that_imitates_gpushds_is_foreign() {
    let host = Planted::healthy();
    host.process(7, "nvidia-cuda-mps", "0::/", "CUDA_MPS_PIPE_DIRECTORY=/run/gpush-mps/0/p1\u{0}");
    host.owner(7, 1_000_000);
    let own = "0::/user.slice/user-1000000.slice/user@1000000.service/app.slice/gpushd-mps@0.service\n";
    host.process(8, "nvidia-cuda-mps", own, "");
    let found = host.bad(Area::Managers, &healthy_agent());
    assert_eq!(found.len(), 2, "{found:#?}");
}

/// Fault: the hint was a command with the pipe directory that the process named. For the process of a user that named the
/// directory of gpushd's daemon in another form, the command ended gpushd's daemon.
#[test]
fn hint_for_foreign_mps_daemon_names_only_its_pid() {
    let host = Planted::healthy();
    for directory in ["/var/../run/gpush-mps/0/p1", "/tmp/a`reboot`"] {
        host.process(7, "nvidia-cuda-mps", "0::/user.slice", &format!("CUDA_MPS_PIPE_DIRECTORY={directory}\u{0}"));
        let found = host.bad(Area::Managers, &healthy_agent());
        assert_eq!(found[0].hint.as_deref(), Some("end this daemon with `kill 7`"), "{found:#?}");
    }
}

#[test]
fn memory_limits_of_the_driver_are_named() {
    let host = Planted::healthy();
    let mut agent = healthy_agent();
    let named = |agent: &Agent| {
        let findings = examine(&Host::at(host.0.path()), agent, &[Area::Agent]);
        findings.iter().any(|finding| finding.message.contains("can limit the memory of a cgroup"))
    };
    assert!(!named(&agent));
    if let Agent::Reached { has_memory_limits, .. } = &mut agent {
        *has_memory_limits = true;
    }
    assert!(named(&agent));
}

/// Fault: if gpushd used another config file, the doctor examined /etc/gpush/config.toml instead.
#[test]
fn config_that_gpushd_uses_is_examined() {
    let host = Planted::healthy();
    host.write("srv/c.toml", "[[gpu]]\nmatch = [\"0\"]\nmode = \"mpz\"\n");
    let config_path = Some("/srv/c.toml".to_owned());
    let Agent::Reached { version, own, .. } = healthy_agent() else { panic!("it answers") };
    let agent = Agent::Reached {
        version,
        own,
        troubles: Vec::new(),
        gpus: Vec::new(),
        rules: Vec::new(),
        config_path,
        has_memory_limits: false,
    };
    let findings = examine(&Host::at(host.0.path()), &agent, &[Area::Config]);
    assert_eq!(findings.len(), 1, "{findings:?}");
    assert!(findings[0].message.contains("/srv/c.toml is not a valid config"), "{findings:?}");
}

#[test]
fn config_that_does_not_exist_is_not_a_problem() {
    let host = Planted::healthy();
    host.remove("etc/gpush");
    host.remove("usr/bin/nvidia-cuda-mps-control");
    let findings = examine(&Host::at(host.0.path()), &healthy_agent(), &[Area::Config, Area::Mps]);
    let severities: Vec<Severity> = findings.iter().map(|finding| finding.severity).collect();
    assert_eq!(severities, [Severity::Ok; 2], "no rule needs MPS: {findings:#?}");
}
