//! The facts about a process that decide to which lease it belongs.

use std::fmt;

use gpush_api::LeaseId;

use super::Cgroups;

/// A fact about a process, or why it cannot be read.
pub type Fact<T> = Result<T, Unreadable>;

/// A fact that cannot be read, for example because of too many open files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unreadable {
    /// The fact.
    pub fact: FactName,
    /// Why it cannot be read.
    pub why: String,
}

/// The name of a fact.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FactName {
    /// The user of the process.
    User,
    /// The cgroups of the process.
    Cgroups,
    /// The environment of the process. The owner of the process can prevent gpushd from reading it.
    Environment,
}

impl fmt::Display for Unreadable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.why)
    }
}

/// The lease that the environment of a process names, if it is one of the accepted leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NamedLease {
    /// The environment names this lease, or named it before the process overwrote its environment.
    Named(LeaseId),
    /// The environment names no accepted lease.
    None,
    /// The process has overwritten or hidden its environment. It may have named a lease.
    Overwritten,
}

/// The facts about one process.
///
/// The facts are methods, and not fields, because the environment is expensive to read: it can be large, and the memory
/// of the process can be swapped out. [`super::attribute`] asks for a fact only if the fact can change the answer.
pub trait Facts {
    /// Returns the effective uid of the process.
    ///
    /// # Errors
    /// The uid cannot be read.
    fn uid(&self) -> Fact<u32>;

    /// Returns the cgroups of the process.
    ///
    /// # Errors
    /// The cgroups cannot be read.
    fn cgroups(&self) -> Fact<Cgroups>;

    /// Returns the lease that the process names in its own environment. `accepts` returns whether a lease can be the
    /// answer. If one of the uids of the process is another user's, the process names no lease.
    ///
    /// # Errors
    /// The environment cannot be read. An environment that the process has overwritten is not an error.
    fn named_lease(&self, accepts: &dyn Fn(LeaseId) -> bool) -> Fact<NamedLease>;

    /// Returns the lease that the process named before it executed its present program, or that an ancestor of the same
    /// user names or named. `accepts` returns whether a lease can be the answer.
    ///
    /// # Errors
    /// The environment of an ancestor cannot be read.
    fn inherited_lease(&self, accepts: &dyn Fn(LeaseId) -> bool) -> Fact<Option<LeaseId>>;
}
