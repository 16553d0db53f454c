//! A QEMU process, and its control connection (QMP) on standard input and output.

use std::{
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, ChildStdin, ChildStdout, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::files::{PORT, Saved};
use crate::agent::PATIENCE;

/// Arguments that a saved machine and its copies have in common.
const MACHINE: &str = "-machine q35 -accel tcg,thread=multi -cpu max -smp 2 -m 2G -nodefaults -no-user-config -display none \
                       -no-reboot -device virtio-rng-pci -qmp stdio";

/// Arguments of the kernel. The masked units have no purpose in a test.
const KERNEL: &str = "console=ttyS0 rw panic=-1 quiet mitigations=off audit=0 \
    systemd.mask=serial-getty@ttyS0.service systemd.mask=getty@tty1.service systemd.mask=apt-daily.timer \
    systemd.mask=apt-daily-upgrade.timer systemd.mask=dpkg-db-backup.timer systemd.mask=fstrim.timer \
    systemd.mask=e2scrub_all.timer systemd.mask=e2scrub_reap.service systemd.mask=ldconfig.service \
    systemd.mask=systemd-journal-catalog-update.service systemd.mask=systemd-update-done.service";

/// A disk of the machine.
#[derive(Debug)]
pub(super) struct Disk<'a> {
    pub(super) file: &'a Path,
    /// What happens with what the machine writes.
    pub(super) writes: Writes,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Writes {
    /// They go to the file.
    Kept,
    /// They go to a temporary file.
    Dropped,
    /// The machine cannot write.
    Refused,
}

/// A running QEMU. Dropping this value kills it.
#[derive(Debug)]
pub(super) struct Qemu {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
    scratch: tempfile::TempDir,
}

impl Qemu {
    /// Boots the kernel with these disks.
    pub(super) fn boot(saved: &Saved, root: &Disk<'_>, programs: &Disk<'_>) -> Result<Self, String> {
        Self::start(saved, &[root, programs], None)
    }

    /// Loads the saved machine. `cont` continues it.
    pub(super) fn resume(saved: &Saved, programs: &Path) -> Result<Self, String> {
        let disk = saved.disk();
        let root = Disk { file: &disk, writes: Writes::Dropped };
        let programs = Disk { file: programs, writes: Writes::Refused };
        Self::start(saved, &[&root, &programs], Some(&saved.state()))
    }

    /// Waits until the saved machine is loaded.
    pub(super) fn until_loaded(&mut self) -> Result<(), String> {
        self.until("the state is loaded", |qemu| Ok(qemu.call("query-status", &json!({}))?["status"] != "inmigrate"))
    }

    fn start(saved: &Saved, disks: &[&Disk<'_>], state: Option<&Path>) -> Result<Self, String> {
        let scratch = tempfile::Builder::new().prefix("gpush-vm-").tempdir().map_err(|error| error.to_string())?;
        let mut qemu = saved.tools.killed_with_caller("qemu-system-x86_64");
        qemu.args(MACHINE.split_whitespace());
        for directory in ["usr/share/qemu", "usr/share/seabios"] {
            qemu.arg("-L").arg(saved.tools.path(directory));
        }
        qemu.arg("-kernel").arg(saved.kernel()).arg("-initrd").arg(saved.initrd()).args(["-append", KERNEL]);
        qemu.arg("-serial").arg(format!("file:{}", scratch.path().join("console").display()));
        // The host chooses a free port.
        let network = format!("user,id=net,restrict=on,hostfwd=tcp:127.0.0.1:0-:{PORT}");
        qemu.args(["-netdev", &network, "-device", "virtio-net-pci,netdev=net,romfile="]);
        for (number, disk) in disks.iter().enumerate() {
            let writes = match disk.writes {
                Writes::Kept => "cache=unsafe",
                Writes::Dropped => "snapshot=on",
                Writes::Refused => "readonly=on",
            };
            let drive = format!("file={},format=raw,if=none,id=disk{number},{writes}", disk.file.display());
            qemu.args(["-drive", &drive, "-device", &format!("virtio-blk-pci,drive=disk{number}")]);
        }
        if let Some(state) = state {
            qemu.arg("-incoming").arg(format!("file:{}", state.display()));
        }
        let errors = std::fs::File::create(scratch.path().join("errors")).map_err(|error| error.to_string())?;
        qemu.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(errors);
        let mut child = qemu.spawn().map_err(|error| format!("QEMU can't be started: {error}"))?;
        let (Some(commands), Some(answers)) = (child.stdin.take(), child.stdout.take()) else {
            return Err("QEMU has no control connection".to_owned());
        };
        let mut qemu = Self { child, commands, answers: BufReader::new(answers), scratch };
        qemu.line()?;
        qemu.call("qmp_capabilities", &json!({}))?;
        Ok(qemu)
    }

    /// Executes a command. Returns its answer.
    pub(super) fn call(&mut self, name: &str, arguments: &Value) -> Result<Value, String> {
        let command = json!({"execute": name, "arguments": arguments});
        let sent = writeln!(self.commands, "{command}").and_then(|()| self.commands.flush());
        sent.map_err(|error| format!("{name}: {error}{}", self.errors()))?;
        loop {
            let mut answer = self.line()?;
            if let Some(result) = answer.get_mut("return") {
                return Ok(result.take());
            }
            if let Some(error) = answer.get("error") {
                return Err(format!("{name}: {error}"));
            }
        }
    }

    /// Reads a line: an answer, or an event.
    fn line(&mut self) -> Result<Value, String> {
        let mut line = String::new();
        match self.answers.read_line(&mut line) {
            Ok(length) if length > 0 => serde_json::from_str(&line).map_err(|error| format!("{line}: {error}")),
            _ => Err(format!("QEMU ended{}", self.errors())),
        }
    }

    /// Returns what QEMU printed.
    fn errors(&self) -> String {
        let printed = std::fs::read_to_string(self.scratch.path().join("errors")).unwrap_or_default();
        printed.lines().last().map(|line| format!(": {line}")).unwrap_or_default()
    }

    /// Returns the host's port of `machine_exec`.
    pub(super) fn port(&mut self) -> Result<u16, String> {
        let text = self.call("human-monitor-command", &json!({"command-line": "info usernet"}))?;
        let text = text.as_str().unwrap_or_default();
        let forwarded = text.lines().find(|line| line.contains("HOST_FORWARD"));
        let port = forwarded.and_then(|line| line.split_whitespace().nth(3)?.parse().ok());
        port.ok_or_else(|| format!("QEMU does not say which port it forwards: {text}"))
    }

    /// Saves the stopped machine to a file, and ends QEMU.
    pub(super) fn save(mut self, file: &Path) -> Result<(), String> {
        self.call("stop", &json!({}))?;
        self.call("migrate-set-parameters", &json!({"max-bandwidth": 10_000_000_000_u64}))?;
        self.call("migrate", &json!({"uri": format!("file:{}", file.display())}))?;
        self.until("the state is saved", |qemu| {
            let found = qemu.call("query-migrate", &json!({}))?;
            match found["status"].as_str() {
                Some("completed") => Ok(true),
                Some("failed") => Err(format!("the machine can't be saved: {found}")),
                _ => Ok(false),
            }
        })?;
        self.call("quit", &json!({}))?;
        self.child.wait().map_err(|error| error.to_string())?;
        Ok(())
    }

    /// Polls until a condition is true. QEMU reports none of these conditions in time.
    fn until(&mut self, what: &str, mut is_so: impl FnMut(&mut Self) -> Result<bool, String>) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        while !is_so(self)? {
            if Instant::now() > until {
                return Err(format!("not so within {PATIENCE:?}: {what}"));
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    pub(super) fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    pub(super) fn console(&self) -> String {
        std::fs::read_to_string(self.scratch.path().join("console")).unwrap_or_default()
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
