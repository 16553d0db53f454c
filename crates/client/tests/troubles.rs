//! The client with a gpushd that works, has ended, does not answer, sends invalid data, or has another version; and
//! with other programs.
//!
//! Helper functions outside `#[test]` functions may also panic to fail a test.
#![allow(clippy::unwrap_used)]

use std::{
    collections::VecDeque,
    convert::Infallible,
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use gpush_api::{Actor, ApiError, ApplyRequest, Code, Operation, OperationState, Version};
use gpush_client::{Client, Error, Kind, Origin, Socket};
use http_body_util::Full;
use hyper::{Request, Response, body::Bytes, body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
};

fn client(path: &Path) -> Client {
    Client::new(Socket::given(path, Origin::Option)).deadline(Duration::from_secs(5))
}

fn version(api: &str) -> String {
    serde_json::to_string(&Version { agent: "0.9.9".into(), api: api.into(), driver: None }).unwrap()
}

type Answer = (u16, String);

/// Starts an HTTP server on `path` that answers by method and path. Returns the number of connections.
fn serve(path: &Path, answer: impl Fn(&str, &str) -> Answer + Send + Sync + 'static) -> Arc<AtomicUsize> {
    let listener = UnixListener::bind(path).unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&connections);
    let answer = Arc::new(answer);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            count.fetch_add(1, Ordering::SeqCst);
            let answer = Arc::clone(&answer);
            tokio::spawn(async move {
                let service = service_fn(move |request: Request<Incoming>| {
                    let path = request.uri().path_and_query().unwrap().to_string();
                    let (status, body) = answer(request.method().as_str(), &path);
                    async move {
                        let body = Full::new(Bytes::from(body));
                        Ok::<_, Infallible>(Response::builder().status(status).body(body).unwrap())
                    }
                });
                drop(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
            });
        }
    });
    connections
}

/// Starts a server that passes each raw connection to `handle`.
fn serve_raw<F>(path: &Path, handle: impl Fn(UnixStream) -> F + Send + 'static) -> Arc<AtomicUsize>
where
    F: Future<Output = ()> + Send + 'static,
{
    let listener = UnixListener::bind(path).unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&connections);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            count.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(handle(stream));
        }
    });
    connections
}

fn hint(error: &Error) -> &str {
    error.error.hint.as_deref().expect("a way out")
}

#[tokio::test]
async fn requests_share_one_connection() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let connections = serve(&path, |method, path| {
        assert_eq!(method, "GET");
        match path {
            "/v1/version" => (200, version("v1")),
            "/v1/gpus?profiles=true" => (200, "[]".into()),
            other => (404, serde_json::to_string(&ApiError::new(Code::NotFound, format!("no {other}"))).unwrap()),
        }
    });
    let mut client = client(&path);
    assert_eq!(client.version().await.unwrap().agent, "0.9.9");
    assert!(client.gpus(true).await.unwrap().is_empty());
    // As after any other answer, the connection stays open after an API error.
    let error = client.gpu("GPU-x/y").await.unwrap_err();
    assert_eq!((error.kind, error.code()), (Kind::Answer, Code::NotFound));
    assert_eq!(error.error.message, "no /v1/gpus/GPU-x%2Fy");
    assert!(client.gpus(true).await.unwrap().is_empty());
    assert_eq!(connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn connection_closed_while_idle_is_reopened_for_reads_only() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    // The server answers one request per connection, then closes the connection without a notice.
    let connections = serve_raw(&path, |mut stream| async move {
        let mut buffer = [0; 4096];
        let _ = stream.read(&mut buffer).await;
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]").await;
    });
    let mut reader = client(&path);
    for _ in 0..5 {
        assert!(reader.gpus(false).await.unwrap().is_empty());
    }
    assert_eq!(connections.load(Ordering::SeqCst), 5);
}

/// Returns an operation as an answer.
fn operation() -> Vec<u8> {
    let by = Actor { uid: 0, user: None, pid: None };
    let operation = Operation {
        begun: true,
        layouts_before: Vec::new(),
        id: "op-1".into(),
        revision: 1,
        kind: "mig.apply".into(),
        state: OperationState::Running,
        by,
        created_at: jiff::Timestamp::UNIX_EPOCH,
        ended_at: None,
        reason: None,
        plans: Vec::new(),
        progress: Vec::new(),
        waits_for: Vec::new(),
        notes: Vec::new(),
        error: None,
    };
    let body = serde_json::to_string(&operation).unwrap();
    format!("HTTP/1.1 202 Accepted\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

fn refusal(retryable: bool) -> Vec<u8> {
    let error = ApiError { retryable, ..ApiError::new(Code::Stopping, "gpushd is stopping") };
    let body = serde_json::to_string(&error).unwrap();
    format!("HTTP/1.1 503 Busy\r\ncontent-length: {}\r\n\r\n{body}", body.len()).into_bytes()
}

#[tokio::test]
async fn unanswered_change_is_repeated_under_its_key() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let keys = Arc::new(Mutex::new(Vec::new()));
    // The client opens four connections. The server closes the first one before the answer, refuses the request on the
    // second one, closes the third one during the answer, and answers on the fourth one.
    let answers = [Vec::new(), refusal(true), operation()[..30].to_vec(), operation()];
    let answers = Arc::new(Mutex::new(VecDeque::from(answers)));
    let connections = serve_raw(&path, {
        let keys = Arc::clone(&keys);
        move |mut stream| {
            let (keys, answers) = (Arc::clone(&keys), Arc::clone(&answers));
            async move {
                let mut buffer = vec![0; 4096];
                let length = stream.read(&mut buffer).await.unwrap();
                let head = String::from_utf8_lossy(&buffer[..length]).into_owned();
                let key = head.lines().find_map(|line| line.strip_prefix("idempotency-key: ")).map(str::to_owned);
                keys.lock().unwrap().push(key.unwrap());
                let answer = answers.lock().unwrap().pop_front().unwrap_or_else(operation);
                let _ = stream.write_all(&answer).await;
            }
        }
    });
    let mut writer = client(&path);
    assert_eq!(writer.apply(&ApplyRequest::default()).await.unwrap().id, "op-1");
    assert_eq!(connections.load(Ordering::SeqCst), 4);
    assert_eq!(writer.cancel("op-1").await.unwrap().id, "op-1");
    let keys = keys.lock().unwrap();
    assert!(keys[..4].iter().all(|key| *key == keys[0]), "one request, one key: {keys:?}");
    assert_ne!(keys[4], keys[0], "another request, another key");
}

#[tokio::test]
async fn uncertain_change_is_reported_and_final_refusal_is_final() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let connections = serve(&path, |_, _| {
        let error = ApiError::new(Code::Unavailable, "the store is read-only");
        (503, serde_json::to_string(&error).unwrap())
    });
    let error = client(&path).apply(&ApplyRequest::default()).await.unwrap_err();
    assert_eq!((error.kind, connections.load(Ordering::SeqCst)), (Kind::Answer, 1), "{error:?}");

    // The server receives the request, ends, and is not started again.
    let path = dir.path().join("gone");
    let (listener, file) = (UnixListener::bind(&path).unwrap(), path.clone());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let _ = stream.read(&mut [0; 4096]).await;
        std::fs::remove_file(file).unwrap();
    });
    let mut writer = client(&path).deadline(Duration::from_millis(600));
    let error = writer.apply(&ApplyRequest::default()).await.unwrap_err();
    assert_eq!(error.kind, Kind::Lost, "{error:?}");
    assert!(hint(&error).contains("gpushctl operation list"), "{error:?}");
    assert!(error.error.causes.last().unwrap().contains("there is no socket"), "{error:?}");
}

#[tokio::test]
async fn refusal_of_stopping_agent_stands_after_its_end() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let (listener, file) = (UnixListener::bind(&path).unwrap(), path.clone());
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        for _ in 0..2 {
            let _ = stream.read(&mut [0; 4096]).await;
            stream.write_all(&refusal(true)).await.unwrap();
        }
        // The third request reuses this connection, and the server then closes it.
        let _ = stream.read(&mut [0; 4096]).await;
        std::fs::remove_file(file).unwrap();
    });
    let mut writer = client(&path).deadline(Duration::from_millis(900));
    let error = writer.apply(&ApplyRequest::default()).await.unwrap_err();
    assert_eq!((error.kind, error.error.code), (Kind::Answer, Code::Stopping), "{error:?}");
    assert_eq!(error.error.message, "gpushd is stopping");
    assert!(error.error.causes.is_empty(), "no doubt: {error:?}");
}

#[tokio::test]
async fn refusal_of_next_agent_leaves_change_uncertain() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let first = AtomicUsize::new(0);
    serve_raw(&path, move |mut stream| {
        let is_first = first.fetch_add(1, Ordering::SeqCst) == 0;
        async move {
            let _ = stream.read(&mut [0; 4096]).await;
            if !is_first {
                let _ = stream.write_all(&refusal(true)).await;
            }
        }
    });
    let mut writer = client(&path).deadline(Duration::from_millis(900));
    let error = writer.apply(&ApplyRequest::default()).await.unwrap_err();
    assert_eq!(error.kind, Kind::Lost, "{error:?}");
    assert!(hint(&error).contains("may have carried out the request"), "{error:?}");
}

#[tokio::test]
async fn absent_stale_and_non_socket_paths_have_distinct_errors() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("gpushd.sock");

    let error = client(&path).version().await.unwrap_err();
    assert_eq!(error.kind, Kind::Connect);
    assert!(error.error.message.contains("there is no socket"), "{error:?}");
    assert!(hint(&error).contains(&format!("gpushd --config FILE --socket {}", path.display())), "{error:?}");

    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let error = client(&path).version().await.unwrap_err();
    assert_eq!((error.kind, error.code()), (Kind::Connect, Code::Unreachable));
    assert!(error.error.message.contains("is from a previous gpushd"), "{error:?}");

    std::fs::remove_file(&path).unwrap();
    std::fs::write(&path, "").unwrap();
    let error = client(&path).version().await.unwrap_err();
    assert!(error.error.message.contains("a regular file, not gpushd's socket"), "{error:?}");

    let long = dir.path().join("x".repeat(120));
    let error = client(&long).version().await.unwrap_err();
    assert_eq!(error.code(), Code::BadRequest);
    assert!(error.error.message.contains("107"), "{error:?}");
}

#[tokio::test]
async fn silent_agent_ends_with_deadline_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    serve_raw(&path, |stream| async move {
        std::future::pending::<()>().await;
        drop(stream);
    });
    let mut client = client(&path).deadline(Duration::from_millis(50));
    let error = client.gpus(false).await.unwrap_err();
    assert_eq!((error.kind, error.code().exit_status()), (Kind::TimedOut, 8));
    assert!(error.error.message.contains("GET /v1/gpus in 0.05s"), "{error:?}");
    assert!(hint(&error).contains("--request-timeout"), "{error:?}");

    let error = client.apply(&ApplyRequest::default()).await.unwrap_err();
    assert_eq!(error.kind, Kind::TimedOut);
    assert!(hint(&error).contains("may still carry out the request"), "{error:?}");
}

#[tokio::test]
async fn agent_with_full_backlog_is_busy_not_absent() {
    use nix::sys::socket::{AddressFamily, Backlog, SockFlag, SockType, UnixAddr, bind, listen, socket};
    use std::os::fd::AsRawFd;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let fd = socket(AddressFamily::Unix, SockType::Stream, SockFlag::empty(), None).unwrap();
    bind(fd.as_raw_fd(), &UnixAddr::new(&path).unwrap()).unwrap();
    listen(&fd, Backlog::new(0).unwrap()).unwrap();
    let mut waiting = Vec::new();
    let refused = loop {
        match tokio::net::UnixStream::connect(&path).await {
            Ok(stream) => waiting.push(stream),
            Err(e) => break e,
        }
        assert!(waiting.len() < 64, "the backlog never fills");
    };
    assert_eq!(refused.kind(), std::io::ErrorKind::WouldBlock);
    let error = client(&path).version().await.unwrap_err();
    assert!(error.error.retryable && error.error.message.contains("too many connections are waiting"), "{error:?}");
}

#[tokio::test]
async fn foreign_server_differs_from_other_gpushd_version() {
    let dir = tempfile::tempdir().unwrap();

    // The server sends data first, and the data is not HTTP.
    let path = dir.path().join("ssh");
    serve_raw(&path, |mut stream| async move {
        let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").await;
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest).await;
    });
    let error = client(&path).gpus(false).await.unwrap_err();
    assert_eq!((error.kind, error.code().exit_status()), (Kind::Foreign, 6), "{error:?}");
    assert!(error.error.message.contains("is not gpushd"), "{error:?}");

    // Another program with an HTTP server listens on the socket.
    let path = dir.path().join("docker");
    serve(&path, |_, _| (404, r#"{"message":"page not found"}"#.into()));
    let error = client(&path).gpus(false).await.unwrap_err();
    assert_eq!(error.kind, Kind::Foreign);
    assert!(error.error.message.contains("is not gpushd"), "{error:?}");
    assert!(error.error.causes[0].contains("404"), "{error:?}");

    // gpushd has another API version. `version` detects this immediately. Every other call detects
    // the other version when the client cannot parse an answer.
    let path = dir.path().join("v2");
    serve(&path, |_, path| if path == "/v1/version" { (200, version("v2")) } else { (404, "gone".into()) });
    for error in [client(&path).version().await.unwrap_err(), client(&path).gpus(false).await.unwrap_err()] {
        assert_eq!((error.kind, error.code().exit_status()), (Kind::Foreign, 6));
        assert!(error.error.message.contains("gpushd 0.9.9 uses API v2"), "{error:?}");
        assert!(hint(&error).contains("same version"), "{error:?}");
    }

    // The server has the same API version, but sends an answer that this build cannot parse.
    let path = dir.path().join("odd");
    serve(&path, |_, path| (200, if path == "/v1/version" { version("v1") } else { r#"[{"index":"zero"}]"#.into() }));
    let error = client(&path).gpus(false).await.unwrap_err();
    assert_eq!(error.kind, Kind::Foreign);
    assert!(error.error.message.contains("gpushd 0.9.9 answered GET /v1/gpus in a form"), "{error:?}");
}

#[tokio::test]
async fn agent_that_dies_during_an_answer_is_lost() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    serve_raw(&path, |mut stream| async move {
        let mut buffer = [0; 4096];
        let _ = stream.read(&mut buffer).await;
        let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n[").await;
    });
    let error = client(&path).gpus(false).await.unwrap_err();
    assert_eq!((error.kind, error.code().exit_status()), (Kind::Lost, 6), "{error:?}");
    assert!(error.error.retryable && hint(&error).contains("journalctl"), "{error:?}");
}

/// Fault: while gpushd finished a long operation before its restart, changes failed with "gpushd is stopping".
#[tokio::test]
async fn changes_wait_while_gpushd_finishes_its_operations() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("s");
    let refusals = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&refusals);
    // The time limit for an answer is shorter than the time until gpushd has ended.
    serve(&path, move |method, _| match (count.fetch_add(1, Ordering::SeqCst) % 10, method) {
        (9, "DELETE") => (404, serde_json::to_string(&ApiError::new(Code::NotFound, "no override")).unwrap()),
        (9, _) => (200, "{\"in_maintenance\":false}".into()),
        (_, _) => (503, serde_json::to_string(&ApiError::stopping("gpushd is stopping")).unwrap()),
    });
    let notified = Arc::new(AtomicUsize::new(0));
    let tell = Arc::clone(&notified);
    let mut writer = client(&path).deadline(Duration::from_millis(300)).wait_for_restart(
        Duration::from_secs(60),
        Duration::from_millis(100),
        move || {
            tell.fetch_add(1, Ordering::SeqCst);
        },
    );
    let error = writer.end_override("0").await.unwrap_err();
    assert_eq!((error.code(), refusals.load(Ordering::SeqCst)), (Code::NotFound, 10), "{error:?}");
    assert!(!writer.leave_maintenance(&gpush_api::MaintenanceRequest::default()).await.unwrap().in_maintenance);
    assert_eq!(
        (refusals.load(Ordering::SeqCst), notified.load(Ordering::SeqCst)),
        (20, 1),
        "the user is notified once"
    );

    // Without the wait, the time limit for the answer counts.
    let error = client(&path).deadline(Duration::from_millis(300)).apply(&ApplyRequest::default()).await.unwrap_err();
    assert_eq!((error.code(), error.kind), (Code::Stopping, Kind::Answer), "{error:?}");
}
