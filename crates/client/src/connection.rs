//! One HTTP/1.1 connection over the socket. Sends one request at a time, each with its deadline.
//!
//! ```text
//! idle ──request──► open ──answer──► open        reused for the next request
//!                    │
//!                    └──ended / deadline──► idle  a read is repeated once;
//!                                                 a request with a key until gpushd has restarted
//! ```
//!
//! A stopping gpushd first finishes its running operations, and meanwhile refuses every change. With a [`RestartWait`],
//! the client repeats a refused change until the next gpushd answers, so an upgrade fails no change.
//!
//! A change has an idempotency key, so gpushd executes each change only once. So the client can
//! repeat a change if the connection ended before the answer, or if a stopping gpushd refused the
//! change. After an upgrade, the next gpushd returns the answer to a change that the previous
//! gpushd began.

use std::{
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    time::Duration,
};

use gpush_api::{ApiError, Code};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::{
    Response,
    body::{Bytes, Incoming},
    client::conn::http1,
    header::HeaderValue,
};
use hyper_util::rt::TokioIo;
use tokio::{net::UnixStream, time::Instant};

use crate::{
    attempts::{Answer, EarlierOutcome},
    error::{Error, Kind},
    failures,
    notifications::{RestartWait, Slow},
    question::Question,
    socket::Socket,
};

/// Maximum size of an answer in bytes. 64 GPUs with all profiles and processes need far less.
pub(crate) const LARGEST_ANSWER: usize = 64 << 20;

/// Pause between attempts to connect while gpushd's backlog is full.
pub(crate) const BACKLOG_FULL: Duration = Duration::from_millis(2);

/// Maximum time to wait for a connection.
pub(crate) const CONNECT_DEADLINE: Duration = Duration::from_secs(2);

/// Pause between two repetitions.
const RETRY: Duration = Duration::from_millis(100);

/// How long the client waits for a socket that does not exist, or on which no process listens. The
/// wait is for users who start gpushd with `gpushd &` and immediately type a command.
pub(crate) const STARTUP_WAIT: Duration = Duration::from_millis(300);

/// Interval between two checks while the client waits for a socket.
pub(crate) const STARTUP_POLL: Duration = Duration::from_millis(10);

pub(crate) fn is_absent(error: &std::io::Error) -> bool {
    matches!(error.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::ConnectionRefused)
}

/// A connection that is opened when needed.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) socket: Socket,
    open: Option<http1::SendRequest<Full<Bytes>>>,
    /// Whether a gpushd has answered before. If not, the client waits for a gpushd that is
    /// starting.
    met: AtomicBool,
    pub(crate) restart_wait: Option<RestartWait>,
    pub(crate) slow: Option<Slow>,
}

impl Connection {
    pub(crate) fn new(socket: Socket) -> Self {
        Self { socket, open: None, met: AtomicBool::new(false), restart_wait: None, slow: None }
    }

    /// Makes the client not wait for a gpushd that is starting.
    pub(crate) fn expect_running(&mut self) {
        *self.met.get_mut() = true;
    }

    /// Sends one request and receives its answer, both within `deadline`. If a stopping gpushd refuses a change, the next
    /// gpushd has the same time for its answer.
    pub(crate) async fn ask(&mut self, question: &Question<'_>, deadline: Duration) -> Result<Answer, Error> {
        let until = Instant::now() + deadline;
        let reused = self.open.is_some();
        let first = self.attempt(question, until, deadline).await;
        // A change without a key is repeated only if gpushd said that it did not begin the change, and the caller waits
        // for the next gpushd. Slurm's hooks do not: they decide again what to request.
        let is_refused = self.restart_wait.is_some() && first.as_ref().is_ok_and(Answer::is_stopping);
        if question.key.is_some() || is_refused {
            return self.until_answered(question, first, until, deadline).await;
        }
        match first {
            // gpushd may have closed the idle connection, so try once more with a new connection.
            Err(error) if error.kind == Kind::Lost && reused => self.attempt(question, until, deadline).await,
            other => other,
        }
    }

    /// Repeats a change, with the same key if it has one, while gpushd may be restarting.
    async fn until_answered(
        &mut self,
        question: &Question<'_>,
        first: Result<Answer, Error>,
        mut until: Instant,
        deadline: Duration,
    ) -> Result<Answer, Error> {
        let mut give_up = until.min(Instant::now() + question.away);
        let (asked, mut refused_since) = (Instant::now(), None);
        let mut last = first;
        let (mut before, mut same_connection) = (EarlierOutcome::Nothing, false);
        loop {
            let is_stopping = last.as_ref().is_ok_and(Answer::is_stopping);
            if is_stopping {
                let since = *refused_since.get_or_insert_with(Instant::now);
                if self.waits_for_restart(since) {
                    until = until.max(Instant::now() + deadline);
                    give_up = until.min(Instant::now() + question.away);
                }
            }
            before = before.after_attempt(&last, same_connection);
            let again = match &last {
                Ok(answer) => answer.is_passing(),
                Err(error) => {
                    let is_refused = matches!(before, EarlierOutcome::Refused(_));
                    (error.kind == Kind::Lost && (question.key.is_some() || is_refused))
                        || (error.kind == Kind::Connect && !matches!(before, EarlierOutcome::Nothing))
                }
            };
            if !again || Instant::now() + RETRY >= give_up {
                return before.final_result(last);
            }
            if !is_stopping && let Some(slow) = self.due_notification(question, asked, deadline) {
                (slow.tell)(deadline);
            }
            tokio::time::sleep(RETRY).await;
            same_connection = self.open.is_some();
            let began = Instant::now();
            last = self.attempt(question, until, deadline).await;
            if began.elapsed() > question.away {
                // The attempt took longer than `away`, so a gpushd accepted and queued the request.
                // If the attempt failed, that gpushd has ended. Allow the full time again for the
                // next gpushd.
                give_up = until.min(Instant::now() + question.away);
            }
        }
    }

    /// Returns whether to wait for the next gpushd; `since` is the time of the first refusal. Notifies the user once.
    fn waits_for_restart(&mut self, since: Instant) -> bool {
        let Some(wait) = &mut self.restart_wait else { return false };
        let elapsed = since.elapsed();
        if elapsed >= wait.silence
            && let Some(tell) = wait.tell.take()
        {
            tell();
        }
        elapsed < wait.most
    }

    /// Opens a separate connection for an answer without an end. Returns the status and the body of
    /// the answer.
    pub(crate) async fn stream(
        &self,
        question: &Question<'_>,
        after: Option<&str>,
        deadline: Duration,
    ) -> Result<Response<Incoming>, Error> {
        let until = Instant::now() + deadline;
        let mut sender = self.connect(until).await?;
        let mut request = question.request()?;
        if let Some(after) = after.and_then(|after| HeaderValue::from_str(after).ok()) {
            request.headers_mut().insert("last-event-id", after);
        }
        match tokio::time::timeout_at(until, sender.send_request(request)).await {
            Ok(Ok(response)) => Ok(response),
            Ok(Err(cause)) => Err(self.ended(&cause, question)),
            Err(_) => Err(self.silent(question, deadline)),
        }
    }

    /// Sends a read on a separate connection, and receives the whole answer within `deadline`. In contrast to
    /// [`Self::ask`], the answer has its headers.
    pub(crate) async fn fetch(&self, question: &Question<'_>, deadline: Duration) -> Result<Response<Bytes>, Error> {
        let exchange = async {
            let (head, body) = self.stream(question, None, deadline).await?.into_parts();
            let body = Limited::new(body, LARGEST_ANSWER).collect().await;
            let body = body.map_err(|e| self.cut(e.as_ref(), question))?.to_bytes();
            Ok(Response::from_parts(head, body))
        };
        match tokio::time::timeout(deadline, exchange).await {
            Ok(answered) => answered,
            Err(_) => Err(self.silent(question, deadline)),
        }
    }

    /// Takes the notification about a slow answer if the question was sent long enough ago. `asked` is the time of sending.
    fn due_notification(&mut self, question: &Question<'_>, asked: Instant, deadline: Duration) -> Option<Slow> {
        let is_due = |slow: &mut Slow| slow.after < deadline && asked.elapsed() >= slow.after;
        self.slow.take_if(|slow| question.reports_slow && is_due(slow))
    }

    /// Sends a request once. Notifies the user if the answer is slow.
    async fn attempt(&mut self, question: &Question<'_>, until: Instant, deadline: Duration) -> Result<Answer, Error> {
        let Some(slow) = self.slow.take_if(|slow| question.reports_slow && slow.after < deadline) else {
            return self.exchange(question, until, deadline).await;
        };
        let answered = {
            let mut exchange = std::pin::pin!(self.exchange(question, until, deadline));
            match tokio::time::timeout(slow.after, &mut exchange).await {
                Ok(answered) => answered,
                Err(_) => {
                    (slow.tell)(deadline);
                    return exchange.await;
                }
            }
        };
        self.slow = Some(slow);
        answered
    }

    async fn exchange(&mut self, question: &Question<'_>, until: Instant, deadline: Duration) -> Result<Answer, Error> {
        let mut sender = match self.open.take() {
            Some(sender) => sender,
            None => self.connect(until).await?,
        };
        let request = question.request()?;
        let exchange = async {
            let response = sender.send_request(request).await.map_err(|e| self.ended(&e, question))?;
            let status = response.status();
            let body = Limited::new(response.into_body(), LARGEST_ANSWER).collect().await;
            let body = body.map_err(|e| self.cut(e.as_ref(), question))?.to_bytes();
            Ok(Answer { status, body })
        };
        match tokio::time::timeout_at(until, exchange).await {
            Ok(Ok(answer)) => {
                self.open = Some(sender);
                Ok(answer)
            }
            Ok(Err(error)) => Err(error),
            Err(_) => Err(self.silent(question, deadline)),
        }
    }

    async fn connect(&self, until: Instant) -> Result<http1::SendRequest<Full<Bytes>>, Error> {
        let path = &self.socket.path;
        let until = until.min(Instant::now() + CONNECT_DEADLINE);
        if let Some(admin) = &self.socket.admin
            && let Ok(Ok(stream)) = tokio::time::timeout_at(until, UnixStream::connect(admin)).await
        {
            return self.speak(stream).await;
        }
        let connecting = async {
            let give_up = Instant::now() + if self.met.load(Relaxed) { Duration::ZERO } else { STARTUP_WAIT };
            loop {
                match UnixStream::connect(path).await {
                    // gpushd is starting and will soon listen, so try again.
                    Err(error) if is_absent(&error) && Instant::now() < give_up => {
                        tokio::time::sleep(STARTUP_POLL).await;
                    }
                    // The backlog is full. In this case, connect(2) on a non-blocking socket fails
                    // immediately, so wait here.
                    Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                        tokio::time::sleep(BACKLOG_FULL).await;
                    }
                    other => break other,
                }
            }
        };
        let stream = match tokio::time::timeout_at(until, connecting).await {
            Ok(Ok(stream)) => {
                self.met.store(true, Relaxed);
                stream
            }
            Ok(Err(cause)) => {
                return Err(failures::no_connection(&self.socket, &cause));
            }
            Err(_) => {
                let cause = std::io::Error::from(std::io::ErrorKind::WouldBlock);
                return Err(failures::no_connection(&self.socket, &cause));
            }
        };
        self.speak(stream).await
    }

    async fn speak(&self, stream: UnixStream) -> Result<http1::SendRequest<Full<Bytes>>, Error> {
        // hyper sends nothing during an HTTP/1 handshake, so the handshake can fail only because of
        // hyper itself.
        let (sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|e| {
            let error = ApiError::new(Code::Internal, "cannot start HTTP on the connection to gpushd");
            Error::new(Kind::Connect, error.cause(e.to_string()))
        })?;
        // The request in flight reports the end of the connection, so ignore the result here.
        tokio::spawn(async move { drop(connection.await) });
        Ok(sender)
    }

    fn ended(&self, cause: &hyper::Error, question: &Question<'_>) -> Error {
        if cause.is_parse() {
            return failures::not_http(&self.socket).with_cause(cause.to_string());
        }
        failures::lost(&self.socket, question).with_cause(source_of(cause))
    }

    fn cut(&self, cause: &(dyn std::error::Error + Send + Sync + 'static), question: &Question<'_>) -> Error {
        if cause.is::<LengthLimitError>() {
            return failures::too_long(&self.socket, question, LARGEST_ANSWER);
        }
        failures::lost(&self.socket, question).with_cause(cause.to_string())
    }

    fn silent(&self, question: &Question<'_>, deadline: Duration) -> Error {
        failures::silent(&self.socket, question, deadline)
    }
}

/// Returns the innermost source, because hyper's own text ("connection error") is less specific.
fn source_of(error: &hyper::Error) -> String {
    let mut at: &dyn std::error::Error = error;
    while let Some(source) = at.source() {
        at = source;
    }
    at.to_string()
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, atomic::AtomicUsize};

    use hyper::StatusCode;

    use super::*;
    use crate::{
        question::{JSON, RETRY_FOR},
        socket::Origin,
    };

    /// Returns how often the user is notified that a change has no answer yet, after this first attempt. Every later
    /// attempt fails, because there is no socket.
    async fn notifications_after(first: Result<Answer, Error>) -> usize {
        let dir = tempfile::tempdir().unwrap();
        let mut connection = Connection::new(Socket::given(dir.path().join("absent"), Origin::Option));
        connection.expect_running();
        let count = Arc::new(AtomicUsize::new(0));
        let counter = Arc::clone(&count);
        let tell = Box::new(move |_| {
            counter.fetch_add(1, Relaxed);
        });
        connection.slow = Some(Slow { after: Duration::ZERO, tell });
        let (method, path, body, key) = ("POST", "/v1/apply", Bytes::new(), Some("key".to_owned()));
        let question = Question { method, path, accept: JSON, body, key, away: RETRY_FOR, reports_slow: true };
        let deadline = 4 * RETRY;
        drop(connection.until_answered(&question, first, Instant::now() + deadline, deadline).await);
        count.load(Relaxed)
    }

    /// Fault: the user read that gpushd had not answered yet, although the client had just received the answer.
    #[tokio::test]
    async fn slow_answer_is_reported_only_before_a_repetition() {
        let lost = Error::new(Kind::Lost, ApiError::new(Code::Unreachable, "connection closed"));
        assert_eq!(notifications_after(Err(lost)).await, 1);
        assert_eq!(notifications_after(Ok(Answer { status: StatusCode::OK, body: Bytes::new() })).await, 0);
        let late = Error::new(Kind::TimedOut, ApiError::new(Code::TimedOut, "no answer in time"));
        assert_eq!(notifications_after(Err(late)).await, 0);
    }
}
