//! The pace of one connection: how long its next request's head may take, and how long it may
//! stay without one.
//!
//! ```text
//! accepted ──► head ──(request read)──► busy ──(answered)──► idle ──(first byte)──► head
//!               │ 1 s                    no deadline │        │ 60 s
//!               └──► closed                          │        └──► closed
//!                                                    └(a stream)─► streaming ──► closed
//!                                                                  60 s without a byte taken
//! ```
//!
//! hyper's own header deadline also counts the time between two requests, so it can't tell a slow
//! sender from a connection that is kept for later. A connection that doesn't take its answer
//! counts as idle. Bodies have a deadline where they are read.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::UnixStream,
    sync::watch,
    time::Instant,
};

/// For a request's head, from its first byte (from the connection, for the first one).
const HEAD: Duration = Duration::from_secs(1);

/// Between an answer and the next request's first byte.
const IDLE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Head(Instant),
    Busy,
    Idle(Instant),
    /// An answer without end is being written; since when the peer takes nothing of it.
    Streaming(Instant),
}

/// Marks an answer without end, in the extensions of a response. Something of it is to be written
/// well within [`IDLE`], always.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Endless;

/// How exactly the time since the last byte taken is known.
const TICK: Duration = Duration::from_secs(1);

/// Where a connection is; shared by its stream, its service and its task.
#[derive(Debug, Clone)]
pub(crate) struct Pace(Arc<watch::Sender<Phase>>);

impl Pace {
    /// That of a connection just accepted.
    pub(crate) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(Phase::Head(Instant::now()))))
    }

    /// A request's head is complete.
    pub(crate) fn busy(&self) {
        self.0.send_replace(Phase::Busy);
    }

    /// Its answer is ready to be written.
    pub(crate) fn answered(&self) {
        self.0.send_replace(Phase::Idle(Instant::now()));
    }

    /// Its answer has no end.
    pub(crate) fn streams(&self) {
        self.0.send_replace(Phase::Streaming(Instant::now()));
    }

    fn bytes_taken(&self) {
        self.0.send_if_modified(|phase| match phase {
            Phase::Streaming(since) if since.elapsed() > TICK => {
                *since = Instant::now();
                true
            }
            Phase::Streaming(_) | Phase::Head(_) | Phase::Busy | Phase::Idle(_) => false,
        });
    }

    fn bytes_came(&self) {
        self.0.send_if_modified(|phase| match phase {
            Phase::Idle(_) => {
                *phase = Phase::Head(Instant::now());
                true
            }
            Phase::Head(_) | Phase::Busy | Phase::Streaming(_) => false,
        });
    }

    /// Returns when the connection is too slow to be kept.
    pub(crate) async fn too_slow(&self) {
        let mut phase = self.0.subscribe();
        loop {
            let due = match *phase.borrow_and_update() {
                Phase::Head(since) => Some(since + HEAD),
                Phase::Idle(since) | Phase::Streaming(since) => Some(since + IDLE),
                Phase::Busy => None,
            };
            let changed = match due {
                Some(due) => tokio::time::timeout_at(due, phase.changed()).await,
                None => Ok(phase.changed().await),
            };
            // The sender lives as long as we do, so `changed` itself can't fail.
            if changed.is_err() {
                return;
            }
        }
    }
}

/// A stream that tells its pace when bytes come, and when they are taken.
#[derive(Debug)]
pub(crate) struct Paced {
    stream: UnixStream,
    pace: Pace,
}

impl Paced {
    /// Wraps a stream.
    pub(crate) fn new(stream: UnixStream, pace: Pace) -> Self {
        Self { stream, pace }
    }

    fn told(&self, written: Poll<io::Result<usize>>) -> Poll<io::Result<usize>> {
        if matches!(written, Poll::Ready(Ok(count)) if count > 0) {
            self.pace.bytes_taken();
        }
        written
    }
}

impl AsyncRead for Paced {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(cx, buf);
        if buf.filled().len() > before {
            self.pace.bytes_came();
        }
        read
    }
}

impl AsyncWrite for Paced {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(cx, buf);
        self.told(written)
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
        let written = Pin::new(&mut self.stream).poll_write_vectored(cx, bufs);
        self.told(written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stream_is_kept_while_its_peer_takes_it() {
        let pace = Pace::new();
        pace.busy();
        pace.streams();
        let slow = tokio::spawn({
            let pace = pace.clone();
            async move { pace.too_slow().await }
        });
        for _ in 0..100 {
            tokio::time::sleep(IDLE / 2).await;
            // What the peer says meanwhile is nothing that was asked of it.
            pace.bytes_came();
            pace.bytes_taken();
        }
        assert!(!slow.is_finished());
        let stopped = Instant::now();
        slow.await.unwrap();
        assert_eq!(stopped.elapsed(), IDLE);
    }
}
