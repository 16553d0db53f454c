//! Finds Unix sockets by inode: the path that a socket is bound to, and its peer. Each query asks
//! the kernel for only one socket.
//!
//! The kernel reports only sockets of gpushd's network namespace. A connection to a daemon is in the network namespace
//! of the process that connected.

use std::{
    fs, io,
    os::fd::{AsRawFd, OwnedFd},
};

use netlink_packet_core::{NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::{
    SockDiagMessage,
    unix::{
        ShowFlags, StateFlags, UnixRequest,
        nlas::{Nla, UnixDiagName},
    },
};
use nix::{
    errno::Errno,
    sys::{
        socket::{self, AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, sockopt},
        time::TimeVal,
    },
};

use super::command::Pid;

/// Largest datagram from the kernel.
const LARGEST: usize = 64 << 10;

/// Timeout of one query in seconds. Normally the kernel answers at once.
const PATIENCE: i64 = 1;

/// Returns the inodes of a process's sockets.
pub(crate) fn of_process(pid: Pid) -> io::Result<impl Iterator<Item = u64>> {
    let inode = |entry: fs::DirEntry| {
        let link = fs::read_link(entry.path()).ok()?;
        link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    };
    Ok(fs::read_dir(format!("/proc/{pid}/fd"))?.flatten().filter_map(inode))
}

#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Socket {
    /// Path that the socket is bound to; for an accepted connection, the path of its listener.
    pub(crate) name: Option<Vec<u8>>,
    /// Inode of the peer; `None` after the peer has closed.
    pub(crate) peer: Option<u64>,
    /// Inodes of the connections that are not accepted yet.
    pub(crate) queued: Vec<u64>,
}

/// A netlink connection to the kernel.
#[derive(Debug)]
pub(crate) struct Kernel(OwnedFd);

impl Kernel {
    /// Opens the connection.
    pub(crate) fn open() -> io::Result<Self> {
        let kernel = socket::socket(
            AddressFamily::Netlink,
            SockType::Datagram,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkSockDiag,
        )?;
        socket::setsockopt(&kernel, sockopt::ReceiveTimeout, &TimeVal::new(PATIENCE, 0))?;
        Ok(Self(kernel))
    }

    /// Returns the Unix socket with this inode; `None` if this network namespace does not have it.
    pub(crate) fn socket(&self, inode: u64) -> io::Result<Option<Socket>> {
        let Ok(inode) = u32::try_from(inode) else { return Ok(None) };
        socket::sendto(self.0.as_raw_fd(), &request(inode), &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
        let mut buffer = vec![0; LARGEST];
        let length = socket::recv(self.0.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
        let reported = NetlinkMessage::<SockDiagMessage>::deserialize(buffer.get(..length).unwrap_or_default());
        match reported.map_err(io::Error::other)?.payload {
            NetlinkPayload::InnerMessage(SockDiagMessage::UnixResponse(one)) => Ok(Some(about(one.nlas.as_slice()))),
            NetlinkPayload::Error(error) if error.to_io().raw_os_error() == Some(Errno::ENOENT as i32) => Ok(None),
            NetlinkPayload::Error(error) => Err(error.to_io()),
            _ => Err(io::Error::other("the kernel's answer does not match the request")),
        }
    }
}

fn request(inode: u32) -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST;
    let asked = SockDiagMessage::UnixRequest(UnixRequest {
        state_flags: StateFlags::ESTABLISHED | StateFlags::LISTEN,
        inode,
        show_flags: ShowFlags::NAME | ShowFlags::PEER | ShowFlags::ICONS,
        // A query with these bytes matches any cookie.
        cookie: [0xff; 8],
    });
    let mut message = NetlinkMessage::new(header, NetlinkPayload::from(asked));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

fn about(reported: &[Nla]) -> Socket {
    let mut socket = Socket::default();
    for one in reported {
        match one {
            Nla::Name(UnixDiagName::Pathname(path)) => socket.name = Some(path.as_encoded_bytes().to_owned()),
            Nla::Peer(peer) => socket.peer = Some(u64::from(*peer)).filter(|peer| *peer != 0),
            Nla::PendingConnections(queued) => {
                socket.queued = queued.iter().filter(|one| **one != 0).map(|one| u64::from(*one)).collect();
            }
            _ => {}
        }
    }
    socket
}

#[cfg(test)]
mod tests {
    use std::os::{
        fd::AsFd,
        unix::{
            ffi::OsStrExt,
            net::{UnixListener, UnixStream},
        },
    };

    use super::*;

    #[test]
    fn connection_is_found_by_inode_with_path_and_peer() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("control");
        let listener = UnixListener::bind(&at).unwrap();
        let kernel = Kernel::open().unwrap();
        let found = |of: &dyn AsFd| kernel.socket(inode(of)).unwrap().unwrap();
        let name = Some(at.as_os_str().as_bytes().to_owned());
        assert_eq!(found(&listener), Socket { name: name.clone(), ..Socket::default() });
        let peer = UnixStream::connect(&at).unwrap();
        assert_eq!(found(&listener).queued, [inode(&peer)], "not accepted yet");
        let (accepted, _) = listener.accept().unwrap();
        assert_eq!(found(&listener).queued, [] as [u64; 0]);
        assert_eq!(found(&accepted), Socket { name, peer: Some(inode(&peer)), queued: Vec::new() });
        let me = Pid::try_from(std::process::id()).unwrap();
        let own: Vec<u64> = of_process(me).unwrap().collect();
        assert!(own.contains(&inode(&peer)) && own.contains(&inode(&accepted)));
        drop(peer);
        assert_eq!(found(&accepted).peer, None, "it was closed");
        assert_eq!(kernel.socket(u64::from(u32::MAX)).unwrap(), None);
    }

    fn inode(of: &dyn AsFd) -> u64 {
        nix::sys::stat::fstat(of).unwrap().st_ino
    }
}
