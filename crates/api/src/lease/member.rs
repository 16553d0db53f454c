//! The members of a lease (its targets), and the process, cgroup or job that the lease is bound to.

use serde::{Deserialize, Serialize};

use super::LeaseKind;
use crate::{
    compute::{ComputeMode, TimesliceLevel},
    ids::{GpuUuid, TargetUuid},
    mps::{MemoryLimit, Percentage, Priority},
};

/// The share of one target that a lease grants.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum MemberShare {
    /// A MIG device.
    Mig {
        /// Profile, such as `1g.10gb` or `1c.3g.40gb`.
        profile: String,
    },
    /// A part of a target that is shared through MPS.
    Mps {
        /// Active thread percentage.
        #[cfg_attr(feature = "openapi", schema(value_type = f64))]
        percentage: Percentage,
        /// Maximum device memory that one client process may pin, in MiB.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
        memory_limit_mib: Option<MemoryLimit>,
        /// Priority of kernels.
        #[serde(default)]
        priority: Priority,
    },
    /// A time-slice replica.
    Timeslice {
        /// Number of replicas of the GPU at the time of the grant.
        replicas: u32,
        /// Time-slice level at the time of the grant; absent if the lease is from an earlier version of gpushd.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        level: Option<TimesliceLevel>,
        /// Compute mode that the rule set at the time of the grant; absent if the rule set none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        compute_mode: Option<ComputeMode>,
    },
    /// The whole GPU.
    Whole,
}

impl MemberShare {
    /// Returns the kind of lease that has this share.
    #[must_use]
    pub fn kind(&self) -> LeaseKind {
        match self {
            Self::Mig { .. } => LeaseKind::Mig,
            Self::Mps { .. } => LeaseKind::Mps,
            Self::Timeslice { .. } => LeaseKind::Timeslice,
            Self::Whole => LeaseKind::Whole,
        }
    }
}

/// One target of a lease, and the share that the lease grants on it.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseMember {
    /// UUID of the GPU, or of the MIG device; empty while the device is being created.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub target: TargetUuid,
    /// UUID of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub gpu_uuid: GpuUuid,
    /// Share that is granted on the target.
    #[serde(rename = "granted_share")]
    pub share: MemberShare,
    /// Memory that counts for quotas, in MiB: the memory of the MIG device, or the leased part of
    /// the GPU's memory.
    pub memory_mib: u64,
    /// Memory of the whole GPU, in MiB.
    pub gpu_memory_mib: u64,
}

/// What a lease is bound to. The binding determines how gpushd finds the processes of the lease.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum LeaseBinding {
    /// A transient systemd scope that was created for the lease.
    Scope {
        /// Unit name; absent if the caller may not see it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        unit: Option<String>,
        /// Path of the scope's cgroup below the cgroup root; absent if the caller may not see it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cgroup: Option<String>,
    },
    /// An existing cgroup of a session, service or container. gpushd moves no process into it.
    Cgroup {
        /// Path below the cgroup root; absent if the caller may not see it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cgroup: Option<String>,
        /// Process that requested a scope, in the host's pid namespace. The lease ends when this
        /// process exits, even if other processes are in the cgroup. Absent if the lease lasts as
        /// long as the cgroup has processes, or if the caller may not see it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pid: Option<u32>,
        /// Start time of that process, in clock ticks since boot.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        start: Option<u64>,
    },
    /// A process. The lease ends when the process exits.
    Process {
        /// Process id in the host's pid namespace; absent if the caller may not see it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pid: Option<u32>,
        /// Start time of the process, in clock ticks since boot. It distinguishes the process from
        /// a later process with the same pid.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        start: Option<u64>,
    },
    /// A Slurm job on this host.
    Job {
        /// Name of the Slurm cluster.
        cluster: String,
        /// Job id. For a heterogeneous job: the id of the component on this node.
        job: u32,
        /// Node name. One host can run several nodes.
        #[serde(default)]
        node: String,
        /// How often the job was requeued before this run.
        #[serde(rename = "restart_count", default)]
        restart: u32,
        /// Job id of the leader, if the job is a component of a heterogeneous job.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        leader: Option<u32>,
        /// Path of the job's cgroup; absent if the job has none or the caller may not see it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cgroup: Option<String>,
        /// Name of the job; absent if Slurm does not say it to Prolog, or the caller may not see it.
        #[serde(rename = "job_name", default, skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// Slurm account of the job; absent like the name.
        #[serde(rename = "job_account", default, skip_serializing_if = "Option::is_none")]
        account: Option<String>,
    },
    /// No process or cgroup: only the end time ends the lease.
    Time,
    /// No process, cgroup or end time: the lease lasts until it is released.
    None,
}

impl LeaseBinding {
    /// Removes the fields that only the holder and administrators may see.
    pub(super) fn redact(&mut self) {
        match self {
            Self::Scope { unit, cgroup } => (*unit, *cgroup) = (None, None),
            Self::Cgroup { cgroup, pid, start } => (*cgroup, *pid, *start) = (None, None, None),
            Self::Job { cgroup, name, account, .. } => (*cgroup, *name, *account) = (None, None, None),
            Self::Process { pid, start } => (*pid, *start) = (None, None),
            Self::Time | Self::None => {}
        }
    }
}
