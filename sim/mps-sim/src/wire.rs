//! Packets between the daemon and its peers: AF_UNIX, SEQPACKET, little-endian.
//!
//! ```text
//! daemon ► OUTBHELL\0
//!   peer ► OUTBCRED\0 + credentials, u32 kind      its kind
//! server ► u32 status (room for a text after it)   then the daemon sends the defaults
//! client ◄ OUTBCUFD\0 + a socket to its server     then the daemon waits for a frame or the close
//! ```

use std::{
    io::{self, IoSlice, IoSliceMut},
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    path::Path,
};

use nix::{
    cmsg_space,
    errno::Errno,
    sys::socket::{
        self, AddressFamily, Backlog, ControlMessage, ControlMessageOwned, MsgFlags, SockFlag, SockType, UnixAddr,
        UnixCredentials, sockopt,
    },
};

/// Greeting of the daemon.
pub(crate) const HELLO: &[u8] = b"OUTBHELL\0";
/// Greeting of a daemon with an unknown protocol version.
pub(crate) const FOREIGN_HELLO: &[u8] = b"OUTBHEL3\0\x03\0\0\0";
/// Packet that is sent together with credentials.
pub(crate) const CREDENTIALS: &[u8] = b"OUTBCRED\0";
/// Packet that is sent together with a socket.
pub(crate) const SOCKET: &[u8] = b"OUTBCUFD\0";

/// The kind with which a peer introduces itself to the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A server that is ready.
    Server,
    /// A program that uses CUDA.
    Client,
    /// A program under a debugger.
    Debuggee,
    /// A user interface.
    UserInterface,
    /// A server that had a fatal exception.
    FatalException,
}

impl Kind {
    const ALL: [(u32, Self); 5] = [
        (1, Self::Server),
        (2, Self::Client),
        (3, Self::Debuggee),
        (4, Self::UserInterface),
        (10, Self::FatalException),
    ];

    pub(crate) fn of(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find_map(|(own, kind)| (own == number).then_some(kind))
    }

    pub(crate) fn number(self) -> u32 {
        Self::ALL.into_iter().find_map(|(own, kind)| (kind == self).then_some(own)).unwrap_or_default()
    }
}

/// A peer, identified by socket credentials.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Peer {
    pub(crate) pid: i32,
    pub(crate) uid: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Packet {
    pub(crate) bytes: Vec<u8>,
    pub(crate) from: Option<Peer>,
    pub(crate) socket: Option<Socket>,
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

impl Socket {
    fn unconnected() -> io::Result<OwnedFd> {
        Ok(socket::socket(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None)?)
    }

    /// Creates a socket at a path, and listens on it. Replaces an existing socket.
    pub(crate) fn listen(at: &Path) -> io::Result<Self> {
        let fd = Self::unconnected()?;
        match std::fs::remove_file(at) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            Ok(()) | Err(_) => {}
        }
        socket::bind(fd.as_raw_fd(), &UnixAddr::new(at)?)?;
        socket::listen(&fd, Backlog::new(128)?)?;
        Ok(Self(fd))
    }

    pub(crate) fn accept(&self) -> io::Result<Self> {
        // `UnixListener` is meant for stream sockets, but its `accept` also works for SEQPACKET sockets.
        let listener = std::os::unix::net::UnixListener::from(self.0.try_clone()?);
        Self::with_names(listener.accept()?.0.into())
    }

    fn with_names(fd: OwnedFd) -> io::Result<Self> {
        socket::setsockopt(&fd, sockopt::PassCred, &true)?;
        Ok(Self(fd))
    }

    /// Returns two connected sockets.
    pub(crate) fn pair() -> io::Result<(Self, Self)> {
        let (one, other) = socket::socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        Ok((Self(one), Self(other)))
    }

    /// Connects, waits for the greeting, and sends the kind of this peer.
    pub(crate) fn introduced(at: &Path, kind: Kind) -> io::Result<Self> {
        let fd = Self::unconnected()?;
        socket::connect(fd.as_raw_fd(), &UnixAddr::new(at)?)?;
        let own = Self::with_names(fd)?;
        if ![HELLO, FOREIGN_HELLO].contains(&own.receive()?.bytes.as_slice()) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "it greets as no daemon does"));
        }
        own.send_named(CREDENTIALS)?;
        own.send(&kind.number().to_le_bytes())?;
        Ok(own)
    }

    pub(crate) fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.send_with(bytes, &[])
    }

    /// Sends a packet with credentials.
    pub(crate) fn send_named(&self, bytes: &[u8]) -> io::Result<()> {
        self.send_with(bytes, &[ControlMessage::ScmCredentials(&UnixCredentials::new())])
    }

    /// Sends a copy of a socket to the peer.
    pub(crate) fn send_socket(&self, other: &Self) -> io::Result<()> {
        self.send_with(SOCKET, &[ControlMessage::ScmRights(&[other.0.as_raw_fd()])])
    }

    fn send_with(&self, bytes: &[u8], with: &[ControlMessage<'_>]) -> io::Result<()> {
        let parts = [IoSlice::new(bytes)];
        socket::sendmsg::<()>(self.0.as_raw_fd(), &parts, with, MsgFlags::MSG_NOSIGNAL, None)?;
        Ok(())
    }

    /// Waits for the next packet. Returns an error if the other end is closed.
    pub(crate) fn receive(&self) -> io::Result<Packet> {
        let mut bytes = vec![0; 64 << 10];
        let (length, from, socket) = loop {
            match self.receive_into(&mut bytes) {
                Err(Errno::EINTR) => {}
                other => break other?,
            }
        };
        if length == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes.truncate(length);
        Ok(Packet { bytes, from, socket })
    }

    #[expect(unsafe_code, reason = "nix gives what it received as numbers")]
    fn receive_into(&self, bytes: &mut [u8]) -> Result<(usize, Option<Peer>, Option<Self>), Errno> {
        let mut room = cmsg_space!(UnixCredentials, [i32; 1]);
        let mut parts = [IoSliceMut::new(bytes)];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let message = socket::recvmsg::<()>(self.0.as_raw_fd(), &mut parts, Some(&mut room), flags)?;
        let (mut from, mut got) = (None, None);
        for one in message.cmsgs()? {
            match one {
                ControlMessageOwned::ScmCredentials(who) => from = Some(Peer { pid: who.pid(), uid: who.uid() }),
                ControlMessageOwned::ScmRights(fds) => {
                    for fd in fds {
                        // SAFETY: the kernel created this descriptor for this process, and no other
                        // code has it.
                        got = Some(Self(unsafe { OwnedFd::from_raw_fd(fd) }));
                    }
                }
                _ => {}
            }
        }
        Ok((message.bytes, from, got))
    }

    /// Receives a packet that must contain a number.
    pub(crate) fn receive_u32(&self) -> io::Result<u32> {
        Ok(u32::from_le_bytes(self.receive_array()?))
    }

    /// Receives a packet and returns its first bytes.
    pub(crate) fn receive_array<const N: usize>(&self) -> io::Result<[u8; N]> {
        let packet = self.receive()?;
        let first = packet.bytes.first_chunk().copied();
        first.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "a packet is too short"))
    }

    /// Makes the kernel attach the credentials of the peer to each packet that this socket receives.
    pub(crate) fn ask_names(self) -> io::Result<Self> {
        Self::with_names(self.0)
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
