//! A control daemon under test, real or simulated. Both start the simulated server, which comes
//! first on their `PATH`.

use std::{
    io::{BufRead, BufReader, Write},
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use gpush_mps::protocol::{command::Pid, control::Control, session};
use mps_sim::fault::{self, FaultFile, Kind};

pub(crate) const LONG: Duration = Duration::from_secs(10);
const CONTROL: &str = "nvidia-cuda-mps-control";
const SERVER: &str = "nvidia-cuda-mps-server";
const STAND_IN: &str = env!("CARGO_BIN_EXE_mps-sim");

/// The daemon under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Which {
    Real,
    StandIn555,
    StandIn550,
    StandIn535,
}

/// A behaviour that differs between versions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Trait {
    KnowsServerStatus,
    WritesPidFile,
    StrangersMaySet,
    ServesSeveralUsers,
}

/// A version of the daemon. Versions with the same behaviour in these tests are one value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Branch {
    V535,
    V550,
    V555,
}

/// For each behaviour that differs: whether the versions 535, 550 and 555 have this behaviour, and
/// how this is known. The tests treat a real daemon as 550 or later if it has the command
/// `get_server_status`. They treat a real daemon as 555 if its program file contains the word
/// `-multiuser-server`.
pub(crate) const DIFFERENCES: &[(Trait, [bool; 3], &str)] = &[
    (Trait::KnowsServerStatus, [false, true, true], "seen with 535.309, 550.163 and 555.58"),
    (Trait::WritesPidFile, [false, true, true], "535.309 was seen not to write it, 550.163 and 555.58 to write it"),
    (Trait::StrangersMaySet, [true, false, false], "any uid sets values with 535.309; 550.163 was seen to refuse"),
    (Trait::ServesSeveralUsers, [false, false, true], "seen with 535.309, 550.163 and 555.58.02"),
];

/// With this option, one server serves clients of all users. The server runs as root.
pub(crate) const MULTI_USER: &str = "-multiuser-server";

/// The settings of a daemon under test: directories, programs, faults.
pub(crate) struct Setup {
    pub(crate) which: Which,
    scratch: tempfile::TempDir,
    pub(crate) pipe: PathBuf,
    environment: Vec<(String, String)>,
    arguments: Vec<&'static str>,
}

impl Setup {
    /// Creates the settings. Returns `None` if the daemon is not installed.
    pub(crate) fn of(which: Which, check: &str) -> Option<Self> {
        if which == Which::Real && program(CONTROL).is_none() {
            println!("SKIPPED {check}: {CONTROL} is not installed; `cargo xtask test` as root installs it");
            return None;
        }
        let scratch = tempfile::tempdir().unwrap();
        // Clients run as other users, so every user must be able to enter the directory.
        std::fs::set_permissions(scratch.path(), PermissionsExt::from_mode(0o755)).unwrap();
        for name in ["bin", "pipe", "log"] {
            std::fs::create_dir(scratch.path().join(name)).unwrap();
        }
        symlink(STAND_IN, scratch.path().join("bin").join(SERVER)).unwrap();
        let control = match which {
            Which::Real => program(CONTROL).unwrap(),
            Which::StandIn555 | Which::StandIn550 | Which::StandIn535 => STAND_IN.into(),
        };
        symlink(control, scratch.path().join("bin").join(CONTROL)).unwrap();
        let pipe = scratch.path().join("pipe");
        Some(Self { which, scratch, pipe, environment: Vec::new(), arguments: Vec::new() })
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.scratch.path().join(name)
    }

    /// Sets the pipe directory.
    pub(crate) fn at(mut self, pipe: PathBuf) -> Self {
        self.pipe = pipe;
        self
    }

    pub(crate) fn with(mut self, name: &str, value: &str) -> Self {
        self.environment.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Adds an argument of the daemon.
    pub(crate) fn argument(mut self, argument: &'static str) -> Self {
        self.arguments.push(argument);
        self
    }

    /// Returns the version of a simulated daemon.
    pub(crate) fn version(&self) -> &'static str {
        match self.which {
            Which::StandIn535 => "535",
            Which::Real | Which::StandIn550 => "550",
            Which::StandIn555 => "555",
        }
    }

    /// Returns whether the control program supports several users. For NVIDIA's program, the
    /// program file shows this. For the simulated program, the table [`DIFFERENCES`] shows it.
    pub(crate) fn serves_several_users(&self) -> bool {
        match self.which {
            Which::Real => {
                let program = std::fs::read(program(CONTROL).unwrap()).unwrap();
                program.split(|byte| *byte == 0).any(|word| word == MULTI_USER.as_bytes())
            }
            Which::StandIn555 => true,
            Which::StandIn550 | Which::StandIn535 => false,
        }
    }

    /// Returns the fault file of the simulated server. The real daemon also starts this server.
    pub(crate) fn faults(&self) -> FaultFile {
        FaultFile::at(self.path("faults.toml"))
    }

    pub(crate) fn fault(&self, kind: Kind) -> u64 {
        self.faults().add(kind, None, None, None).unwrap()
    }

    /// Returns a command with the daemon's environment.
    pub(crate) fn command(&self, program: &Path) -> Command {
        let path = format!("{}:{}", self.path("bin").display(), std::env::var("PATH").unwrap());
        // A test in the background ignores SIGINT, and a test under nohup ignores SIGHUP. Child
        // processes would inherit this, so restore the default signal handling.
        let mut command = Command::new("/usr/bin/env");
        command
            .arg("--default-signal=INT,HUP")
            .arg(program)
            .env_clear()
            .env("PATH", path)
            .env("CUDA_MPS_PIPE_DIRECTORY", &self.pipe)
            .env("CUDA_MPS_LOG_DIRECTORY", self.path("log"))
            .env("CUDA_VISIBLE_DEVICES", "GPU-01020304-0506-0708-090a-0b0c0d0e0f10")
            .env(fault::VARIABLE, self.path("faults.toml"))
            .env("MPS_SIM_VERSION", self.version())
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        command
    }

    /// Returns the path of the control program.
    pub(crate) fn control_program(&self) -> PathBuf {
        self.path("bin").join(CONTROL)
    }

    pub(crate) fn spawn(&self) -> Child {
        let out = std::fs::OpenOptions::new().create(true).append(true).open(self.path("out")).unwrap();
        self.command(&self.control_program()).arg("-f").args(&self.arguments).stdout(out).spawn().unwrap()
    }

    /// Starts the daemon in the foreground, and waits until it answers.
    pub(crate) async fn start(self) -> Daemon {
        let child = self.spawn();
        let daemon = Daemon { control: Control::of(&self.pipe), setup: self, child };
        until("it answers", async || daemon.control.daemon(LONG).await.ok()).await;
        daemon
    }
}

/// A running daemon. Dropping this value kills the daemon. The server then ends, because the pipe
/// directory is removed.
pub(crate) struct Daemon {
    pub(crate) control: Control,
    pub(crate) setup: Setup,
    pub(crate) child: Child,
}

impl Daemon {
    pub(crate) fn pid(&self) -> Pid {
        i32::try_from(self.child.id()).unwrap()
    }

    /// Sends a line to the daemon without changes. Returns the frames of the answer.
    pub(crate) async fn says(&self, line: &str) -> Vec<String> {
        let door = self.setup.pipe.join("control_privileged");
        let answer = session::ask(&door, line, LONG).await;
        answer.unwrap_or_else(|error| panic!("{line}: {error}")).text
    }

    /// Returns what a daemon in the foreground has logged so far.
    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.setup.path("out")).unwrap()
    }

    pub(crate) async fn logs(&self, part: &str) {
        until(part, async || self.log().contains(part).then_some(())).await;
    }

    pub(crate) async fn has(&self, one: Trait) -> bool {
        let branch = match self.setup.which {
            Which::Real if self.says("get_server_status 1").await.concat().contains("Unknown command") => Branch::V535,
            Which::Real if !self.setup.serves_several_users() => Branch::V550,
            Which::Real | Which::StandIn555 => Branch::V555,
            Which::StandIn550 => Branch::V550,
            Which::StandIn535 => Branch::V535,
        };
        DIFFERENCES.iter().any(|&(known, has, _)| known == one && has[branch as usize])
    }

    /// Waits for a server and returns its pid.
    pub(crate) async fn server(&self) -> Pid {
        until("a server", async || self.control.servers(LONG).await.unwrap().first().copied()).await
    }

    /// Waits for a server that answers queries, and returns its pid.
    pub(crate) async fn ready_server(&self) -> Pid {
        let server = self.server().await;
        until("a server that is asked", async || self.control.percentage(server, LONG).await.ok()).await;
        server
    }

    pub(crate) async fn no_server(&self) {
        until("no server", async || self.control.servers(LONG).await.unwrap().is_empty().then_some(())).await;
    }

    /// Starts a client as the test's own user, with additional environment variables.
    pub(crate) fn client(&self, environment: &[(&str, &str)]) -> Client {
        self.client_of(None, environment)
    }

    /// Starts a client as another user. Only root can do that.
    pub(crate) fn client_of(&self, uid: Option<u32>, environment: &[(&str, &str)]) -> Client {
        let mut command = self.setup.command(Path::new(STAND_IN));
        if let Some(uid) = uid {
            std::os::unix::process::CommandExt::uid(&mut command, uid);
        }
        command.arg("client").envs(environment.iter().copied()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Client { child, lines }
    }

    /// Kills the daemon, as a crash would.
    pub(crate) fn kill(&mut self) {
        let _gone = self.child.kill();
        self.child.wait().unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

/// A client. Dropping this value kills the client.
pub(crate) struct Client {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Client {
    pub(crate) fn pid(&self) -> Pid {
        i32::try_from(self.child.id()).unwrap()
    }

    /// Returns the next line that the client prints, or an empty text if the client has ended.
    pub(crate) fn next(&mut self) -> String {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        line.trim().to_owned()
    }

    /// Asks the client to end, and waits for it.
    pub(crate) fn end(mut self) {
        self.child.stdin.take().unwrap().write_all(b"end\n").unwrap();
        self.child.wait().unwrap();
    }

    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _gone = self.child.kill();
        let _gone = self.child.wait();
    }
}

/// Polls until `ask` returns a value.
pub(crate) async fn until<T>(what: &str, ask: impl AsyncFn() -> Option<T>) -> T {
    let started = Instant::now();
    loop {
        if let Some(answer) = ask().await {
            return answer;
        }
        assert!(started.elapsed() < LONG, "not in time: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

pub(crate) fn is_alive(pid: Pid) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, rest)| !rest.starts_with('Z'))
}

pub(crate) fn signal(pid: Pid, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), signal).unwrap();
}

/// Returns the uid of another user. The test must be able to become this user, and this user must
/// be able to run the programs.
pub(crate) fn another_uid(check: &str) -> Option<u32> {
    let uid = 65_534;
    let mut command = Command::new(STAND_IN);
    std::os::unix::process::CommandExt::uid(&mut command, uid);
    let may = nix::unistd::geteuid().is_root() && command.stderr(Stdio::null()).status().is_ok();
    if !may {
        println!("SKIPPED {check}: only root can be two users, and uid {uid} must reach {STAND_IN}");
    }
    may.then_some(uid)
}

fn program(name: &str) -> Option<PathBuf> {
    let paths = std::env::var_os("PATH")?;
    std::env::split_paths(&paths).map(|dir| dir.join(name)).find(|path| path.is_file())
}
