//! The process at the other end of a Unix socket, by the credentials that the kernel recorded.
//!
//! ```text
//! SO_PEERCRED ──────────► uid, gid, pid when it connected
//! SO_PEERPIDFD ─────────► its pidfd (Linux 6.5), else pidfd_open(pid)
//! /proc/PID/status ─────► supplementary groups ─┐ believed only if the process is alive afterwards,
//! /proc/PID/ns, uid_map ► namespaces ───────────┘ groups only if all its uids are still the peer's
//! ```
//!
//! So a process that passes its connection on and then changes its user does not pass on that user's groups. A uid
//! identifies a user of the host only in gpushd's own user and pid namespaces: see [`Peer::is_on_this_host`].

use std::os::fd::AsFd;

use nix::sys::socket::{
    getsockopt,
    sockopt::{PeerCredentials, PeerPidfd},
};

use crate::{
    pidfd::PidFd,
    proc::{self, Status},
};

/// The process that connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Effective user id at that time.
    pub uid: u32,
    /// Process id; `None` when the process is in a pid namespace that gpushd cannot see into.
    pub pid: Option<u32>,
    /// Effective group and supplementary groups.
    pub groups: Vec<u32>,
    /// Whether the process is in gpushd's own user and pid namespaces. Root of a container usually is not: there it may
    /// take any user id and group id. A container that shares both namespaces with the host (`--pid=host` without user
    /// namespaces) cannot be told apart.
    pub is_on_this_host: bool,
}

impl Peer {
    /// Asks the kernel who is at the other end of a connected socket: one system call. Supplementary groups and
    /// namespaces are not known before [`Peer::identify`].
    ///
    /// # Errors
    /// When the socket has no peer.
    pub fn of(stream: &impl AsFd) -> nix::Result<Self> {
        let credentials = getsockopt(stream, PeerCredentials)?;
        let pid = u32::try_from(credentials.pid()).ok().filter(|pid| *pid > 0);
        Ok(Self { uid: credentials.uid(), pid, groups: vec![credentials.gid()], is_on_this_host: false })
    }

    /// Adds the supplementary groups, and whether the process is in gpushd's own namespaces. `stream` is the socket
    /// that the peer was read from.
    #[must_use]
    pub fn identify(self, stream: &impl AsFd) -> Self {
        let mut peer = self;
        let Some(pid) = peer.pid else { return peer };
        let process = match getsockopt(stream, PeerPidfd) {
            Ok(fd) => Some(PidFd::of(pid.cast_signed(), fd)),
            Err(_) => PidFd::open(pid).ok().flatten(),
        };
        let (status, is_on_this_host) = (Status::of(pid), proc::is_on_this_host(pid));
        // While the process is alive, no other has its pid: all of this was read from the peer.
        if process.is_some_and(|process| !process.has_ended()) {
            peer.groups.extend(status.map(|status| supplementary(status, peer.uid)).unwrap_or_default());
            peer.is_on_this_host = is_on_this_host;
        }
        peer
    }
}

/// Returns the supplementary groups of a process whose uids are all `uid`.
fn supplementary(status: Status, uid: u32) -> Vec<u32> {
    if status.uids == [uid; 4] { status.groups } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::net::{UnixListener, UnixStream},
        process::{Child, Command, Stdio},
    };

    use super::*;

    #[test]
    fn groups_of_a_process_that_changed_its_user_do_not_count() {
        let status = |uids: [u32; 4]| Status { uids, groups: vec![4, 27], ..Status::default() };
        assert_eq!(supplementary(status([1000; 4]), 1000), [4, 27]);
        assert_eq!(supplementary(status([1000; 4]), 1001), [] as [u32; 0]);
        assert_eq!(supplementary(status([1000, 0, 0, 0]), 1000), [] as [u32; 0]);
    }

    #[test]
    fn peer_of_our_own_connection_is_this_process() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let peer = Peer::of(&ours).unwrap().identify(&ours);
        let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
        assert_eq!((peer.uid, peer.pid, peer.groups[0]), (uid, Some(std::process::id()), gid));
        assert!(peer.is_on_this_host);
    }

    /// Accepts a connection from python, started by `through`; `None` where that cannot run.
    fn peer_through(through: &[&str]) -> Option<(Peer, Child)> {
        const CONNECT: &str =
            "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1)";
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        listener.set_nonblocking(true).unwrap();
        let words = through.iter().copied().chain(["python3", "-c", CONNECT]);
        let mut child =
            Command::new("env").args(words).arg(&path).stderr(Stdio::null()).stdin(Stdio::null()).spawn().unwrap();
        loop {
            if let Ok((stream, _)) = listener.accept() {
                let peer = Peer::of(&stream).unwrap().identify(&stream);
                drop(stream);
                return Some((peer, child));
            }
            if child.try_wait().unwrap().is_some() {
                println!("SKIPPED peers through {through:?}: it is not possible here");
                return None;
            }
            std::thread::yield_now();
        }
    }

    #[test]
    fn peer_in_other_namespaces_is_not_on_this_host() {
        let own = nix::unistd::geteuid().as_raw();
        let namespaces: [&[&str]; 3] =
            [&["unshare", "--fork", "--pid"], &["unshare", "--user", "--map-root-user"], &["unshare", "--net"]];
        for (through, expected) in namespaces.into_iter().zip([false, false, true]) {
            let Some((peer, mut child)) = peer_through(through) else { continue };
            assert_eq!((peer.uid, peer.is_on_this_host), (own, expected), "{through:?}");
            child.wait().unwrap();
        }
    }
}
