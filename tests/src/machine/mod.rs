//! A machine of its own with a real systemd: Debian in a container, booted for one test.
//!
//! What a service manager does to units, sockets and processes is systemd's to say, not a mock's.
//! A boot takes less than a second; every machine starts from the same files ([`root`]), and what it
//! writes is in memory and gone with it.
//!
//! ```text
//! root, made once ──boot──► running ──install──► gpush as docs/install.md puts it there
//!                              │                  └─simulated_host──► gpushd would see GPUs
//!                              └──drop──► init killed, cgroups removed, also when a test panics
//! ```
//!
//! Commands enter it by `nsenter`. They are in none of its units: what a unit's sandbox allows can be
//! asked of a unit only. Missing in it are udevd and, where this machine gives them to cgroup v1, the
//! controllers for memory, CPU and tasks.

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
use crate::agent::PATIENCE;

/// Programs that make and boot machines, with their Debian packages.
const PROGRAMS: [(&str, &str); 4] = [
    ("mmdebstrap", "mmdebstrap"),
    ("systemd-nspawn", "systemd-container"),
    ("nsenter", "util-linux"),
    ("setpriv", "util-linux"),
];

/// A machine that runs; gone, with all that was in it, when dropped.
#[derive(Debug)]
pub struct Machine {
    nspawn: Child,
    /// Its init, by our pid.
    init: Pid,
    /// How long it took to boot.
    pub boot: Duration,
    scratch: tempfile::TempDir,
    // Last: nothing is in it once the machine is down.
    _cgroup: Cgroup,
}

impl Machine {
    /// Boots one. `None` where that can't be done; then `what` is said to be skipped, and why.
    ///
    /// # Panics
    /// When it can be done, and the machine does not come up.
    #[must_use]
    pub fn boot(what: &str) -> Option<Self> {
        let name = unique();
        let made = able().and_then(|()| root::root()).and_then(|root| Ok((root, Cgroup::make(&name)?)));
        match made {
            Ok((root, cgroup)) => Some(Self::start(&name, root, cgroup)),
            Err(why) => {
                println!("SKIPPED {what}: {why}");
                None
            }
        }
    }

    fn start(name: &str, root: &Path, cgroup: Cgroup) -> Self {
        let begun = Instant::now();
        let scratch = tempfile::Builder::new().prefix("gpush-machine-").tempdir().expect("a temporary directory");
        let notify = UnixDatagram::bind(scratch.path().join("notify")).expect("a notify socket");
        let console = File::create(scratch.path().join("console")).expect("a file for the console");
        let mut command = Command::new("systemd-nspawn");
        command
            .args(["--quiet", "--boot", "--console=pipe", "--register=no", "--keep-unit", "--notify-ready=yes"])
            // Without it DeviceAllow= of units is not enforced, and nobody says so.
            .arg("--system-call-filter=bpf")
            .arg("--volatile=overlay")
            .arg(format!("--machine={name}"))
            .arg(format!("--bind-ro={}:{}", guest::built().display(), guest::BUILT))
            .arg(format!("--bind-ro={}:{}:norbind", guest::repository().display(), guest::REPOSITORY))
            .arg("--directory")
            .arg(root);
        let nspawn = cgroup.spawn(&command, |shell| {
            shell.env("SYSTEMD_NSPAWN_UNIFIED_HIERARCHY", "1").env("NOTIFY_SOCKET", scratch.path().join("notify"));
            shell.env_remove("JOURNAL_STREAM").stdin(Stdio::null());
            shell.stdout(console.try_clone().expect("a descriptor")).stderr(console);
        });
        let nspawn = nspawn.expect("systemd-nspawn can be started");
        let mut machine = Self { nspawn, init: Pid::from_raw(0), boot: Duration::ZERO, scratch, _cgroup: cgroup };
        machine.wait_until_ready(&notify);
        machine.boot = begun.elapsed();
        machine
    }

    /// Until its init says that all units of the boot are up. Before, it says who it is.
    fn wait_until_ready(&mut self, notify: &UnixDatagram) {
        let until = Instant::now() + PATIENCE;
        notify.set_read_timeout(Some(Duration::from_millis(50))).expect("a timeout can be set");
        let mut buffer = [0; 4096];
        loop {
            if let Ok(length) = notify.recv(&mut buffer) {
                let said = String::from_utf8_lossy(&buffer[..length]).into_owned();
                if let Some(pid) = said.lines().find_map(|line| line.strip_prefix("X_NSPAWN_LEADER_PID=")) {
                    self.init = Pid::from_raw(pid.parse().expect("a pid"));
                }
                if said.lines().any(|line| line == "READY=1") {
                    break;
                }
            }
            let ended = self.nspawn.try_wait().expect("a child can be waited for");
            assert!(ended.is_none(), "the machine ended ({ended:?}):\n{}", self.console());
            assert!(Instant::now() < until, "the machine does not come up:\n{}", self.console());
        }
        // To anybody 0 would be their own process group, and 1 the init of this machine.
        assert!(self.init.as_raw() > 1, "systemd-nspawn did not say who the init is:\n{}", self.console());
    }

    /// What the machine printed on its console.
    #[must_use]
    pub fn console(&self) -> String {
        std::fs::read_to_string(self.scratch.path().join("console")).unwrap_or_default()
    }

    /// A command inside, as root, with a plain environment; ended when it takes too long.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("timeout");
        command.arg(PATIENCE.as_secs().to_string()).args(["nsenter", "--all", "--target"]);
        command.arg(self.init.to_string()).args(["--", program]).stdin(Stdio::null());
        command.env_clear().env("LANG", "C.UTF-8");
        command.env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        command
    }

    /// Runs a shell's line inside, whatever comes of it.
    ///
    /// # Panics
    /// When it can't be started.
    #[must_use]
    pub fn run(&self, line: &str) -> Output {
        self.command("sh").args(["-c", line]).output().expect("nsenter can be started")
    }

    /// Runs a shell's line inside that shall succeed; gives what it printed.
    ///
    /// # Panics
    /// When it fails.
    pub fn sh(&self, line: &str) -> String {
        let output = self.run(line);
        let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
        assert!(output.status.success(), "{line}: {}\n{out}{err}\n{}", output.status, self.journal_end());
        out.trim_end().to_owned()
    }

    /// The journal's last lines, for whoever has to find out.
    fn journal_end(&self) -> String {
        let output = self.command("journalctl").args(["--no-pager", "--lines=60"]).output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
    }

    /// Writes a file inside, and the directories on the way.
    ///
    /// # Panics
    /// When that fails.
    pub fn write(&self, path: &str, content: impl AsRef<[u8]>) {
        // Through a program there: files in memory of another machine can't be reached by path.
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

    /// Puts a program inside.
    ///
    /// # Panics
    /// When that fails.
    pub fn put(&self, path: &str, program: impl AsRef<[u8]>) {
        self.write(path, program);
        self.sh(&format!("chmod 755 {path}"));
    }

    /// A property of a unit.
    #[must_use]
    pub fn property(&self, unit: &str, property: &str) -> String {
        self.sh(&format!("systemctl show --value --property={property} '{unit}'"))
    }

    /// A unit's main process, by the machine's pid.
    ///
    /// # Panics
    /// When there is none: systemd says 0 then, which to `kill` is the caller's own group.
    #[must_use]
    pub fn main_pid(&self, unit: &str) -> u32 {
        let pid = self.property(unit, "MainPID").parse().expect("a pid");
        assert!(pid > 1, "{unit} has no main process:\n{}", self.journal_end());
        pid
    }

    /// Kills a process inside without warning.
    ///
    /// # Panics
    /// When it is none that may be killed, or gone.
    pub fn kill(&self, pid: u32) {
        assert!(pid > 1, "{pid} is not killed");
        self.sh(&format!("kill -KILL {pid}"));
    }

    /// Waits until the journal has an entry that says this, among those that match, such as
    /// `_SYSTEMD_UNIT=gpushd.service`, and gives it.
    ///
    /// # Panics
    /// When none comes.
    #[must_use]
    pub fn journal_until(&self, matches: &str, says: &str) -> String {
        self.sh(&format!("journalctl --follow --lines=all --output=cat {matches} | grep -m1 -F -- '{says}'"))
    }

    /// Waits until something is so inside that sends no event.
    ///
    /// # Panics
    /// When it is not for too long.
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
        // Killed, not shut down: what is left is in memory. With its init the kernel ends all of it,
        // and systemd-nspawn cleans up behind it.
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

/// Whether machines can be made here.
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
    // The root of a container may be refused this, and all that follows from it.
    let mounts = Command::new("unshare").args(["--mount", "true"]).output();
    if !mounts.is_ok_and(|output| output.status.success()) {
        return Err("no mount namespace can be had here".to_owned());
    }
    Ok(())
}

fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{}{}-{}", cgroup::PREFIX, std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}
