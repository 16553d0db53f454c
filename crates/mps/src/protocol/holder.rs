//! Finds the processes that are connected to a daemon.
//!
//! A daemon accepts one connection at a time, so an open front-end or a silent peer blocks all
//! other processes. Neither the daemon nor the connection identifies the blocking process. Clients
//! that wait for a server appear only in the daemon's log, and users can write into that log.
//!
//! ```text
//! /proc/DAEMON/fd ──► its sockets ─┐
//! sock_diag ──► name and peer ─────┴─► those bound to its paths ──► peers ──► /proc/*/fd ──► pids
//! ```
//!
//! A daemon has few sockets, so gpushd queries the kernel for each socket. gpushd searches the
//! descriptors of all processes only if a socket has an unknown peer. The daemon and gpushd must
//! share their network and pid namespaces. Without root privileges, gpushd finds only processes of
//! its own user.

use std::{
    collections::BTreeSet,
    io,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use gpush_host::proc;

use super::{
    command::Pid,
    sockets::{Kernel, of_process},
};

/// The two sockets of a daemon. The front-ends of root connect to the first socket. Clients,
/// servers and the front-ends of users connect to the second socket.
const CONTROL_SOCKETS: [&str; 2] = ["control_privileged", "control"];

/// Returns the pids of the processes that are connected to a daemon, except its servers and gpushd. Usually this is
/// only the process that holds the control connection. The result is empty if that process has disconnected, or if
/// gpushd is not permitted to see it.
///
/// # Errors
/// The daemon's descriptors or sockets cannot be read.
pub fn holders(daemon: Pid, directory: &Path) -> io::Result<Vec<Pid>> {
    let peers = ControlSockets::of(directory).peers(daemon)?.accepted;
    let mut holders = Vec::new();
    for (pid, _) in processes_with_sockets(&peers)? {
        // Skip the servers: they are children of the daemon, and stay connected while they run.
        if pid != daemon && Ok(pid) != Pid::try_from(std::process::id()) && parent(pid) != Some(daemon) {
            holders.push(pid);
        }
    }
    Ok(holders)
}

/// The processes that are connected to a daemon but that the daemon does not list.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct UnlistedClients {
    /// Pids of the processes. The daemon may not have accepted their connections yet.
    pub pids: BTreeSet<Pid>,
    /// Whether there is a process that gpushd cannot see, because the process is in another pid namespace, or because
    /// the process belongs to another user and gpushd is not root.
    pub unseen: bool,
    /// Number of connections from other network namespaces. gpushd cannot find the processes of
    /// these connections.
    pub elsewhere: usize,
}

/// Finds the processes that are connected to a daemon's client socket, except its servers, gpushd, gpushd's front-ends,
/// and the `known` processes.
///
/// # Errors
/// The daemon's descriptors or sockets cannot be read.
pub fn unlisted_clients(daemon: Pid, directory: &Path, known: &[Pid]) -> io::Result<UnlistedClients> {
    let sockets = ControlSockets::for_clients(directory);
    let first = sockets.peers(daemon)?;
    let mut peers: BTreeSet<u64> = first.accepted.union(&first.queued).copied().collect();
    for pid in known {
        if peers.is_empty() {
            break;
        }
        // A process that has ended has no sockets.
        for inode in of_process(*pid).into_iter().flatten() {
            peers.remove(&inode);
        }
    }
    let mut unlisted = UnlistedClients { elsewhere: first.elsewhere, ..UnlistedClients::default() };
    if peers.is_empty() {
        return Ok(unlisted);
    }
    let having = processes_with_sockets(&peers)?;
    let us = Pid::try_from(std::process::id()).unwrap_or_default();
    let is_ours = |pid: Pid| {
        let parent = parent(pid);
        // If gpushd is the first process of a container, any process may be its child.
        pid == daemon || pid == us || parent == Some(daemon) || (us != 1 && parent == Some(us))
    };
    // Ignore the connections of these processes, even if another process, such as a forked child,
    // shares the connections.
    for (_, theirs) in having.iter().filter(|(pid, _)| is_ours(*pid)) {
        peers.retain(|inode| !theirs.contains(inode));
    }
    // Read the connections again. A process that connected only to send a command has disconnected by now, so it is not
    // reported as a client.
    let again = sockets.peers(daemon)?;
    peers.retain(|inode| again.accepted.contains(inode) || again.queued.contains(inode));
    unlisted.unseen = peers.iter().any(|inode| !having.iter().any(|(_, theirs)| theirs.contains(inode)));
    unlisted.pids = having.iter().filter(|(_, theirs)| !theirs.is_disjoint(&peers)).map(|(pid, _)| *pid).collect();
    Ok(unlisted)
}

/// Paths of a daemon's sockets.
struct ControlSockets(Vec<PathBuf>);

/// The connected peers, by the inodes of their sockets.
#[derive(Debug, Default)]
struct Peers {
    accepted: BTreeSet<u64>,
    /// Connections that the daemon has not accepted yet.
    queued: BTreeSet<u64>,
    /// Number of the daemon's sockets that are not in this network namespace.
    elsewhere: usize,
}

impl ControlSockets {
    fn of(directory: &Path) -> Self {
        Self(CONTROL_SOCKETS.map(|path| directory.join(path)).into())
    }

    fn for_clients(directory: &Path) -> Self {
        Self(vec![directory.join(CONTROL_SOCKETS[1])])
    }

    fn peers(&self, daemon: Pid) -> io::Result<Peers> {
        let (kernel, mut peers, mut unknown) = (Kernel::open()?, Peers::default(), BTreeSet::new());
        let mut found = 0;
        for inode in of_process(daemon)? {
            let Some(socket) = kernel.socket(inode)? else {
                unknown.insert(inode);
                continue;
            };
            // Ignore other sockets of the daemon, such as its output.
            if self.0.iter().any(|path| socket.name.as_deref() == Some(path.as_os_str().as_bytes())) {
                found += 1;
                peers.accepted.extend(socket.peer);
                peers.queued.extend(socket.queued);
            }
        }
        // A kernel that does not support `sock_diag` for these sockets reports each socket as
        // missing.
        if found == 0 {
            return Err(io::Error::other("the kernel lists none of the sockets of the MPS daemon"));
        }
        // Ignore sockets that the daemon has closed in the meantime.
        if !unknown.is_empty() {
            peers.elsewhere = of_process(daemon)?.filter(|inode| unknown.contains(inode)).count();
        }
        Ok(peers)
    }
}

/// Returns the processes that have any of these sockets, with those sockets.
fn processes_with_sockets(sockets: &BTreeSet<u64>) -> io::Result<Vec<(Pid, BTreeSet<u64>)>> {
    if sockets.is_empty() {
        return Ok(Vec::new());
    }
    let theirs = |pid: Pid| {
        let theirs: BTreeSet<u64> = of_process(pid).ok()?.filter(|inode| sockets.contains(inode)).collect();
        (!theirs.is_empty()).then_some((pid, theirs))
    };
    Ok(proc::pids()?.into_iter().filter_map(theirs).collect())
}

fn parent(pid: Pid) -> Option<Pid> {
    Pid::try_from(proc::parent(pid)?).ok()
}

#[cfg(test)]
mod tests {
    use std::{
        os::{
            fd::OwnedFd,
            unix::net::{UnixListener, UnixStream},
        },
        process::Command,
    };

    use super::*;

    /// Starts a process that is not a child of this test, and connects it to a socket. The process
    /// ends when its peer closes the connection. Returns the pid of the process.
    fn client(path: &Path) -> Pid {
        let socket = OwnedFd::from(UnixStream::connect(path).unwrap());
        let mut shell = Command::new("sh");
        shell.args(["-c", "exec 3<&0; cat <&3 > /dev/null 2>&1 & echo $!"]).stdin(socket);
        // The shell has ended, so the process that it started is not a child of this test.
        String::from_utf8(shell.output().unwrap().stdout).unwrap().trim().parse().unwrap()
    }

    #[test]
    fn connected_processes_are_found_unless_known() {
        let dir = tempfile::tempdir().unwrap();
        let me = Pid::try_from(std::process::id()).unwrap();
        // This test plays the daemon, so its netlink socket also appears as a socket of the daemon.
        let at = |known: &[Pid]| UnlistedClients { elsewhere: 0, ..unlisted_clients(me, dir.path(), known).unwrap() };
        let listener = UnixListener::bind(dir.path().join("control")).unwrap();
        let ours = UnixStream::connect(dir.path().join("control")).unwrap();
        assert_eq!(at(&[]), UnlistedClients::default(), "no process but this one");
        drop((ours, listener.accept().unwrap()));
        let one = client(&dir.path().join("control"));
        let found =
            |pids: &[Pid]| UnlistedClients { pids: pids.iter().copied().collect(), unseen: false, elsewhere: 0 };
        // Other tests start children, which inherit the socket for a moment. While a child has the
        // socket, the client is ignored too.
        let becomes = |known: &[Pid], is: UnlistedClients| (0..1000).any(|_| at(known) == is);
        assert!(becomes(&[], found(&[one])), "he waits to be accepted");
        assert_eq!(holders(me, dir.path()).unwrap(), [] as [Pid; 0]);
        let (accepted, _) = listener.accept().unwrap();
        assert!(becomes(&[], found(&[one])));
        assert_eq!(holders(me, dir.path()).unwrap(), [one]);
        let other = client(&dir.path().join("control"));
        assert!(becomes(&[], found(&[one, other])) && becomes(&[one], found(&[other])));
        assert_eq!(at(&[one, other]), UnlistedClients::default());
        drop((accepted, listener));
    }

    #[test]
    fn missing_process_is_an_error() {
        assert!(holders(Pid::MAX, Path::new("/nowhere")).is_err());
        assert!(unlisted_clients(Pid::MAX, Path::new("/nowhere"), &[]).is_err());
        assert_eq!(parent(Pid::MAX), None);
    }
}
