//! The lease of a process, and how certain it is.

use gpush_api::LeaseId;

use super::{FactName, Unreadable};

/// To which lease a process belongs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attribution {
    /// The process belongs to this lease.
    Lease {
        /// The lease.
        id: LeaseId,
        /// What identifies the lease.
        evidence: Evidence,
        /// Leases of earlier runs of the same Slurm job, to which the process may belong: all runs have the same cgroup.
        earlier_runs: Vec<LeaseId>,
    },
    /// The process may belong to one of these leases; the list is not empty. Each of them keeps its capacity until the process ends.
    Perhaps {
        /// The leases, the oldest first.
        leases: Vec<LeaseId>,
        /// Why the lease is not certain.
        doubt: Doubt,
    },
    /// A fact cannot be read. The process may belong to one of these leases, or to none.
    Unknown {
        /// The leases, the oldest first.
        leases: Vec<LeaseId>,
        /// The fact.
        unreadable: Unreadable,
    },
    /// The process belongs to no lease.
    NoLease,
}

/// What identifies the lease of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Evidence {
    /// The process is in the scope of the lease.
    Scope,
    /// The process is in the cgroup of the Slurm job.
    Job,
    /// The environment of the process names the lease.
    Environment,
    /// The process named the lease before it executed its present program, or an ancestor of the same user names it. The
    /// program may have removed the name on purpose, so gpushd does not end the process.
    Inherited,
    /// The process is in the login session, service or container to which the lease is bound.
    Cgroup,
}

/// Why the lease of a process is not certain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Doubt {
    /// Nothing identifies a lease.
    NoEvidence,
    /// The process has overwritten its environment, which may have named a lease.
    Overwritten,
    /// Several leases are bound to the cgroup of the process.
    SeveralLeases,
    /// The process is in the cgroup of a Slurm job, and jobs of several clusters or nodes have this job id.
    SeveralJobs,
    /// The process is in the cgroup of a Slurm job, and a later run of this job has a lease on another device.
    LaterRun,
    /// The environment names the lease of a Slurm job, but the process is outside the cgroup of the job.
    NamesJob,
    /// The process is outside the cgroup of the Slurm job.
    OutsideJob,
    /// The scope or the job of the process belongs to a lease on another device, or its environment names such a lease.
    OtherDevice {
        /// Whether the process or an ancestor names the lease on the device that the process uses.
        is_named: bool,
    },
    /// The process is in the cgroup of the lease, but belongs to another user.
    OtherUser,
}

/// Whether a process belongs to a given lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseMatch<'a> {
    /// It belongs to this lease. Only such a process may be ended together with the lease.
    This,
    /// It may belong to this lease, or it belongs to this lease but must not be ended together with it.
    PerhapsThis,
    /// A fact cannot be read. It may belong to this lease.
    Unread(&'a Unreadable),
    /// It does not belong to this lease.
    Another,
}

impl Attribution {
    pub(super) fn lease(id: LeaseId, evidence: Evidence) -> Self {
        Self::Lease { id, evidence, earlier_runs: Vec::new() }
    }

    pub(super) fn perhaps(id: LeaseId, doubt: Doubt) -> Self {
        Self::Perhaps { leases: vec![id], doubt }
    }

    /// Returns the answer if a fact cannot be read. If there is no lease to which the process may belong, the fact does
    /// not matter.
    pub(super) fn unknown(leases: Vec<LeaseId>, unreadable: Unreadable) -> Self {
        if leases.is_empty() { Self::NoLease } else { Self::Unknown { leases, unreadable } }
    }

    /// Returns whether the process belongs to a lease.
    #[must_use]
    pub fn matches(&self, lease: LeaseId) -> LeaseMatch<'_> {
        match self {
            Self::Lease { id, evidence, .. } if *id == lease => match evidence {
                Evidence::Scope | Evidence::Job | Evidence::Environment | Evidence::Cgroup => LeaseMatch::This,
                Evidence::Inherited => LeaseMatch::PerhapsThis,
            },
            Self::Lease { earlier_runs: leases, .. } | Self::Perhaps { leases, .. } if leases.contains(&lease) => {
                LeaseMatch::PerhapsThis
            }
            Self::Unknown { leases, unreadable } if leases.contains(&lease) => LeaseMatch::Unread(unreadable),
            Self::Lease { .. } | Self::Perhaps { .. } | Self::Unknown { .. } | Self::NoLease => LeaseMatch::Another,
        }
    }

    /// Returns the lease to show with the process, and whether it is only a guess. Several leases are shown as the oldest
    /// of them. Returns `None` if the user of the process cannot be read.
    #[must_use]
    pub fn shown(&self) -> Option<(LeaseId, bool)> {
        match self {
            Self::Lease { id, .. } => Some((*id, false)),
            Self::Unknown { unreadable: Unreadable { fact: FactName::User, .. }, .. } | Self::NoLease => None,
            Self::Perhaps { leases, .. } | Self::Unknown { leases, .. } => Some((*leases.first()?, true)),
        }
    }

    /// Returns whether the cgroup or the environment of the process identifies a lease of its user on the device that it
    /// uses, even if this is not certain.
    #[must_use]
    pub fn is_identified(&self) -> bool {
        match self {
            Self::Lease { .. } => true,
            Self::Perhaps { doubt, .. } => match doubt {
                Doubt::SeveralJobs | Doubt::LaterRun | Doubt::NamesJob | Doubt::OtherDevice { is_named: true } => true,
                Doubt::NoEvidence
                | Doubt::Overwritten
                | Doubt::SeveralLeases
                | Doubt::OutsideJob
                | Doubt::OtherDevice { is_named: false }
                | Doubt::OtherUser => false,
            },
            Self::Unknown { .. } | Self::NoLease => false,
        }
    }
}
