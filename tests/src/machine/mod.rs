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
mod container;
mod guest;
mod root;
mod vm;

use std::{
    process::{Command, Output, Stdio},
    sync::atomic::{AtomicU32, Ordering},
    thread,
    time::{Duration, Instant},
};

use nix::sys::signal::Signal;

pub use self::{
    cgroup::Hierarchy,
    guest::{packages, packages_are_releases},
};
use self::{container::Container, vm::Vm};
use crate::agent::PATIENCE;

/// How much slower a virtual machine is than the host, at least.
const SLOWNESS_OF_VM: u32 = 3;

/// A running machine. Dropping this value stops the machine and deletes its files.
#[derive(Debug)]
pub struct Machine {
    system: System,
    /// Duration of the boot.
    pub boot: Duration,
}

/// What runs the machine.
#[derive(Debug)]
enum System {
    Container(Box<Container>),
    Vm(Vm),
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

    /// Resumes a virtual machine with Debian 13, its Slurm 24.11 and its kernel. The machine has all controllers of
    /// cgroup v2. It is many times slower than a container.
    #[must_use]
    pub fn resume_vm(what: &str) -> Option<Self> {
        Self::started(what, || Vm::resume().map(System::Vm))
    }

    fn boot_kind(what: &str, kind: Kind) -> Option<Self> {
        Self::started(what, || Container::boot(kind).map(|container| System::Container(Box::new(container))))
    }

    fn started(what: &str, start: impl FnOnce() -> Result<System, String>) -> Option<Self> {
        let begun = Instant::now();
        match start() {
            Ok(system) => Some(Self { system, boot: begun.elapsed() }),
            Err(why) => {
                println!("SKIPPED {what}: {why}");
                None
            }
        }
    }

    /// Reboots the machine, as `systemctl reboot` does.
    ///
    /// # Panics
    /// If the machine does not stop or does not come up again, or its files are in memory.
    pub fn reboot(self) -> Self {
        let begun = Instant::now();
        match self.system {
            System::Container(container) => {
                let system = System::Container(Box::new(container.reboot()));
                Self { system, boot: begun.elapsed() }
            }
            System::Vm(_) => panic!("a virtual machine cannot reboot, because its files are in memory"),
        }
    }

    /// Returns whether the machine is a virtual machine.
    #[must_use]
    pub fn is_vm(&self) -> bool {
        matches!(self.system, System::Vm(_))
    }

    /// Returns the output on the machine's console.
    #[must_use]
    pub fn console(&self) -> String {
        match &self.system {
            System::Container(container) => container.console(),
            System::Vm(vm) => vm.console(),
        }
    }

    /// Returns how long a test waits for a condition in the machine.
    fn patience(&self) -> Duration {
        match &self.system {
            System::Container(_) => PATIENCE,
            System::Vm(_) => PATIENCE * SLOWNESS_OF_VM,
        }
    }

    /// Returns a command that runs as root in the machine, with a minimal environment and a time
    /// limit.
    #[must_use]
    pub fn command(&self, program: &str) -> Command {
        let entered = match &self.system {
            System::Container(container) => container.enter(program),
            System::Vm(vm) => vm.enter(program),
        };
        let mut command = Command::new("timeout");
        command.arg(self.patience().as_secs().to_string()).arg(entered.get_program()).args(entered.get_args());
        command.stdin(Stdio::null()).env_clear().env("LANG", "C.UTF-8");
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
        let until = Instant::now() + self.patience();
        while !is_so(self) {
            assert!(Instant::now() < until, "not so: {what}\n{}", self.journal_end());
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Suspends systemd in the machine with SIGSTOP. While systemd is suspended, processes that
    /// have lost their parent stay zombies after their end, and callers of systemd wait.
    ///
    /// # Panics
    /// If the machine has ended, or is a virtual machine.
    pub fn stop_init(&self) {
        self.signal_init(Signal::SIGSTOP);
    }

    /// Lets systemd continue after [`Machine::stop_init`].
    ///
    /// # Panics
    /// If the machine has ended, or is a virtual machine.
    pub fn continue_init(&self) {
        self.signal_init(Signal::SIGCONT);
    }

    fn signal_init(&self, signal: Signal) {
        match &self.system {
            System::Container(container) => container.signal_init(signal),
            System::Vm(_) => panic!("the kernel of a virtual machine does not stop its init"),
        }
    }
}

fn unique() -> String {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    format!("{}{}-{}", cgroup::PREFIX, std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}
