//! Receives the body of a request.
//!
//! A body arrives in pieces. A piece can be one byte long, but it keeps the buffer into which hyper received it, which
//! has several KiB. So the functions copy or drop each piece before they wait for the next one. Otherwise a client could
//! fill the memory with many short pieces.

use std::error::Error;

use axum::{RequestExt as _, body::Body, extract::Request};
use http_body_util::{BodyExt as _, LengthLimitError, Limited};

/// Why a body was not received.
#[derive(Debug)]
pub(super) enum BodyError {
    /// The body is larger than the limit of its route.
    TooLarge,
    /// The client has sent something else than a body, or has closed the connection.
    Broken(String),
}

/// Returns the body of a request.
pub(super) async fn receive(request: Request) -> Result<Vec<u8>, BodyError> {
    let mut received = Vec::new();
    each_piece(request.into_limited_body(), |piece| received.extend_from_slice(piece)).await?;
    Ok(received)
}

/// Receives the body of a request, and drops it.
pub(super) async fn skip(request: Request, most_bytes: usize) -> Result<(), BodyError> {
    each_piece(Body::new(Limited::new(request.into_body(), most_bytes)), |_| ()).await
}

async fn each_piece(mut body: Body, mut take: impl FnMut(&[u8])) -> Result<(), BodyError> {
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            if is_too_large(&error) { BodyError::TooLarge } else { BodyError::Broken(error.to_string()) }
        })?;
        if let Some(piece) = frame.data_ref() {
            take(piece);
        }
    }
    Ok(())
}

fn is_too_large(error: &axum::Error) -> bool {
    let mut next: Option<&dyn Error> = Some(error);
    while let Some(error) = next {
        if error.is::<LengthLimitError>() {
            return true;
        }
        next = error.source();
    }
    false
}

#[cfg(test)]
mod tests {
    use std::{
        convert::Infallible,
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
    };

    use axum::{body::Bytes, extract::DefaultBodyLimit};
    use futures_util::stream;

    use super::*;

    /// A piece of a body. Counts the pieces that exist.
    struct Piece(Arc<AtomicUsize>);

    impl AsRef<[u8]> for Piece {
        fn as_ref(&self) -> &[u8] {
            b" "
        }
    }

    impl Drop for Piece {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Returns a request whose body has pieces of one byte, and the largest number of pieces that existed at a time.
    fn request(pieces: usize) -> (Request, Arc<AtomicUsize>) {
        let (count, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let largest = Arc::clone(&most);
        let body = stream::iter((0..pieces).map(move |_| {
            largest.fetch_max(count.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            Ok::<_, Infallible>(Bytes::from_owner(Piece(Arc::clone(&count))))
        }));
        let mut request = Request::new(Body::from_stream(body));
        DefaultBodyLimit::max(1000).apply(&mut request);
        (request, most)
    }

    /// Fault: gpushd kept every piece until the body was complete. So 32 connections of one user filled 1 GiB.
    #[tokio::test]
    async fn pieces_of_a_body_are_not_kept() {
        let (whole, most) = request(1000);
        assert_eq!(receive(whole).await.unwrap(), vec![b' '; 1000]);
        assert_eq!(most.load(Ordering::SeqCst), 1);
        let (skipped, most) = request(1000);
        skip(skipped, 1000).await.unwrap();
        assert_eq!(most.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn body_beyond_the_limit_is_too_large() {
        assert!(matches!(receive(request(1001).0).await, Err(BodyError::TooLarge)));
        assert!(matches!(skip(request(1001).0, 1000).await, Err(BodyError::TooLarge)));
    }
}
