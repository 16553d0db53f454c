//! Tests of the requests of hooks. The test itself answers instead of gpushd.

use std::{
    io::{Read, Write},
    os::unix::net::{UnixListener, UnixStream},
    path::Path,
    thread,
};

use gpush_api::SlurmOutcome;
use gpush_client::{Origin, Socket};

use super::*;

/// An answer of gpushd: HTTP status and body. `None` closes the connection without an answer.
pub(crate) type Answer = Option<(u16, String)>;

impl Calls {
    /// Creates the calls to the gpushd that listens on `socket`.
    pub(crate) fn to(socket: &Path, time: Duration, restart: Duration) -> Self {
        let client = BlockingClient::new(Socket::given(socket, Origin::Option));
        Self { client, until: Instant::now() + time, restart }
    }
}

/// Listens on `socket`, and answers each request with what `answer` returns for its body.
pub(crate) fn serve(socket: &Path, mut answer: impl FnMut(&str) -> Answer + Send + 'static) {
    let listener = UnixListener::bind(socket).unwrap();
    thread::spawn(move || {
        for mut connection in listener.incoming().flatten() {
            let Some(body) = request(&mut connection) else { continue };
            let Some((status, body)) = answer(&body) else { continue };
            let length = body.len();
            let head = format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n");
            let _hook_has_ended = connection.write_all(format!("{head}{body}").as_bytes());
        }
    });
}

/// Reads a request until the end of its body, which is a JSON object. Returns the body.
fn request(connection: &mut UnixStream) -> Option<String> {
    let mut text = String::new();
    loop {
        let mut bytes = [0; 4096];
        let length = connection.read(&mut bytes).ok().filter(|length| *length > 0)?;
        text.push_str(&String::from_utf8_lossy(&bytes[..length]));
        if let Some((_, body)) = text.split_once("\r\n\r\n")
            && body.ends_with('}')
        {
            return Some(body.to_owned());
        }
    }
}

pub(crate) fn error(error: &ApiError) -> Answer {
    Some((503, serde_json::to_string(error).unwrap()))
}

/// Returns gpushd's answer to Prolog for a job that does not concern gpush.
fn not_concerned() -> Answer {
    let started = SlurmJobStarted { outcome: SlurmOutcome::NotConcerned, owned: Vec::new() };
    Some((200, serde_json::to_string(&started).unwrap()))
}

fn busy() -> ApiError {
    ApiError::new(Code::Unavailable, "an MPS daemon is starting").retryable()
}

fn job() -> SlurmJobStart {
    SlurmJobStart {
        cluster: "ci".to_owned(),
        job: 42,
        node: "n1".to_owned(),
        uid: 1,
        restart: 0,
        leader: None,
        name: None,
        account: None,
        request: None,
        devices: Vec::new(),
        until_ms: 0,
    }
}

/// Begins a job. gpushd answers the first request with the first one of `answers`, and so on. After
/// the last answer, gpushd repeats that answer.
fn start(answers: Vec<Answer>, time: Duration, restart: Duration) -> Result<Option<SlurmJobStarted>, Unanswered> {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let mut requests = 0;
    serve(&socket, move |_| {
        requests += 1;
        answers[requests.min(answers.len()) - 1].clone()
    });
    Calls::to(&socket, time, restart).start(&job(), || true)
}

/// Fault: the host's clock was set forward. gpushd then considered the request late, and Prolog
/// drained the node.
#[test]
fn request_that_is_late_by_the_clock_is_sent_again() {
    let late = || error(&ApiError::new(Code::TimedOut, "gpushd read the request after its deadline"));
    let minutes = Duration::from_secs(600);
    assert!(start(vec![late(), not_concerned()], minutes, RESTART).is_ok());
    let answer = start(vec![late()], Duration::from_millis(300), RESTART);
    assert!(matches!(answer, Err(Unanswered::NoAnswer(_))), "{answer:?}");
}

/// Fault: if gpushd restarted long after a hook had begun, the hook did not wait for the restart.
/// Each restart must have its own time limit.
#[test]
fn every_restart_of_gpushd_has_its_time() {
    let restart = PAUSE * 5;
    // All these requests together take longer than the time limit for a restart.
    let mut answers = vec![error(&busy()); 7];
    answers.extend([None, not_concerned()]);
    let answer = start(answers, Duration::from_secs(600), restart);
    assert!(answer.is_ok(), "{answer:?}");
}

/// Fault: jobs whose GPUs gpush does not manage waited for a gpushd that was not running.
#[test]
fn job_that_does_not_concern_gpush_waits_for_no_restart() {
    let begin = |concern| {
        let (dir, mut answers) = (tempfile::tempdir().unwrap(), [None, not_concerned()].into_iter());
        let socket = dir.path().join("socket");
        serve(&socket, move |_| answers.next().flatten());
        let mut calls = Calls::to(&socket, Duration::from_secs(600), RESTART).for_concern(concern);
        calls.start(&job(), || true)
    };
    assert!(begin(Concern::Request).is_ok() && begin(Concern::Gpus).is_ok());
    let answer = begin(Concern::Nothing);
    assert!(matches!(answer, Err(Unanswered::NoAnswer(_))), "{answer:?}");
}

/// Fault: jobs that do not concern gpush waited for a hanging gpushd until the deadline of the hook.
#[test]
fn job_that_does_not_concern_gpush_has_a_short_time_limit() {
    let limit = |concern| {
        let calls = Calls::to(Path::new("/nonexistent"), Duration::from_secs(600), RESTART).for_concern(concern);
        calls.left()
    };
    assert!(limit(Concern::Nothing) <= SHORT);
    assert!(limit(Concern::Request) > SHORT && limit(Concern::Gpus) > SHORT);
}

/// Fault: the Prolog of an earlier run waited for gpushd, and its request ended the lease of the next run.
#[test]
fn prolog_sends_no_request_after_the_next_run_has_begun() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let (seen, requests) = std::sync::mpsc::channel();
    let next_has_begun = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let begun = next_has_begun.clone();
    serve(&socket, move |_| {
        begun.store(true, std::sync::atomic::Ordering::SeqCst);
        seen.send(()).unwrap();
        error(&busy())
    });
    let mut calls = Calls::to(&socket, Duration::from_secs(600), RESTART);
    let is_current = || !next_has_begun.load(std::sync::atomic::Ordering::SeqCst);
    let answer = calls.start(&job(), is_current);
    assert!(matches!(answer, Ok(None)), "{answer:?}");
    assert_eq!(requests.try_iter().count(), 1);
}

/// At first, no process listens on the socket. Before the second attempt, gpushd has started.
#[test]
fn epilog_waits_for_a_gpushd_that_does_not_listen_yet() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("socket");
    let attempts = std::cell::Cell::new(0);
    let run = || {
        attempts.set(attempts.get() + 1);
        if attempts.get() == 2 {
            serve(&socket, |_| Some((200, "{}".to_owned())));
        }
        let (cluster, node) = ("ci".to_owned(), "n1".to_owned());
        Some(SlurmJobEnd { cluster, job: 42, node, restart: 0, until_ms: 0 })
    };
    let minutes = Duration::from_secs(600);
    let ended = Calls::to(&socket, minutes, minutes).end_run(run);
    assert!(ended.is_ok_and(|ended| ended.left.is_empty()));
    assert_eq!(attempts.get(), 2);
}
