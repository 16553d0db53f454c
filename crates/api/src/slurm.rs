//! API calls that Slurm's hooks make. Prolog begins the lease of a job on this node, and Epilog ends the lease.
//!
//! Only hooks that run as root can make these calls, through the admin socket. If a refusal
//! concerns only the job, the answer is [`SlurmOutcome::Refused`]. An error means that the node
//! cannot serve the job.

use serde::{Deserialize, Serialize};

use crate::ids::{GpuIndex, GpuUuid, TargetUuid};

use crate::lease::{LeaseGrant, LeaseId, LeaseRequest};

/// A GPU or MIG device that Slurm allocated to a job.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
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
        /// Id of the compute instance in the GPU instance.
        compute_instance: u32,
    },
    /// A whole GPU that slurmd found through NVML (`AutoDetect=nvml`). slurmd sorts whole GPUs in the order of the
    /// driver's list, and the MIG devices of a GPU in their order on that GPU.
    Detected {
        /// Index in `SLURM_JOB_GPUS`.
        index: u32,
        /// Number of GPUs and MIG devices that slurm.conf gives the node.
        #[serde(rename = "device_count")]
        devices: u32,
        /// For each GPU and MIG device that gres.conf lists: the minor number of its GPU. The list is empty if slurmd
        /// uses all devices.
        #[serde(default)]
        minors: Vec<u32>,
    },
}

/// Body of `POST /v1/slurm/jobs`: a job begins on this node. If the request is repeated, gpushd
/// answers with the same lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SlurmJobStart {
    /// Cluster name.
    pub cluster: String,
    /// Job id. For a heterogeneous job: the id of the component on this node.
    pub job: u32,
    /// Node name.
    #[serde(default)]
    pub node: String,
    /// User of the job.
    pub uid: u32,
    /// Number of times that the job was requeued before this run.
    #[serde(rename = "restart_count", default)]
    pub restart: u32,
    /// Job id of the leader, if the job is a component of a heterogeneous job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub leader: Option<u32>,
    /// Name of the job, at most 128 characters.
    #[serde(rename = "job_name", default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Slurm account of the job, at most 128 characters.
    #[serde(rename = "job_account", default, skip_serializing_if = "Option::is_none")]
    pub account: Option<String>,
    /// The share that the job requests. If absent, gpushd makes a lease only for allocated GPUs
    /// whose rule has `owner = "slurm"`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub request: Option<LeaseRequest>,
    /// GPUs and MIG devices that Slurm allocated.
    #[serde(rename = "slurm_devices", default)]
    pub devices: Vec<SlurmDevice>,
    /// Time at which the hook gives up, in milliseconds since the Unix epoch. gpushd grants nothing
    /// after that time.
    pub until_ms: i64,
}

/// Result for a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "outcome", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum SlurmOutcome {
    /// No lease: the job requests no share, and none of its GPUs has a rule with `owner = "slurm"`.
    NotConcerned,
    /// A lease.
    Granted {
        /// The lease and its environment.
        grant: Box<LeaseGrant>,
    },
    /// No lease: the tasks of the job must fail with these reasons.
    Refused {
        /// What was refused and why, one sentence each.
        reasons: Vec<String>,
        /// What the user can do.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        hint: Option<String>,
    },
}

/// A GPU that only Slurm jobs can lease: its rule has `owner = "slurm"`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SlurmGpu {
    /// `GPU-<uuid>`.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub uuid: GpuUuid,
    /// Minor number of `/dev/nvidia<minor>`.
    pub minor: u32,
    /// UUIDs of its MIG devices.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub mig_uuids: Vec<TargetUuid>,
}

/// Answer to [`SlurmJobStart`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SlurmJobStarted {
    /// Result for the job.
    #[serde(flatten)]
    pub outcome: SlurmOutcome,
    /// The GPUs that only Slurm jobs can lease. Hooks store the list and use it while gpushd does
    /// not answer.
    #[serde(default)]
    pub owned: Vec<SlurmGpu>,
}

/// Body of `POST /v1/slurm/jobs/end`: a job has ended on this node. It contains no share and no
/// devices.
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
    /// Number of times that the job was requeued before the run that has ended. gpushd keeps the
    /// lease of a later run.
    #[serde(rename = "restart_count", default)]
    pub restart: u32,
    /// Time until which the hook waits for free capacity, in milliseconds since the Unix epoch. If
    /// the hook of another job reports the end late, it does not wait, and gpushd ends no process of
    /// the ended job.
    pub until_ms: i64,
}

/// A lease whose capacity is not free after the end of its job.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SlurmLeftover {
    /// The lease.
    #[serde(rename = "lease_id")]
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub lease: LeaseId,
    /// Indexes of its GPUs.
    #[serde(rename = "gpu_indexes")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<u32>))]
    pub gpus: Vec<GpuIndex>,
    /// What the lease waits for, one sentence each.
    pub waits_for: Vec<String>,
    /// Whether only processes outside the job's cgroup, or an MPS daemon that does not answer, keep the GPUs in use. A
    /// user can cause this state even after all processes in the job's cgroup have ended.
    #[serde(default)]
    pub unattributed: bool,
}

/// Answer to [`SlurmJobEnd`].
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct SlurmJobEnded {
    /// Leases that ended; empty if the job had no lease.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub ended: Vec<LeaseId>,
    /// Leases of later runs of the job. gpushd keeps them.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub later: Vec<LeaseId>,
    /// Leases whose capacity is not free yet.
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
            owned: vec![SlurmGpu { uuid: "GPU-1".into(), minor: 3, mig_uuids: Vec::new() }],
        };
        let json = serde_json::to_value(&started).unwrap();
        assert_eq!((&json["outcome"], &json["reasons"][0]), (&"refused".into(), &"GPU 0 has no room".into()));
        assert_eq!(serde_json::from_value::<SlurmJobStarted>(json).unwrap(), started);
        let device: SlurmDevice = serde_json::from_str(r#"{"minor":3}"#).unwrap();
        assert_eq!(device, SlurmDevice::Minor(3));
        let device: SlurmDevice = serde_json::from_str(r#"{"detected":{"index":1,"device_count":4}}"#).unwrap();
        assert_eq!(device, SlurmDevice::Detected { index: 1, devices: 4, minors: Vec::new() });
    }
}
