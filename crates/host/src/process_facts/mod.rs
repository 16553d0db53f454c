//! The facts about a process that decide to which lease it belongs ([`gpush_core::attribution`]).
//!
//! ```text
//! start, program, uids ──► the decision reads cgroups and environment, if it needs them ──► start again
//!       ▲                                                                               │ same: the answer
//!       └───────────────── another process has the pid now ◄────────────────────────────┘
//! ```
//!
//! The uids and the cgroups are read once, so one decision never mixes two readings of them. The environment is read again
//! while the process executes a program.

mod lease_names;

use std::{cell::OnceCell, io};

use gpush_api::LeaseId;
use gpush_core::attribution::{Cgroups, Fact, FactName, Facts, NamedLease, Unreadable};

pub use self::lease_names::{EnvironmentName, LeaseNames};
use crate::{
    cgroup::{CgroupKind, Membership},
    proc::{self, ProcessReading},
};

/// Maximum number of attempts if the pid gets a new process each time.
const ATTEMPTS: u32 = 8;

/// The facts about one process. Blocks while it reads them, so use it on a blocking thread.
#[derive(Debug)]
pub struct ProcessFacts<'a> {
    names: &'a LeaseNames,
    pid: u32,
    /// Its start is `None` if the process has ended, but its parent has not waited for it yet.
    reading: ProcessReading,
    /// Real, effective, saved and file system uid.
    uids: [u32; 4],
    /// The text of `/proc/PID/cgroup`, empty if there is none.
    cgroups: OnceCell<Fact<String>>,
    membership: OnceCell<Option<Membership>>,
}

impl<'a> ProcessFacts<'a> {
    /// Calls `decide` with the facts about the process that has this pid. If another process gets the pid meanwhile, decides
    /// again. Returns `None` if there is no such process.
    ///
    /// # Errors
    /// The start or the uids of the process cannot be read, for example because of too many open files. Or the pid
    /// changes its process at each attempt.
    pub fn examine<T>(names: &'a LeaseNames, pid: u32, decide: impl Fn(&Self) -> T) -> io::Result<Option<T>> {
        Self::examine_since(names, pid, proc::try_reading(pid)?, decide)
    }

    /// Does the same as [`Self::examine`]. `first` is what the caller has just read from the process.
    ///
    /// # Errors
    /// As [`Self::examine`].
    pub fn examine_since<T>(
        names: &'a LeaseNames,
        pid: u32,
        first: ProcessReading,
        decide: impl Fn(&Self) -> T,
    ) -> io::Result<Option<T>> {
        let mut reading = first;
        for _ in 0..ATTEMPTS {
            let Some(uids) = proc::try_uids(pid)? else { return Ok(None) };
            let (cgroups, membership) = (OnceCell::new(), OnceCell::new());
            let answer = decide(&Self { names, pid, reading, uids, cgroups, membership });
            let now = proc::try_reading(pid)?;
            // The process may have executed another program. The answer is then about the earlier one.
            if now.start == reading.start {
                return Ok(Some(answer));
            }
            reading = now;
        }
        Err(io::Error::other(format!("pid {pid} belongs to another process at each attempt")))
    }

    /// Returns the effective uid.
    pub fn owner(&self) -> u32 {
        self.uids[1]
    }

    /// Returns the pid.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Returns whether the process has ended, but its parent has not waited for it yet.
    pub fn has_ended(&self) -> bool {
        self.reading.start.is_none()
    }

    /// Returns whether the process executes a program. A process that is ending does not any more.
    pub fn executes_program(&self) -> bool {
        self.reading.image.is_some()
    }

    /// Returns the unit and the Slurm job of the process; `None` if its cgroup cannot be read, or it is in no cgroup.
    pub fn membership(&self) -> Option<&Membership> {
        let text = self.cgroup_text().ok()?;
        self.membership.get_or_init(|| Membership::parse(text)).as_ref()
    }

    /// Returns the kind of the cgroup of the process.
    ///
    /// # Errors
    /// The cgroup cannot be read.
    pub fn cgroup_kind(&self) -> Fact<CgroupKind> {
        Ok(CgroupKind::parse(self.cgroup_text()?))
    }

    /// Returns the lease that the environment of the process names, regardless of the users of the process and of the
    /// lease.
    pub fn environment_name(&self) -> EnvironmentName {
        self.names.name(self.pid).unwrap_or(EnvironmentName::Unknown)
    }

    fn cgroup_text(&self) -> Fact<&str> {
        let read = || match proc::try_cgroups(self.pid) {
            Ok(text) => Ok(text.unwrap_or_default()),
            Err(error) => Err(unreadable(FactName::Cgroups, &error)),
        };
        self.cgroups.get_or_init(read).as_deref().map_err(Clone::clone)
    }

    /// Returns the lease that an ancestor names now or named earlier.
    fn lease_of_ancestor(&self, pid: u32, accepts: &dyn Fn(LeaseId) -> bool) -> io::Result<Option<LeaseId>> {
        // Do not read the environments of ancestors that belong to other users: such a read may hang.
        if proc::try_uids(pid)? != Some([self.owner(); 4]) {
            return Ok(None);
        }
        match self.names.name(pid)? {
            EnvironmentName::Lease(id) if accepts(id) => Ok(Some(id)),
            EnvironmentName::Lease(_) | EnvironmentName::None | EnvironmentName::Unknown => {
                Ok(self.names.remembered(pid, proc::try_start(pid)?).filter(|id| accepts(*id)))
            }
        }
    }

    /// Returns whether all uids of the process are the same. If not, it runs a setuid program, whose environment comes
    /// from another user.
    fn has_one_user(&self) -> bool {
        self.uids == [self.owner(); 4]
    }
}

impl Facts for ProcessFacts<'_> {
    fn uid(&self) -> Fact<u32> {
        Ok(self.owner())
    }

    fn cgroups(&self) -> Fact<Cgroups> {
        let paths = self.cgroup_text()?.lines().filter_map(|line| line.splitn(3, ':').nth(2));
        let paths = paths.map(str::to_owned).collect();
        Ok(Cgroups { paths, slurm_job: self.membership().and_then(|found| found.slurm_job.clone()) })
    }

    fn named_lease(&self, accepts: &dyn Fn(LeaseId) -> bool) -> Fact<NamedLease> {
        if !self.has_one_user() {
            return Ok(NamedLease::None);
        }
        let name = self
            .names
            .settled_name(self.pid, self.reading.image)
            .map_err(|error| unreadable(FactName::Environment, &error))?;
        Ok(match name {
            EnvironmentName::Lease(id) if accepts(id) => {
                self.names.remember_own(self.pid, self.reading.start, id);
                NamedLease::Named(id)
            }
            EnvironmentName::Lease(_) | EnvironmentName::None => NamedLease::None,
            EnvironmentName::Unknown => {
                let before = self.names.remembered_own(self.pid, self.reading.start).filter(|id| accepts(*id));
                before.map_or(NamedLease::Overwritten, NamedLease::Named)
            }
        })
    }

    fn inherited_lease(&self, accepts: &dyn Fn(LeaseId) -> bool) -> Fact<Option<LeaseId>> {
        let own = self.names.remembered(self.pid, self.reading.start).filter(|id| self.has_one_user() && accepts(*id));
        let found = match own {
            Some(own) => Ok(Some(own)),
            None => {
                let lease_of = |pid: io::Result<u32>| pid.and_then(|pid| self.lease_of_ancestor(pid, accepts));
                proc::try_ancestors(self.pid).find_map(|pid| lease_of(pid).transpose()).transpose()
            }
        };
        let found = found.map_err(|error| unreadable(FactName::Environment, &error))?;
        if let Some(id) = found {
            self.names.remember_inherited(self.pid, self.reading.start, id);
        }
        Ok(found)
    }
}

fn unreadable(fact: FactName, error: &io::Error) -> Unreadable {
    Unreadable { fact, why: error.to_string() }
}

#[cfg(test)]
mod tests;
