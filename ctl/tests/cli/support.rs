//! Runs `gpushctl` as a process and captures its output. Provides an agent for tests, which answers instead of gpushd.

use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::{Arc, Mutex},
};

/// Path of the binary under test.
pub(crate) const GPUSHCTL: &str = env!("CARGO_BIN_EXE_gpushctl");

/// A temporary directory in which `gpushctl` runs, with a clean environment.
pub(crate) struct Host {
    pub(crate) dir: tempfile::TempDir,
}

impl Host {
    pub(crate) fn new() -> Self {
        Self { dir: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        std::fs::write(&path, content).unwrap();
        // The umask may let the group write, which `metrics serve` refuses.
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        path
    }

    /// Returns a command that runs gpushctl with a clean environment. The path of the socket, `gpushd.sock`, is
    /// relative, so that lines wrap at the same place on every machine.
    pub(crate) fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(GPUSHCTL);
        command
            .args(args)
            .current_dir(self.dir.path())
            .env_clear()
            .env("LANG", "C.UTF-8")
            .env("COLUMNS", "80")
            .env("GPUSH_SOCKET", "gpushd.sock");
        command
    }

    /// Runs gpushctl with these arguments. Returns its output and exit status as text.
    pub(crate) fn run(&self, args: &[&str]) -> String {
        self.run_with(args, b"")
    }

    /// Runs gpushctl with these arguments and this stdin. Returns its output and exit status as text.
    pub(crate) fn run_with(&self, args: &[&str], stdin: &[u8]) -> String {
        let mut command = self.command(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // Ignore an error: gpushctl may exit without reading stdin.
        let _ = child.stdin.take().unwrap().write_all(stdin);
        Self::transcript(args, &child.wait_with_output().unwrap())
    }

    /// Formats the result of a command: `$ gpushctl …`, stdout, stderr and the exit status. Replaces the version of
    /// this build by `VERSION`.
    pub(crate) fn transcript(args: &[&str], output: &Output) -> String {
        let quoted =
            args.iter().map(|a| if a.is_empty() || a.contains(' ') { format!("'{a}'") } else { (*a).to_owned() });
        let mut text = format!("$ gpushctl {}\n", quoted.collect::<Vec<_>>().join(" "));
        text += &String::from_utf8_lossy(&output.stdout);
        if !output.stderr.is_empty() {
            text += &format!("[stderr]\n{}", String::from_utf8_lossy(&output.stderr));
        }
        match output.status.code() {
            Some(code) => text += &format!("[exit {code}]\n"),
            None => text += "[killed]\n",
        }
        text.replace(env!("CARGO_PKG_VERSION"), "VERSION")
    }
}

/// A request that the agent for tests has got.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) method: String,
    pub(crate) path: String,
    pub(crate) accept: String,
    pub(crate) body: String,
}

/// What the agent for tests does with a request.
pub(crate) enum Answer {
    /// Sends this status and body.
    Json(u16, String),
    /// Sends this content type and body, with status 200.
    Text(&'static str, String),
    /// Sends nothing, and keeps the connection open.
    Silence,
    /// Closes the connection.
    HangUp,
}

impl Answer {
    pub(crate) fn ok<T: serde::Serialize + ?Sized>(value: &T) -> Self {
        Self::Json(200, serde_json::to_string(value).unwrap())
    }

    pub(crate) fn error(error: &gpush_api::ApiError) -> Self {
        Self::Json(error.code.http_status(), serde_json::to_string(error).unwrap())
    }
}

/// An agent for tests. It gives the answers that a test defines, and records all requests.
#[derive(Clone)]
pub(crate) struct Agent {
    pub(crate) requests: Arc<Mutex<Vec<Request>>>,
}

impl Agent {
    /// Listens on `socket` until the test process ends.
    pub(crate) fn listen(socket: &Path, answer: impl Fn(&Request) -> Answer + Send + Sync + 'static) -> Self {
        let listener = UnixListener::bind(socket).unwrap();
        let agent = Self { requests: Arc::default() };
        let (requests, answer) = (Arc::clone(&agent.requests), Arc::new(answer));
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (requests, answer) = (Arc::clone(&requests), Arc::clone(&answer));
                std::thread::spawn(move || serve(stream.unwrap(), &requests, answer.as_ref()));
            }
        });
        agent
    }

    /// Returns all requests so far, as `METHOD path`.
    pub(crate) fn asked(&self) -> Vec<String> {
        self.requests.lock().unwrap().iter().map(|r| format!("{} {}", r.method, r.path)).collect()
    }

    /// Returns the bodies of all requests to `path`.
    pub(crate) fn bodies(&self, path: &str) -> Vec<String> {
        let requests = self.requests.lock().unwrap();
        requests.iter().filter(|r| r.path == path).map(|r| r.body.clone()).collect()
    }
}

fn serve(mut stream: UnixStream, requests: &Mutex<Vec<Request>>, answer: &dyn Fn(&Request) -> Answer) {
    let mut buffer = Vec::new();
    while let Some(request) = read(&mut stream, &mut buffer) {
        requests.lock().unwrap().push(request.clone());
        let (status, content_type, body) = match answer(&request) {
            Answer::Json(status, body) => (status, "application/json", body),
            Answer::Text(content_type, body) => (200, content_type, body),
            Answer::Silence => {
                // This read returns when the client closes the connection.
                let _ = stream.read(&mut [0]);
                return;
            }
            Answer::HangUp => return,
        };
        let length = body.len();
        let head = format!("HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\ncontent-length: {length}\r\n\r\n");
        if stream.write_all((head + &body).as_bytes()).is_err() {
            return;
        }
    }
}

/// Reads one HTTP/1.1 request with `content-length`, the only kind that the client sends.
fn read(stream: &mut UnixStream, buffer: &mut Vec<u8>) -> Option<Request> {
    loop {
        if let Some(end) = buffer.windows(4).position(|w| w == b"\r\n\r\n") {
            let head = String::from_utf8(buffer[..end].to_vec()).unwrap();
            let header = |name: &str| {
                let mut lines = head.lines().filter_map(|line| line.split_once(": "));
                lines.find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.to_owned())
            };
            let length = header("content-length").map_or(0, |n| n.parse::<usize>().unwrap());
            if buffer.len() >= end + 4 + length {
                let mut words = head.split(' ');
                let (method, path) = (words.next().unwrap().to_owned(), words.next().unwrap().to_owned());
                let accept = header("accept").unwrap_or_default();
                let body = String::from_utf8(buffer[end + 4..end + 4 + length].to_vec()).unwrap();
                buffer.drain(..end + 4 + length);
                return Some(Request { method, path, accept, body });
            }
        }
        let mut chunk = [0; 4096];
        match stream.read(&mut chunk) {
            Ok(0) | Err(_) => return None,
            Ok(n) => buffer.extend_from_slice(&chunk[..n]),
        }
    }
}
