//! A machine with a real systemd: Debian in a container, booted for one test.
//!
//! A real service manager controls the units, sockets and processes. A boot takes less than a
//! second. Every machine of a kind starts from the same files ([`root`]). The files that a machine
//! writes are in memory, and disappear with the machine.
//!
//! ```text
//! root, made once ──boot──► running ──install──► gpush as in docs/install.md
//!                              │                  └─simulated_host──► gpushd sees GPUs
//!                              └──drop──► init killed, cgroups removed, also when a test panics
//! ```
//!
//! A machine of [`Machine::boot_lasting`] keeps its files in a directory of the host, also over
//! [`Machine::reboot`].
//!
//! Commands enter the machine through `nsenter`, and belong to none of its units. So a test of a
//! sandbox must run its command inside a unit. The machine has no udevd. If the host uses the
//! controllers for memory, CPU and tasks in cgroup v1, the machine does not have these controllers.

mod cgroup;
mod guest;
mod root;

use std::{
    fs::File,
    os::unix::net::UnixDatagram,
    path::{Path, PathBuf},
    process::{Child, Command, Output, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use self::cgroup::Cgroup;
pub use self::{
    cgroup::Hierarchy,
    guest::{packages, packages_are_releases},
};
use crate::agent::PATIENCE;

/// Programs that create and boot machines, with their Debian packages.
const PROGRAMS: [(&str, &str); 4] = [
    ("mmdebstrap", "mmdebstrap"),
    ("systemd-nspawn", "systemd-container"),
    ("nsenter", "util-linux"),
    ("setpriv", "util-linux"),
];

/// A running machine. Dropping this value stops the machine and deletes its files.
#[derive(Debug)]
pub struct Machine {
    nspawn: Child,
    /// Pid of the machine's init process, in the pid namespace of the host.
    init: Pid,
    /// Duration of the boot.
    pub boot: Duration,
    scratch: tempfile::TempDir,
    root: &'static Path,
    kind: Kind,
    // This must be the last field, so that it is dropped after the machine has stopped. The cgroup
    // is then empty.
    _cgroup: Cgroup,
}

/// Where a machine keeps the files that it writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Files {
    /// In memory, until the machine stops.
    InMemory,
    /// In a directory of the host, over reboots.
    Lasting,
}

/// A release of Debian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Debian {
    /// Debian 11, with systemd 247.
    Bullseye,
    /// The Debian release of this host.
    OfHost,
    /// Debian 13, with Slurm 24.11.
    Trixie,
}

/// The kind of machine to boot. The default is the Debian release of this host.
#[derive(Debug, Clone, Copy)]
struct Kind {
    debian: Debian,
    files: Files,
    hierarchy: Hierarchy,
    /// Controllers of cgroup v1 that the machine can mount.
    controllers: &'static [&'static str],
}

impl Default for Kind {
    fn default() -> Self {
        Self { debian: Debian::OfHost, files: Files::InMemory, hierarchy: Hierarchy::Unified, controllers: &[] }
    }
}

impl Machine {
    /// Boots a machine. If this host cannot run machines, prints that the test `what` is skipped
    /// and why, and returns `None`.
    ///
    /// # Panics
    /// If this host can run machines, but the machine does not boot.
    #[must_use]
    pub fn boot(what: &str) -> Option<Self> {
        Self::boot_kind(what, Kind::default())
    }

    /// Does the same as [`Machine::boot`], with the cgroup hierarchies of another kind of host.
    /// This host must have these hierarchies.
    #[must_use]
    pub fn boot_with_cgroups(what: &str, hierarchy: Hierarchy) -> Option<Self> {
        Self::boot_kind(what, Kind { hierarchy, ..Kind::default() })
    }

    /// Does the same as [`Machine::boot`], with another release of Debian.
    #[must_use]
    pub fn boot_release(what: &str, debian: Debian) -> Option<Self> {
        Self::boot_kind(what, Kind { debian, ..Kind::default() })
    }

    /// Does the same as [`Machine::boot_release`], but the machine can reboot.
    #[must_use]
    pub fn boot_lasting(what: &str, debian: Debian) -> Option<Self> {
        Self::boot_kind(what, Kind { debian, files: Files::Lasting, ..Kind::default() })
    }

    /// Does the same as [`Machine::boot`], with Debian 13 and its Slurm 24.11. If the host has the
    /// cgroup v1 controllers `freezer` and `devices`, the machine can mount them, and then sees its
    /// own cgroups there.
    #[must_use]
    pub fn boot_with_slurm(what: &str) -> Option<Self> {
        Self::boot_kind(what, Kind { debian: Debian::Trixie, controllers: &["freezer", "devices"], ..Kind::default() })
    }

    /// Reboots the machine, as `systemctl reboot` does.
    ///
    /// # Panics
    /// If the machine does not stop or does not come up again, or its files are in memory.
    pub fn reboot(mut self) -> Self {
        assert_eq!(self.kind.files, Files::Lasting, "a machine whose files are in memory cannot reboot");
        let _ = self.run("systemctl --no-block reboot");
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

    fn boot_kind(what: &str, kind: Kind) -> Option<Self> {
        let name = unique();
        let able = able().and_then(|()| kind.hierarchy.check());
        let made = able.and_then(|()| root::root(kind.debian));
        let made = made.and_then(|root| Ok((root, Cgroup::make(&name, kind.controllers)?)));
        match made {
            Ok((root, cgroup)) => Some(Self::start(&name, root, kind, scratch(), cgroup)),
            Err(why) => {
                println!("SKIPPED {what}: {why}");
                None
            }
        }
    }

    fn start(name: &str, root: &'static Path, kind: Kind, scratch: tempfile::TempDir, cgroup: Cgroup) -> Self {
        let begun = Instant::now();
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
        let (init, boot) = (Pid::from_raw(0), Duration::ZERO);
        let mut machine = Self { nspawn, init, boot, scratch, root, kind, _cgroup: cgroup };
        machine.wait_until_ready(&notify);
        machine.boot = begun.elapsed();
        machine
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
    #[must_use]
    pub fn console(&self) -> String {
        std::fs::read_to_string(self.scratch.path().join("console")).unwrap_or_default()
    }

    /// Returns a command that runs as root in the machine, with a minimal environment and a time
    /// limit.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("timeout");
        command.arg(PATIENCE.as_secs().to_string()).args(["nsenter", "--all", "--target"]);
        command.arg(self.init.to_string()).args(["--", program]).stdin(Stdio::null());
        command.env_clear().env("LANG", "C.UTF-8");
        command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command
    }

    /// Runs a shell command in the machine. Returns its output, even if the exit code is not 0.
    ///
    /// # Panics
    /// If the command cannot be started.
    #[must_use]
    pub fn run(&self, line: &str) -> Output {
        self.command("sh").args(["-c", line]).output().expect("nsenter can be started")
    }

    /// Runs a shell command in the machine. The command must succeed. Returns its output.
    ///
    /// # Panics
    /// If the command fails.
    pub fn sh(&self, line: &str) -> String {
        let output = self.run(line);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{line}: {}\n{out}{err}\n{}", output.status, self.journal_end());
        out.trim_end().to_owned()
    }

    /// Returns the last lines of the journal, for failure messages.
    fn journal_end(&self) -> String {
        let output = self.command("journalctl").args(["--no-pager", "--lines=60"]).output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
    }

    /// Writes a file in the machine, and creates its parent directories.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn write(&self, path: &str, content: impl AsRef<[u8]>) {
        // The files of the machine are in memory and have no path on the host. So a program in the
        // machine writes the file.
        let mut child = self
            .command("sh")
            .args(["-c", r#"mkdir -p "$(dirname "$0")" && cat > "$0""#, path])
            .stdin(Stdio::piped())
            .spawn()
            .expect("nsenter can be started");
        let mut stdin = child.stdin.take().expect("it was asked for");
        std::io::Write::write_all(&mut stdin, content.as_ref()).expect("the machine reads");
        drop(stdin);
        assert!(child.wait().expect("a child can be waited for").success(), "{path} can't be written");
    }

    /// Copies a program into the machine.
    ///
    /// # Panics
    /// If the program cannot be copied.
    pub fn put(&self, path: &str, program: impl AsRef<[u8]>) {
        self.write(path, program);
        self.sh(&format!("chmod 755 {path}"));
    }

    /// Returns a property of a unit.
    #[must_use]
    pub fn property(&self, unit: &str, property: &str) -> String {
        self.sh(&format!("systemctl show --value --property={property} '{unit}'"))
    }

    /// Returns the pid of a unit's main process, as seen in the machine.
    ///
    /// # Panics
    /// If the unit has no main process. systemd then reports 0, and kill(2) with 0 would signal the
    /// process group of the caller.
    #[must_use]
    pub fn main_pid(&self, unit: &str) -> u32 {
        let pid = self.property(unit, "MainPID").parse().expect("a pid");
        assert!(pid > 1, "{unit} has no main process:\n{}", self.journal_end());
        pid
    }

    /// Sends SIGKILL to a process in the machine.
    ///
    /// # Panics
    /// If the process has ended, or the pid is 0 or 1.
    pub fn kill(&self, pid: u32) {
        assert!(pid > 1, "{pid} is not killed");
        self.sh(&format!("kill -KILL {pid}"));
    }

    /// Suspends systemd in the machine with SIGSTOP. While systemd is suspended, processes that
    /// have lost their parent stay zombies after their end, and callers of systemd wait.
    ///
    /// # Panics
    /// If the machine has ended.
    pub fn stop_init(&self) {
        // The kernel delivers SIGSTOP to an init only if the sender is outside the pid namespace of
        // this init.
        kill(self.init, Signal::SIGSTOP).expect("the machine runs");
    }

    /// Lets systemd continue after [`Machine::stop_init`].
    ///
    /// # Panics
    /// If the machine has ended.
    pub fn continue_init(&self) {
        kill(self.init, Signal::SIGCONT).expect("the machine runs");
    }

    /// Waits until the journal has an entry that contains `says` and matches a filter such as
    /// `_SYSTEMD_UNIT=gpushd.service`. Returns the entry.
    ///
    /// # Panics
    /// If no such entry appears in time.
    #[must_use]
    pub fn journal_until(&self, matches: &str, says: &str) -> String {
        self.sh(&format!("journalctl --follow --lines=all --output=cat {matches} | grep -m1 -F -- '{says}'"))
    }

    /// Polls until a condition in the machine is true. Use it if no event reports the condition.
    ///
    /// # Panics
    /// If the condition does not become true in time.
    pub fn await_that(&self, what: &str, is_so: impl Fn(&Self) -> bool) {
        let until = Instant::now() + PATIENCE;
        while !is_so(self) {
            assert!(Instant::now() < until, "not so: {what}\n{}", self.journal_end());
            thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Machine {
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
fn able() -> Result<(), String> {
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
        return Err("no mount namespace can be had here".to_owned());
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

fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{}{}-{}", cgroup::PREFIX, std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}
