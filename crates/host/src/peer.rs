//! The process at the other end of a Unix socket, identified by the credentials that the kernel recorded.
//!
//! ```text
//! SO_PEERCRED ──────────► uid, gid, pid when it connected
//! SO_PEERPIDFD ─────────► its pidfd; pidfd_open(pid) before Linux 6.5
//! /proc/PID/status ─────► supplementary groups ─┐ used only if the process is alive afterwards and all four of its
//! /proc/PID/ns, uid_map ► namespaces ───────────┘ uids are still the peer's
//! ```
//!
//! A process may connect, pass the connection to another process, and then change its user. Because
//! of the check of the uids, the connection does not gain the groups or namespaces of the new user.
//! A uid identifies a user of the host only in gpushd's own user and pid namespaces: see
//! [`Peer::is_on_this_host`].

use std::os::fd::{AsFd, OwnedFd};

use nix::{
    errno::Errno,
    sys::socket::{
        getsockopt,
        sockopt::{PeerCredentials, PeerPidfd},
    },
};

use crate::{
    pidfd::PidFd,
    proc::{self, Status},
};

/// The process that connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Peer {
    /// Effective user id when the process connected.
    pub uid: u32,
    /// Process id; `None` when gpushd cannot see into the pid namespace of the process.
    pub pid: Option<u32>,
    /// Start of the process in clock ticks since the boot, which distinguishes the process from a
    /// later process with the same pid.
    pub start: Option<u64>,
    /// Effective group and supplementary groups.
    pub groups: Vec<u32>,
    /// Whether the process is in gpushd's own user and pid namespaces. Root of a container is
    /// usually in other namespaces, and can choose any user id and group id there. But if a
    /// container shares both namespaces with the host (`--pid=host` without user namespaces), its
    /// processes cannot be distinguished from those of the host.
    pub is_on_this_host: bool,
}

impl Peer {
    /// Reads the peer of a connected socket from the kernel, with one system call. The supplementary groups and
    /// namespaces are unknown until [`Peer::identify`].
    ///
    /// # Errors
    /// The socket has no peer.
    pub fn of(stream: &impl AsFd) -> nix::Result<Self> {
        let credentials = getsockopt(stream, PeerCredentials)?;
        let pid = u32::try_from(credentials.pid()).ok().filter(|pid| *pid > 0);
        Ok(Self { uid: credentials.uid(), pid, start: None, groups: vec![credentials.gid()], is_on_this_host: false })
    }

    /// Reads the supplementary groups of the peer's process, and whether the process is in gpushd's own namespaces.
    /// Adds both to the peer. `stream` is the socket from which the peer was read.
    #[must_use]
    pub fn identify(self, stream: &impl AsFd) -> Self {
        let mut peer = self;
        let Some(pid) = peer.pid else { return peer };
        let Some(process) = process(getsockopt(stream, PeerPidfd), pid) else { return peer };
        let (start, status, is_on_this_host) = (proc::start(pid), Status::of(pid), proc::is_on_this_host(pid));
        // While the process is alive, no other process has its pid. So the status and the
        // namespaces are those of the peer.
        if let Some(status) = status
            && !process.has_ended()
        {
            peer.add_groups_and_namespaces(status, is_on_this_host);
            peer.start = start;
        }
        peer
    }

    /// Adds groups and namespaces from /proc, if all uids of the process still equal the uid of the
    /// user that connected.
    fn add_groups_and_namespaces(&mut self, status: Status, is_on_this_host: bool) {
        if status.uids == [self.uid; 4] {
            self.groups.extend(status.groups);
            self.is_on_this_host = is_on_this_host;
        }
    }
}

/// Returns the peer's process. Uses `pidfd_open` only on kernels that do not support SO_PEERPIDFD. If the kernel
/// supports the option and the call fails, the peer has ended, and another process may have its pid.
fn process(pidfd: nix::Result<OwnedFd>, pid: u32) -> Option<PidFd> {
    match pidfd {
        Ok(fd) => Some(PidFd::of(pid.cast_signed(), fd)),
        Err(Errno::ENOPROTOOPT) => PidFd::open(pid).ok().flatten(),
        Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::{
        os::unix::net::{UnixListener, UnixStream},
        process::{Child, Command, Stdio},
    };

    use super::*;

    #[test]
    fn process_that_changed_its_user_is_not_on_this_host() {
        let peer = |uids: [u32; 4], uid: u32| {
            let mut peer = Peer { uid, pid: Some(1), start: None, groups: vec![uid], is_on_this_host: false };
            peer.add_groups_and_namespaces(Status { uids, groups: vec![4, 27], ..Status::default() }, true);
            (peer.groups, peer.is_on_this_host)
        };
        assert_eq!(peer([1000; 4], 1000), (vec![1000, 4, 27], true));
        assert_eq!(peer([1000; 4], 1001), (vec![1001], false));
        assert_eq!(peer([1000, 0, 0, 0], 1000), (vec![1000], false));
    }

    #[test]
    fn pid_is_opened_only_where_the_kernel_gives_no_pidfd() {
        let own = std::process::id();
        assert!(process(Err(Errno::ENOPROTOOPT), own).is_some());
        assert!(process(Err(Errno::ESRCH), own).is_none() && process(Err(Errno::EINVAL), own).is_none());
    }

    #[test]
    fn peer_of_our_own_connection_is_this_process() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let peer = Peer::of(&ours).unwrap().identify(&ours);
        let (uid, gid) = (nix::unistd::geteuid().as_raw(), nix::unistd::getegid().as_raw());
        assert_eq!((peer.uid, peer.pid, peer.groups[0]), (uid, Some(std::process::id()), gid));
        assert!(peer.is_on_this_host && peer.start.is_some() && peer.start == proc::start(std::process::id()));
    }

    /// Accepts a connection from a python process that the command `through` starts; `None` if that
    /// command cannot run.
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
