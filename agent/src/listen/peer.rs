//! Who is at the other end of a connection, by the kernel's word.
//!
//! uid and pid come from `SO_PEERCRED`, as they were when the peer connected. Supplementary groups
//! come from `/proc/PID/status`, read at once and only believed while every uid of that process is
//! still the peer's: so a process that hands its connection on and then becomes somebody else
//! lends nobody that somebody's groups. (`SO_PEERGROUPS` says the same with less ado, but has no
//! safe binding.) A peer in another pid namespace has no pid here, and therefore no groups.

use std::os::fd::AsFd;

use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};

/// The process that connected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Peer {
    /// Effective user id at the time.
    pub(crate) uid: u32,
    /// Process id; `None` when it is in a pid namespace that we can't see into.
    pub(crate) pid: Option<u32>,
    /// Its effective group and its supplementary groups.
    pub(crate) groups: Vec<u32>,
}

impl Peer {
    /// The process at the other end, without its supplementary groups: one system call.
    pub(crate) fn of(stream: &impl AsFd) -> nix::Result<Self> {
        let credentials = getsockopt(stream, PeerCredentials)?;
        let pid = u32::try_from(credentials.pid()).ok().filter(|pid| *pid > 0);
        Ok(Self { uid: credentials.uid(), pid, groups: vec![credentials.gid()] })
    }

    /// Adds its supplementary groups.
    pub(crate) fn with_groups(mut self) -> Self {
        // Root may do everything anyway.
        if self.uid != 0
            && let Some(pid) = self.pid
            && let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status"))
        {
            self.groups.extend(supplementary(&status, self.uid));
        }
        self
    }
}

/// The groups of a `/proc/PID/status`, if all its uids are `uid`.
fn supplementary(status: &str, uid: u32) -> Vec<u32> {
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let numbers = |text: &str| text.split_whitespace().map_while(|word| word.parse().ok()).collect::<Vec<u32>>();
    let uids = field("Uid").map(numbers).unwrap_or_default();
    if uids.len() == 4 && uids.iter().all(|other| *other == uid) {
        field("Groups").map(numbers).unwrap_or_default()
    } else {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    const NONE: [u32; 0] = [];
    const STATUS: &str =
        "Name:\tbash\nUid:\t1000\t1000\t1000\t1000\nGid:\t1000\t1000\t1000\t1000\nGroups:\t4 27 1000 \n";

    #[test]
    fn groups_are_believed_only_of_a_process_that_is_still_the_same_user() {
        assert_eq!(supplementary(STATUS, 1000), [4, 27, 1000]);
        assert_eq!(supplementary(STATUS, 1001), NONE);
        assert_eq!(supplementary(&STATUS.replace("1000\t1000\t1000\t1000\nGid", "1000\t0\t0\t0\nGid"), 1000), NONE);
        assert_eq!(supplementary("", 0), NONE);
    }

    #[test]
    fn the_peer_of_our_own_connection_is_us() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let peer = Peer::of(&ours).unwrap();
        assert_eq!(peer.uid, nix::unistd::geteuid().as_raw());
        assert_eq!(peer.pid, Some(std::process::id()));
        assert_eq!(peer.groups[0], nix::unistd::getegid().as_raw());
    }
}
