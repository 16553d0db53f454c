//! A `gpushd` under test: the real program on a simulated host, used through its socket.
//!
//! The harness acts as the service manager: gpushd counts as started when it sends its ready
//! notification. No wait has a fixed duration. Requests are plain bytes on the socket, so the tests
//! see what any HTTP client sees.

mod answer;
mod listener;
mod operations;
mod real_layout;
mod setup;
mod waiting;

use std::{
    io::{Read, Write},
    os::unix::{
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
    real_layout::{gi_at, real_layout},
    setup::Setup,
};
use crate::host::Host;

/// Time limit for every wait in a test. It is long, because the machine may be busy.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A running agent. Dropping this value kills the agent.
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

fn request_bytes(method: &str, path: &str, headers: &str, body: &[u8]) -> Vec<u8> {
    let head = format!(
        "{method} {path} HTTP/1.1\r\nhost: gpush\r\nconnection: close\r\n{headers}content-length: {}\r\n\r\n",
        body.len()
    );
    [head.as_bytes(), body].concat()
}

impl Agent {
    /// Starts an agent on `host` with this config.
    #[must_use]
    pub fn start(host: &Host, config: &str) -> Self {
        Setup::on(host).config(config).start()
    }

    /// Starts gpushd again on a host whose previous gpushd has ended. First waits for the next
    /// second. Times of the API are whole seconds, so without this wait, an operation of the
    /// previous gpushd could seem to belong to the new gpushd.
    #[must_use]
    pub fn start_again(host: &Host, config: &str) -> Self {
        let into_second = jiff::Timestamp::now().as_millisecond().rem_euclid(1000).unsigned_abs();
        std::thread::sleep(Duration::from_millis(1000 - into_second));
        Self::start(host, config)
    }

    /// Starts gpushd on a socket that other users can reach: its directory permits every user to
    /// enter.
    #[must_use]
    pub fn start_public(host: &Host, config: &str) -> Self {
        Setup::on(host).config(config).start_public()
    }

    /// Returns the pid of gpushd.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the path of the socket.
    #[must_use]
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Returns the content of the log file. gpushd writes a log line after the event that the line
    /// reports. So a test that expects a line calls [`Agent::wait_for_log`] instead.
    #[must_use]
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Replaces the config file, without a reload.
    ///
    /// # Panics
    /// If the file cannot be written.
    pub fn write_config(&self, text: impl AsRef<[u8]>) {
        std::fs::write(&self.config, text).expect("the config can be written");
    }

    /// Replaces the config file and reloads it.
    ///
    /// # Panics
    /// If gpushd refuses the config.
    pub fn reload(&self, config: impl AsRef<[u8]>) {
        self.write_config(config);
        let answer = self.post("/v1/config/reload", &serde_json::json!({}));
        assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
    }

    /// Waits until gpushd has sent the service manager a line that begins with this text.
    ///
    /// # Panics
    /// If gpushd ends before that, or does not send the line in time.
    pub fn wait_for(&mut self, line: &str) {
        if let Err(status) = self.says(line) {
            panic!("gpushd ended ({status}) before it logged {line}:\n{}", self.log());
        }
    }

    /// Waits for a line as [`Agent::wait_for`] does. If gpushd ends first, returns its exit status.
    fn says(&mut self, line: &str) -> Result<(), ExitStatus> {
        let until = Instant::now() + PATIENCE;
        self.notify.set_read_timeout(Some(Duration::from_millis(20))).expect("a timeout can be set");
        let mut buffer = [0; 4096];
        loop {
            if let Ok(length) = self.notify.recv(&mut buffer)
                && String::from_utf8_lossy(&buffer[..length]).lines().any(|printed| printed.starts_with(line))
            {
                return Ok(());
            }
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(status);
            }
            assert!(Instant::now() < until, "gpushd did not say {line}:\n{}", self.log());
        }
    }

    /// Sends a signal to gpushd.
    ///
    /// # Panics
    /// If gpushd has ended.
    pub fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id()).expect("a pid");
        kill(Pid::from_raw(pid), signal).expect("gpushd can be signalled");
    }

    /// Returns whether gpushd has ended.
    ///
    /// # Panics
    /// If the process status cannot be read.
    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("a child can be waited for").is_some()
    }

    /// Waits until gpushd ends.
    ///
    /// # Panics
    /// If gpushd does not end in time.
    pub fn wait(&mut self) -> ExitStatus {
        wait(&mut self.child)
    }

    /// Sends SIGTERM and waits until gpushd has ended.
    ///
    /// # Panics
    /// If gpushd ends with an error.
    pub fn stop(mut self) {
        self.signal(Signal::SIGTERM);
        let status = self.wait();
        assert!(status.success(), "gpushd ended with {status}:\n{}", self.log());
    }

    /// Sends SIGKILL.
    ///
    /// # Panics
    /// If gpushd has ended already.
    pub fn kill(mut self) {
        self.signal(Signal::SIGKILL);
        assert_eq!(self.wait().signal(), Some(9));
    }

    /// Sends bytes without changes. Returns everything that gpushd sends before it closes the
    /// connection.
    ///
    /// # Panics
    /// If the connection fails.
    #[must_use]
    pub fn raw(&self, bytes: &[u8]) -> Vec<u8> {
        Self::exchange(self.connect(), bytes)
    }

    fn exchange(mut stream: UnixStream, bytes: &[u8]) -> Vec<u8> {
        // Ignore an error: gpushd may answer and close the connection before it has read all bytes.
        let _ = stream.write_all(bytes);
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        answer
    }

    /// Does the same as [`Agent::raw`], for a gpushd that may end at any time. Returns `None` if
    /// the connection fails.
    #[must_use]
    pub fn try_raw(&self, bytes: &[u8]) -> Option<Vec<u8>> {
        let stream = UnixStream::connect(&self.socket).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        Some(Self::exchange(stream, bytes))
    }

    /// Follows an operation to its end. If gpushd ends first, returns `None`.
    ///
    /// # Panics
    /// If neither the operation nor gpushd ends in time.
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

    /// Connects to the socket.
    ///
    /// # Panics
    /// If the connection fails.
    #[must_use]
    pub fn connect(&self) -> UnixStream {
        self.connect_at(&self.socket)
    }

    fn connect_at(&self, socket: &Path) -> UnixStream {
        let stream = UnixStream::connect(socket).expect("gpushd can be connected to");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout can be set");
        stream
    }

    /// Sends a request.
    ///
    /// # Panics
    /// If the answer is not HTTP.
    #[must_use]
    pub fn request(&self, method: &str, path: &str, headers: &str, body: &[u8]) -> Answer {
        self.request_at(&self.socket, method, path, headers, body)
    }

    /// Sends a request to another socket of gpushd.
    ///
    /// # Panics
    /// If the answer is not HTTP.
    #[must_use]
    pub fn request_at(&self, socket: &Path, method: &str, path: &str, headers: &str, body: &[u8]) -> Answer {
        let answer = Self::exchange(self.connect_at(socket), &request_bytes(method, path, headers, body));
        parse(&answer).unwrap_or_else(|| panic!("no answer to {method} {path}:\n{}", self.log()))
    }

    /// Sends a `GET`.
    #[must_use]
    pub fn get(&self, path: &str) -> Answer {
        self.request("GET", path, "", b"")
    }

    /// Sends a `GET` to another socket of gpushd.
    ///
    /// # Panics
    /// If the answer is not HTTP.
    #[must_use]
    pub fn get_at(&self, socket: &Path, path: &str) -> Answer {
        let request = format!("GET {path} HTTP/1.1\r\nhost: gpush\r\nconnection: close\r\n\r\n");
        let answer = Self::exchange(self.connect_at(socket), request.as_bytes());
        parse(&answer).unwrap_or_else(|| panic!("no answer to GET {path}:\n{}", self.log()))
    }

    /// Sends a `POST` with a JSON body.
    #[must_use]
    pub fn post(&self, path: &str, body: &Value) -> Answer {
        self.request("POST", path, "content-type: application/json\r\n", body.to_string().as_bytes())
    }

    /// Returns all GPUs.
    ///
    /// # Panics
    /// If the request fails.
    #[must_use]
    pub fn gpus(&self) -> Vec<Gpu> {
        let answer = self.get("/v1/gpus");
        assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
        serde_json::from_value(answer.json()).expect("GPUs")
    }

    /// Returns one GPU, by index.
    ///
    /// # Panics
    /// If the request fails.
    #[must_use]
    pub fn gpu(&self, index: u32) -> Gpu {
        let answer = self.get(&format!("/v1/gpus/{index}"));
        assert_eq!(answer.status, 200, "{}", String::from_utf8_lossy(&answer.body));
        serde_json::from_value(answer.json()).expect("a GPU")
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Use SIGKILL: a failing test must not wait for an operation that hangs.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
