//! The accept loop, and the life of one connection.
//!
//! ```text
//! accept ─► who is it? ─► a place under the caps? ─► task: hyper, paced ─► closed
//!                              └─ no: 503 and closed, without a task
//! ```
//!
//! When the agent closes, the loop ends at once, connections finish the request that they are in
//! and are cut off after [`DRAIN`].

use std::{convert::Infallible, io, sync::Arc, time::Duration};

use axum::{Router, body::Body, extract::Request};
use gpush_host::peer::Peer;
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use nix::sys::resource::{Resource, getrlimit};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::{Semaphore, mpsc},
};
use tokio_util::{
    sync::CancellationToken,
    task::{AbortOnDropHandle, TaskTracker},
};
use tower_service::Service;

use super::{
    caps::{Caps, Place},
    pace::{Endless, Pace, Paced},
};
use crate::{http::failure::Failure, watchdog::Knock};

/// How long connections may take to end once the agent closes.
pub(crate) const DRAIN: Duration = Duration::from_secs(2);

/// Largest request head; hyper's smallest buffer.
const HEAD_BYTES: usize = 8 << 10;

/// How long a refusal may take, and how many may be told at once.
const REFUSAL: Duration = Duration::from_millis(500);
const REFUSALS: usize = 32;

/// How long to wait before accepting again when there are no file descriptors.
const EXHAUSTED: Duration = Duration::from_millis(50);

/// Which socket a loop serves: each has its own loop, backlog and caps, so that what happens on one
/// costs the other nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Door {
    /// The first, for everybody.
    Public,
    /// The second, for root and the agent's own user.
    Admin,
}

/// Accepts, and answers whoever knocks, until `closing`, then returns when all connections have ended, or after [`DRAIN`].
pub(crate) async fn serve(
    listener: std::os::unix::net::UnixListener,
    door: Door,
    router: Router,
    closing: CancellationToken,
    mut knocks: mpsc::Receiver<Knock>,
) -> io::Result<()> {
    let listener = UnixListener::from_std(listener)?;
    let (descriptors, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((1024, 1024));
    let own = nix::unistd::geteuid().as_raw();
    let caps = match door {
        Door::Public => Caps::public(descriptors, own),
        Door::Admin => Caps::admin(descriptors, own),
    };
    let connections = TaskTracker::new();
    let cut = CancellationToken::new();
    let refusals = Arc::new(Semaphore::new(REFUSALS));
    loop {
        let accepted = tokio::select! {
            () = closing.cancelled() => break,
            Some(knock) = knocks.recv() => {
                let _ = knock.send(());
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok((stream, _)) => admit(stream, &caps, &router, &closing, &cut, &connections, &refusals),
            Err(error) => {
                // Out of descriptors or memory; what is left of them is given back by others.
                tracing::warn!("a connection could not be accepted: {error}");
                tokio::time::sleep(EXHAUSTED).await;
            }
        }
    }
    drop(listener);
    connections.close();
    if tokio::time::timeout(DRAIN, connections.wait()).await.is_err() {
        tracing::info!("{} connections were still open and are cut off", connections.len());
        cut.cancel();
        connections.wait().await;
    }
    Ok(())
}

fn admit(
    stream: UnixStream,
    caps: &Caps,
    router: &Router,
    closing: &CancellationToken,
    cut: &CancellationToken,
    connections: &TaskTracker,
    refusals: &Arc<Semaphore>,
) {
    // It may have gone again.
    let Ok(peer) = Peer::of(&stream) else { return };
    match caps.enter(peer.uid) {
        Ok(place) => {
            let connection = connection(stream, peer, place, router.clone(), closing.clone());
            let cut = cut.clone();
            connections.spawn(async move {
                tokio::select! {
                    () = connection => {}
                    () = cut.cancelled() => {}
                }
            });
        }
        Err(why) => {
            tracing::debug!(uid = peer.uid, "{why}");
            let refusal = Failure::busy(why).as_http();
            // Beyond that number they are closed without a word.
            if let Ok(turn) = Arc::clone(refusals).try_acquire_owned() {
                connections.spawn(async move {
                    refuse(stream, refusal).await;
                    drop(turn);
                });
            }
        }
    }
}

/// Says no without looking at the request. What the peer sends is read and thrown away until it
/// closes: closing before that would make the kernel drop the answer.
async fn refuse(mut stream: UnixStream, answer: Vec<u8>) {
    let said = async {
        let _ = stream.write_all(&answer).await;
        let _ = stream.shutdown().await;
        let mut sink = [0; 4096];
        while stream.read(&mut sink).await.is_ok_and(|length| length > 0) {}
    };
    let _ = tokio::time::timeout(REFUSAL, said).await;
}

async fn connection(stream: UnixStream, peer: Peer, _place: Place, router: Router, closing: CancellationToken) {
    let pace = Pace::new();
    let io = TokioIo::new(Paced::new(stream, pace.clone()));
    let service = service_fn(|request: hyper::Request<Incoming>| {
        pace.busy();
        let mut request: Request = request.map(Body::new);
        request.extensions_mut().insert(peer.clone());
        let mut router = router.clone();
        // In a task of its own, so that a panic in it is an answer and not a broken connection;
        // dropped with the connection.
        let handler = AbortOnDropHandle::new(tokio::spawn(async move { router.call(request).await }));
        let pace = pace.clone();
        async move {
            let response = match handler.await {
                Ok(Ok(response)) => response,
                Ok(Err(never)) => match never {},
                Err(_) => Failure::internal().into(),
            };
            if response.extensions().get::<Endless>().is_some() {
                pace.streams();
            } else {
                pace.answered();
            }
            Ok::<_, Infallible>(response)
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .header_read_timeout(None)
        .max_buf_size(HEAD_BYTES)
        .serve_connection(io, service);
    let mut connection = std::pin::pin!(connection);
    let mut closing = std::pin::pin!(closing.cancelled_owned());
    let mut asked_to_end = false;
    loop {
        tokio::select! {
            ended = &mut connection => {
                if let Err(error) = ended {
                    tracing::debug!(uid = peer.uid, "a connection ended: {error}");
                }
                return;
            }
            () = pace.too_slow() => {
                tracing::debug!(uid = peer.uid, "a connection was too slow and is closed");
                return;
            }
            () = &mut closing, if !asked_to_end => {
                asked_to_end = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}
