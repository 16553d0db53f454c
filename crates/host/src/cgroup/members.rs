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

use gpush_core::attribution::is_at_or_below;

use super::{
    MOUNTS,
    walk::{MOST_CGROUPS, Members, directories, existing, exists, members_of},
};
use crate::{pidfd::Awaited, subtask};

/// First and longest pause before a cgroup is read again. Used if no process in the cgroup can be
/// awaited, or the awaited process ended soon.
const PAUSE: (Duration, Duration) = (Duration::from_millis(5), Duration::from_secs(1));

/// Minimum duration of a wait after which no pause is needed.
const LONG: Duration = Duration::from_millis(100);

/// Returns whether a process is in a cgroup or below it, from the text of its `/proc/PID/cgroup`.
#[must_use]
pub fn contains(cgroup: &str, cgroups: &str) -> bool {
    let paths = cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    paths.into_iter().any(|path| is_at_or_below(path, cgroup))
}

/// Returns whether a process is in this cgroup itself, not in a cgroup below it. `cgroups` is the text of its
/// `/proc/PID/cgroup`.
#[must_use]
pub fn is_at(cgroup: &str, cgroups: &str) -> bool {
    let paths = || cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2));
    let is_below = |path: &str| path.strip_prefix(cgroup).is_some_and(|rest| rest.starts_with('/'));
    paths().any(|path| path == cgroup) && !paths().any(is_below)
}

/// Returns the processes in a cgroup and below it; `None` when there is no such cgroup. Omits processes
/// that gpushd cannot see. Blocks, so call it on a blocking thread.
#[must_use]
pub fn processes(cgroup: &str) -> Option<Members> {
    let dir = match directory(cgroup) {
        Ok(dir) => dir?,
        Err(error) => return Some(Members { pids: Vec::new(), error: Some(error) }),
    };
    let mut found = members_of(&dir);
    // If a process moved from one child cgroup to another during the walk, the walk may have missed the process in
    // both. So walk again.
    if found.is_empty() && is_populated(&dir) {
        found = members_of(&dir);
    }
    let is_gone = found.is_empty() && matches!(exists(&dir), Ok(false));
    (!is_gone).then_some(found)
}

/// Waits until no process is in a cgroup or below it, or until the cgroup no longer exists.
///
/// Waits for one process at a time, so the wait uses no CPU time while the processes run. If each
/// process soon starts the next one and ends, the wait pauses between the reads.
pub async fn wait_until_empty(cgroup: &str) {
    let (mut pauses, mut pause, mut is_logged) = (Pauses::default(), None, false);
    loop {
        let Some(found) = remaining(cgroup).await else { return };
        if let Some(error) = &found.error
            && !std::mem::replace(&mut is_logged, true)
        {
            tracing::warn!("cannot read all processes of cgroup {cgroup}, so gpushd treats it as in use: {error}");
        }
        if let Some(pause) = pause.take() {
            tokio::time::sleep(pause).await;
            continue;
        }
        let begun = Instant::now();
        for pid in found.pids {
            match Awaited::open(pid) {
                Ok(Some(process)) if !process.has_ended() => {
                    process.wait_until_ended().await;
                    break;
                }
                Ok(_) => {}
                // No other process can be awaited either.
                Err(_) => break,
            }
        }
        // gpushd cannot wait for zombies or for processes that it cannot see. If there is no other process, only this
        // pause limits how often gpushd reads the cgroup.
        pause = pauses.after(begun.elapsed());
    }
}

/// Returns the processes that are in a cgroup and below it; `None` if no process can be there. Reads the cgroup on a
/// blocking thread.
async fn remaining(cgroup: &str) -> Option<Members> {
    let cgroup = cgroup.to_owned();
    let read = subtask::blocking(move || {
        let found = processes(&cgroup)?;
        // The kernel also reports processes that gpushd cannot see.
        let is_populated = || directory(&cgroup).map_or(true, |dir| dir.is_some_and(|dir| is_populated(&dir)));
        let is_left = !found.is_empty() || is_populated();
        is_left.then_some(found)
    });
    // A walk that did not end shows nothing about the cgroup.
    let stopping = || Some(Members { pids: Vec::new(), error: Some(io::Error::other("gpushd is stopping")) });
    read.await.unwrap_or_else(stopping)
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

/// Returns the paths of the cgroups directly below a cgroup; empty when that cgroup does not exist. Blocks, so call it on
/// a blocking thread.
///
/// # Errors
/// The cgroup cannot be read, or has more than [`MOST_CGROUPS`] children.
pub fn children(cgroup: &str) -> io::Result<Vec<String>> {
    let Some(dir) = directory(cgroup)? else { return Ok(Vec::new()) };
    let found = directories(&dir, MOST_CGROUPS)?;
    let path = |child: &PathBuf| Some(format!("{cgroup}/{}", child.file_name()?.to_str()?));
    let mut paths: Vec<String> = found.iter().filter_map(path).collect();
    paths.sort_unstable();
    Ok(paths)
}

/// Returns whether the kernel reports processes in a cgroup of the unified hierarchy or below it. If the cgroup exists
/// but cannot be read, for example because gpushd has no free file descriptor, it counts as populated.
fn is_populated(dir: &Path) -> bool {
    match existing(fs::read_to_string(dir.join("cgroup.events"))) {
        Ok(text) => text.is_some_and(|text| text.lines().any(|line| line == "populated 1")),
        Err(_) => true,
    }
}

/// Returns the directory of a cgroup; `None` if there is no such cgroup.
///
/// # Errors
/// The directory cannot be looked up.
fn directory(cgroup: &str) -> io::Result<Option<PathBuf>> {
    let Some(below) = cgroup.strip_prefix('/').map(Path::new) else { return Ok(None) };
    let is_plain = below.components().all(|part| matches!(part, Component::Normal(_)));
    if below.as_os_str().is_empty() || !is_plain {
        return Ok(None);
    }
    let first = ["unified", "", "systemd"].iter().map(|name| Path::new(MOUNTS).join(name));
    for mount in first {
        if exists(&mount.join(below).join("cgroup.procs"))? {
            return Ok(Some(mount.join(below)));
        }
    }
    for mount in directories(Path::new(MOUNTS), MOST_CGROUPS)? {
        if exists(&mount.join(below).join("cgroup.procs"))? {
            return Ok(Some(mount.join(below)));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A batch system runs jobs in cgroups below the cgroup of its service.
    #[test]
    fn process_below_a_cgroup_is_not_at_it() {
        let service = "/system.slice/batch.service";
        assert!(is_at(service, &format!("0::{service}\n")));
        assert!(is_at(service, &format!("4:memory:/\n1:name=systemd:{service}\n")));
        for text in [format!("0::{service}/slot1\n"), format!("4:memory:{service}/slot1\n1:name=systemd:{service}\n")] {
            assert!(contains(service, &text) && !is_at(service, &text), "{text}");
        }
    }

    /// Fault: without a free file descriptor, gpushd read a cgroup as empty, and ended the lease of the cgroup while
    /// the processes of the lease ran.
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
            assert!(processes(cgroup).is_none(), "{cgroup}");
            assert_eq!(children(cgroup).unwrap(), [] as [&str; 0], "{cgroup}");
        }
    }

    /// Fault: if each process in a cgroup soon started the next one and ended, gpushd read the cgroup after each of
    /// them without a pause.
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
        let found = |name: &str| processes(name).filter(|found| found.error.is_none()).map(|found| found.pids);
        assert_eq!(found(&name), Some(Vec::new()));
        let start = || std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let (mut first, mut second) = (start(), start());
        fs::write(dir.join("cgroup.procs"), first.id().to_string()).unwrap();
        fs::write(dir.join("below/cgroup.procs"), second.id().to_string()).unwrap();
        let mut both = vec![first.id(), second.id()];
        both.sort_unstable();
        assert_eq!(found(&name), Some(both));
        assert_eq!(children(&name).unwrap(), [format!("{name}/below")]);
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
