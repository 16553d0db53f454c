//! Reads every process of a listing, and the processes that start meanwhile.
//!
//! A process can start another process and end after the listing and before gpushd reads it. The listing does not have
//! the new process. So if a process ended before it was read, the scan lists again, and reads the processes that are
//! new in the listing. An ended process starts no more processes, so the scan is complete when a pass reads every new
//! process.

use std::{cell::Cell, collections::BTreeSet, fmt, io};

/// Maximum number of listings of one scan.
const MOST_PASSES: usize = 32;

/// What a scan finds out about a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Reading<T> {
    /// The scan looks for this process.
    Found(T),
    /// The scan does not look for this process.
    Other,
    /// The process ended before it was read.
    Ended,
}

/// Why a scan may have missed a process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Incomplete {
    /// A process or the listing cannot be read.
    Unread(String),
    /// In each pass, a process ended before it was read.
    Churn,
}

impl fmt::Display for Incomplete {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unread(why) => f.write_str(why),
            Self::Churn => f.write_str("processes started and ended while gpushd listed them"),
        }
    }
}

/// Applies `read` to each process that `list` visits, and repeats this until no process can be missing. Returns the
/// results, and why the scan may have missed a process. After an error, the scan still reads the other processes.
pub(super) fn scan<T>(
    list: impl Fn(&mut dyn FnMut(u32)) -> io::Result<()>,
    read: impl Fn(u32) -> io::Result<Reading<T>>,
) -> (Vec<T>, Option<Incomplete>) {
    let unread = |error: io::Error| Incomplete::Unread(error.to_string());
    let (mut found, mut unknown, mut known) = (Vec::new(), None, BTreeSet::new());
    for _ in 0..MOST_PASSES {
        let mut has_ended = false;
        let mut visit = |pid: u32| {
            if !known.insert(pid) {
                return;
            }
            match read(pid) {
                Ok(Reading::Found(one)) => found.push(one),
                Ok(Reading::Other) => {}
                Ok(Reading::Ended) => has_ended = true,
                Err(error) => drop(unknown.get_or_insert_with(|| unread(error))),
            }
        };
        if let Err(error) = list(&mut visit) {
            return (found, Some(unread(error)));
        }
        if !has_ended {
            return (found, unknown);
        }
    }
    (found, unknown.or(Some(Incomplete::Churn)))
}

/// Scans the processes of a Slurm job. `in_cgroups` returns the processes in the job's cgroups, or `None` if they are
/// not known. The scan then reads every process that `all` lists.
///
/// If the scan read only the cgroups of the job, returns [`Incomplete::Unread`] instead of [`Incomplete::Churn`],
/// because only the job itself starts processes there.
pub(super) fn scan_job<T>(
    in_cgroups: impl Fn() -> Option<Vec<u32>>,
    all: impl Fn(&mut dyn FnMut(u32)) -> io::Result<()>,
    read: impl Fn(u32) -> io::Result<Reading<T>>,
) -> (Vec<T>, Option<Incomplete>) {
    let has_listed_all = Cell::new(false);
    let list = |visit: &mut dyn FnMut(u32)| {
        let Some(pids) = in_cgroups() else {
            has_listed_all.set(true);
            return all(visit);
        };
        pids.into_iter().for_each(visit);
        Ok(())
    };
    let (found, unknown) = scan(list, read);
    let unknown = unknown.map(|why| match why {
        Incomplete::Churn if !has_listed_all.get() => Incomplete::Unread(why.to_string()),
        Incomplete::Churn | Incomplete::Unread(_) => why,
    });
    (found, unknown)
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use nix::libc;

    use super::*;

    /// Lists these processes.
    fn listing(pids: impl Fn() -> Vec<u32>) -> impl Fn(&mut dyn FnMut(u32)) -> io::Result<()> {
        move |visit| {
            pids().into_iter().for_each(visit);
            Ok(())
        }
    }

    fn too_many_files() -> io::Error {
        io::Error::from_raw_os_error(libc::EMFILE)
    }

    #[test]
    fn processes_after_one_that_cannot_be_read_are_still_read() {
        let read = |pid: u32| match pid {
            1 => Ok(Reading::Other),
            2 => Err(too_many_files()),
            _ => Ok(Reading::Found(pid)),
        };
        assert_eq!(scan(listing(|| vec![1, 3, 4]), read), (vec![3, 4], None));
        let unread = || Some(Incomplete::Unread(too_many_files().to_string()));
        assert_eq!(scan(listing(|| vec![1, 2, 3]), read), (vec![3], unread()));
        assert_eq!(scan(|_: &mut dyn FnMut(u32)| Err(too_many_files()), read), (vec![], unread()));
    }

    /// Fault: to become a daemon, the command of a lease started a second process, the second one started a third, and
    /// the first two ended. gpushd listed the second process, read it after its end, did not find the third process,
    /// and ended the lease.
    #[test]
    fn process_that_started_during_the_scan_is_found() {
        // Each process up to 12 starts the next one and ends just before it is read.
        let alive = RefCell::new(vec![1, 10]);
        let read = |pid: u32| match pid {
            10..12 => {
                *alive.borrow_mut() = vec![1, pid + 1];
                Ok(Reading::Ended)
            }
            12 => Ok(Reading::Found(pid)),
            _ => Ok(Reading::Other),
        };
        assert_eq!(scan(listing(|| alive.borrow().clone()), read), (vec![12], None));
    }

    #[test]
    fn endless_chain_of_processes_makes_the_scan_incomplete() {
        let next = RefCell::new(10);
        let read = |pid: u32| {
            *next.borrow_mut() = pid + 1;
            Ok(Reading::<u32>::Ended)
        };
        assert_eq!(scan(listing(|| vec![*next.borrow()]), read), (vec![], Some(Incomplete::Churn)));
    }

    /// Fault: if gpushd had to read all processes of the host, a user who started short-lived processes during Epilog
    /// drained the node.
    #[test]
    fn churn_in_the_cgroup_of_a_job_is_the_jobs_own() {
        let next = RefCell::new(10);
        let read = |pid: u32| match pid {
            7 => Ok(Reading::Found(pid)),
            _ => {
                *next.borrow_mut() = pid + 1;
                Ok(Reading::Ended)
            }
        };
        let churning = || vec![7, *next.borrow()];
        let none = |_: &mut dyn FnMut(u32)| Ok(());
        assert_eq!(scan_job(|| None, listing(churning), read), (vec![7], Some(Incomplete::Churn)));
        let (found, unknown) = scan_job(|| Some(churning()), none, read);
        assert_eq!(found, [7]);
        assert!(matches!(unknown, Some(Incomplete::Unread(why)) if why.contains("started and ended")));
        assert_eq!(scan_job(|| Some(vec![7]), none, read), (vec![7], None));
    }

    #[test]
    fn process_that_has_ended_for_long_is_read_once() {
        let reads = RefCell::new(Vec::new());
        let read = |pid: u32| {
            reads.borrow_mut().push(pid);
            Ok(if pid == 7 { Reading::Ended } else { Reading::Found(pid) })
        };
        assert_eq!(scan(listing(|| vec![7, 8]), read), (vec![8], None));
        assert_eq!(*reads.borrow(), [7, 8]);
    }
}
