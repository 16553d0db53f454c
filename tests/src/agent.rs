//! A `gpushd` under test: the real program on a simulated host, asked over its socket.
//!
//! It counts as started when it tells its service manager so, which is this harness; nothing here
//! waits by the clock. Requests are written by hand on the socket: what the agent says to a plain
//! HTTP client is under test, not a library's idea of it.

use std::{
    io::{Read, Write},
    os::fd::OwnedFd,
    os::unix::{
        fs::PermissionsExt,
        net::{UnixDatagram, UnixStream},
        process::ExitStatusExt,
    },
    path::{Path, PathBuf},
    process::{Child, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use gpush_api::{ApiError, Gpu, Operation};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::host::{Host, program};

/// How long anything may take before a test gives up. Generous: the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// How an agent is to be started.
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
}

/// A running agent; ended when dropped.
#[derive(Debug)]
pub struct Agent {
    child: Child,
    socket: PathBuf,
    config: PathBuf,
    log: PathBuf,
    notify: UnixDatagram,
    _public: Option<tempfile::TempDir>,
}

/// An HTTP answer.
#[derive(Debug, Clone)]
pub struct Answer {
    /// Status code.
    pub status: u16,
    /// Head, status line included.
    pub head: String,
    /// Body.
    pub body: Vec<u8>,
}

impl Answer {
    /// The body as JSON.
    ///
    /// # Panics
    /// When it is none.
    #[must_use]
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("{error}: {} {}", self.head, String::from_utf8_lossy(&self.body)))
    }

    /// The body as an error of the API.
    ///
    /// # Panics
    /// When it is none.
    #[must_use]
    pub fn error(&self) -> ApiError {
        assert!(self.status >= 400, "not an error: {} {}", self.head, String::from_utf8_lossy(&self.body));
        assert!(self.head.contains("application/json"), "{}", self.head);
        serde_json::from_value(self.json()).unwrap_or_else(|error| panic!("{error}: {}", self.json()))
    }
}

impl<'h> Setup<'h> {
    /// An agent on `host` without a config file.
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
        }
    }

    /// With this config.
    #[must_use]
    pub fn config(mut self, text: impl AsRef<[u8]>) -> Self {
        self.config = Some(text.as_ref().to_vec());
        self
    }

    /// With a variable in its environment, over the host's own.
    #[must_use]
    pub fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// With another argument.
    #[must_use]
    pub fn arg(mut self, argument: impl Into<String>) -> Self {
        self.arguments.push(argument.into());
        self
    }

    /// With a state directory, socket and config file of its own, so that several can run on one host.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        self.name = name.to_owned();
        self
    }

    /// With its socket at this path.
    #[must_use]
    pub fn socket(mut self, path: impl Into<PathBuf>) -> Self {
        self.socket = Some(path.into());
        self
    }

    /// Started by another program, whose last arguments are then gpushd and its own.
    #[must_use]
    pub fn through(mut self, program: &[&str]) -> Self {
        self.through = program.iter().map(|word| (*word).to_owned()).collect();
        self
    }

    /// With this as its standard input.
    #[must_use]
    pub fn stdin(mut self, stdin: OwnedFd) -> Self {
        self.stdin = Some(stdin.into());
        self
    }

    /// With this as its standard error, instead of a file.
    #[must_use]
    pub fn stderr(mut self, stderr: OwnedFd) -> Self {
        self.stderr = Some(stderr.into());
        self
    }

    /// Its state directory.
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
        command
            .arg("--config")
            .arg(&config)
            .arg("--socket")
            .arg(&socket)
            .arg("--state-dir")
            .arg(self.state_dir())
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

    /// Starts it and waits until it serves.
    ///
    /// # Panics
    /// When it ends instead; the panic shows what it said.
    #[must_use]
    pub fn start(self) -> Agent {
        self.spawn(None)
    }

    /// The same, when it serves on another socket than its own.
    ///
    /// # Panics
    /// When it ends instead.
    #[must_use]
    pub fn start_at(self, socket: &Path) -> Agent {
        self.spawn(Some(socket))
    }

    fn spawn(mut self, at: Option<&Path>) -> Agent {
        let (mut command, socket, config, log, notify) = self.command();
        let socket = at.map_or(socket, Path::to_owned);
        let child = command.spawn().expect("gpushd can be started");
        // The command holds what was handed to the child; its other end shall see it close.
        drop(command);
        let mut agent = Agent { child, socket, config, log, notify, _public: None };
        agent.wait_for("READY=1");
        agent
    }

    /// Starts it and waits until it ends by itself: its exit status and what it said.
    ///
    /// # Panics
    /// When it can't be started, or serves.
    #[must_use]
    pub fn refused(mut self) -> (ExitStatus, String) {
        let (mut command, _, _, log, notify) = self.command();
        let mut child = command.spawn().expect("gpushd can be started");
        let status = wait(&mut child);
        notify.set_nonblocking(true).expect("a socket can be set");
        let mut buffer = [0; 4096];
        assert!(notify.recv(&mut buffer).is_err(), "it said that it was ready");
        (status, std::fs::read_to_string(log).expect("a log"))
    }
}

fn wait(child: &mut Child) -> ExitStatus {
    let until = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.try_wait().expect("a child can be waited for") {
            return status;
        }
        assert!(Instant::now() < until, "gpushd did not end within {PATIENCE:?}");
        std::thread::yield_now();
    }
}

impl Agent {
    /// An agent on `host` with this config.
    #[must_use]
    pub fn start(host: &Host, config: &str) -> Self {
        Setup::on(host).config(config).start()
    }

    /// The same, on a socket that other users can reach: it lies in a directory of its own that is
    /// open to all.
    #[must_use]
    pub fn start_public(host: &Host, config: &str) -> Self {
        let dir = tempfile::Builder::new().prefix("gpush-socket-").tempdir().expect("a temporary directory");
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).expect("an open directory");
        let mut agent = Setup::on(host).config(config).socket(dir.path().join("gpushd.sock")).start();
        agent._public = Some(dir);
        agent
    }

    /// Its pid.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Its socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// What it has logged so far.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Replaces its config file, without telling it.
    ///
    /// # Panics
    /// When the file can't be written.
    pub fn write_config(&self, text: impl AsRef<[u8]>) {
        std::fs::write(&self.config, text).expect("the config can be written");
    }

    /// Waits until it sends the service manager this line.
    ///
    /// # Panics
    /// When it ends before, or nothing comes.
    pub fn wait_for(&mut self, line: &str) {
        let until = Instant::now() + PATIENCE;
        self.notify.set_read_timeout(Some(Duration::from_millis(20))).expect("a timeout can be set");
        let mut buffer = [0; 4096];
        loop {
            if let Ok(length) = self.notify.recv(&mut buffer)
                && String::from_utf8_lossy(&buffer[..length]).lines().any(|said| said == line)
            {
                return;
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                panic!("gpushd ended ({status}) before it said {line}:\n{}", self.log());
            }
            assert!(Instant::now() < until, "gpushd did not say {line}:\n{}", self.log());
        }
    }

    /// Sends it a signal.
    ///
    /// # Panics
    /// When it is gone.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("a pid");
        kill(Pid::from_raw(pid), signal).expect("gpushd can be signalled");
    }

    /// Waits until it has ended.
    ///
    /// # Panics
    /// When it does not.
    pub fn wait(&mut self) -> ExitStatus {
        wait(&mut self.child)
    }

    /// Asks it to stop and waits until it has.
    ///
    /// # Panics
    /// When it ends otherwise than it should.
    pub fn stop(mut self) {
        self.signal(Signal::SIGTERM);
        let status = self.wait();
        assert!(status.success(), "gpushd ended with {status}:\n{}", self.log());
    }

    /// Kills it without warning.
    ///
    /// # Panics
    /// When it is gone already.
    pub fn kill(mut self) {
        self.signal(Signal::SIGKILL);
        assert_eq!(self.wait().signal(), Some(9));
    }

    /// Sends bytes as they are, and gives back the whole answer once the agent has closed.
    ///
    /// # Panics
    /// When there is no connection to be had.
    #[must_use]
    pub fn raw(&self, bytes: &[u8]) -> Vec<u8> {
        let mut stream = self.connect();
        // It may have answered and closed before it has read all of it.
        let _ = stream.write_all(bytes);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        answer
    }

    /// A connection to it.
    ///
    /// # Panics
    /// When there is none to be had.
    #[must_use]
    pub fn connect(&self) -> UnixStream {
        let stream = UnixStream::connect(&self.socket).expect("gpushd can be connected to");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        stream
    }

    /// Any request.
    ///
    /// # Panics
    /// When the answer is no HTTP.
    #[must_use]
    pub fn request(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> Answer {
        let mut bytes = format!(
            "{method} {path} HTTP/1.1\r\nhost: gpush\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n",
            body.len()
        )
        .into_bytes();
        bytes.extend(body);
        parse(&self.raw(&bytes)).unwrap_or_else(|| panic!("no answer to {method} {path}:\n{}", self.log()))
    }

    /// `GET`.
    #[must_use]
    pub fn get(&self, path: &str) -> Answer {
        self.request("GET", path, "", b"")
    }

    /// `POST` of JSON.
    #[must_use]
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.request("POST", path, "content-type: application/json\r\n", body.to_string().as_bytes())
    }

    /// All GPUs.
    ///
    /// # Panics
    /// When they can't be had.
    #[must_use]
    pub fn gpus(&self) -> Vec<Gpu> {
        let answer = self.get("/v1/gpus");
        assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
        serde_json::from_value(answer.json()).expect("GPUs")
    }

    /// One GPU, by index.
    ///
    /// # Panics
    /// When it can't be had.
    #[must_use]
    pub fn gpu(&self, index: u32) -> Gpu {
        let answer = self.get(&format!("/v1/gpus/{index}"));
        assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
        serde_json::from_value(answer.json()).expect("a GPU")
    }

    /// Waits until readings made before this call are no longer shown: something beside the agent
    /// has changed the hardware.
    ///
    /// # Panics
    /// When no newer reading comes.
    pub fn settle_reads(&self) {
        self.settle_reads_except(u32::MAX);
    }

    /// The same, but for one GPU of which no new reading may come.
    ///
    /// # Panics
    /// When no newer reading of another comes.
    pub fn settle_reads_except(&self, index: u32) {
        let before = jiff::Timestamp::now();
        let until = Instant::now() + PATIENCE;
        while self.gpus().iter().any(|gpu| gpu.index != index && gpu.observed_at < before) {
            assert!(Instant::now() < until, "{}", self.log());
        }
    }

    /// Asks for entries on GPUs: the operation as it was begun, or the refusal.
    pub fn begin(&self, gpus: &[&str], entries: &[&str]) -> Result<Operation, ApiError> {
        self.begin_with(&json!({ "gpus": gpus, "layout": { "entries": entries } }))
    }

    /// Asks for whatever the body says.
    ///
    /// # Errors
    /// The refusal.
    ///
    /// # Panics
    /// When the answer is neither.
    pub fn begin_with(&self, body: &Value) -> Result<Operation, ApiError> {
        let answer = self.post("/v1/mig/apply", body);
        if answer.status == 202 {
            return Ok(serde_json::from_value(answer.json()).expect("an operation"));
        }
        Err(answer.error())
    }

    /// Follows an operation to its end.
    ///
    /// # Panics
    /// When it does not end.
    #[must_use]
    pub fn follow(&self, mut operation: Operation) -> Operation {
        let until = Instant::now() + PATIENCE * 2;
        while !operation.state.is_final() {
            assert!(Instant::now() < until, "{operation:?}\n{}", self.log());
            let path = format!("/v1/operations/{}?after={}&wait_ms=10000", operation.id, operation.revision);
            operation = serde_json::from_value(self.get(&path).json()).expect("an operation");
        }
        operation
    }

    /// Asks for entries on GPUs and follows the operation to its end.
    ///
    /// # Panics
    /// When it is refused.
    #[must_use]
    pub fn apply(&self, gpus: &[&str], entries: &[&str]) -> Operation {
        match self.begin(gpus, entries) {
            Ok(operation) => self.follow(operation),
            Err(error) => panic!("{error:?}"),
        }
    }

    /// Waits until no operation goes on, and gives all there were.
    ///
    /// # Panics
    /// When one does not end.
    #[must_use]
    pub fn settle(&self) -> Vec<Operation> {
        let all: Vec<Operation> = serde_json::from_value(self.get("/v1/operations").json()).expect("operations");
        all.into_iter().map(|operation| self.follow(operation)).collect()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // SIGKILL: a test that fails must not wait for an operation that hangs.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// An HTTP answer taken apart; `None` when it is none.
#[must_use]
pub fn parse(bytes: &[u8]) -> Option<Answer> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = String::from_utf8(bytes[..end].to_vec()).ok()?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some(Answer { status, head, body: bytes[end + 4..].to_vec() })
}

/// What a GPU holds, past the agent and the driver's ABI: `3g.40gb@4[3g.40gb@0]`, in order of
/// placement, as `gpush-sim` has it; the GPU's MIG mode first when it is off.
///
/// # Panics
/// When the host has no such GPU.
#[must_use]
pub fn truth(host: &Host, gpu: usize) -> Vec<String> {
    let show = host.show();
    let gpu = &show["gpus"][gpu];
    let model = gpu["model"].as_str().and_then(gpush_geometry::model).expect("a GPU of a known model");
    let state = &gpu["state"];
    if state["mig"] == json!(false) {
        return vec!["MIG off".to_owned()];
    }
    let number = |value: &Value| value.as_u64().expect("a number");
    let start = |value: &Value| number(&value["placement"]["start"]);
    let mut found = Vec::new();
    for instance in state["instances"].as_array().expect("instances") {
        let id = number(&instance["profile_id"]);
        let profile = model.gi_profiles.iter().find(|p| u64::from(p.id) == id).expect("a known profile");
        let compute = instance["instances"].as_array().expect("compute instances").iter().map(|compute| {
            let id = number(&compute["profile_id"]);
            let name = &profile.compute.iter().find(|c| u64::from(c.id) == id).expect("a known profile").name;
            format!("{name}@{}", start(compute))
        });
        let compute: Vec<String> = compute.collect();
        found.push((start(instance), format!("{}@{}[{}]", profile.name, start(instance), compute.join(" "))));
    }
    found.sort();
    found.into_iter().map(|(_, text)| text).collect()
}

/// The id of the GPU instance that starts at a memory slice.
///
/// # Panics
/// When there is none.
#[must_use]
pub fn gi_at(host: &Host, gpu: usize, start: u64) -> u64 {
    let show = host.show();
    let instances = show["gpus"][gpu]["state"]["instances"].as_array().expect("instances").clone();
    let found = instances.iter().find(|instance| instance["placement"]["start"] == json!(start));
    found.unwrap_or_else(|| panic!("no GPU instance at {start}: {instances:?}"))["id"].as_u64().expect("an id")
}
