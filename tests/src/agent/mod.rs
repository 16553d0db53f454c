//! A `gpushd` under test: the real program on a simulated host, asked over its socket.
//!
//! It counts as started when it tells its service manager so, which is this harness; nothing here
//! waits by the clock. Requests are written by hand on the socket: what the agent says to a plain
//! HTTP client is under test, not a library's idea of it.

mod answer;
mod listener;
mod operations;
mod setup;
mod truth;
mod waiting;

use std::{
    io::{Read, Write},
    os::unix::{
        fs::PermissionsExt,
        net::{UnixDatagram, UnixStream},
        process::ExitStatusExt,
    },
    path::{Path, PathBuf},
    process::{Child, ExitStatus},
    time::{Duration, Instant},
};

use gpush_api::{Gpu, Operation};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;

pub use self::{
    answer::{Answer, parse},
    listener::{Listener, number, state},
    setup::Setup,
    truth::{gi_at, truth},
};
use crate::host::Host;

/// How long anything may take before a test gives up. Generous: the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A running agent; ended when dropped.
#[derive(Debug)]
pub struct Agent {
    child: Child,
    socket: PathBuf,
    config: PathBuf,
    log: PathBuf,
    notify: UnixDatagram,
    started: jiff::Timestamp,
    _public: Option<tempfile::TempDir>,
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

    /// Returns what the log file contains. gpushd writes a line after the event that the line reports, so a test that
    /// expects a line calls [`Agent::wait_for_log`].
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

    /// Has it take another config.
    ///
    /// # Panics
    /// When it refuses it.
    pub fn reload(&self, config: impl AsRef<[u8]>) {
        self.write_config(config);
        let answer = self.post("/v1/config/reload", &serde_json::json!({}));
        assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
    }

    /// Waits until it sends the service manager this line.
    ///
    /// # Panics
    /// When it ends before, or nothing comes.
    pub fn wait_for(&mut self, line: &str) {
        if let Err(status) = self.says(line) {
            panic!("gpushd ended ({status}) before it said {line}:\n{}", self.log());
        }
    }

    /// The same; its exit status when it ends before.
    fn says(&mut self, line: &str) -> Result<(), ExitStatus> {
        let until = Instant::now() + PATIENCE;
        self.notify.set_read_timeout(Some(Duration::from_millis(20))).expect("a timeout can be set");
        let mut buffer = [0; 4096];
        loop {
            if let Ok(length) = self.notify.recv(&mut buffer)
                && String::from_utf8_lossy(&buffer[..length]).lines().any(|said| said == line)
            {
                return Ok(());
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(status);
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

    /// Whether it has ended.
    ///
    /// # Panics
    /// When that can't be told.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("a child can be waited for").is_some()
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
        Self::exchange(self.connect(), bytes)
    }

    fn exchange(mut stream: UnixStream, bytes: &[u8]) -> Vec<u8> {
        // It may have answered and closed before it has read all of it.
        let _ = stream.write_all(bytes);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        answer
    }

    /// As [`Agent::raw`], of an agent that may die: `None` when there is no connection to be had.
    #[must_use]
    pub fn try_raw(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        let stream = UnixStream::connect(&self.socket).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        Some(Self::exchange(stream, bytes))
    }

    /// Follows an operation to its end, of an agent that may die on the way: `None` when it has.
    ///
    /// # Panics
    /// When neither ends.
    pub fn outlives(&mut self, id: &str) -> Option<Operation> {
        let until = Instant::now() + PATIENCE;
        let request =
            format!("GET /v1/operations/{id}?after=0&wait_ms=50 HTTP/1.1\r\nhost: gpush\r\nconnection: close\r\n\r\n");
        loop {
            let answer = self.try_raw(request.as_bytes()).and_then(|answer| parse(&answer));
            let operation = answer.and_then(|answer| serde_json::from_value::<Operation>(answer.json()).ok());
            if let Some(operation) = operation.filter(|operation| operation.state.is_final()) {
                return Some(operation);
            }
            if let Ok(Some(_)) = self.child.try_wait() {
                return None;
            }
            assert!(Instant::now() < until, "neither {id} nor gpushd ends:\n{}", self.log());
        }
    }

    /// A connection to it.
    ///
    /// # Panics
    /// When there is none to be had.
    #[must_use]
    pub fn connect(&self) -> UnixStream {
        self.connect_at(&self.socket)
    }

    fn connect_at(&self, socket: &Path) -> UnixStream {
        let stream = UnixStream::connect(socket).expect("gpushd can be connected to");
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

    /// `GET` over another socket of it.
    ///
    /// # Panics
    /// When the answer is no HTTP.
    #[must_use]
    pub fn get_at(&self, socket: &Path, path: &str) -> Answer {
        let request = format!("GET {path} HTTP/1.1\r\nhost: gpush\r\nconnection: close\r\n\r\n");
        let answer = Self::exchange(self.connect_at(socket), request.as_bytes());
        parse(&answer).unwrap_or_else(|| panic!("no answer to GET {path}:\n{}", self.log()))
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
}

impl Drop for Agent {
    fn drop(&mut self) {
        // SIGKILL: a test that fails must not wait for an operation that hangs.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
