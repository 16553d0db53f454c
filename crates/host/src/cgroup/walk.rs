//! Walks through trees of cgroups.
//!
//! A walk reads at most [`MOST_CGROUPS`] cgroups and [`MOST_PROCESSES`] pids. A walk that exceeds a limit, or cannot read
//! a cgroup, reports the processes that it found and the error. An error never means that a cgroup is empty: only a
//! cgroup that does not exist has no processes.

use std::{
    fs::{self, File},
    io::{self, BufRead, BufReader},
    path::{Path, PathBuf},
};

/// Maximum depth below the cgroup that is read.
const DEPTH: usize = 32;

/// Maximum number of cgroups that one walk reads.
pub(super) const MOST_CGROUPS: usize = 4096;

/// Maximum number of pids that one walk reads.
const MOST_PROCESSES: usize = 1 << 16;

/// The processes that a walk found in a cgroup and below it.
#[derive(Debug, Default)]
pub struct Members {
    /// The pids, sorted.
    pub pids: Vec<u32>,
    /// Why other processes may be in the cgroup; `None` if the walk was complete.
    pub error: Option<io::Error>,
}

impl Members {
    /// Returns whether the cgroup certainly has no process.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pids.is_empty() && self.error.is_none()
    }
}

/// Returns the processes in the cgroup of a directory and below it.
pub(super) fn members_of(dir: &Path) -> Members {
    Walk::default().members_of(dir)
}

/// Returns the directories directly below a directory; none if there is no such directory.
///
/// # Errors
/// The directory cannot be read, or contains more than `most` directories.
pub(super) fn directories(dir: &Path, most: usize) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in existing(fs::read_dir(dir))?.into_iter().flatten() {
        let Some(entry) = existing(entry)? else { break };
        let Some(kind) = existing(entry.file_type())? else { continue };
        if kind.is_dir() {
            if found.len() == most {
                return Err(too_many("cgroups", most));
            }
            found.push(entry.path());
        }
    }
    Ok(found)
}

/// Converts the error of a missing cgroup to `None`.
pub(super) fn existing<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // The cgroup was removed after its file was opened.
        Err(error) if error.raw_os_error() == Some(nix::libc::ENODEV) => Ok(None),
        Err(error) => Err(error),
    }
}

pub(super) fn exists(path: &Path) -> io::Result<bool> {
    existing(fs::metadata(path)).map(|meta| meta.is_some())
}

fn too_many(what: &str, most: usize) -> io::Error {
    io::Error::other(format!("the cgroup has more than {most} {what}"))
}

/// A walk through a tree of cgroups.
#[derive(Debug)]
pub(super) struct Walk {
    pub(super) pids: Vec<u32>,
    cgroups: usize,
    most_cgroups: usize,
    most_processes: usize,
}

impl Default for Walk {
    fn default() -> Self {
        Self { pids: Vec::new(), cgroups: 0, most_cgroups: MOST_CGROUPS, most_processes: MOST_PROCESSES }
    }
}

impl Walk {
    fn members_of(mut self, dir: &Path) -> Members {
        let error = self.collect(dir, DEPTH).err();
        self.pids.sort_unstable();
        self.pids.dedup();
        Members { pids: self.pids, error }
    }

    /// Adds the pids in the cgroup of a directory and below it. Adds none if there is no such directory.
    ///
    /// # Errors
    /// A cgroup cannot be read, or the walk exceeds [`MOST_CGROUPS`] or [`MOST_PROCESSES`].
    pub(super) fn collect_all(&mut self, dir: &Path) -> io::Result<()> {
        self.collect(dir, DEPTH)
    }

    fn collect(&mut self, dir: &Path, depth: usize) -> io::Result<()> {
        if self.cgroups == self.most_cgroups {
            return Err(too_many("cgroups", self.most_cgroups));
        }
        self.cgroups += 1;
        self.collect_pids(dir)?;
        let children = directories(dir, self.most_cgroups)?;
        if depth == 0 && !children.is_empty() {
            return Err(io::Error::other(format!("the cgroup has more than {DEPTH} levels")));
        }
        children.iter().try_for_each(|child| self.collect(child, depth - 1))
    }

    fn collect_pids(&mut self, dir: &Path) -> io::Result<()> {
        let Some(file) = existing(File::open(dir.join("cgroup.procs")))? else { return Ok(()) };
        for line in BufReader::new(file).lines() {
            let line = match line {
                // Ignore this error: the cgroup is threaded. The list of the cgroup above it also contains its
                // processes.
                Err(error) if error.raw_os_error() == Some(nix::libc::EOPNOTSUPP) && self.cgroups > 1 => return Ok(()),
                other => existing(other)?,
            };
            let Some(line) = line else { return Ok(()) };
            // 0 stands for a process outside of gpushd's pid namespace.
            self.pids.extend(line.parse::<u32>().ok().filter(|pid| *pid > 0));
            if self.pids.len() > self.most_processes {
                self.pids.truncate(self.most_processes);
                return Err(too_many("processes", self.most_processes));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Creates a cgroup with these pids in a directory.
    fn create(dir: &Path, pids: impl Iterator<Item = usize>) {
        fs::create_dir_all(dir).unwrap();
        fs::write(dir.join("cgroup.procs"), pids.map(|pid| format!("{pid}\n")).collect::<String>()).unwrap();
    }

    /// Fault: if a cgroup below the cgroup of a lease could not be read, the lease ended while its processes ran.
    #[test]
    fn cgroup_below_that_cannot_be_read_is_not_empty() {
        let dir = tempfile::tempdir().unwrap();
        create(dir.path(), 7..8);
        create(&dir.path().join("a"), 9..10);
        let found = members_of(dir.path());
        assert_eq!((found.pids, found.error.is_none()), (vec![7, 9], true));
        fs::create_dir_all(dir.path().join("b/cgroup.procs")).unwrap();
        let found = members_of(dir.path());
        assert!(found.pids.contains(&7) && found.error.is_some());
        create(dir.path(), 0..0);
        create(&dir.path().join("a"), 0..0);
        assert!(!members_of(dir.path()).is_empty());
        fs::remove_dir_all(dir.path().join("b")).unwrap();
        assert!(members_of(dir.path()).is_empty());
    }

    #[test]
    fn walk_beyond_its_limits_is_incomplete() {
        const MOST: usize = 8;
        let walk = |dir: &Path| Walk { most_cgroups: MOST, most_processes: MOST, ..Walk::default() }.members_of(dir);
        let dir = tempfile::tempdir().unwrap();
        create(dir.path(), 1..MOST + 1);
        assert_eq!((walk(dir.path()).pids.len(), walk(dir.path()).error.is_none()), (MOST, true));
        create(&dir.path().join("below"), 100..101);
        let found = walk(dir.path());
        assert_eq!(found.pids.len(), MOST, "the processes that were found are known");
        assert_eq!(found.error.unwrap().to_string(), "the cgroup has more than 8 processes");

        let dir = tempfile::tempdir().unwrap();
        (1..MOST).for_each(|number| create(&dir.path().join(number.to_string()), 0..0));
        assert!(walk(dir.path()).is_empty());
        create(&dir.path().join("1/below"), 0..0);
        let found = walk(dir.path());
        assert!(!found.is_empty());
        assert_eq!(found.error.unwrap().to_string(), "the cgroup has more than 8 cgroups");

        let dir = tempfile::tempdir().unwrap();
        let deepest: PathBuf = (0..DEPTH).map(|_| "x").collect();
        create(&dir.path().join(&deepest), 7..8);
        let found = members_of(dir.path());
        assert_eq!((found.pids, found.error.is_none()), (vec![7], true));
        create(&dir.path().join(&deepest).join("x"), 0..0);
        assert_eq!(members_of(dir.path()).error.unwrap().to_string(), "the cgroup has more than 32 levels");
    }
}
