//! A client that blocks, without a runtime. It has only the calls of Slurm's hooks.
//!
//! Each request uses a new connection. The calls return the same errors as [`crate::Client`].

use std::{
    io::{self, Read, Write},
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::Path,
    time::{Duration, Instant},
};

use gpush_api::{Lease, SlurmJobEnd, SlurmJobEnded, SlurmJobStart, SlurmJobStarted};
use hyper::{StatusCode, body::Bytes};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, UnixAddr, connect, socket};
use serde::{Serialize, de::DeserializeOwned};

use crate::{
    attempts::Answer,
    client::{DEFAULT_DEADLINE, Unparsed, VERSION, json, other_form, parsed},
    connection::{BACKLOG_FULL, CONNECT_DEADLINE, LARGEST_ANSWER, STARTUP_POLL, STARTUP_WAIT, is_absent},
    error::Error,
    failures,
    leases::{LeaseSelection, PAGE},
    question::{JSON, Question},
    socket::Socket,
};

/// Maximum size of the head of an answer in bytes.
const LARGEST_HEAD: usize = 64 << 10;

/// A client of one gpushd, for programs without a runtime.
#[derive(Debug)]
pub struct BlockingClient {
    socket: Socket,
    deadline: Duration,
    /// Whether to wait a moment for a gpushd that is starting.
    waits_for_start: bool,
}

impl BlockingClient {
    /// Creates a client of the gpushd behind `socket`. Does not connect yet.
    #[must_use]
    pub fn new(socket: Socket) -> Self {
        Self { socket, deadline: DEFAULT_DEADLINE, waits_for_start: true }
    }

    /// Fails immediately if no gpushd listens. Without this call, the client waits a moment for a gpushd that is
    /// starting.
    #[must_use]
    pub fn without_waiting_for_start(mut self) -> Self {
        self.waits_for_start = false;
        self
    }

    /// Sets the time limit of each answer from now on.
    pub fn set_deadline(&mut self, deadline: Duration) {
        self.deadline = deadline;
    }

    /// `POST /v1/slurm/jobs`. The job is the idempotency key: if the request is repeated, gpushd answers with the same
    /// lease.
    ///
    /// # Errors
    /// See [`crate::Kind`]. If gpushd answers with an error, the node cannot serve the job.
    pub fn slurm_start(&mut self, job: &SlurmJobStart) -> Result<SlurmJobStarted, Error> {
        self.post("/v1/slurm/jobs", job)
    }

    /// `POST /v1/slurm/jobs/end`. The request can be repeated.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub fn slurm_end(&mut self, job: &SlurmJobEnd) -> Result<SlurmJobEnded, Error> {
        self.post("/v1/slurm/jobs/end", job)
    }

    /// `GET /v1/leases`. Returns a selection of leases, with at most 100 ended leases.
    ///
    /// # Errors
    /// See [`crate::Kind`].
    pub fn leases_of(&mut self, selection: &LeaseSelection) -> Result<Vec<Lease>, Error> {
        self.call(&Question::get(&selection.path(selection.ended.min(PAGE), None)))
    }

    fn post<B: Serialize, T: DeserializeOwned>(&mut self, path: &str, body: &B) -> Result<T, Error> {
        self.call(&Question { method: "POST", body: Bytes::from(json(body)?), ..Question::get(path) })
    }

    fn call<T: DeserializeOwned>(&mut self, question: &Question<'_>) -> Result<T, Error> {
        match parsed(&self.ask(question)?) {
            Ok(value) => Ok(value),
            Err(Unparsed::Refusal(error)) => Err(error),
            Err(Unparsed::OtherForm(cause)) => {
                let version = self.ask(&Question::get(VERSION)).ok();
                Err(other_form(&self.socket, question, version, cause))
            }
        }
    }

    fn ask(&mut self, question: &Question<'_>) -> Result<Answer, Error> {
        let until = Instant::now() + self.deadline;
        let mut stream = self.connect(until)?;
        let failed = |cause: &io::Error| match cause.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                failures::silent(&self.socket, question, self.deadline)
            }
            io::ErrorKind::InvalidData => failures::not_http(&self.socket).with_cause(cause.to_string()),
            io::ErrorKind::FileTooLarge => failures::too_long(&self.socket, question, LARGEST_ANSWER),
            _ => failures::lost(&self.socket, question).with_cause(cause.to_string()),
        };
        // If gpushd closes the connection early, its answer may say why, so read the answer even if a write fails.
        let sent = send(&mut stream, question, until);
        self.waits_for_start = false;
        receive(&mut stream, until).map_err(|cause| failed(sent.as_ref().err().unwrap_or(&cause)))
    }

    fn connect(&self, until: Instant) -> Result<UnixStream, Error> {
        let until = until.min(Instant::now() + CONNECT_DEADLINE);
        if let Some(admin) = &self.socket.admin
            && let Ok(stream) = connect_until(admin, until, until)
        {
            return Ok(stream);
        }
        let give_up = Instant::now() + if self.waits_for_start { STARTUP_WAIT } else { Duration::ZERO };
        connect_until(&self.socket.path, until, give_up).map_err(|cause| failures::no_connection(&self.socket, &cause))
    }
}

/// Opens a connection. While no process listens, tries again until `give_up`. While the backlog of gpushd is full, tries
/// again until `until`.
fn connect_until(path: &Path, until: Instant, give_up: Instant) -> io::Result<UnixStream> {
    loop {
        let error = match connect_once(path) {
            Ok(stream) => return Ok(stream),
            Err(error) => error,
        };
        let now = Instant::now();
        if is_absent(&error) && now < give_up.min(until) {
            std::thread::sleep(STARTUP_POLL);
        } else if error.kind() == io::ErrorKind::WouldBlock && now < until {
            std::thread::sleep(BACKLOG_FULL);
        } else {
            return Err(error);
        }
    }
}

fn connect_once(path: &Path) -> io::Result<UnixStream> {
    // A path that is too long for an address gets the error that `std` gives.
    let Ok(address) = UnixAddr::new(path) else { return UnixStream::connect(path) };
    // On a blocking socket, connect(2) would wait without a limit while the backlog is full.
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket(AddressFamily::Unix, SockType::Stream, flags, None)?;
    connect(fd.as_raw_fd(), &address)?;
    let stream = UnixStream::from(fd);
    stream.set_nonblocking(false)?;
    Ok(stream)
}

fn send(stream: &mut UnixStream, question: &Question<'_>, until: Instant) -> io::Result<()> {
    let Question { method, path, accept, body, .. } = question;
    let mut request = format!(
        "{method} {path} HTTP/1.1\r\nhost: localhost\r\naccept: {accept}\r\ncontent-type: {JSON}\r\ncontent-length: \
         {}\r\nconnection: close\r\n\r\n",
        body.len()
    )
    .into_bytes();
    request.extend_from_slice(body);
    stream.set_write_timeout(Some(left(until)?))?;
    stream.write_all(&request)
}

fn receive(stream: &mut UnixStream, until: Instant) -> io::Result<Answer> {
    let mut bytes = Vec::new();
    loop {
        if let Some(answer) = answer(&bytes)? {
            return Ok(answer);
        }
        stream.set_read_timeout(Some(left(until)?))?;
        let mut some = [0; 16 << 10];
        match stream.read(&mut some) {
            Ok(0) => return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the answer is incomplete")),
            Ok(length) => bytes.extend_from_slice(&some[..length]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
}

/// Returns the time until a deadline. It is never zero, because a time limit of zero would mean no limit.
fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Parses an answer; `None` if it is not complete yet. gpushd writes the length of each answer into its head.
///
/// # Errors
/// If the bytes are not an answer of gpushd.
fn answer(bytes: &[u8]) -> io::Result<Option<Answer>> {
    let wrong = |what: &'static str| io::Error::new(io::ErrorKind::InvalidData, what);
    let start = b"HTTP/1.";
    let seen = bytes.len().min(start.len());
    if bytes[..seen] != start[..seen] {
        return Err(wrong("the answer is not HTTP"));
    }
    let Some(end) = bytes.windows(4).position(|four| four == b"\r\n\r\n") else {
        return if bytes.len() > LARGEST_HEAD { Err(wrong("the head of the answer has no end")) } else { Ok(None) };
    };
    let head = std::str::from_utf8(&bytes[..end]).map_err(|_| wrong("the head of the answer is not text"))?;
    let mut lines = head.split("\r\n");
    let status = lines.next().and_then(|line| line.split(' ').nth(1)).unwrap_or_default();
    let status = StatusCode::from_bytes(status.as_bytes()).map_err(|_| wrong("the answer has no HTTP status"))?;
    let mut fields = lines.filter_map(|line| line.split_once(':'));
    let length = fields.find(|(name, _)| name.eq_ignore_ascii_case("content-length"));
    let length = length.and_then(|(_, length)| length.trim().parse::<usize>().ok());
    let length = length.ok_or_else(|| wrong("the head of the answer has no length"))?;
    if length > LARGEST_ANSWER {
        return Err(io::ErrorKind::FileTooLarge.into());
    }
    let body = &bytes[end + 4..];
    Ok(body.get(..length).map(|body| Answer { status, body: Bytes::copy_from_slice(body) }))
}

#[cfg(test)]
mod tests {
    use std::{os::unix::net::UnixListener, thread};

    use super::*;
    use crate::{Kind, socket::Origin};

    /// Returns the result of a request to a program that answers with `bytes` and closes the connection.
    fn answered(bytes: &'static [u8]) -> Result<SlurmJobEnded, Error> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        thread::spawn(move || {
            for mut stream in listener.incoming().flatten() {
                let mut some = [0; 4096];
                let _request = stream.read(&mut some).unwrap();
                let _client_has_ended = stream.write_all(bytes);
            }
        });
        let mut client = BlockingClient::new(Socket::given(path, Origin::Option));
        client.set_deadline(Duration::from_secs(600));
        client.slurm_end(&SlurmJobEnd { cluster: "c".into(), job: 1, node: "n".into(), restart: 0, until_ms: 0 })
    }

    #[test]
    fn answer_and_error_of_gpushd_are_read() {
        let ended = answered(b"HTTP/1.1 200 OK\r\nContent-Length: 16\r\n\r\n{\"ended\":[\"L7\"]}").unwrap();
        assert_eq!(ended.ended, [gpush_api::LeaseId(7)]);
        let refused =
            b"HTTP/1.1 503 X\r\ncontent-length: 46\r\n\r\n{\"code\":\"stopping\",\"message\":\"it is stopping\"}";
        let error = answered(refused).unwrap_err();
        assert_eq!((error.kind, error.code()), (Kind::Answer, gpush_api::Code::Stopping));
    }

    #[test]
    fn broken_answers_have_different_kinds() {
        for (bytes, kind) in [
            (&b""[..], Kind::Lost),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{}", Kind::Lost),
            (b"220 mail ready\r\n", Kind::Foreign),
            (b"HTTP/1.1 200 OK\r\n\r\n{}", Kind::Foreign),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n", Kind::Foreign),
            (b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n7", Kind::Foreign),
        ] {
            let error = answered(bytes).unwrap_err();
            assert_eq!(error.kind, kind, "{}: {error}", String::from_utf8_lossy(bytes));
        }
    }

    #[test]
    fn silent_gpushd_and_absent_socket_end_in_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("socket");
        let ask = || {
            let mut client = BlockingClient::new(Socket::given(&path, Origin::Option)).without_waiting_for_start();
            client.set_deadline(Duration::from_millis(50));
            client.leases_of(&LeaseSelection::default()).unwrap_err()
        };
        assert_eq!(ask().kind, Kind::Connect);
        let _silent = UnixListener::bind(&path).unwrap();
        let error = ask();
        assert_eq!(error.kind, Kind::TimedOut, "{error}");
        let long = Socket::given("/".repeat(200), Origin::Option);
        assert_eq!(BlockingClient::new(long).leases_of(&LeaseSelection::default()).unwrap_err().kind, Kind::Connect);
    }
}
