//! One HTTP/1.1 connection over the socket: requests in turn, each with its deadline.
//!
//! ```text
//! idle ──request──► open ──answer──► open        reused for the next request
//!                    │
//!                    └──ended / deadline──► idle  GETs are asked once more on a new connection
//! ```

use std::time::Duration;

use gpush_api::{ApiError, Code};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::{Method, Request, StatusCode, body::Bytes, client::conn::http1, header};
use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, time::Instant};

use crate::{
    error::{Error, Kind},
    explain,
    socket::Socket,
};

/// Largest answer that is read, in bytes: 64 GPUs with all profiles and processes are well below.
const LARGEST_ANSWER: usize = 64 << 20;

/// Longest wait for `connect`, which blocks while the agent's backlog is full.
const CONNECT_DEADLINE: Duration = Duration::from_secs(2);

/// A status and the bytes that came with it.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    pub(crate) body: Bytes,
}

/// A connection that opens itself when it is needed.
#[derive(Debug)]
pub(crate) struct Wire {
    pub(crate) socket: Socket,
    open: Option<http1::SendRequest<Full<Bytes>>>,
}

impl Wire {
    pub(crate) fn new(socket: Socket) -> Self {
        Self { socket, open: None }
    }

    /// Sends one request and reads its answer, all within `deadline`.
    pub(crate) async fn request(
        &mut self,
        method: &Method,
        path: &str,
        body: Option<Vec<u8>>,
        deadline: Duration,
    ) -> Result<Answer, Error> {
        let until = Instant::now() + deadline;
        let body = body.map_or_else(Bytes::new, Bytes::from);
        let reused = self.open.is_some();
        let answer = self.attempt(method, path, body.clone(), until, deadline).await;
        match answer {
            // An idle connection that the agent had closed meanwhile says nothing about the agent.
            Err(error) if error.kind == Kind::Lost && reused && method == Method::GET => {
                self.attempt(method, path, body, until, deadline).await
            }
            other => other,
        }
    }

    async fn attempt(
        &mut self,
        method: &Method,
        path: &str,
        body: Bytes,
        until: Instant,
        deadline: Duration,
    ) -> Result<Answer, Error> {
        let mut sender = match self.open.take() {
            Some(sender) => sender,
            None => self.connect(until).await?,
        };
        let request = Request::builder()
            .method(method)
            .uri(path)
            .header(header::HOST, "localhost")
            .header(header::ACCEPT, "application/json")
            .header(header::CONTENT_TYPE, "application/json")
            .body(Full::new(body))
            .map_err(|e| {
                Error::new(
                    Kind::Connect,
                    ApiError::new(Code::Internal, "the request can't be put into HTTP").cause(e.to_string()),
                )
            })?;
        let exchange = async {
            let response = sender.send_request(request).await.map_err(|e| self.ended(&e, method, path))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), LARGEST_ANSWER).collect().await;
            let body = body.map_err(|e| self.cut(e.as_ref(), method, path))?.to_bytes();
            Ok(Answer { status, body })
        };
        match tokio::time::timeout_at(until, exchange).await {
            Ok(Ok(answer)) => {
                self.open = Some(sender);
                Ok(answer)
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(self.silent(method, path, deadline)),
        }
    }

    async fn connect(&self, until: Instant) -> Result<http1::SendRequest<Full<Bytes>>, Error> {
        let path = &self.socket.path;
        let until = until.min(Instant::now() + CONNECT_DEADLINE);
        let stream = match tokio::time::timeout_at(until, UnixStream::connect(path)).await {
            Ok(Ok(stream)) => stream,
            Ok(Err(cause)) => {
                return Err(Error::new(Kind::Connect, explain::explain(&cause, &explain::gather(&self.socket))));
            }
            Err(_) => {
                let cause = std::io::Error::from(std::io::ErrorKind::WouldBlock);
                return Err(Error::new(Kind::Connect, explain::explain(&cause, &explain::gather(&self.socket))));
            }
        };
        // An HTTP/1 handshake sends nothing: it fails only if hyper does.
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|e| {
            Error::new(Kind::Connect, ApiError::new(Code::Internal, "no HTTP on the connection").cause(e.to_string()))
        })?;
        // Its end shows in the request that is under way.
        tokio::spawn(async move { drop(connection.await) });
        Ok(sender)
    }

    fn ended(&self, cause: &hyper::Error, method: &Method, path: &str) -> Error {
        if cause.is_parse() {
            return self.not_http().map_cause(cause.to_string());
        }
        self.lost(method, path).map_cause(source_of(cause))
    }

    fn cut(&self, cause: &(dyn std::error::Error + Send + Sync + 'static), method: &Method, path: &str) -> Error {
        if cause.is::<LengthLimitError>() {
            let text = format!("the answer to {method} {path} is larger than {} MiB", LARGEST_ANSWER >> 20);
            return Error::new(Kind::Foreign, ApiError::new(Code::Unreachable, text).hint(self.who_listens()));
        }
        self.lost(method, path).map_cause(cause.to_string())
    }

    fn lost(&self, method: &Method, path: &str) -> Error {
        let at = self.socket.path.display();
        let error =
            ApiError::new(Code::Unreachable, format!("gpushd at {at} hung up before it answered {method} {path}"));
        let error = if method == Method::GET {
            error.hint("look why: systemctl status gpushd; journalctl -u gpushd").retryable()
        } else {
            error.hint("it may have been done all the same: gpushctl operation list; gpushctl status")
        };
        Error::new(Kind::Lost, error)
    }

    fn silent(&self, method: &Method, path: &str, deadline: Duration) -> Error {
        let at = self.socket.path.display();
        let seconds = deadline.as_secs_f64();
        let error =
            ApiError::new(Code::TimedOut, format!("gpushd at {at} did not answer {method} {path} in {seconds} s"));
        let error = if method == Method::GET {
            error.hint("wait longer with --timeout SECONDS, or look why: systemctl status gpushd; journalctl -u gpushd")
        } else {
            error.hint("it may still be done: gpushctl operation list; gpushctl status")
        };
        Error::new(Kind::TimedOut, error.retryable())
    }

    pub(crate) fn not_http(&self) -> Error {
        let at = self.socket.path.display();
        Error::new(
            Kind::Foreign,
            ApiError::new(Code::Unreachable, format!("what answers at {at} is not gpushd")).hint(self.who_listens()),
        )
    }

    fn who_listens(&self) -> String {
        format!("see who listens there: ss -xlp src {}; give gpushd's socket with --socket", self.socket.path.display())
    }
}

impl Error {
    fn map_cause(mut self, cause: String) -> Self {
        self.error.causes.push(cause);
        self
    }
}

/// The innermost source: hyper's own text ("connection error") says less.
fn source_of(error: &hyper::Error) -> String {
    let mut at: &dyn std::error::Error = error;
    while let Some(source) = at.source() {
        at = source;
    }
    at.to_string()
}
