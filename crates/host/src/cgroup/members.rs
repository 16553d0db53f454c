//! The processes of a cgroup and of the cgroups below it.
//!
//! A cgroup is named by its path below the root of its hierarchy. Its directory is the first match
//! in this order: the unified hierarchy, systemd's own hierarchy, the hierarchies of the
//! controllers.

use std::{
    fs, io,
    path::{Component, Path, PathBuf},
    time::{Duration, Instant},
};

use super::MOUNTS;
use crate::pidfd::AsyncPidFd;

/// First and longest pause before a cgroup is read again. Used if no process in the cgroup can be
/// awaited, or the awaited process ended soon.
const PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// Shortest wait for a process after which no pause is needed.
const LONG: Duration = Duration::from_millis(100);

/// Maximum depth below the cgroup that is read.
const DEPTH: usize = 32;

/// Returns whether a process is in a cgroup or below it, from the text of its `/proc/PID/cgroup`.
#[must_use]
pub fn contains(cgroup: &str, cgroups: &str) -> bool {
    let paths = cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let is_in = |path: &str| path.strip_prefix(cgroup).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    cgroup.len() > 1 && paths.into_iter().any(is_in)
}

/// Returns the pids in a cgroup and below it; `None` when there is no such cgroup. Omits processes
/// that gpushd cannot see.
#[must_use]
pub fn processes(cgroup: &str) -> Option<Vec<u32>> {
    let dir = directory(cgroup)?;
    let mut pids = Vec::new();
    collect(&dir, DEPTH, &mut pids);
    if pids.is_empty() {
        // If a process moved from one child cgroup to another while they were read, the loop may
        // have missed the process in both.
        if is_populated(&dir) {
            collect(&dir, DEPTH, &mut pids);
        }
        if !dir.is_dir() {
            return None;
        }
    }
    pids.sort_unstable();
    pids.dedup();
    Some(pids)
}

/// Waits until no process is left in a cgroup and below it, or the cgroup no longer exists.
///
/// Waits for one process at a time, so the wait uses no CPU time while the processes run. If each
/// process soon starts the next one and ends, the wait pauses between the reads.
pub async fn wait_until_empty(cgroup: &str) {
    let (mut pauses, mut pause) = (Pauses::default(), None);
    loop {
        let Some(pids) = processes(cgroup) else { return };
        let is_left = !pids.is_empty() || directory(cgroup).is_some_and(|dir| is_populated(&dir));
        if !is_left {
            return;
        }
        if let Some(pause) = pause.take() {
            tokio::time::sleep(pause).await;
            continue;
        }
        let begun = Instant::now();
        for pid in pids {
            if let Ok(Some(process)) = AsyncPidFd::open(pid)
                && !process.has_ended()
            {
                process.wait_until_ended().await;
                break;
            }
        }
        // gpushd cannot wait for zombies or for processes that it cannot see. If no other process is left, only this
        // pause limits how often gpushd reads the cgroup.
        pause = pauses.after(begun.elapsed());
    }
}

/// The pauses between two reads of a cgroup.
#[derive(Debug)]
struct Pauses {
    next: Duration,
}

impl Default for Pauses {
    fn default() -> Self {
        Self { next: PAUSE.0 }
    }
}

impl Pauses {
    /// Returns the pause after a wait of this duration; `None` if the wait was long enough.
    fn after(&mut self, waited: Duration) -> Option<Duration> {
        if waited >= LONG {
            self.next = PAUSE.0;
            return None;
        }
        let pause = self.next;
        self.next = (pause * 2).min(PAUSE.1);
        Some(pause)
    }
}

/// Returns the paths of the cgroups directly below a cgroup; empty when that cgroup does not exist.
#[must_use]
pub fn children(cgroup: &str) -> Vec<String> {
    let Some(dir) = directory(cgroup) else { return Vec::new() };
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let mut paths: Vec<String> =
        dirs.filter_map(|entry| Some(format!("{cgroup}/{}", entry.file_name().to_str()?))).collect();
    paths.sort_unstable();
    paths
}

/// Adds the pids in the cgroup of a directory and below it. Adds none if there is no such directory.
pub(super) fn collect_all(dir: &Path, pids: &mut Vec<u32>) {
    collect(dir, DEPTH, pids);
}

fn collect(dir: &Path, depth: usize, pids: &mut Vec<u32>) {
    let text = fs::read_to_string(dir.join("cgroup.procs")).unwrap_or_default();
    // 0 stands for a process outside of gpushd's pid namespace.
    pids.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()).filter(|pid| *pid > 0));
    if depth == 0 {
        return;
    }
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            collect(&entry.path(), depth - 1, pids);
        }
    }
}

/// Returns whether the kernel reports processes in a cgroup of the unified hierarchy or below it. If
/// the cgroup exists but cannot be read, for example because gpushd has no file descriptor left, it
/// counts as populated.
fn is_populated(dir: &Path) -> bool {
    match fs::read_to_string(dir.join("cgroup.events")) {
        Ok(text) => text.lines().any(|line| line == "populated 1"),
        Err(error) => error.kind() != io::ErrorKind::NotFound && error.raw_os_error() != Some(nix::libc::ENODEV),
    }
}

fn directory(cgroup: &str) -> Option<PathBuf> {
    let below = Path::new(cgroup.strip_prefix('/')?);
    let is_plain = below.components().all(|part| matches!(part, Component::Normal(_)));
    if below.as_os_str().is_empty() || !is_plain {
        return None;
    }
    let first = ["unified", "", "systemd"].iter().map(|name| Path::new(MOUNTS).join(name));
    let controllers = || fs::read_dir(MOUNTS).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_there = |dir: &PathBuf| dir.join("cgroup.procs").is_file();
    let mut found = first.map(|mount| mount.join(below)).find(is_there);
    if found.is_none() {
        found = controllers().map(|mount| mount.join(below)).find(is_there);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: without a free file descriptor, a cgroup was read as empty, and its lease ended while its processes ran.
    #[test]
    fn cgroup_that_cannot_be_read_counts_as_populated() {
        let dir = tempfile::tempdir().unwrap();
        let events = dir.path().join("cgroup.events");
        assert!(!is_populated(dir.path()), "a cgroup of another hierarchy, or none");
        for (text, expected) in [("populated 0\nfrozen 0\n", false), ("populated 1\nfrozen 0\n", true)] {
            fs::write(&events, text).unwrap();
            assert_eq!(is_populated(dir.path()), expected);
        }
        fs::remove_file(&events).unwrap();
        fs::create_dir(&events).unwrap();
        assert!(is_populated(dir.path()), "reading the file fails");
    }

    #[test]
    fn process_is_in_a_cgroup_by_its_whole_path() {
        let text = "4:memory:/a\n1:name=systemd:/gpulease.slice/x.scope\n0::/gpulease.slice/x.scope/below\n";
        for cgroup in ["/gpulease.slice/x.scope", "/gpulease.slice", "/a", "/gpulease.slice/x.scope/below"] {
            assert!(contains(cgroup, text), "{cgroup}");
        }
        for cgroup in ["/gpulease.slice/x", "/x.scope", "/", "", "/gpulease.slice/x.scope2", "/b"] {
            assert!(!contains(cgroup, text), "{cgroup}");
        }
    }

    #[test]
    fn path_outside_of_the_hierarchies_has_no_processes() {
        for cgroup in ["", "/", "/..", "/../../proc", "/no-such.slice/no-such.scope", "relative"] {
            assert_eq!(processes(cgroup), None, "{cgroup}");
            assert_eq!(children(cgroup), [] as [&str; 0], "{cgroup}");
        }
    }

    /// Fault: a chain of processes, each of which starts the next one and ends, made gpushd read the
    /// cgroup after each of them.
    #[test]
    fn pauses_grow_while_processes_end_soon() {
        let mut pauses = Pauses::default();
        let mut after = |ms| pauses.after(Duration::from_millis(ms)).map(|pause| pause.as_millis());
        assert_eq!([after(0), after(99), after(1)], [Some(5), Some(10), Some(20)]);
        assert_eq!([after(100), after(0), after(0)], [None, Some(5), Some(10)]);
        let longest = (0..20).map(|_| after(0)).last();
        assert_eq!(longest, Some(Some(1000)));
    }

    #[tokio::test]
    async fn cgroup_is_emptied_by_the_end_of_its_last_process() {
        let mounts = ["/sys/fs/cgroup/unified", "/sys/fs/cgroup"];
        let Some(mount) = mounts.iter().map(Path::new).find(|mount| mount.join("cgroup.procs").is_file()) else {
            return println!("SKIPPED the processes of a cgroup: no hierarchy is mounted");
        };
        let name = format!("/gpush-test-members-{}", std::process::id());
        let dir = mount.join(&name[1..]);
        if fs::create_dir(&dir).and_then(|()| fs::create_dir(dir.join("below"))).is_err() {
            return println!("SKIPPED the processes of a cgroup: none can be created");
        }
        assert_eq!(processes(&name), Some(Vec::new()));
        let start = || std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let (mut first, mut second) = (start(), start());
        fs::write(dir.join("cgroup.procs"), first.id().to_string()).unwrap();
        fs::write(dir.join("below/cgroup.procs"), second.id().to_string()).unwrap();
        let mut both = vec![first.id(), second.id()];
        both.sort_unstable();
        assert_eq!(processes(&name), Some(both));
        assert_eq!(children(&name), [format!("{name}/below")]);
        let waiting = tokio::spawn(async move { wait_until_empty(&name).await });
        first.kill().unwrap();
        first.wait().unwrap();
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished(), "the second process is still there");
        second.kill().unwrap();
        second.wait().unwrap();
        waiting.await.unwrap();
        fs::remove_dir(dir.join("below")).and_then(|()| fs::remove_dir(&dir)).unwrap();
    }
}
