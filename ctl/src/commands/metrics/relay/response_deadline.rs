//! A time limit for sending a response. A scraper that reads one byte a second makes progress with each write, so a limit
//! for each write would never end it.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Sleep, sleep},
};

/// A stream that fails if the peer takes too long to receive a response. The time runs from the first write that must
/// wait for the peer until everything is written.
#[derive(Debug)]
pub(super) struct ResponseDeadline<S> {
    stream: S,
    limit: Duration,
    running: Option<Pin<Box<Sleep>>>,
}

impl<S> ResponseDeadline<S> {
    pub(super) fn new(stream: S, limit: Duration) -> Self {
        Self { stream, limit, running: None }
    }

    /// Handles the result of a write. Fails if the write must wait and the time is over.
    fn checked<T>(&mut self, context: &mut Context<'_>, result: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if result.is_pending() {
            let limit = self.limit;
            let running = self.running.get_or_insert_with(|| Box::pin(sleep(limit)));
            ready!(running.as_mut().poll(context));
            return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
        }
        result
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ResponseDeadline<S> {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, into)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ResponseDeadline<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.checked(context, result)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let result = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.checked(context, result)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    /// hyper and rustls flush only when they have written everything, so a successful flush ends the time.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_flush(context);
        if let Poll::Ready(Ok(())) = result {
            self.running = None;
        }
        self.checked(context, result)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let result = Pin::new(&mut self.stream).poll_shutdown(context);
        self.checked(context, result)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    /// Returns how writing 100 bytes ends if the peer reads a byte after each of these pauses.
    async fn written_to_reader(pauses: impl Iterator<Item = Duration>) -> io::Result<()> {
        let (own, mut peer) = duplex(10);
        let mut stream = ResponseDeadline::new(own, Duration::from_secs(1));
        let writing = async {
            stream.write_all(&[0; 100]).await?;
            stream.flush().await
        };
        let reading = async {
            for pause in pauses {
                tokio::time::sleep(pause).await;
                let _ = peer.read_u8().await;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            done = writing => done,
            () = reading => unreachable!(),
        }
    }

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
    }

    #[test]
    fn reader_of_one_byte_at_a_time_is_cut_off_although_each_write_makes_progress() {
        let slow = std::iter::repeat(Duration::from_millis(50));
        let error = runtime().block_on(written_to_reader(slow)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn fast_reader_gets_everything() {
        runtime().block_on(written_to_reader(std::iter::repeat_n(Duration::ZERO, 100))).unwrap();
    }

    #[test]
    fn each_response_has_its_own_time() {
        runtime().block_on(async {
            let (own, mut peer) = duplex(10);
            let mut stream = ResponseDeadline::new(own, Duration::from_secs(3600));
            let exchange = async {
                stream.write_all(&[0; 20]).await.unwrap();
                assert!(stream.running.is_some(), "the write had to wait");
                stream.flush().await.unwrap();
                assert!(stream.running.is_none(), "everything is written");
            };
            let mut all = [0; 20];
            tokio::join!(exchange, async { peer.read_exact(&mut all).await.unwrap() });
        });
    }
}
