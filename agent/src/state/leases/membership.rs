//! Finds the lease of a process by its cgroup.
//!
//! ```text
//! the scope of a lease, the cgroup of a Slurm job ─► certain: all processes there belong to the lease
//! a login session, a service, a container ─────────► shared: processes there may belong to other leases, which their
//!                                                    environment then names
//! ```

use std::collections::BTreeSet;

use gpush_api::{LeaseBinding, LeaseId};
use gpush_host::cgroup;

use super::{LeaseTable, OpenLease};

/// The leases whose cgroup contains a process, the oldest first.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct CgroupLeases {
    certain: Vec<LeaseId>,
    shared: Vec<LeaseId>,
}

impl CgroupLeases {
    /// Returns the lease that the process belongs to, even if its environment names another lease.
    pub(crate) fn certain(&self) -> Option<LeaseId> {
        only(&self.certain)
    }

    /// Returns the lease that the process belongs to if its environment names no lease of its user.
    pub(crate) fn likely(&self) -> Option<LeaseId> {
        only(if self.certain.is_empty() { &self.shared } else { &self.certain })
    }

    /// Returns the oldest lease.
    pub(crate) fn oldest(&self) -> Option<LeaseId> {
        self.certain.first().or(self.shared.first()).copied()
    }
}

fn only(leases: &[LeaseId]) -> Option<LeaseId> {
    match leases {
        [only] => Some(*only),
        _ => None,
    }
}

impl OpenLease {
    /// Returns whether all processes in the cgroup of the lease belong to the lease.
    fn owns_its_cgroup(&self) -> bool {
        match self.record.binding {
            LeaseBinding::Scope { .. } | LeaseBinding::Job { .. } => true,
            LeaseBinding::Cgroup { .. } | LeaseBinding::Process { .. } | LeaseBinding::Time | LeaseBinding::None => {
                false
            }
        }
    }

    /// Returns whether the cgroup of a Slurm job may belong to this lease's job, according to the path of the cgroup. A
    /// path without a node fits the jobs of all clusters and nodes of the host.
    pub(crate) fn fits_job(&self, found: &cgroup::SlurmJob) -> bool {
        let LeaseBinding::Job { job, node, .. } = &self.record.binding else { return false };
        u64::from(*job) == found.id
            && found.node.as_ref().is_none_or(|found| node.is_empty() || found == node)
            && found.uid.is_none_or(|uid| uid == self.record.holder.uid)
    }
}

impl LeaseTable {
    /// Returns which of the leases in `among` have a cgroup that contains a given process. `cgroups` is the text of
    /// this process's `/proc/PID/cgroup`.
    pub(crate) fn by_cgroup(&self, among: &[LeaseId], cgroups: &str) -> CgroupLeases {
        let leases = self.holding().filter(|lease| among.contains(&lease.id()));
        let bound = leases.filter(|lease| lease.cgroup().is_some_and(|cgroup| cgroup::contains(cgroup, cgroups)));
        let mut found = CgroupLeases::default();
        for lease in bound {
            let list = if lease.owns_its_cgroup() { &mut found.certain } else { &mut found.shared };
            list.push(lease.id());
        }
        found
    }

    /// Returns whether several jobs, of different clusters or nodes, have the job id that is in the
    /// path of this cgroup. If so, the path does not identify the job.
    pub(crate) fn is_ambiguous(&self, found: &cgroup::SlurmJob, uid: u32) -> bool {
        let place = |lease: &OpenLease| match &lease.record.binding {
            LeaseBinding::Job { cluster, node, .. } if lease.fits_job(found) && lease.record.holder.uid == uid => {
                Some((cluster.clone(), node.clone()))
            }
            _ => None,
        };
        let places: BTreeSet<(String, String)> = self.holding().filter_map(place).collect();
        places.len() > 1
    }
}
