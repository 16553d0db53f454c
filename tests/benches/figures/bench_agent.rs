//! A `gpushd` to measure: started on a simulated host, ready by its own word.

use std::{
    fs,
    os::unix::net::UnixDatagram,
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    time::{Duration, Instant},
};

use gpush_tests::host::{Host, program};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// An agent on a host; ended when dropped.
pub(crate) struct Agent<'a> {
    host: &'a Host,
    child: Child,
    socket: PathBuf,
    /// From start to `READY=1`.
    pub(crate) ready_after: Duration,
}

impl<'a> Agent<'a> {
    /// Starts an agent with an empty config and waits until it says that it is ready.
    pub(crate) fn start(host: &'a Host) -> Self {
        let folder = host.scratch("agent");
        fs::create_dir_all(&folder).expect("a folder for the agent");
        let (config, socket, notify) = (folder.join("config.toml"), folder.join("sock"), folder.join("notify"));
        fs::write(&config, "").expect("a config");
        let _ = fs::remove_file(&notify);
        let readiness = UnixDatagram::bind(&notify).expect("a socket to hear readiness on");
        readiness.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");

        let mut command = host.command(program("gpushd"));
        command.arg("--config").arg(&config).arg("--socket").arg(&socket).arg("--state-dir").arg(folder.join("state"));
        command.env("NOTIFY_SOCKET", &notify).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let started = Instant::now();
        let child = command.spawn().expect("gpushd can be started");
        let mut buffer = [0; 4096];
        loop {
            let length = readiness.recv(&mut buffer).expect("gpushd says that it is ready");
            if buffer[..length].split(|byte| *byte == b'\n').any(|line| line == b"READY=1") {
                break;
            }
        }
        Self { host, child, socket, ready_after: started.elapsed() }
    }

    /// A `gpushctl` that speaks to this agent.
    pub(crate) fn ctl(&self, arguments: &[&str]) -> Command {
        let mut command = self.host.command(program("gpushctl"));
        command.args(arguments).env("GPUSH_SOCKET", &self.socket).stdin(Stdio::null());
        command
    }

    /// Runs `gpushctl` to its end.
    pub(crate) fn run(&self, arguments: &[&str]) -> Output {
        self.ctl(arguments).output().expect("gpushctl can be started")
    }

    /// As [`Agent::run`], for what must work.
    pub(crate) fn must(&self, arguments: &[&str]) -> Output {
        let output = self.run(arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "gpushctl {}: {said}", arguments.join(" "));
        output
    }
}

impl Drop for Agent<'_> {
    fn drop(&mut self) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGTERM);
        }
        let _ = self.child.wait();
    }
}
