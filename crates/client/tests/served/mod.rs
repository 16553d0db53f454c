//! Servers for tests of the client.

use std::{
    convert::Infallible,
    path::Path,
    sync::{Arc, Mutex},
};

use http_body_util::{BodyExt, Full};
use hyper::{Request, Response, body::Bytes, body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use tokio::{net::UnixListener, sync::Notify};

/// The received requests: `METHOD path body`, and the idempotency key.
pub(crate) type Asked = Arc<Mutex<Vec<(String, Option<String>)>>>;

/// Answers every request with `not_found`, and returns the list of requests.
pub(crate) fn serve(path: &Path) -> Asked {
    let listener = UnixListener::bind(path).unwrap();
    let asked = Asked::default();
    let all = Arc::clone(&asked);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let all = Arc::clone(&all);
            tokio::spawn(async move {
                let service = service_fn(move |request: Request<Incoming>| {
                    let all = Arc::clone(&all);
                    async move {
                        let key = request.headers().get("idempotency-key").map(|key| key.to_str().unwrap().to_owned());
                        let head = format!("{} {}", request.method(), request.uri().path_and_query().unwrap());
                        let body = request.into_body().collect().await.unwrap().to_bytes();
                        let line = format!("{head} {}", String::from_utf8_lossy(&body));
                        all.lock().unwrap().push((line.trim_end().to_owned(), key));
                        let error = r#"{"code":"not_found","message":"nothing here"}"#;
                        let answer = Response::builder().status(404).body(Full::new(Bytes::from(error)));
                        Ok::<_, Infallible>(answer.unwrap())
                    }
                });
                drop(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
            });
        }
    });
    asked
}

/// Answers the first request with an empty object, but only after a notification.
#[allow(dead_code, reason = "not every test needs it")]
pub(crate) fn answers_when_notified(path: &Path) -> Arc<Notify> {
    let listener = UnixListener::bind(path).unwrap();
    let may_answer = Arc::new(Notify::new());
    let notified = Arc::clone(&may_answer);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let notified = Arc::clone(&notified);
            tokio::spawn(async move {
                let service = service_fn(move |_: Request<Incoming>| {
                    let notified = Arc::clone(&notified);
                    async move {
                        notified.notified().await;
                        // Release the next request too: after this answer, the client asks for the
                        // version.
                        notified.notify_one();
                        Ok::<_, Infallible>(Response::new(Full::new(Bytes::from("{}"))))
                    }
                });
                drop(hyper::server::conn::http1::Builder::new().serve_connection(TokioIo::new(stream), service).await);
            });
        }
    });
    may_answer
}
