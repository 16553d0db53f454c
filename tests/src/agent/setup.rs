//! Start of a gpushd under test: its config, its environment, its file descriptors, and the program
//! that starts it.

use std::{
    os::{
        fd::OwnedFd,
        unix::{fs::PermissionsExt, net::UnixDatagram},
    },
    path::{Path, PathBuf},
    process::{ExitStatus, Stdio},
};

use super::{Agent, wait};
use crate::host::{Host, program};

/// The settings with which gpushd is started.
#[derive(Debug)]
pub struct Setup<'h> {
    host: &'h Host,
    config: Option<Vec<u8>>,
    socket: Option<PathBuf>,
    environment: Vec<(String, String)>,
    arguments: Vec<String>,
    name: String,
    through: Vec<String>,
    stdin: Option<Stdio>,
    stderr: Option<Stdio>,
    admin_beside: bool,
}

impl<'h> Setup<'h> {
    /// Prepares gpushd on `host` without a config file.
    #[must_use]
    pub fn on(host: &'h Host) -> Self {
        Self {
            host,
            config: None,
            socket: None,
            environment: Vec::new(),
            arguments: Vec::new(),
            name: "gpushd".to_owned(),
            through: Vec::new(),
            stdin: None,
            stderr: None,
            admin_beside: false,
        }
    }

    /// Sets the config. Its comment lines `# --constants KEY=VALUE,…` set constants of gpushd, such as
    /// `# --constants mps.stop=2s`.
    #[must_use]
    pub fn config(mut self, text: impl AsRef<[u8]>) -> Self {
        self.config = Some(text.as_ref().to_vec());
        self
    }

    /// Sets an environment variable of gpushd. If the simulated host sets a variable with this
    /// name, replaces the value from the host.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// Sets the content of `/etc/subuid` for gpushd: lines in the form `OWNER:FIRST:COUNT`.
    ///
    /// # Panics
    /// If the file cannot be written.
    #[must_use]
    pub fn subuid(self, text: &str) -> Self {
        let root = self.host.scratch(&format!("{}.root", self.name));
        std::fs::create_dir_all(root.join("etc")).expect("a directory");
        std::fs::write(root.join("etc/subuid"), text).expect("a file");
        self.env("GPUSH_HOST_ROOT", root.to_str().expect("text"))
    }

    /// Adds a command-line argument of gpushd.
    #[must_use]
    pub fn arg(mut self, argument: impl Into<String>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// Sets a name for the state directory, the socket and the config file. With different names,
    /// several gpushd can run on one host.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    /// Sets the path of the socket.
    #[must_use]
    pub fn socket(mut self, path: impl Into<PathBuf>) -> Self {
        self.socket = Some(path.into());
        self
    }

    /// Puts the admin socket at its default path, next to the socket for all users. Then only one
    /// gpushd can use this directory.
    #[must_use]
    pub fn admin_beside(mut self) -> Self {
        self.admin_beside = true;
        self
    }

    /// Starts gpushd through another program. The last arguments of this program are gpushd and its
    /// arguments.
    #[must_use]
    pub fn through(mut self, program: &[&str]) -> Self {
        self.through = program.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// Sets the standard input of gpushd.
    #[must_use]
    pub fn stdin(mut self, stdin: OwnedFd) -> Self {
        self.stdin = Some(stdin.into());
        self
    }

    /// Sets the standard error of gpushd. By default, it is a file.
    #[must_use]
    pub fn stderr(mut self, stderr: OwnedFd) -> Self {
        self.stderr = Some(stderr.into());
        self
    }

    /// Returns the state directory.
    #[must_use]
    pub fn state_dir(&self) -> PathBuf {
        self.host.scratch(&format!("{}.state", self.name))
    }

    fn command(&mut self) -> (std::process::Command, PathBuf, PathBuf, PathBuf, UnixDatagram) {
        let config = self.host.scratch(&format!("{}.toml", self.name));
        match &self.config {
            Some(text) => std::fs::write(&config, text).expect("the config can be written"),
            None => std::fs::write(&config, "").expect("the config can be written"),
        }
        let socket = self.socket.clone().unwrap_or_else(|| self.host.scratch(&format!("{}.sock", self.name)));
        let log = self.host.scratch(&format!("{}.log", self.name));
        let notify = self.host.scratch(&format!("{}.notify", self.name));
        let _ = std::fs::remove_file(&notify);
        let listener = UnixDatagram::bind(&notify).expect("a notify socket");
        let file = std::fs::OpenOptions::new().create(true).append(true).open(&log).expect("a log file");
        let mut command = match self.through.split_first() {
            Some((first, rest)) => {
                let mut command = self.host.command(first);
                command.args(rest).arg(program("gpushd"));
                command
            }
            None => self.host.command(program("gpushd")),
        };
        if !self.admin_beside {
            command.arg("--admin-socket").arg(self.host.scratch(&format!("{}.admin.sock", self.name)));
        }
        command
            .arg("--config")
            .arg(&config)
            .arg("--socket")
            .arg(&socket)
            .arg("--state-dir")
            .arg(self.state_dir())
            .arg("--constants")
            .arg(constants(self.config.as_deref().unwrap_or_default()))
            .args(&self.arguments)
            .env("NOTIFY_SOCKET", &notify)
            .env("GPUSH_LOG", "debug")
            .env_remove("JOURNAL_STREAM")
            .envs(self.environment.iter().map(|(name, value)| (name, value)))
            .stdin(self.stdin.take().unwrap_or_else(Stdio::null))
            .stdout(Stdio::null())
            .stderr(self.stderr.take().unwrap_or_else(|| file.into()));
        (command, socket, config, log, listener)
    }

    /// Starts gpushd and waits until it is ready.
    ///
    /// # Panics
    /// If gpushd ends instead. The panic shows the output of gpushd.
    #[must_use]
    pub fn start(self) -> Agent {
        self.spawn(None)
    }

    /// Starts gpushd with a socket that all users can reach, and waits until gpushd is ready.
    ///
    /// # Panics
    /// If gpushd ends instead.
    #[must_use]
    pub fn start_public(self) -> Agent {
        let dir = tempfile::Builder::new().prefix("gpush-socket-").tempdir().expect("a temporary directory");
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).expect("an open directory");
        let mut agent = self.socket(dir.path().join("gpushd.sock")).start();
        agent._public = Some(dir);
        agent
    }

    /// Starts gpushd, whose socket is at this path, and waits until gpushd is ready.
    ///
    /// # Panics
    /// If gpushd ends instead.
    #[must_use]
    pub fn start_at(self, socket: &Path) -> Agent {
        self.spawn(Some(socket))
    }

    /// Starts gpushd and waits until it is ready.
    ///
    /// # Errors
    /// The exit status and the output, if gpushd ends instead.
    pub fn try_start(mut self) -> Result<Agent, (ExitStatus, String)> {
        let mut agent = self.begin(None);
        match agent.says("READY=1") {
            Ok(()) => Ok(agent),
            Err(status) => Err((status, agent.log())),
        }
    }

    fn spawn(mut self, at: Option<&Path>) -> Agent {
        let mut agent = self.begin(at);
        agent.wait_for("READY=1");
        agent
    }

    fn begin(&mut self, at: Option<&Path>) -> Agent {
        let (mut command, socket, config, log, notify) = self.command();
        let socket = at.map_or(socket, Path::to_owned);
        // Times of the API are whole seconds, so round the start time down.
        let started = jiff::Timestamp::from_second(jiff::Timestamp::now().as_second()).expect("a time");
        let child = command.spawn().expect("gpushd can be started");
        // `command` still has copies of the descriptors that the child inherited. If these copies
        // stayed open, the peers would not notice when the child closes its own copies.
        drop(command);
        Agent { child, socket, config, log, notify, started, _public: None }
    }

    /// Starts a gpushd that must fail at its start, and waits until it ends. Returns the exit
    /// status and the output.
    ///
    /// # Panics
    /// If gpushd cannot be started, or becomes ready.
    #[must_use]
    pub fn refused(mut self) -> (ExitStatus, String) {
        let (mut command, _, _, log, notify) = self.command();
        let mut child = command.spawn().expect("gpushd can be started");
        let status = wait(&mut child);
        notify.set_nonblocking(true).expect("a socket can be set");
        let mut buffer = [0; 4096];
        // Ignore status messages: a previous gpushd with the same name may have sent them.
        while let Ok(length) = notify.recv(&mut buffer) {
            assert!(!buffer[..length].starts_with(b"READY=1"), "gpushd reported that it was ready");
        }
        (status, std::fs::read_to_string(log).expect("a log"))
    }
}

/// Returns the constants that the comments of a config name.
fn constants(config: &[u8]) -> String {
    let config = String::from_utf8_lossy(config);
    config.lines().filter_map(|line| line.strip_prefix("# --constants ")).collect::<Vec<_>>().join(",")
}
