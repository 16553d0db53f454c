//! The machine as a virtual machine of QEMU, for what a container cannot have: all controllers of cgroup v2, and devices.
//!
//! QEMU interprets the processor (TCG), because most machines that build gpush cannot use KVM. A boot takes half a
//! minute. So a machine is booted once, and saved ([`saved`]). Each test resumes a copy, which takes one or two seconds.
//!
//! ```text
//! root of Debian 13 ──► disk ──boot──► settled ──► state   made once, in target/machine-vm
//!                                                    │
//! built programs ─────► disk ──────────► resume ◄────┘     for each test
//! ```
//!
//! Commands enter the machine through `machine_exec`, and belong to none of its units. Files that the machine writes are
//! deleted with it. The machine has no udevd, and reaches no network.

mod files;
mod programs;
mod qemu;
mod saved;

use std::{
    process::Command,
    thread,
    time::{Duration, Instant, SystemTime},
};

use self::qemu::{Disk, Qemu};
use crate::{agent::PATIENCE, host::program};

/// Where the disk with the built programs is mounted: [`super::guest::BUILT`] is below it.
const PROGRAMS: &str = "/opt";

/// A running virtual machine. Dropping this value kills it.
#[derive(Debug)]
pub(super) struct Vm {
    qemu: Qemu,
    port: u16,
}

impl Vm {
    /// Resumes a copy of the saved machine. The first call boots and saves the machine.
    ///
    /// # Errors
    /// The reason, if this host cannot run the machine.
    ///
    /// # Panics
    /// If this host can run the machine, but the machine does not answer.
    pub(super) fn resume() -> Result<Self, String> {
        let saved = saved::saved()?;
        let programs = programs::image(saved)?;
        let qemu = Qemu::resume(saved, &programs)?;
        let vm = Self::resumed(qemu).unwrap_or_else(|why| panic!("the saved machine does not resume: {why}"));
        Ok(vm)
    }

    fn resumed(mut qemu: Qemu) -> Result<Self, String> {
        qemu.until_loaded()?;
        let mut vm = Self::start(qemu)?;
        vm.qemu.call("cont", &serde_json::json!({}))?;
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_err(|error| error.to_string())?;
        // The clock continues from the time of the save. The partitions of the disk are those of the save, too.
        let line = format!("date -s @{} >/dev/null && mount -o ro /dev/vdb {PROGRAMS}", now.as_secs());
        vm.run_until(&line, PATIENCE)?;
        Ok(vm)
    }

    /// Boots a machine from a disk, to save it.
    fn boot(saved: &files::Saved, disk: &Disk<'_>, programs: &Disk<'_>) -> Result<Self, String> {
        Self::start(Qemu::boot(saved, disk, programs)?)
    }

    fn start(mut qemu: Qemu) -> Result<Self, String> {
        let port = qemu.port()?;
        Ok(Self { qemu, port })
    }

    /// Returns a command that runs a program in the machine.
    pub(super) fn enter(&self, program_in_vm: &str) -> Command {
        let mut command = Command::new(program("machine_exec"));
        command.args(["run", &self.port.to_string(), program_in_vm]);
        command
    }

    /// Returns the output on the machine's console.
    pub(super) fn console(&self) -> String {
        self.qemu.console()
    }

    /// Runs a shell command in the machine, as soon as the machine accepts commands.
    fn run_until(&mut self, line: &str, patience: Duration) -> Result<String, String> {
        let until = Instant::now() + patience;
        loop {
            let output = self.enter("sh").args(["-c", line]).env_clear().env("PATH", "/usr/sbin:/usr/bin").output();
            let output = output.map_err(|error| format!("machine_exec: {error}"))?;
            if output.status.success() {
                return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
            }
            let ended = self.qemu.has_ended();
            if ended || Instant::now() > until {
                let printed = String::from_utf8_lossy(&output.stderr).into_owned();
                let what = if ended { "QEMU ended" } else { "the machine does not answer" };
                return Err(format!("{what}: {}\n{}", printed.trim_end(), self.console()));
            }
            thread::sleep(Duration::from_millis(20));
        }
    }
}
