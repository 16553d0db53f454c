//! The accept loop, and the lifetime of one connection.
//!
//! ```text
//! accept ─► peer credentials ─► account ─► within the caps? ─► task: delay, hyper, time limits ─► closed
//!                                         └─ no: 503 and closed
//! ```
//!
//! The account of a uid that gpushd has not seen before needs a lookup in the name service. The lookup runs in a task,
//! so it does not delay the loop.
//!
//! When gpushd stops, the loop ends at once. Connections can finish their current request. After [`DRAIN`], gpushd
//! closes the connections that are still open.

use std::{
    convert::Infallible,
    io,
    os::{
        fd::{AsFd, AsRawFd},
        unix::net::UnixStream as StdStream,
    },
    pin::pin,
    sync::Arc,
    time::Duration,
};

use axum::{Router, body::Body, extract::Request};
use gpush_host::{
    accounts::{Account, Accounts},
    peer::Peer,
};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::TokioIo;
use nix::sys::{
    resource::{Resource, getrlimit},
    socket::{Backlog, MsgFlags, recv},
};
use rustix::net::{SocketFlags, accept_with};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{UnixListener, UnixStream},
    sync::{Semaphore, mpsc},
};
use tokio_util::{sync::CancellationToken, task::TaskTracker};
use tower_service::Service;

use super::{
    caps::{Caps, ConnectionSlot, Rank, SlotRefusal},
    connection_timer::{ConnectionTimer, TimedStream},
};
use crate::{
    serve::http::{admin_socket::ThroughAdminSocket, endless::Endless, failure::Failure, head::MOST_BYTES},
    system::{
        tasks::{TaskName, Tasks},
        watchdog::Ping,
    },
};

/// Maximum time that gpushd waits for open connections when it stops.
pub(crate) const DRAIN: Duration = Duration::from_secs(2);

/// Time limit for the answer to a connection that gpushd refuses, and maximum number of such answers at a time.
const REFUSAL: Duration = Duration::from_millis(500);
const REFUSALS: usize = 32;

/// Maximum time for the lookup of an account, and maximum number of lookups at a time. If a limit is reached, the
/// connection counts for the account of all unknown uids.
const LOOKUP: Duration = Duration::from_secs(1);
const LOOKUPS: usize = 64;

/// Maximum number of connections that the kernel queues until gpushd accepts them.
const BACKLOG: i32 = 4096;

/// Maximum number of connections that gpushd accepts before other tasks may run.
const BATCH: usize = 256;

/// When gpushd stops, how long it waits for the first request of a connection. A client that has just connected then gets
/// an answer, and not a connection reset.
const FIRST_REQUEST: Duration = Duration::from_millis(500);

/// Pause before the next accept if no file descriptor is free.
const EXHAUSTED: Duration = Duration::from_millis(50);

/// The socket that an accept loop serves. Each socket has its own loop, backlog and limits, so load on one socket does
/// not affect the other socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SocketKind {
    /// The first socket, for all users.
    Public,
    /// The second socket, for root and the user that gpushd runs as.
    Admin,
}

/// A function that returns whether one of the gids belongs to an admin group of the active config. It does not wait for
/// the name service.
type HasAdminGroup = dyn Fn(&[u32]) -> bool + Send + Sync;

/// The accounts and admin groups that decide which limits apply to a connection.
#[derive(Clone)]
pub(crate) struct Identities {
    pub(crate) accounts: Accounts,
    pub(crate) has_admin_group: Arc<HasAdminGroup>,
}

/// What an accept loop uses to serve connections.
pub(crate) struct Serving {
    pub(crate) identities: Identities,
    pub(crate) router: Router,
    pub(crate) tasks: Tasks,
    /// Ends the loop.
    pub(crate) closing: CancellationToken,
}

/// Accepts and serves connections until `closing` is cancelled. Returns when all connections have ended, or after
/// [`DRAIN`].
pub(crate) async fn serve(
    listener: std::os::unix::net::UnixListener,
    socket_kind: SocketKind,
    serving: Serving,
    mut pings: mpsc::Receiver<Ping>,
) -> io::Result<()> {
    let Serving { identities, router, tasks, closing } = serving;
    // If the backlog is full, the kernel refuses connections of all users. So use the largest backlog that the kernel
    // permits by default (net.core.somaxconn).
    nix::sys::socket::listen(&listener, Backlog::new(BACKLOG)?)?;
    let listener = UnixListener::from_std(listener)?;
    let (descriptors, _) = getrlimit(Resource::RLIMIT_NOFILE).unwrap_or((1024, 1024));
    let own = nix::unistd::geteuid().as_raw();
    let caps = match socket_kind {
        SocketKind::Public => Caps::public(descriptors),
        SocketKind::Admin => Caps::admin(descriptors),
    };
    let admission = Arc::new(Admission {
        limits: Limits { socket_kind, caps, identities, own },
        router,
        tasks,
        closing: closing.clone(),
        cut: CancellationToken::new(),
        connections: TaskTracker::new(),
        refusals: Arc::new(Semaphore::new(REFUSALS)),
        lookups: Arc::new(Semaphore::new(LOOKUPS)),
    });
    loop {
        let accepted = tokio::select! {
            () = closing.cancelled() => break,
            Some(ping) = pings.recv() => {
                let _ = ping.send(());
                continue;
            }
            accepted = listener.accept() => accepted.and_then(|(stream, _)| stream.into_std()),
        };
        // Accept further queued connections without tokio. This is faster if most of these connections are already
        // closed.
        let more = std::iter::repeat_with(|| accept_with(&listener, SocketFlags::CLOEXEC).map(StdStream::from));
        for accepted in std::iter::once(accepted).chain(more.map(|one| one.map_err(io::Error::from))).take(BATCH) {
            match accepted {
                Ok(stream) => admission.admit(stream),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // File descriptors or memory have run out. Pause, so that other connections can end.
                    tracing::warn!("cannot accept a connection: {error}");
                    tokio::time::sleep(EXHAUSTED).await;
                    break;
                }
            }
        }
        tokio::task::yield_now().await;
    }
    drop(listener);
    let Admission { connections, cut, .. } = &*admission;
    connections.close();
    if tokio::time::timeout(DRAIN, connections.wait()).await.is_err() {
        tracing::info!("closing {} connections that are still open", connections.len());
        cut.cancel();
        connections.wait().await;
    }
    Ok(())
}

/// Limits of connections, and the accounts whose connections are counted.
struct Limits {
    socket_kind: SocketKind,
    caps: Caps,
    identities: Identities,
    own: u32,
}

impl Limits {
    /// Returns whether the uid is root or the uid of gpushd. The peer may still be in a container, so the caller must
    /// also check that the peer is on this host.
    fn is_privileged(&self, peer: &Peer) -> bool {
        peer.uid == 0 || peer.uid == self.own
    }

    /// Takes a slot for the connection of a client. Identifies the process of the client only if the identity of the
    /// process can affect the result.
    fn take_slot(&self, client: &mut Client, stream: &StdStream, account: Account) -> Result<ConnectionSlot, String> {
        let now = std::time::Instant::now();
        if self.is_privileged(&client.peer) {
            client.identify(stream);
        }
        let is_privileged = self.is_privileged(&client.peer) && client.peer.is_on_this_host;
        let rank = if is_privileged { Rank::Privileged } else { Rank::User };
        let entered = match self.caps.take_slot(account, rank, now) {
            Err(SlotRefusal::Total(why)) => {
                client.identify(stream);
                if self.has_admin_reserve(&client.peer) {
                    self.caps.take_slot(account, Rank::Admin, now)
                } else {
                    Err(SlotRefusal::Total(why))
                }
            }
            entered => entered,
        };
        entered.map_err(|(SlotRefusal::Account(why) | SlotRefusal::Total(why))| why)
    }

    /// Returns whether a peer may use the slots that are reserved for admin groups. The groups of a peer in a container
    /// do not count.
    fn has_admin_reserve(&self, peer: &Peer) -> bool {
        peer.is_on_this_host && (self.identities.has_admin_group)(&peer.groups)
    }
}

/// The peer of a connection. gpushd identifies the process of the peer only once, because the process may exit or
/// change its user.
struct Client {
    peer: Peer,
    is_identified: bool,
}

impl Client {
    fn new(peer: Peer) -> Self {
        Self { peer, is_identified: false }
    }

    fn identify(&mut self, stream: &impl AsFd) {
        if !self.is_identified {
            self.peer = self.peer.clone().identify(stream);
            self.is_identified = true;
        }
    }
}

/// Returns whether the peer has closed the connection. gpushd drops such a connection at once. This saves work if a
/// client quickly opens and closes many connections.
fn is_closed(stream: &StdStream) -> bool {
    let mut byte = [0];
    matches!(recv(stream.as_raw_fd(), &mut byte, MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT), Ok(0))
}

/// What the accept loop needs for each connection.
struct Admission {
    limits: Limits,
    router: Router,
    tasks: Tasks,
    closing: CancellationToken,
    /// Ends the connections that are still open some time after gpushd began to stop.
    cut: CancellationToken,
    connections: TaskTracker,
    refusals: Arc<Semaphore>,
    lookups: Arc<Semaphore>,
}

impl Admission {
    /// Admits or refuses a connection. If the account of the peer is not known yet, looks it up in a task.
    fn admit(self: &Arc<Self>, stream: StdStream) {
        if is_closed(&stream) {
            return;
        }
        // This fails if the peer has already disconnected.
        let Ok(peer) = Peer::of(&stream) else { return };
        let (uid, client) = (peer.uid, Client::new(peer));
        if let Ok(account) = self.limits.identities.accounts.last(uid) {
            return self.enter(stream, client, account);
        }
        let Ok(turn) = Arc::clone(&self.lookups).try_acquire_owned() else {
            return self.enter(stream, client, Account::Unknown);
        };
        let admission = Arc::clone(self);
        self.spawn(async move {
            let found = tokio::time::timeout(LOOKUP, admission.limits.identities.accounts.of(uid)).await;
            drop(turn);
            admission.enter(stream, client, found.ok().and_then(Result::ok).unwrap_or(Account::Unknown));
        });
    }

    fn spawn(&self, connection: impl Future<Output = ()> + Send + 'static) {
        self.tasks.once_tracked(&self.connections, TaskName::Connection, connection);
    }

    /// Serves a connection of this account, or refuses it.
    fn enter(&self, stream: StdStream, mut client: Client, account: Account) {
        let entered = self.limits.take_slot(&mut client, &stream, account);
        // Identify the peer now if the connection is not delayed. Otherwise identify the peer after the delay: by then,
        // a client that opened many connections has closed most of them.
        if entered.as_ref().is_ok_and(|place| place.delay.is_zero()) {
            client.identify(&stream);
        }
        let stream = || {
            stream.set_nonblocking(true)?;
            UnixStream::from_std(stream)
        };
        match entered {
            Ok(place) => {
                let Ok(stream) = stream() else { return };
                let handlers = (self.router.clone(), self.tasks.clone(), self.closing.clone());
                let connection = connection(stream, client, place, self.limits.socket_kind, handlers);
                let cut = self.cut.clone();
                self.spawn(async move {
                    tokio::select! {
                        () = connection => {}
                        () = cut.cancelled() => {}
                    }
                });
            }
            Err(why) => {
                tracing::debug!(uid = client.peer.uid, "{why}");
                let refusal = Failure::busy(why).as_http();
                // If gpushd is already sending the maximum number of refusals, it closes the connection without an
                // answer.
                if let Ok(turn) = Arc::clone(&self.refusals).try_acquire_owned()
                    && let Ok(stream) = stream()
                {
                    self.spawn(async move {
                        refuse(stream, refusal).await;
                        drop(turn);
                    });
                }
            }
        }
    }
}

/// Sends a refusal without reading the request. Then reads and discards input until the peer closes the connection. If
/// gpushd closed the connection first, the kernel could drop the answer.
async fn refuse(mut stream: UnixStream, answer: Vec<u8>) {
    let message = async {
        let _ = stream.write_all(&answer).await;
        let _ = stream.shutdown().await;
        let mut sink = [0; 4096];
        while stream.read(&mut sink).await.is_ok_and(|length| length > 0) {}
    };
    let _ = tokio::time::timeout(REFUSAL, message).await;
}

async fn connection(
    stream: UnixStream,
    mut client: Client,
    place: ConnectionSlot,
    socket_kind: SocketKind,
    (router, tasks, closing): (Router, Tasks, CancellationToken),
) {
    if !place.delay.is_zero() {
        tokio::time::sleep(place.delay).await;
    }
    client.identify(&stream);
    let peer = client.peer;
    let pace = ConnectionTimer::new();
    let begun = CancellationToken::new();
    let io = TokioIo::new(TimedStream::new(stream, pace.clone()));
    let service = service_fn(|request: hyper::Request<Incoming>| {
        pace.busy();
        begun.cancel();
        let mut request: Request = request.map(Body::new);
        request.extensions_mut().insert(peer.clone());
        if socket_kind == SocketKind::Admin {
            request.extensions_mut().insert(ThroughAdminSocket);
        }
        let mut router = router.clone();
        // A panic becomes an error response. A separate task would also do this, but tokio would often move the task to
        // another worker thread, and this would double the time of a short request.
        let handler = tasks.clone().run_once(TaskName::Request, async move { router.call(request).await });
        let pace = pace.clone();
        async move {
            let response = match handler.await {
                Ok(Ok(response)) => response,
                Ok(Err(never)) => match never {},
                Err(_) => Failure::internal().into(),
            };
            if response.extensions().get::<Endless>().is_some() {
                pace.streaming();
            } else {
                pace.answered();
            }
            Ok::<_, Infallible>(response)
        }
    });
    let connection = hyper::server::conn::http1::Builder::new()
        .header_read_timeout(None)
        .max_buf_size(MOST_BYTES)
        .serve_connection(io, service);
    let mut connection = pin!(connection);
    let mut too_slow = pin!(pace.wait_until_too_slow());
    // Before the first request, a shutdown makes hyper close the connection at once. So wait a moment for the first
    // request.
    let mut ending = pin!(async {
        closing.cancelled().await;
        let _ = tokio::time::timeout(FIRST_REQUEST, begun.cancelled()).await;
    });
    let mut asked_to_end = false;
    loop {
        tokio::select! {
            // Poll the timer after the connection, which changes the phase.
            biased;
            ended = &mut connection => {
                if let Err(error) = ended {
                    tracing::debug!(uid = peer.uid, "a client connection ended with an error: {error}");
                }
                return;
            }
            () = &mut too_slow => {
                tracing::debug!(uid = peer.uid, "closing a connection that is too slow");
                return;
            }
            () = &mut ending, if !asked_to_end => {
                asked_to_end = true;
                connection.as_mut().graceful_shutdown();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use gpush_host::users::{Lookups, NameService};

    use super::*;

    #[test]
    fn admin_reserve_is_for_admin_groups_of_this_host_only() {
        let accounts = Accounts::new(NameService::with(Lookups::empty()).unwrap(), 990, Path::new("/nowhere"));
        let has_admin_group = Arc::new(|gids: &[u32]| gids.contains(&27));
        let identities = Identities { accounts, has_admin_group };
        let limits = Limits { socket_kind: SocketKind::Public, caps: Caps::public(1024), identities, own: 990 };
        let peer = |group: u32, is_on_this_host| Peer {
            uid: 1000,
            pid: Some(1),
            start: None,
            groups: vec![group],
            is_on_this_host,
        };
        assert!(limits.has_admin_reserve(&peer(27, true)));
        assert!(!limits.has_admin_reserve(&peer(27, false)), "in a container any group can be taken");
        assert!(!limits.has_admin_reserve(&peer(100, true)));
    }

    #[test]
    fn identified_client_is_not_identified_again() {
        let (stream, _theirs) = StdStream::pair().unwrap();
        let mut client = Client::new(Peer::of(&stream).unwrap());
        client.identify(&stream);
        let identified = client.peer.clone();
        client.identify(&stream);
        assert_eq!(client.peer, identified, "its groups would be listed twice");
    }
}
