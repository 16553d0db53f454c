//! Who has a daemon's ear. It listens to one at a time: an open front-end, or a peer that connected and says
//! nothing, keeps all others from it, and neither daemon nor connection tells who that is.
//!
//! ```text
//! /proc/DAEMON/fd ──► its sockets ─┐
//! sock_diag ──► name and peer ─────┴─► those bound to its doors ──► peers ──► /proc/*/fd ──► pids
//! ```
//!
//! All sockets and descriptors of the host are gone through for that, so it is asked only when a daemon does
//! not answer. The daemon and we must be in one network namespace, and in one pid namespace; whoever is not
//! root finds processes of his own alone.

use std::{
    collections::BTreeSet,
    fs, io,
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_sock_diag::{
    SockDiagMessage,
    unix::{
        ShowFlags, StateFlags, UnixRequest,
        nlas::{Nla, UnixDiagName},
    },
};
use nix::sys::{
    socket::{self, AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, sockopt},
    time::TimeVal,
};

use crate::command::Pid;

/// Its two sockets. Users come to the second, and can stop the daemon there as well.
const DOORS: [&str; 2] = ["control_privileged", "control"];

/// Largest datagram of the kernel's.
const LARGEST: usize = 64 << 10;

/// Seconds that the kernel may take for one. It takes none.
const PATIENCE: i64 = 1;

/// Pids of the processes that are connected to a daemon's doors, its servers and ourselves left out. Usually
/// that is whoever has its ear; none are found when it went meanwhile, or may not be seen.
///
/// # Errors
/// When the daemon's descriptors or the kernel's list of sockets can't be read.
pub fn holders(daemon: Pid, directory: &Path) -> io::Result<Vec<Pid>> {
    let own: BTreeSet<u64> = sockets(daemon)?.collect();
    let doors = DOORS.map(|door| directory.join(door));
    let is_door = |socket: &Connected| {
        own.contains(&u64::from(socket.inode)) && doors.iter().any(|door| door.as_os_str().as_bytes() == socket.name)
    };
    let peers: BTreeSet<u64> = connected()?.iter().filter(|one| is_door(one)).map(|one| one.peer.into()).collect();
    if peers.is_empty() {
        return Ok(Vec::new());
    }
    let has_one = |pid: &Pid| sockets(*pid).is_ok_and(|mut sockets| sockets.any(|inode| peers.contains(&inode)));
    let others = processes()?.filter(|pid| *pid != daemon && Ok(*pid) != Pid::try_from(std::process::id()));
    // Servers are its children, and stay connected while they live.
    Ok(others.filter(has_one).filter(|pid| parent(*pid) != Some(daemon)).collect())
}

fn processes() -> io::Result<impl Iterator<Item = Pid>> {
    Ok(fs::read_dir("/proc")?.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()))
}

/// Inodes of a process's sockets.
fn sockets(pid: Pid) -> io::Result<impl Iterator<Item = u64>> {
    let inode = |entry: fs::DirEntry| {
        let link = fs::read_link(entry.path()).ok()?;
        link.to_str()?.strip_prefix("socket:[")?.strip_suffix(']')?.parse().ok()
    };
    Ok(fs::read_dir(format!("/proc/{pid}/fd"))?.flatten().filter_map(inode))
}

fn parent(pid: Pid) -> Option<Pid> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name stands in brackets and may hold anything; behind it state and parent.
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}

/// A connection, from the side that was connected to.
#[derive(Debug)]
struct Connected {
    inode: u32,
    /// Inode of the other end.
    peer: u32,
    /// Path that it is bound to.
    name: Vec<u8>,
}

/// All of this host that are bound to a path. Those that nobody has accepted yet have no inode.
fn connected() -> io::Result<Vec<Connected>> {
    let kernel = socket::socket(
        AddressFamily::Netlink,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkSockDiag,
    )?;
    socket::setsockopt(&kernel, sockopt::ReceiveTimeout, &TimeVal::new(PATIENCE, 0))?;
    socket::sendto(kernel.as_raw_fd(), &request(), &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
    let mut all = Vec::new();
    while datagram(&kernel, &mut all)? {}
    Ok(all)
}

fn request() -> Vec<u8> {
    let mut header = NetlinkHeader::default();
    header.flags = NLM_F_REQUEST | NLM_F_DUMP;
    let asked = SockDiagMessage::UnixRequest(UnixRequest {
        state_flags: StateFlags::ESTABLISHED,
        inode: 0,
        show_flags: ShowFlags::NAME | ShowFlags::PEER,
        cookie: [0xff; 8],
    });
    let mut message = NetlinkMessage::new(header, NetlinkPayload::from(asked));
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    bytes
}

/// Takes in one datagram; `false` when it was the last.
fn datagram(kernel: &OwnedFd, all: &mut Vec<Connected>) -> io::Result<bool> {
    let mut buffer = vec![0; LARGEST];
    let length = socket::recv(kernel.as_raw_fd(), &mut buffer, MsgFlags::empty())?;
    let mut rest = buffer.get(..length).unwrap_or_default();
    if rest.is_empty() {
        return Ok(false);
    }
    while let Some(length) = rest.first_chunk::<4>().map(|length| u32::from_ne_bytes(*length) as usize) {
        match NetlinkMessage::<SockDiagMessage>::deserialize(rest).map(|message| message.payload) {
            Ok(NetlinkPayload::InnerMessage(SockDiagMessage::UnixResponse(one))) => {
                all.extend(connection(one.header.inode, one.nlas.as_slice()));
            }
            Ok(NetlinkPayload::Error(error)) => return Err(error.to_io()),
            Ok(NetlinkPayload::Done(_)) => return Ok(false),
            // A socket of somebody else's that can't be read is not one of the daemon's.
            Ok(_) | Err(_) => {}
        }
        // Each starts at a multiple of 4 bytes.
        rest = rest.get(length.max(4).next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(true)
}

fn connection(inode: u32, about: &[Nla]) -> Option<Connected> {
    let name = about.iter().find_map(|one| match one {
        Nla::Name(UnixDiagName::Pathname(path)) => Some(path.as_bytes().to_owned()),
        _ => None,
    })?;
    let peer = about.iter().find_map(|one| match one {
        Nla::Peer(peer) => Some(*peer),
        _ => None,
    })?;
    (inode != 0 && peer != 0).then_some(Connected { inode, peer, name })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    #[test]
    fn a_connection_is_found_by_its_path_with_its_peer() {
        let dir = tempfile::tempdir().unwrap();
        let at = dir.path().join("control");
        let listener = UnixListener::bind(&at).unwrap();
        let peer = UnixStream::connect(&at).unwrap();
        let ours = |all: &[Connected]| all.iter().filter(|one| one.name == at.as_os_str().as_bytes()).count();
        assert_eq!(ours(&connected().unwrap()), 0, "not accepted yet");
        let (accepted, _) = listener.accept().unwrap();
        let all = connected().unwrap();
        let one = all.iter().find(|one| one.name == at.as_os_str().as_bytes()).unwrap();
        let inode = |fd: i32| fs::metadata(format!("/proc/self/fd/{fd}")).map(|meta| ino(&meta)).unwrap();
        assert_eq!(u64::from(one.inode), inode(accepted.as_raw_fd()));
        assert_eq!(u64::from(one.peer), inode(peer.as_raw_fd()));
        let me = Pid::try_from(std::process::id()).unwrap();
        let own: Vec<u64> = sockets(me).unwrap().collect();
        assert!(own.contains(&u64::from(one.peer)) && own.contains(&u64::from(one.inode)));
        assert_eq!(holders(me, dir.path()).unwrap(), [] as [Pid; 0], "nobody but ourselves");
    }

    fn ino(meta: &fs::Metadata) -> u64 {
        std::os::unix::fs::MetadataExt::ino(meta)
    }

    #[test]
    fn a_process_that_is_not_there_is_an_error() {
        assert!(holders(Pid::MAX, Path::new("/nowhere")).is_err());
        assert_eq!(parent(Pid::MAX), None);
    }
}
