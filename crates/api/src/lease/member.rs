//! Members and bindings: which targets a lease consists of, and what its life depends on.

use serde::{Deserialize, Serialize};

use crate::mps::{MemoryLimit, Percentage, Priority};

/// What a lease grants on one target.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum MemberShare {
    /// A MIG device.
    Mig {
        /// Profile, such as `1g.10gb` or `1c.3g.40gb`.
        profile: String,
    },
    /// A part of an MPS daemon's target.
    Mps {
        /// Active thread percentage.
        #[cfg_attr(feature = "openapi", schema(value_type = f64))]
        percentage: Percentage,
        /// Most device memory that one client process may pin, MiB.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[cfg_attr(feature = "openapi", schema(value_type = Option<u64>))]
        memory_limit_mib: Option<MemoryLimit>,
        /// Priority of kernels.
        #[serde(default)]
        priority: Priority,
    },
    /// A time-slice replica.
    Timeslice {
        /// Replicas of the GPU at the time of the grant.
        replicas: u32,
    },
    /// The whole GPU.
    Whole,
}

/// A target of a lease with its settings.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LeaseMember {
    /// UUID of the GPU, or of the MIG device; empty while the device is being created.
    pub target: String,
    /// UUID of the GPU.
    #[serde(rename = "gpu_uuid")]
    pub gpu: String,
    /// What is granted there.
    pub share: MemberShare,
    /// Memory that counts for quotas, MiB: of the MIG device, or the part of the GPU.
    pub memory_mib: u64,
    /// Memory of the GPU, MiB.
    pub gpu_memory_mib: u64,
}

/// What the life of a lease depends on, and how its processes are found.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum LeaseBinding {
    /// A transient systemd scope that was created for the lease.
    Scope {
        /// Unit name. Absent when the caller may not see it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        unit: Option<String>,
        /// Path of its cgroup below the cgroup root. Absent when the caller may not see it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cgroup: Option<String>,
    },
    /// An existing cgroup: of a session, service or container. No process is moved.
    Cgroup {
        /// Path below the cgroup root. Absent when the caller may not see it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cgroup: Option<String>,
    },
    /// A process: the lease ends when it exits.
    Process {
        /// Process id in the host's pid namespace. Absent when the caller may not see it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pid: Option<u32>,
        /// Start time of the process in clock ticks since boot: pids are reused.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        start: Option<u64>,
    },
    /// A Slurm job on this node.
    Job {
        /// Cluster name.
        cluster: String,
        /// Job id; of a heterogeneous job, that of the component on this node.
        job: u32,
        /// Node name: one host can have several nodes.
        #[serde(default)]
        node: String,
        /// How often the job was requeued before this run.
        #[serde(default)]
        restart: u32,
        /// Job id of the leader of a heterogeneous job.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        leader: Option<u32>,
        /// Path of the job's cgroup. Absent when there is none, or the caller may not see it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cgroup: Option<String>,
    },
    /// Nothing but the end time.
    Time,
    /// Nothing: the lease ends when it is released.
    None,
}

impl LeaseBinding {
    /// Removes what only the holder and administrators may see.
    pub(super) fn redact(&mut self) {
        match self {
            Self::Scope { unit, cgroup } => (*unit, *cgroup) = (None, None),
            Self::Cgroup { cgroup } | Self::Job { cgroup, .. } => *cgroup = None,
            Self::Process { pid, start } => (*pid, *start) = (None, None),
            Self::Time | Self::None => {}
        }
    }
}
