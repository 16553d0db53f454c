//! Time limits of one connection: until the head of a request is complete, and between requests.
//!
//! ```text
//! accepted ──► idle ──(first byte)──► head ──(request read)──► busy ──(answered)──► idle
//!               │ 60 s                 │ 1 s                    no deadline │
//!               ├──► closed            └──► closed                          └(a stream)─► streaming ──► closed
//!               │                                                               60 s without a byte taken
//!               └(the response does not fit into the socket)─► unread ─10 s──► closed
//! ```
//!
//! hyper's own time limit for a head includes the time between two requests. So it cannot distinguish a slow sender
//! from a connection that the client keeps open. A peer that does not read its response has less time than an idle one,
//! because gpushd keeps the rest of the response in memory. Handlers that read a body have a separate time limit.
//!
//! The phase changes only while the task of the connection is polled. Therefore a change does not wake the task. If a
//! task wakes itself, tokio also wakes another worker thread. This would double the time of a short request.

use std::{
    future::{Future as _, poll_fn},
    io,
    pin::{Pin, pin},
    sync::{Arc, MutexGuard},
    task::{Context, Poll, ready},
    time::Duration,
};

use gpush_locked::Locked;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
    time::{Instant, sleep_until},
};

use axum::http::StatusCode;

use crate::serve::http::failure::Failure;

/// Maximum time until the head of a request is complete. The time starts with the first byte of the head.
const HEAD: Duration = Duration::from_secs(1);

/// Maximum time before the first byte of a request: after a response, or after gpushd has begun to serve the connection.
const IDLE: Duration = Duration::from_secs(60);

/// Maximum time in which a peer reads nothing of a response that does not fit into the socket.
const UNREAD: Duration = Duration::from_secs(10);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ConnectionPhase {
    Head(Instant),
    Busy,
    Idle(Instant),
    /// The peer does not read its response. The value is the time at which it last read something.
    Unread(Instant),
    /// gpushd is writing an endless response. The value is the time at which the peer last read something.
    Streaming(Instant),
}

impl ConnectionPhase {
    /// Returns the time at which gpushd closes the connection if the phase does not change.
    fn due(self) -> Option<Instant> {
        match self {
            Self::Head(since) => Some(since + HEAD),
            Self::Unread(since) => Some(since + UNREAD),
            Self::Idle(since) | Self::Streaming(since) => Some(since + IDLE),
            Self::Busy => None,
        }
    }
}

/// The phase of a connection. Its stream, its service and its task share this value.
#[derive(Debug, Clone)]
pub(crate) struct ConnectionTimer(Arc<Locked<ConnectionPhase>>);

impl ConnectionTimer {
    /// Creates the timer of a new connection.
    pub(crate) fn new() -> Self {
        Self(Arc::new(Locked::new(ConnectionPhase::Idle(Instant::now()))))
    }

    fn phase(&self) -> MutexGuard<'_, ConnectionPhase> {
        self.0.lock()
    }

    /// Marks that the head of a request is complete, so gpushd handles the request now.
    pub(crate) fn busy(&self) {
        *self.phase() = ConnectionPhase::Busy;
    }

    /// Marks that gpushd has handled the request and writes the response.
    pub(crate) fn answered(&self) {
        *self.phase() = ConnectionPhase::Idle(Instant::now());
    }

    /// Marks that the response is an endless stream.
    pub(crate) fn streaming(&self) {
        *self.phase() = ConnectionPhase::Streaming(Instant::now());
    }

    fn bytes_sent(&self) {
        let mut phase = self.phase();
        match *phase {
            ConnectionPhase::Streaming(_) => *phase = ConnectionPhase::Streaming(Instant::now()),
            ConnectionPhase::Unread(_) => *phase = ConnectionPhase::Idle(Instant::now()),
            ConnectionPhase::Head(_) | ConnectionPhase::Busy | ConnectionPhase::Idle(_) => {}
        }
    }

    fn blocked(&self) {
        let mut phase = self.phase();
        match *phase {
            ConnectionPhase::Idle(_) => *phase = ConnectionPhase::Unread(Instant::now()),
            ConnectionPhase::Head(_)
            | ConnectionPhase::Busy
            | ConnectionPhase::Unread(_)
            | ConnectionPhase::Streaming(_) => {}
        }
    }

    fn bytes_received(&self) {
        let mut phase = self.phase();
        match *phase {
            ConnectionPhase::Idle(_) => *phase = ConnectionPhase::Head(Instant::now()),
            ConnectionPhase::Head(_)
            | ConnectionPhase::Busy
            | ConnectionPhase::Unread(_)
            | ConnectionPhase::Streaming(_) => {}
        }
    }

    /// Waits until the connection exceeds a time limit. After each poll of the connection, the caller must poll this
    /// future: a change of the phase does not wake it.
    pub(crate) async fn wait_until_too_slow(&self) {
        let mut timer = pin!(sleep_until(Instant::now() + IDLE));
        poll_fn(|cx| {
            loop {
                let Some(due) = self.phase().due() else { return Poll::Pending };
                // Set the timer only to an earlier time. If the time limit is later, the timer is set again when it
                // ends, so most requests do not set it.
                if due < timer.deadline() {
                    timer.as_mut().reset(due);
                }
                ready!(timer.as_mut().poll(cx));
                if due <= timer.deadline() {
                    return Poll::Ready(());
                }
                timer.as_mut().reset(due);
            }
        })
        .await;
    }
}

/// A stream that reports received and sent bytes to the timer of its connection. It also replaces hyper's own error
/// responses, because they have no body.
#[derive(Debug)]
pub(crate) struct TimedStream {
    stream: UnixStream,
    pace: ConnectionTimer,
    /// The response that this stream writes instead of hyper's response.
    replaced: Option<Replacement>,
}

/// A response that a stream writes instead of hyper's response.
#[derive(Debug)]
struct Replacement {
    bytes: Vec<u8>,
    written: usize,
    /// Length of hyper's response.
    original: usize,
}

/// Recognizes hyper's own response to an invalid head: its status is an error and its body is empty. Error responses of
/// the API always have a body.
fn refused_head(written: &[u8]) -> Option<StatusCode> {
    let head = written.strip_prefix(b"HTTP/1.1 ")?;
    let status = StatusCode::from_bytes(head.get(..3)?).ok().filter(StatusCode::is_client_error)?;
    let is_empty = head.windows(17).any(|window| window.eq_ignore_ascii_case(b"content-length: 0"));
    is_empty.then_some(status)
}

impl TimedStream {
    /// Wraps a stream.
    pub(crate) fn new(stream: UnixStream, pace: ConnectionTimer) -> Self {
        Self { stream, pace, replaced: None }
    }

    fn report_written(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        match &written {
            Poll::Ready(Ok(count)) if *count > 0 => self.pace.bytes_sent(),
            Poll::Pending => self.pace.blocked(),
            Poll::Ready(_) => {}
        }
        written
    }

    /// Writes the replacement. When it is complete, returns the length of hyper's response. Returns `None` if there is
    /// nothing to replace.
    fn poll_replaced(&mut self, cx: &mut Context<'_>) -> Option<Poll<io::Result<usize>>> {
        let replaced = self.replaced.as_mut()?;
        while replaced.written < replaced.bytes.len() {
            match Pin::new(&mut self.stream).poll_write(cx, &replaced.bytes[replaced.written..]) {
                Poll::Ready(Ok(0)) => return Some(Poll::Ready(Err(io::ErrorKind::WriteZero.into()))),
                Poll::Ready(Ok(count)) => replaced.written += count,
                other => return Some(other),
            }
        }
        let original = replaced.original;
        self.replaced = None;
        Some(Poll::Ready(Ok(original)))
    }

    fn replace(&mut self, first: &[u8], original: usize) {
        if self.replaced.is_none()
            && let Some(status) = refused_head(first)
        {
            let bytes = Failure::refused_head(status).as_http();
            self.replaced = Some(Replacement { bytes, written: 0, original });
        }
    }
}

impl AsyncRead for TimedStream {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.pace.bytes_received();
        }
        read
    }
}

impl AsyncWrite for TimedStream {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.replace(buf, buf.len());
        let written = self.poll_replaced(cx).unwrap_or_else(|| Pin::new(&mut self.stream).poll_write(cx, buf));
        self.report_written(written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        if let Some(first) = bufs.first() {
            self.replace(first, bufs.iter().map(|buf| buf.len()).sum());
        }
        let written =
            self.poll_replaced(cx).unwrap_or_else(|| Pin::new(&mut self.stream).poll_write_vectored(cx, bufs));
        self.report_written(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        task::Wake,
    };

    use super::*;

    #[test]
    fn hyper_answer_is_distinguished_from_api_answer() {
        let own = b"HTTP/1.1 431 Request Header Fields Too Large\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
        assert_eq!(refused_head(own).map(|status| status.as_u16()), Some(431));
        for other in [
            &b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 10\r\n\r\n{}"[..],
            b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            b"HTTP/1.1 4",
            b"{\"code\": 1}",
            b"",
        ] {
            assert_eq!(refused_head(other), None, "{}", String::from_utf8_lossy(other));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn stream_is_kept_while_its_peer_reads() {
        let pace = ConnectionTimer::new();
        pace.busy();
        pace.streaming();
        let slow = tokio::spawn({
            let pace = pace.clone();
            async move { pace.wait_until_too_slow().await }
        });
        for _ in 0..100 {
            tokio::time::sleep(IDLE / 2).await;
            // Simulate input from the peer. The timer must ignore this input, because the timer checks only whether
            // the peer reads the stream.
            pace.bytes_received();
            pace.bytes_sent();
        }
        assert!(!slow.is_finished());
        let stopped = Instant::now();
        slow.await.unwrap();
        assert_eq!(stopped.elapsed(), IDLE);
    }

    #[tokio::test(start_paused = true)]
    async fn new_connection_has_the_limit_of_an_idle_one() {
        let begun = Instant::now();
        ConnectionTimer::new().wait_until_too_slow().await;
        assert_eq!(begun.elapsed(), IDLE);
        let pace = ConnectionTimer::new();
        pace.bytes_received();
        let begun = Instant::now();
        pace.wait_until_too_slow().await;
        assert_eq!(begun.elapsed(), HEAD, "from the first byte on");
    }

    #[tokio::test(start_paused = true)]
    async fn head_after_an_idle_time_has_the_limit_of_a_head() {
        let pace = ConnectionTimer::new();
        let mut too_slow = pin!(pace.wait_until_too_slow());
        assert!(futures_util::poll!(&mut too_slow).is_pending());
        pace.busy();
        tokio::time::advance(2 * IDLE).await;
        assert!(futures_util::poll!(&mut too_slow).is_pending(), "a request has no time limit here");
        pace.answered();
        tokio::time::advance(IDLE / 2).await;
        assert!(futures_util::poll!(&mut too_slow).is_pending());
        pace.bytes_received();
        assert!(futures_util::poll!(&mut too_slow).is_pending());
        let begun = Instant::now();
        too_slow.await;
        assert_eq!(begun.elapsed(), HEAD);
    }

    /// Fault: clients that read no response kept a connection and its response for 60 s.
    #[tokio::test(start_paused = true)]
    async fn unread_response_has_a_shorter_limit_than_an_idle_connection() {
        let pace = ConnectionTimer::new();
        let mut too_slow = pin!(pace.wait_until_too_slow());
        pace.busy();
        pace.answered();
        pace.blocked();
        assert!(futures_util::poll!(&mut too_slow).is_pending());
        tokio::time::advance(UNREAD / 2).await;
        // Further requests do not extend the time, and neither do further attempts to write.
        pace.bytes_received();
        pace.blocked();
        assert!(futures_util::poll!(&mut too_slow).is_pending());
        pace.bytes_sent();
        pace.blocked();
        assert!(futures_util::poll!(&mut too_slow).is_pending());
        let begun = Instant::now();
        too_slow.await;
        assert_eq!(begun.elapsed(), UNREAD, "the peer has read something in between");
        let pace = ConnectionTimer::new();
        pace.answered();
        pace.blocked();
        pace.bytes_sent();
        let begun = Instant::now();
        pace.wait_until_too_slow().await;
        assert_eq!(begun.elapsed(), IDLE, "the response is written");
    }

    /// Counts how often a task is woken.
    #[derive(Debug, Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requests_wake_no_task() {
        let (pace, wakes) = (ConnectionTimer::new(), Arc::new(Wakes::default()));
        let waker = Arc::clone(&wakes).into();
        let mut too_slow = pin!(pace.wait_until_too_slow());
        for _ in 0..10 {
            pace.bytes_received();
            pace.busy();
            assert!(too_slow.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
            pace.answered();
            assert!(too_slow.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        }
        assert_eq!(wakes.0.load(Ordering::Relaxed), 0);
    }
}
