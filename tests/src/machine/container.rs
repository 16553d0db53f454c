//! The machine as a container of systemd-nspawn.

use std::{
    fs::File,
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use super::{Files, Kind, cgroup::Cgroup, guest, root, unique};
use crate::agent::PATIENCE;

/// Programs that create and boot machines, with their Debian packages.
const PROGRAMS: [(&str, &str); 4] = [
    ("mmdebstrap", "mmdebstrap"),
    ("systemd-nspawn", "systemd-container"),
    ("nsenter", "util-linux"),
    ("setpriv", "util-linux"),
];

/// A running container. Dropping this value kills its init, and deletes its files.
#[derive(Debug)]
pub(super) struct Container {
    nspawn: Child,
    /// Pid of the machine's init process, in the pid namespace of the host.
    init: Pid,
    scratch: tempfile::TempDir,
    root: &'static Path,
    kind: Kind,
    // This must be the last field, so that it is dropped after the machine has stopped. The cgroup
    // is then empty.
    _cgroup: Cgroup,
}

impl Container {
    /// Boots a container.
    ///
    /// # Errors
    /// The reason, if this host cannot run containers.
    pub(super) fn boot(kind: Kind) -> Result<Self, String> {
        let name = unique();
        able().and_then(|()| kind.hierarchy.check())?;
        let root = root::root(kind.debian)?;
        let cgroup = Cgroup::make(&name, kind.controllers)?;
        Ok(Self::start(&name, root, kind, scratch(), cgroup))
    }

    /// Reboots the machine, as `systemctl reboot` does.
    ///
    /// # Panics
    /// If the machine does not stop or does not come up again, or its files are in memory.
    pub(super) fn reboot(mut self) -> Self {
        assert_eq!(self.kind.files, Files::Lasting, "a machine whose files are in memory cannot reboot");
        let _ = self.enter("systemctl").args(["--no-block", "reboot"]).output();
        let until = Instant::now() + PATIENCE;
        while matches!(self.nspawn.try_wait(), Ok(None)) {
            assert!(Instant::now() < until, "the machine does not stop:\n{}", self.console());
            thread::sleep(Duration::from_millis(20));
        }
        // The old init has ended, so `drop` must not signal its pid.
        self.init = Pid::from_raw(0);
        let scratch = std::mem::replace(&mut self.scratch, scratch());
        let name = unique();
        let cgroup = Cgroup::make(&name, self.kind.controllers).expect("a cgroup as for the first boot");
        Self::start(&name, self.root, self.kind, scratch, cgroup)
    }

    fn start(name: &str, root: &'static Path, kind: Kind, scratch: tempfile::TempDir, cgroup: Cgroup) -> Self {
        let _ = std::fs::remove_file(scratch.path().join("notify"));
        let notify = UnixDatagram::bind(scratch.path().join("notify")).expect("a notify socket");
        let console = File::create(scratch.path().join("console")).expect("a file for the console");
        let (mut command, volatile, directory) = match kind.files {
            Files::InMemory => (Command::new("systemd-nspawn"), "overlay", root.to_owned()),
            Files::Lasting => (with_overlay(root, scratch.path()), "no", scratch.path().join("merged")),
        };
        let packages = guest::packages();
        command
            .args(["--quiet", "--boot", "--console=pipe", "--register=no", "--keep-unit", "--notify-ready=yes"])
            // Without this option, systemd in the machine silently ignores DeviceAllow= of units.
            .arg("--system-call-filter=bpf")
            .arg(format!("--volatile={volatile}"))
            .arg(format!("--machine={name}"))
            .arg(format!("--bind-ro={}:{}", guest::built().display(), guest::BUILT))
            .arg(format!("--bind-ro={}:{}:norbind", guest::repository().display(), guest::REPOSITORY))
            .args(packages.is_dir().then(|| format!("--bind-ro={}:{}", packages.display(), guest::PACKAGES)))
            .arg("--directory")
            .arg(directory);
        let nspawn = cgroup.spawn(&command, |shell| {
            kind.hierarchy.choose(shell);
            shell.env("NOTIFY_SOCKET", scratch.path().join("notify"));
            shell.env_remove("JOURNAL_STREAM").stdin(Stdio::null());
            shell.stdout(console.try_clone().expect("a descriptor")).stderr(console);
        });
        let nspawn = nspawn.expect("systemd-nspawn can be started");
        let mut container = Self { nspawn, init: Pid::from_raw(0), scratch, root, kind, _cgroup: cgroup };
        container.wait_until_ready(&notify);
        container
    }

    /// Waits until init reports that all units of the boot have started. The first message of init
    /// contains its pid.
    fn wait_until_ready(&mut self, notify: &UnixDatagram) {
        let until = Instant::now() + PATIENCE;
        notify.set_read_timeout(Some(Duration::from_millis(50))).expect("a timeout can be set");
        let mut buffer = [0; 4096];
        loop {
            if let Ok(length) = notify.recv(&mut buffer) {
                let printed = String::from_utf8_lossy(&buffer[..length]).into_owned();
                if let Some(pid) = printed.lines().find_map(|line| line.strip_prefix("X_NSPAWN_LEADER_PID=")) {
                    self.init = Pid::from_raw(pid.parse().expect("a pid"));
                }
                if printed.lines().any(|line| line == "READY=1") {
                    break;
                }
            }
            let ended = self.nspawn.try_wait().expect("a child can be waited for");
            assert!(ended.is_none(), "the machine ended ({ended:?}):\n{}", self.console());
            assert!(Instant::now() < until, "the machine does not come up:\n{}", self.console());
        }
        // kill(2) with 0 would signal the process group of the caller, and pid 1 is the init of the
        // host.
        assert!(self.init.as_raw() > 1, "systemd-nspawn did not say who the init is:\n{}", self.console());
    }

    /// Returns the output on the machine's console.
    pub(super) fn console(&self) -> String {
        std::fs::read_to_string(self.scratch.path().join("console")).unwrap_or_default()
    }

    /// Returns a command that runs a program in the container.
    pub(super) fn enter(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--all", "--target", &self.init.to_string(), "--", program]);
        command
    }

    /// Sends a signal to init. The kernel delivers SIGSTOP to an init only if the sender is outside the pid namespace of
    /// this init.
    ///
    /// # Panics
    /// If the machine has ended.
    pub(super) fn signal_init(&self, signal: Signal) {
        kill(self.init, signal).expect("the machine runs");
    }
}

impl Drop for Container {
    fn drop(&mut self) {
        // Kill the machine without a shutdown, because its files are only in memory. When init
        // ends, the kernel ends all processes of the machine, and systemd-nspawn cleans up.
        if self.init.as_raw() > 1 {
            let _ = kill(self.init, Signal::SIGKILL);
        } else {
            let _ = self.nspawn.kill();
        }
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until && matches!(self.nspawn.try_wait(), Ok(None)) {
            thread::sleep(Duration::from_millis(5));
        }
        let _ = self.nspawn.kill();
        let _ = self.nspawn.wait();
    }
}

/// Checks whether this host can run machines.
pub(super) fn able() -> Result<(), String> {
    if !nix::unistd::geteuid().is_root() {
        return Err("only root can boot a container".to_owned());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    for (program, package) in PROGRAMS {
        if !std::env::split_paths(&path).any(|dir: PathBuf| dir.join(program).is_file()) {
            return Err(format!("{program} is not installed (Debian's package {package})"));
        }
    }
    // Root in a container may not have the permission to mount. In this case, machines cannot run.
    let mounts = Command::new("unshare").args(["--mount", "true"]).output();
    if !mounts.is_ok_and(|output| output.status.success()) {
        return Err("this host permits no mount namespace".to_owned());
    }
    Ok(())
}

fn scratch() -> tempfile::TempDir {
    tempfile::Builder::new().prefix("gpush-machine-").tempdir().expect("a temporary directory")
}

/// Returns a command that runs `systemd-nspawn` with the arguments that the caller adds. Before this, it mounts an
/// overlay of `root` on `scratch/merged`. Only this command sees the mount, which ends with the command.
fn with_overlay(root: &Path, scratch: &Path) -> Command {
    let directories = ["upper", "work", "merged"].map(|name| scratch.join(name));
    directories.iter().for_each(|directory| std::fs::create_dir_all(directory).expect("a directory"));
    let [upper, work, merged] = directories;
    let layers = format!("lowerdir={},upperdir={},workdir={}", root.display(), upper.display(), work.display());
    let mut command = Command::new("unshare");
    command.args([
        "--mount",
        "sh",
        "-c",
        "mount -t overlay overlay -o \"$0\" \"$1\" && shift && exec systemd-nspawn \"$@\"",
    ]);
    command.arg(layers).arg(merged);
    command
}
