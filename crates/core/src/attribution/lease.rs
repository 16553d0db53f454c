//! A lease as attribution sees it, and its relation to the device and the cgroups of a process.

use gpush_api::{GpuUuid, LeaseBinding, LeaseId, LeaseMember, MemberShare, TargetUuid};

use super::{Cgroups, Evidence, SlurmJob};

/// A lease that holds capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttributableLease<'a> {
    /// Id.
    pub id: LeaseId,
    /// Uid of the holder.
    pub holder: u32,
    /// What the lease is bound to.
    pub binding: &'a LeaseBinding,
    /// The shares of the lease.
    pub members: &'a [LeaseMember],
}

/// Which GPU or MIG device a process uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum GpuUse<'a> {
    /// The GPU or MIG device with this UUID.
    Target(&'a TargetUuid),
    /// The GPU with this UUID, or one of its MIG devices: the driver does not tell which.
    Gpu(&'a GpuUuid),
    /// None, as far as known.
    None,
}

impl GpuUse<'_> {
    /// Returns whether a lease has a share of the device. With [`GpuUse::None`], returns `true`, because each lease
    /// can have processes that use no GPU.
    #[must_use]
    pub fn is_of(self, lease: &AttributableLease<'_>) -> bool {
        self == Self::None || lease.members.iter().any(|member| self.is_on(member))
    }

    fn is_on(self, member: &LeaseMember) -> bool {
        match self {
            Self::Target(target) => member.target == *target,
            Self::Gpu(gpu) => member.gpu_uuid == *gpu,
            Self::None => false,
        }
    }
}

impl AttributableLease<'_> {
    pub(super) fn is_of_job(&self) -> bool {
        matches!(self.binding, LeaseBinding::Job { .. })
    }

    /// Returns whether the lease has exclusive use of all its devices.
    pub(super) fn is_exclusive(&self) -> bool {
        self.members.iter().all(|member| match member.share {
            MemberShare::Mig { .. } | MemberShare::Whole => true,
            MemberShare::Mps { .. } | MemberShare::Timeslice { .. } => false,
        })
    }

    /// Returns whether the lease has a cgroup, by which its processes are found.
    pub(super) fn has_cgroup(&self) -> bool {
        match self.binding {
            LeaseBinding::Scope { cgroup, .. } | LeaseBinding::Cgroup { cgroup, .. } => cgroup.is_some(),
            LeaseBinding::Job { .. } => true,
            LeaseBinding::Process { .. } | LeaseBinding::Time | LeaseBinding::None => false,
        }
    }

    /// Returns whether a process with these cgroups is in the scope of the lease, or in a cgroup of its Slurm job.
    /// Such a process belongs to the lease, unless another lease or another user makes this uncertain.
    pub(super) fn owns_cgroup_of(&self, process: &Cgroups) -> bool {
        match self.binding {
            LeaseBinding::Scope { cgroup: Some(cgroup), .. } => process.contains(cgroup),
            LeaseBinding::Job { .. } => process.slurm_job.as_ref().is_some_and(|job| self.fits_job(job)),
            LeaseBinding::Scope { cgroup: None, .. }
            | LeaseBinding::Cgroup { .. }
            | LeaseBinding::Process { .. }
            | LeaseBinding::Time
            | LeaseBinding::None => false,
        }
    }

    /// Returns whether a process with these cgroups is in the login session, service or container of the lease. Processes
    /// there may belong to other leases, which their environment then names.
    pub(super) fn shares_cgroup_of(&self, process: &Cgroups) -> bool {
        matches!(self.binding, LeaseBinding::Cgroup { cgroup: Some(cgroup), .. } if process.contains(cgroup))
    }

    /// Returns whether the cgroup of a Slurm job may belong to this lease's job, according to the path of the cgroup. A
    /// path without a node fits the jobs of all clusters and nodes of the host.
    fn fits_job(&self, found: &SlurmJob) -> bool {
        let LeaseBinding::Job { job, node, .. } = self.binding else { return false };
        u64::from(*job) == found.id
            && found.node.as_ref().is_none_or(|found| node.is_empty() || found == node)
            && found.uid.is_none_or(|uid| uid == self.holder)
    }

    /// Returns the cluster, the node and the run of the Slurm job.
    fn run_of_job(&self) -> Option<(&str, &str, u32)> {
        match self.binding {
            LeaseBinding::Job { cluster, node, restart, .. } => Some((cluster, node, *restart)),
            LeaseBinding::Scope { .. }
            | LeaseBinding::Cgroup { .. }
            | LeaseBinding::Process { .. }
            | LeaseBinding::Time
            | LeaseBinding::None => None,
        }
    }
}

/// Returns the ids of leases.
pub(super) fn ids<'a, 'b: 'a>(leases: impl IntoIterator<Item = &'a AttributableLease<'b>>) -> Vec<LeaseId> {
    leases.into_iter().map(|lease| lease.id).collect()
}

/// The leases of one user whose scope or job contains a process.
#[derive(Debug, PartialEq)]
pub(super) enum ByCgroup {
    One {
        id: LeaseId,
        evidence: Evidence,
        /// Leases of earlier runs of the same Slurm job. All runs have the same cgroup.
        earlier_runs: Vec<LeaseId>,
    },
    /// Jobs of several clusters or nodes have the job id in the path of the cgroup, so the path does not identify the
    /// job. Or the process is in a scope in one hierarchy, and in a job in another hierarchy.
    Several(Vec<LeaseId>),
    None,
}

impl ByCgroup {
    /// Finds the leases among `own`, the leases of the process's user.
    pub(super) fn of(own: &[&AttributableLease<'_>], process: &Cgroups) -> Self {
        let found: Vec<&AttributableLease<'_>> =
            own.iter().copied().filter(|lease| lease.owns_cgroup_of(process)).collect();
        let runs: Vec<(&str, &str, u32)> = found.iter().filter_map(|lease| lease.run_of_job()).collect();
        let last = match (&*found, &*runs) {
            ([], _) => return Self::None,
            ([only], []) => return Self::One { id: only.id, evidence: Evidence::Scope, earlier_runs: Vec::new() },
            (_, [(cluster, node, _), ..])
                if runs.len() == found.len() && runs.iter().all(|run| (run.0, run.1) == (*cluster, *node)) =>
            {
                found.iter().max_by_key(|lease| (lease.run_of_job().map(|run| run.2), lease.id))
            }
            _ => None,
        };
        let Some(last) = last else { return Self::Several(ids(found)) };
        let earlier_runs = ids(found.iter().copied().filter(|lease| lease.id != last.id));
        Self::One { id: last.id, evidence: Evidence::Job, earlier_runs }
    }
}
