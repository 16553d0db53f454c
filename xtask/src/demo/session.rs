//! The simulated host of the demo, with a real `gpushd`.

use std::{
    fs,
    os::unix::{net::UnixDatagram, process::ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// Time limit for the agent to start, to reload its config, and to end.
const PATIENCE: Duration = Duration::from_secs(30);

/// An agent on the simulated host on which this process runs. The session has a folder, in which
/// its commands run.
pub(super) struct Session {
    programs: PathBuf,
    folder: tempfile::TempDir,
    agent: Child,
    /// Receives the notifications of the agent to its service manager, such as readiness.
    reported: UnixDatagram,
}

impl Session {
    /// Starts the agent with this config and waits until it is ready.
    pub(super) fn start(programs: &Path, config: &str) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("gpush-demo-").tempdir().context("no temporary folder")?;
        fs::write(folder.path().join("config.toml"), config).context("the config cannot be written")?;
        let manager = folder.path().join("notify");
        let reported = UnixDatagram::bind(&manager).context("no socket to hear gpushd's readiness on")?;
        reported.set_read_timeout(Some(Duration::from_millis(50)))?;
        let log = fs::File::create(folder.path().join("gpushd.log"))?;
        let agent = Command::new(programs.join("gpushd"))
            .args(["--config", "config.toml", "--socket", "gpushd.sock", "--state-dir", "state"])
            .current_dir(folder.path())
            .env("NOTIFY_SOCKET", &manager)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .spawn()
            .context("gpushd cannot be started")?;
        let mut session = Self { programs: programs.to_owned(), folder, agent, reported };
        session.wait_for("READY=1")?;
        Ok(session)
    }

    /// Returns a command that runs in the folder of the session, in which `gpushctl` finds the
    /// agent.
    pub(super) fn command(&self, program: &str) -> Command {
        let own = self.programs.join(program);
        let mut command = Command::new(if own.is_file() { own } else { program.into() });
        command.current_dir(self.folder.path()).env("GPUSH_SOCKET", "gpushd.sock").env("PATH", self.path());
        command
    }

    /// Returns a value for `PATH` that begins with the folder of the built programs.
    fn path(&self) -> std::ffi::OsString {
        let path = std::env::var_os("PATH").unwrap_or_default();
        let all = std::iter::once(self.programs.clone()).chain(std::env::split_paths(&path));
        std::env::join_paths(all).unwrap_or(path)
    }

    /// Replaces the agent's config and reloads it, as `systemctl reload` would.
    pub(super) fn reload(&mut self, config: &str) -> Result<()> {
        fs::write(self.folder.path().join("config.toml"), config).context("the config cannot be written")?;
        self.signal(Signal::SIGHUP)?;
        self.wait_for("STATUS=the config was reloaded")
    }

    /// Runs a shell on the host.
    pub(super) fn shell(&self) -> Result<bool> {
        let program = std::env::var("SHELL").unwrap_or_else(|_| "/bin/sh".into());
        let mut shell = self.command(&program);
        shell.env("GPUSH_SOCKET", self.folder.path().join("gpushd.sock"));
        let status = shell.status().with_context(|| format!("{program} cannot be started"))?;
        // Ignore the exit code of the shell, because it is the exit code of the last command in the
        // shell.
        Ok(status.signal().is_none())
    }

    /// Ends the agent, and waits until it has ended.
    pub(super) fn end(mut self) -> Result<()> {
        self.signal(Signal::SIGTERM)?;
        let started = Instant::now();
        let mut buffer = [0; 4096];
        loop {
            if let Some(status) = self.agent.try_wait()? {
                if status.success() {
                    return Ok(());
                }
                bail!("gpushd did not end well ({status}); its log:\n{}", self.log());
            }
            if started.elapsed() > PATIENCE {
                bail!("gpushd does not end; its log:\n{}", self.log());
            }
            // This call is only a pause: it ends after a moment, or earlier if the agent sends a
            // notification.
            let _ = self.reported.recv(&mut buffer);
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.agent.id()).context("a pid beyond the kernel's own")?;
        kill(Pid::from_raw(pid), signal).with_context(|| format!("gpushd takes no {signal}"))
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("gpushd.log")).unwrap_or_default()
    }

    /// Waits until the agent sends this line to its service manager.
    fn wait_for(&mut self, line: &str) -> Result<()> {
        let started = Instant::now();
        let mut buffer = [0; 4096];
        loop {
            match self.reported.recv(&mut buffer) {
                Ok(length) if String::from_utf8_lossy(&buffer[..length]).lines().any(|printed| printed == line) => {
                    return Ok(());
                }
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => return Err(error).context("gpushd cannot be heard"),
            }
            if let Some(status) = self.agent.try_wait()? {
                bail!("gpushd ended ({status}); its log:\n{}", self.log());
            }
            if started.elapsed() > PATIENCE {
                bail!("gpushd does not say `{line}`; its log:\n{}", self.log());
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // If `end` was called, the process has ended. After a failure, it may still run.
        let _ = self.agent.kill();
        let _ = self.agent.wait();
    }
}
