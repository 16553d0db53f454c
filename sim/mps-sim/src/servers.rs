//! The daemon's server, and the clients that wait for a server.
//!
//! ```text
//!              ┌ started by a client or a command, for its uid
//!              ▼
//!        starting ──reports 1──► ready ──another uid waits, or a command──► leaving ──ends──► none
//!           │ ends                 │ clients of its uid are passed to it                │
//!           ▼                      ▼ reports 10: as after a command                     ▼
//!     waiting clients are disconnected                          the newest waiting client is served first
//! ```
//!
//! A server serves one uid at a time. With `-multiuser-server`, it serves all users as uid 0. A server is *busy* while
//! it starts, and after it was asked to end. The daemon does not query a busy server: it only logs that the server is
//! busy.

use std::{
    io,
    os::unix::process::CommandExt,
    process::{Child, Command},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    SERVER,
    fault::Rule,
    log::Log,
    options::MULTI_USER,
    wire::{Peer, Socket},
};

/// Requests from the daemon to a server.
pub(crate) mod ask {
    /// Serve a client. The next message has the client's socket.
    pub(crate) const CLIENT: u32 = 2;
    /// End after the last client has ended. The next message is a 0.
    pub(crate) const LEAVE: u32 = 5;
    /// Return the number of clients, and then the pid of each client.
    pub(crate) const CLIENTS: u32 = 6;
    /// Return the active thread percentage, a double.
    pub(crate) const PERCENTAGE: u32 = 8;
    /// Set the active thread percentage. The server sends no answer.
    pub(crate) const SET_PERCENTAGE: u32 = 9;
    /// Return the pinned memory limit of a device, in bytes. The next field is the device.
    pub(crate) const MEMORY: u32 = 11;
    /// Set the pinned memory limit. The next fields are the device and the bytes. The server sends no answer.
    pub(crate) const SET_MEMORY: u32 = 12;
    /// End the work of a client. The next field is the pid of the client. The answer is a status.
    pub(crate) const TERMINATE: u32 = 13;
    /// Return the number of clients, and then a row of `ps` for each client. After the answer, the daemon sends a 0.
    pub(crate) const PROCESSES: u32 = 14;
    /// Return the state of the server: 0 after a fatal exception, another number while the server works.
    pub(crate) const STATUS: u32 = 17;
}

/// Number of devices for which a server receives a memory limit.
pub(crate) const DEVICES: u32 = 32;
/// Length of a row of `ps` in bytes.
pub(crate) const ROW: usize = 40;

/// Settings that the next server gets at its start.
#[derive(Debug, Clone)]
pub(crate) struct Defaults {
    pub(crate) percentage: f64,
    pub(crate) memory: [u64; DEVICES as usize],
    pub(crate) priority: u32,
}

#[derive(Debug)]
pub(crate) struct Server {
    pub(crate) uid: u32,
    child: Child,
    /// The connection to the server. It is set when the server is ready, and removed when the
    /// daemon asks the server to end.
    socket: Option<Socket>,
    was_ready: bool,
    pub(crate) failed: bool,
}

impl Server {
    pub(crate) fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    pub(crate) fn is_active(&self) -> bool {
        self.was_ready && !self.failed
    }

    /// Sends the server a request, unless the server is busy.
    pub(crate) fn ask<T>(&self, log: &Log, ask: impl FnOnce(&Socket) -> io::Result<T>) -> Option<T> {
        match &self.socket {
            Some(socket) => ask(socket).ok(),
            None => {
                log.say(&format!("Server {} is <busy>", self.pid()));
                None
            }
        }
    }

    /// Asks the server to end after its last client.
    fn leave(&mut self) {
        if let Some(socket) = self.socket.take() {
            // Ignore an error: if the server has ended, the next check notices that.
            let _dead = socket.send(&ask::LEAVE.to_le_bytes()).and_then(|()| socket.send(&0_u32.to_le_bytes()));
        }
    }

    fn interrupt(&self) {
        let _gone = kill(Pid::from_raw(self.pid()), Signal::SIGINT);
    }
}

/// A client or command that waits for a server.
#[derive(Debug)]
enum Waiting {
    Client {
        socket: Socket,
        peer: Peer,
    },
    /// A command that only needs a server to be started.
    Start {
        uid: u32,
    },
    /// A client that does not exist: a fault rule simulates it.
    MadeUp {
        uid: u32,
    },
}

impl Waiting {
    fn uid(&self) -> u32 {
        match self {
            Self::Client { peer, .. } => peer.uid,
            Self::Start { uid } | Self::MadeUp { uid } => *uid,
        }
    }
}

/// The uid of the client that a fault rule simulates.
const MADE_UP_UID: u32 = 65_533;

/// The users whose clients one server accepts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Users {
    /// One user.
    #[default]
    One,
    /// All users. With `-multiuser-server`, one server, which runs as root, accepts them.
    Many,
}

impl Users {
    /// Returns the command-line argument for the daemon and its servers.
    pub(crate) fn argument(self) -> Option<&'static str> {
        match self {
            Self::One => None,
            Self::Many => Some(MULTI_USER),
        }
    }

    /// Returns the uid under which the daemon treats a client. With several users, the real daemon treats all clients
    /// as clients of root, also in its log.
    fn uid(self, uid: u32) -> u32 {
        match self {
            Self::One => uid,
            Self::Many => 0,
        }
    }
}

/// All servers of a daemon.
#[derive(Debug, Default)]
pub(crate) struct Servers {
    users: Users,
    now: Option<Server>,
    waiting: Vec<Waiting>,
    made_up: Option<(Rule, Option<Socket>)>,
}

impl Servers {
    pub(crate) fn serving(users: Users) -> Self {
        Self { users, ..Self::default() }
    }

    pub(crate) fn now(&self) -> Option<&Server> {
        self.now.as_ref()
    }

    /// Returns the server with a pid.
    pub(crate) fn of(&self, pid: i64) -> Option<&Server> {
        self.now.as_ref().filter(|server| i64::from(server.pid()) == pid)
    }

    /// Handles a new client.
    pub(crate) fn client(&mut self, socket: Socket, peer: Peer, log: &Log) {
        let peer = Peer { uid: self.users.uid(peer.uid), ..peer };
        let there = self.now.as_ref().is_some_and(|now| now.uid == peer.uid && now.socket.is_some());
        let message = if there { "Server already exists" } else { "Server is not ready, push client to pending list" };
        log.say(&format!("NEW CLIENT {} from user {}: {message}", peer.pid, peer.uid));
        self.waiting.push(Waiting::Client { socket, peer });
        self.settle(log);
    }

    pub(crate) fn start(&mut self, uid: u32, log: &Log) {
        let uid = self.users.uid(uid);
        self.waiting.push(Waiting::Start { uid });
        self.settle(log);
    }

    /// Handles a server's report that it is ready. Sends the default settings to the server.
    pub(crate) fn ready(&mut self, socket: Socket, peer: Peer, defaults: &Defaults, log: &Log) -> io::Result<()> {
        let Some(now) = self.now.as_mut().filter(|now| now.pid() == peer.pid) else {
            log.say(&format!("NEW SERVER {}: Ignoring connection from user", peer.pid));
            return Ok(());
        };
        log.say(&format!("NEW SERVER {}: Ready", peer.pid));
        // Wait for the status without a time limit, as the real daemon does.
        socket.receive()?;
        socket.send(&defaults.percentage.to_le_bytes())?;
        socket.send(&u64::from(DEVICES).to_le_bytes())?;
        for limit in defaults.memory {
            socket.send(&limit.to_le_bytes())?;
        }
        socket.send(&defaults.priority.to_le_bytes())?;
        now.socket = Some(socket);
        now.was_ready = true;
        self.settle(log);
        Ok(())
    }

    /// Handles a server's fatal exception.
    pub(crate) fn failed(&mut self, peer: Peer, log: &Log) {
        if let Some(now) = self.now.as_mut().filter(|now| now.pid() == peer.pid) {
            log.say("Server encountered a fatal exception. Shutting down");
            now.failed = true;
            now.leave();
        }
    }

    /// Asks the server to end after its last client, or immediately if `force` is true.
    pub(crate) fn shutdown(&mut self, force: bool) {
        if let Some(now) = &mut self.now {
            now.leave();
            if force {
                now.interrupt();
            }
        }
    }

    /// Ends all servers, because the daemon is ending.
    pub(crate) fn end_all(&mut self) {
        self.waiting.clear();
        self.made_up = None;
        match &mut self.now {
            // If the server is not ready, it cannot receive a request. So interrupt it.
            Some(now) if now.socket.is_none() && !now.was_ready => now.interrupt(),
            Some(now) => now.leave(),
            None => {}
        }
    }

    /// Sends SIGINT to the server.
    pub(crate) fn interrupt(&self) {
        if let Some(now) = &self.now {
            now.interrupt();
        }
    }

    /// Checks whether the server has ended, and returns its exit code.
    pub(crate) fn reap(&mut self, log: &Log) -> Option<i32> {
        let now = self.now.as_mut()?;
        let status = now.child.try_wait().ok()??;
        let code = status.code().unwrap_or(0);
        log.say(&format!("Server {} exited with status {code}", now.pid()));
        let (uid, was_ready) = (now.uid, now.was_ready);
        self.now = None;
        if !was_ready {
            // Remove the waiting clients of this uid. In their programs, cuInit returns 805.
            self.waiting.retain(|one| one.uid() != uid);
        }
        self.settle(log);
        Some(code)
    }

    /// Does everything that is possible now: starts a server for the newest waiting client, passes waiting clients to
    /// the server of their uid, and asks the server to end if a client of another user waits.
    fn settle(&mut self, log: &Log) {
        if self.now.is_none()
            && let Some(uid) = self.waiting.last().map(Waiting::uid)
        {
            match spawn(uid, self.users) {
                Ok(child) => {
                    log.say(&format!("Starting new server {} for user {uid}", child.id()));
                    self.now = Some(Server { uid, child, socket: None, was_ready: false, failed: false });
                }
                Err(error) => {
                    log.say(&format!("Starting new server for user {uid}: {error}"));
                    self.waiting.retain(|one| one.uid() != uid);
                }
            }
        }
        let Some(now) = &mut self.now else { return };
        let Some(socket) = &now.socket else { return };
        let (theirs, others): (Vec<_>, Vec<_>) = self.waiting.drain(..).partition(|one| one.uid() == now.uid);
        self.waiting = others;
        for one in theirs {
            match one {
                Waiting::Client { socket: client, .. } => {
                    // Ignore an error: a client that has ended needs no server.
                    let _gone = hand_over(socket, &client);
                }
                Waiting::Start { .. } => {}
                Waiting::MadeUp { .. } => {
                    if let (Some((_, end)), Ok((ours, its))) = (&mut self.made_up, Socket::pair()) {
                        let sent = socket.send(&ask::CLIENT.to_le_bytes()).and_then(|()| socket.send_socket(&its));
                        let _dead = sent.and_then(|()| ours.send_named(b"percentage=100"));
                        *end = Some(ours);
                    }
                }
            }
        }
        if !self.waiting.is_empty() {
            now.leave();
        }
    }

    /// Simulates a client of another uid, because of a fault rule.
    pub(crate) fn make_up(&mut self, rule: Rule, log: &Log) {
        self.made_up = Some((rule, None));
        self.waiting.push(Waiting::MadeUp { uid: self.users.uid(MADE_UP_UID) });
        self.settle(log);
    }

    /// Returns the rule of the simulated client.
    pub(crate) fn made_up(&self) -> Option<&Rule> {
        self.made_up.as_ref().map(|(rule, _)| rule)
    }

    /// Ends the simulated client, whether it waits or is served.
    pub(crate) fn unmake(&mut self) {
        self.made_up = None;
        self.waiting.retain(|one| !matches!(one, Waiting::MadeUp { .. }));
        if self.now.as_ref().is_some_and(|now| now.uid == MADE_UP_UID) {
            self.shutdown(false);
        }
    }
}

/// Creates a pair of connected sockets, and sends one socket to the server and the other to its
/// client.
fn hand_over(server: &Socket, client: &Socket) -> io::Result<()> {
    let (one, other) = Socket::pair()?;
    server.send(&ask::CLIENT.to_le_bytes())?;
    server.send_socket(&one)?;
    drop(one);
    client.send_socket(&other)?;
    drop(other);
    // If a client does not answer, it blocks the daemon, as it blocks the real daemon.
    client.receive().map(|_| ())
}

/// Finds the server program through `PATH`, and starts a server. If this process is root, the server runs as the user
/// `uid`.
fn spawn(uid: u32, users: Users) -> io::Result<Child> {
    let mut command = Command::new(SERVER);
    command.args(users.argument());
    if nix::unistd::geteuid().is_root() && uid != 0 && uid != MADE_UP_UID {
        command.uid(uid);
    }
    // As with the real daemon, the server inherits the standard input of the daemon. If standard input is a locked
    // file, the lock stays while the server runs.
    command.spawn()
}
