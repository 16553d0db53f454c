//! One command to a daemon, over a separate connection.
//!
//! ```text
//! connect ──► hello ──► credentials, kind, command, no more ──► text* ──► status ──► answered
//!    │          │                                                │
//!    │          └ none in time: silent            closed before: another connection, or the daemon ended
//!    └ no socket, no process that listens, or no permission
//! ```
//!
//! While a session is open, the daemon completes the handshake of a second session and then closes
//! that session. gpushd cannot distinguish this from the end of the daemon, so both are
//! [`SessionError::Closed`].

use std::{
    io::{self, IoSlice, IoSliceMut},
    os::fd::AsRawFd,
    path::{Path, PathBuf},
    time::Duration,
};

use nix::{
    cmsg_space,
    errno::Errno,
    sys::socket::{
        self, AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr,
        UnixCredentials, sockopt,
    },
};
use thiserror::Error;
use tokio::{io::Interest, net::UnixStream};

use super::wire::{self, Frame};

/// The process that answered, identified by socket peer credentials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Daemon {
    /// Pid of the process.
    pub pid: i32,
    /// Uid of the process.
    pub uid: u32,
}

/// The result of a command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Answer {
    /// The process that answered.
    pub daemon: Daemon,
    /// The frames of the reply; may be empty.
    pub text: Vec<String>,
    /// The status: 0 means success.
    pub status: i32,
}

/// The stage of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Waits for the greeting.
    Hello,
    /// Waits for the reply.
    Answer,
}

/// Why there is no reply.
#[derive(Debug, Error)]
pub enum SessionError {
    /// No daemon listens at this path.
    #[error("no control daemon listens at {}", at.display())]
    Absent {
        /// Path of the socket.
        at: PathBuf,
        /// The error of the system call.
        #[source]
        cause: io::Error,
    },
    /// The daemon closed the connection before it sent the status: another process is connected, or
    /// the daemon is ending.
    #[error("the control daemon closed the connection before it answered")]
    Closed,
    /// No message arrived before the deadline.
    #[error("the control daemon does not respond: {}", match stage {
        Stage::Hello => "it sends no greeting",
        Stage::Answer => "it sends no answer",
    })]
    Silent {
        /// The stage at the deadline.
        stage: Stage,
    },
    /// A process other than the expected daemon listens. gpushd sent no command to this process.
    #[error("process {pid} answers in place of the control daemon (pid {meant})")]
    Another {
        /// The process that answered.
        pid: i32,
        /// The expected process.
        meant: i32,
    },
    /// A message that is not part of the protocol.
    #[error("the answer does not come from an MPS control daemon that gpushd knows: {0}")]
    Foreign(String),
    /// A text that must not be sent as a command.
    #[error("`{0}` is not a command")]
    NoCommand(String),
    /// A system call failed.
    #[error("the socket of the control daemon can't be used")]
    System(#[source] io::Error),
}

/// Sends one command. [`super::control`] ensures that commands are sent one at a time.
///
/// # Errors
/// See [`SessionError`].
pub async fn ask(at: &Path, line: &str, deadline: Duration) -> Result<Answer, SessionError> {
    ask_only(None, at, line, deadline).await
}

/// Sends one command if the expected process listens. Checks the process by its socket peer
/// credentials.
///
/// # Errors
/// See [`SessionError`].
pub(crate) async fn ask_only(
    meant: Option<i32>,
    at: &Path,
    line: &str,
    deadline: Duration,
) -> Result<Answer, SessionError> {
    let (length, body) = wire::command(line).ok_or_else(|| SessionError::NoCommand(line.to_owned()))?;
    let mut stage = Stage::Hello;
    let exchange = async {
        let wire = connect(at)?;
        let (hello, daemon) = receive(&wire).await?;
        if hello != wire::HELLO {
            return Err(SessionError::Foreign(format!("the greeting has {} bytes", hello.len())));
        }
        let daemon = daemon.ok_or_else(|| {
            SessionError::Foreign("the kernel does not say which process is at the other end of the socket".to_owned())
        })?;
        if let Some(meant) = meant.filter(|meant| *meant != daemon.pid) {
            return Err(SessionError::Another { pid: daemon.pid, meant });
        }
        stage = Stage::Answer;
        let own = UnixCredentials::new();
        send(&wire, wire::CREDENTIALS, &[ControlMessage::ScmCredentials(&own)]).await?;
        for frame in [&wire::USER_INTERFACE[..], &length, &body, &wire::NO_MORE] {
            send(&wire, frame, &[]).await?;
        }
        let mut text = Vec::new();
        loop {
            match wire::frame(&receive(&wire).await?.0) {
                Some(Frame::Text(part)) => text.push(part),
                Some(Frame::Status(status)) => return Ok(Answer { daemon, text, status }),
                None => {
                    return Err(SessionError::Foreign("the frames of the answer have an unknown format".to_owned()));
                }
            }
        }
    };
    match tokio::time::timeout(deadline, exchange).await {
        Ok(answered) => answered,
        Err(_) => Err(SessionError::Silent { stage }),
    }
}

/// Opens a SEQPACKET socket as tokio's `UnixStream`. tokio only waits for readiness; [`send`] and
/// [`receive`] transfer the bytes.
fn connect(at: &Path) -> Result<UnixStream, SessionError> {
    let system = |errno: Errno| SessionError::System(errno.into());
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let fd = socket::socket(AddressFamily::Unix, SockType::SeqPacket, flags, None).map_err(system)?;
    socket::setsockopt(&fd, sockopt::PassCred, &true).map_err(system)?;
    let address = UnixAddr::new(at).map_err(system)?;
    match socket::connect(fd.as_raw_fd(), &address) {
        Ok(()) => UnixStream::from_std(fd.into()).map_err(SessionError::System),
        // The queue of the socket is full, because the daemon does not accept connections.
        Err(Errno::EAGAIN) => Err(SessionError::Silent { stage: Stage::Hello }),
        Err(errno @ (Errno::ENOENT | Errno::ECONNREFUSED | Errno::ENOTDIR)) => {
            Err(SessionError::Absent { at: at.to_owned(), cause: errno.into() })
        }
        Err(errno) => Err(system(errno)),
    }
}

async fn send(wire: &UnixStream, bytes: &[u8], with: &[ControlMessage<'_>]) -> Result<(), SessionError> {
    let parts = [IoSlice::new(bytes)];
    let sent = wire.async_io(Interest::WRITABLE, || {
        Ok(socket::sendmsg::<()>(wire.as_raw_fd(), &parts, with, MsgFlags::MSG_NOSIGNAL, None)?)
    });
    sent.await.map(|_| ()).map_err(ended_or)
}

/// Receives one frame, with its sender if the kernel reports it.
async fn receive(wire: &UnixStream) -> Result<(Vec<u8>, Option<Daemon>), SessionError> {
    let mut buffer = vec![0; wire::LARGEST_FRAME];
    let got = wire.async_io(Interest::READABLE, || {
        let mut parts = [IoSliceMut::new(&mut buffer)];
        let mut room = cmsg_space!(UnixCredentials);
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let message = socket::recvmsg::<()>(wire.as_raw_fd(), &mut parts, Some(&mut room), flags)?;
        let daemon = message.cmsgs()?.find_map(|one| match one {
            ControlMessageOwned::ScmCredentials(who) => Some(Daemon { pid: who.pid(), uid: who.uid() }),
            _ => None,
        });
        Ok((message.bytes, message.flags.contains(MsgFlags::MSG_TRUNC), daemon))
    });
    match got.await.map_err(ended_or)? {
        (0, _, _) => Err(SessionError::Closed),
        (_, true, _) => Err(SessionError::Foreign("a frame of the answer is too large".to_owned())),
        (length, false, daemon) => {
            buffer.truncate(length);
            Ok((buffer, daemon))
        }
    }
}

fn ended_or(error: io::Error) -> SessionError {
    match error.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => SessionError::Closed,
        _ => SessionError::System(error),
    }
}
