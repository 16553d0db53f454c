//! User ids, groups and pids in nested namespaces, from `/proc/PID/status`.
//!
//! `procfs` also has a parser for this file, but that parser needs the whole file, and a process may have 65,536
//! groups. The user ids come before the groups, so the first [`super::LIMIT`] bytes always contain the user ids.

use std::{fs::File, io};

use super::{AnyPid, of_process, open, positive, read};

/// The content of `/proc/PID/status`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Status {
    /// Real, effective, saved and file system user id.
    pub uids: [u32; 4],
    /// Supplementary groups; empty if the file is longer than gpushd reads.
    pub groups: Vec<u32>,
    /// Pids in nested namespaces, beginning with the namespace of gpushd's `/proc`; empty if unknown. A single entry
    /// means that the process is in the pid namespace of that `/proc`.
    pub pids: Vec<u32>,
    /// Pending signals: sent, but not delivered yet. A mask in which bit 0 is signal 1.
    pub pending: u64,
    /// Signals for which the process has a handler. A mask in which bit 0 is signal 1.
    pub caught: u64,
}

impl Status {
    /// Reads the status of a process; `None` if there is no such process.
    pub fn of(pid: impl AnyPid) -> Option<Self> {
        Self::parse(&read::text(open(pid)?.open_relative("status").ok()?).ok()?)
    }

    /// Parses the beginning of a `status` file; `None` if it contains no user ids.
    pub fn parse(text: &str) -> Option<Self> {
        let whole = whole_lines(text)?;
        let mask = |name: &str| -> u64 {
            let line = whole.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|line| u64::from_str_radix(line.trim(), 16).ok()).unwrap_or_default()
        };
        Some(Self {
            // Signals that are pending for the first thread, and for the process.
            pending: mask("SigPnd") | mask("ShdPnd"),
            caught: mask("SigCgt"),
            uids: numbers(whole, "Uid")?.try_into().ok()?,
            groups: numbers(whole, "Groups").unwrap_or_default(),
            pids: numbers(whole, "NSpid").unwrap_or_default(),
        })
    }

    /// Returns whether the process has a handler for the signal with this number.
    pub fn catches(&self, signal: i32) -> bool {
        u32::try_from(signal - 1).is_ok_and(|bit| bit < 64 && self.caught >> bit & 1 == 1)
    }

    /// Returns the effective user id, which determines what the process may do.
    pub fn uid(&self) -> u32 {
        self.uids[1]
    }
}

/// Returns the text without its last line, which may be incomplete.
fn whole_lines(text: &str) -> Option<&str> {
    Some(text.rsplit_once('\n')?.0)
}

/// Returns the numbers in the line of a field.
fn numbers(lines: &str, field: &str) -> Option<Vec<u32>> {
    let line = lines.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    line.split_whitespace().map(|word| word.parse().ok()).collect()
}

/// Number of bytes that contain the user ids. Only the line with the name (at most 64 bytes) and eight shorter lines
/// come before the user ids.
const UIDS_WITHIN: usize = 512;

/// Returns the real, effective, saved and file system user id of a process.
pub fn uids(pid: impl AnyPid) -> Option<[u32; 4]> {
    try_uids(pid).ok().flatten()
}

/// Reads the user ids from the beginning of the file, because some callers call this for every process of the host.
///
/// # Errors
/// The kernel or gpushd has no free descriptor or memory.
pub fn try_uids(pid: impl AnyPid) -> io::Result<Option<[u32; 4]>> {
    let Some(pid) = positive(pid) else { return Ok(None) };
    let beginning = File::open(format!("/proc/{pid}/status")).and_then(read::beginning::<UIDS_WITHIN>);
    let uids = |text: String| numbers(whole_lines(&text)?, "Uid")?.try_into().ok();
    Ok(of_process(beginning)?.and_then(uids))
}

/// Returns the effective user id of a process.
///
/// Do not use the owner of its directory in `/proc` instead: if a process is not dumpable, root
/// owns that directory.
pub fn owner(pid: impl AnyPid) -> Option<u32> {
    try_owner(pid).ok().flatten()
}

/// Returns the effective user id of a process; `None` if there is no such process, or gpushd is not permitted to see
/// it.
///
/// # Errors
/// The id cannot be read for another reason, such as too many open files.
pub fn try_owner(pid: impl AnyPid) -> io::Result<Option<u32>> {
    Ok(try_uids(pid)?.map(|[_, effective, ..]| effective))
}

/// Translates a pid in a peer's request to the pid in gpushd's namespace.
///
/// # Errors
/// The reason, as a clause: the peer has ended, or the pid is in another pid namespace and is not
/// the pid of the peer itself.
pub fn local_pid(peer: Option<u32>, named: u32) -> Result<u32, &'static str> {
    const ELSEWHERE: &str =
        "the process is in another pid namespace (a container), where gpushd can identify only the caller itself";
    let peer = peer.ok_or(ELSEWHERE)?;
    let status = Status::of(peer).ok_or("the caller has ended")?;
    match status.pids.as_slice() {
        [_] => Ok(named),
        [.., own] if *own == named => Ok(peer),
        _ => Err(ELSEWHERE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\tbash\nUid:\t1000\t1001\t1002\t1003\nGid:\t1\t1\t1\t1\nGroups:\t4 27 1000 \n\
                          NStgid:\t70\t3\nNSpid:\t70\t3\nSigPnd:\t0000000000000100\n\
                          ShdPnd:\t0000000000000001\nSigCgt:\t0000000000000201\n";

    #[test]
    fn status_gives_uids_groups_and_pids() {
        let status = Status::parse(STATUS).unwrap();
        let expected = Status {
            uids: [1000, 1001, 1002, 1003],
            groups: vec![4, 27, 1000],
            pids: vec![70, 3],
            pending: 0x101,
            caught: 0x201,
        };
        assert_eq!((status.uid(), &status), (1001, &expected));
        let caught: Vec<i32> = (-1..70).filter(|signal| status.catches(*signal)).collect();
        assert_eq!(caught, [1, 10], "SIGHUP and SIGUSR1");
        assert_eq!(Status::parse(""), None);
        assert_eq!(Status::parse("Uid:\t1\t2\t3\n"), None);
        // Old kernels omit the pids in nested namespaces, so the pid namespace is unknown.
        assert_eq!(Status::parse("Uid:\t1\t1\t1\t1\n").unwrap().pids, [] as [u32; 0]);
    }

    #[test]
    fn status_cut_in_its_groups_still_gives_the_uids() {
        let cut = &STATUS[..STATUS.find("1000 \n").unwrap() + 2];
        let expected = Status { uids: [1000, 1001, 1002, 1003], ..Status::default() };
        assert_eq!(Status::parse(cut), Some(expected));
    }

    #[test]
    fn own_status_has_our_uids() {
        let me = std::process::id();
        let (real, effective) = (nix::unistd::getuid().as_raw(), nix::unistd::geteuid().as_raw());
        assert_eq!(uids(me).unwrap()[..2], [real, effective]);
        assert_eq!(owner(me), Some(effective));
        for pid in [i64::from(i32::MAX), 0, -1, i64::MAX] {
            assert_eq!((uids(pid), owner(pid)), (None, None), "{pid}");
        }
    }

    #[test]
    fn pid_named_by_a_peer_is_local_only_in_our_namespace() {
        let me = std::process::id();
        assert_eq!(local_pid(Some(me), 4711), Ok(4711));
        assert!(local_pid(None, me).is_err());
        assert!(local_pid(Some(u32::MAX), me).is_err() && local_pid(Some(i32::MAX.cast_unsigned()), me).is_err());
    }
}
