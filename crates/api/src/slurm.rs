//! Calls of Slurm's hooks: Prolog begins the lease of a job on this node, Epilog ends it.
//!
//! Only root's hooks can make them, through the admin socket. A refusal that concerns the job alone is an answer
//! ([`SlurmOutcome::Refused`]). An error means that the node cannot serve the job.

use serde::{Deserialize, Serialize};

use crate::lease::{LeaseGrant, LeaseId, LeaseRequest};

/// A GPU or MIG device that Slurm allocated to a job.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SlurmDevice {
    /// `GPU-<uuid>` or `MIG-<uuid>`.
    Uuid(String),
    /// Minor number of `/dev/nvidia<minor>`.
    Minor(u32),
    /// A MIG device, by the ids of its instances.
    #[serde(rename = "mig_device")]
    Mig {
        /// Minor number of its GPU.
        minor: u32,
        /// Id of the GPU instance.
        gpu_instance: u32,
        /// Id of the compute instance in it.
        compute_instance: u32,
    },
    /// A whole GPU that slurmd found through NVML (`AutoDetect=nvml`). slurmd sorts whole GPUs by their position in the
    /// driver's list, and MIG devices by their position on their GPU.
    Detected {
        /// Index in `SLURM_JOB_GPUS`.
        index: u32,
        /// Number of GPUs and MIG devices that slurm.conf gives the node.
        devices: u32,
        /// Minor number of the GPU of each GPU and MIG device that gres.conf lists; empty if slurmd uses all.
        #[serde(default)]
        minors: Vec<u32>,
    },
}

/// `POST /v1/slurm/jobs`: a job begins on this node. The same request again gets the same lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SlurmJobStart {
    /// Cluster name.
    pub cluster: String,
    /// Job id; of a heterogeneous job, that of the component on this node.
    pub job: u32,
    /// Node name.
    #[serde(default)]
    pub node: String,
    /// User of the job.
    pub uid: u32,
    /// How often the job was requeued.
    #[serde(rename = "restart_count", default)]
    pub restart: u32,
    /// Job id of the leader of a heterogeneous job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<u32>,
    /// The share that the job requests. Without it, a lease is made only on GPUs with `owner = "slurm"`, of what Slurm
    /// allocated.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<LeaseRequest>,
    /// What Slurm allocated.
    #[serde(rename = "slurm_devices", default)]
    pub devices: Vec<SlurmDevice>,
    /// When the hook gives up, in milliseconds since the Unix epoch: later, nothing is granted.
    pub until_ms: i64,
}

/// What a job gets.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SlurmOutcome {
    /// No lease: it requests none, and none of its GPUs has `owner = "slurm"`.
    NotConcerned,
    /// A lease.
    Granted {
        /// The lease and its environment.
        grant: Box<LeaseGrant>,
    },
    /// No lease: its tasks must fail with this reason.
    Refused {
        /// What was refused and why, one sentence each.
        reasons: Vec<String>,
        /// What the user can do.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
    },
}

/// A GPU that only Slurm's jobs can lease: its rule has `owner = "slurm"`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SlurmGpu {
    /// `GPU-<uuid>`.
    pub uuid: String,
    /// Minor number of `/dev/nvidia<minor>`.
    pub minor: u32,
    /// UUIDs of its MIG devices.
    #[serde(default)]
    pub mig_devices: Vec<String>,
}

/// Answer to [`SlurmJobStart`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SlurmJobStarted {
    /// What the job gets.
    #[serde(flatten)]
    pub outcome: SlurmOutcome,
    /// The GPUs that only Slurm's jobs can lease. Hooks keep the list for the time that gpushd does not answer.
    #[serde(default)]
    pub owned: Vec<SlurmGpu>,
}

/// `POST /v1/slurm/jobs/end`: a job has ended on this node. Needs nothing but the job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SlurmJobEnd {
    /// Cluster name.
    pub cluster: String,
    /// Job id.
    pub job: u32,
    /// Node name.
    #[serde(default)]
    pub node: String,
    /// How often the run that has ended was requeued before: the lease of a later run stays.
    #[serde(rename = "restart_count", default)]
    pub restart: u32,
    /// Until when the hook waits for the capacity to be free, in milliseconds since the Unix epoch. A hook that delivers
    /// the end late, for another job, does not wait: then no process of the job is ended.
    pub until_ms: i64,
}

/// A lease whose capacity is not free after the end of its job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SlurmLeftover {
    /// The lease.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub lease: LeaseId,
    /// Indexes of its GPUs.
    pub gpus: Vec<u32>,
    /// What it waits for, one sentence each.
    pub waits_for: Vec<String>,
    /// Whether nothing of the job itself is left: only processes outside its cgroup, or an MPS daemon that does not
    /// answer, keep the GPUs in use. A user can cause that.
    #[serde(default)]
    pub unattributed: bool,
}

/// Answer to [`SlurmJobEnd`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SlurmJobEnded {
    /// Leases that ended; none for a job without one.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub ended: Vec<LeaseId>,
    /// Leases of later runs of the job, which stay.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub later: Vec<LeaseId>,
    /// Leases whose capacity is not free.
    #[serde(default)]
    pub left: Vec<SlurmLeftover>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answer_json_has_the_outcome_at_its_top() {
        let reasons = vec!["GPU 0 has no room".to_owned()];
        let started = SlurmJobStarted {
            outcome: SlurmOutcome::Refused { reasons, hint: None },
            owned: vec![SlurmGpu { uuid: "GPU-1".to_owned(), minor: 3, mig_devices: Vec::new() }],
        };
        let json = serde_json::to_value(&started).unwrap();
        assert_eq!((&json["outcome"], &json["reasons"][0]), (&"refused".into(), &"GPU 0 has no room".into()));
        assert_eq!(serde_json::from_value::<SlurmJobStarted>(json).unwrap(), started);
        let device: SlurmDevice = serde_json::from_str(r#"{"minor":3}"#).unwrap();
        assert_eq!(device, SlurmDevice::Minor(3));
        let device: SlurmDevice = serde_json::from_str(r#"{"detected":{"index":1,"devices":4}}"#).unwrap();
        assert_eq!(device, SlurmDevice::Detected { index: 1, devices: 4, minors: Vec::new() });
    }
}
