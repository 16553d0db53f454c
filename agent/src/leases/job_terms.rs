//! What Slurm's hooks say about a job.

use std::collections::BTreeSet;

use gpush_api::{LeaseBinding, TargetUuid};

/// The additional data of a request from Slurm's hooks.
#[derive(Debug, Clone)]
pub(crate) struct JobTerms {
    /// The binding to the Slurm job.
    pub(crate) binding: LeaseBinding,
    /// UUIDs of the MIG devices that Slurm allocated; `None` if Slurm allocated whole GPUs.
    pub(crate) targets: Option<BTreeSet<TargetUuid>>,
    /// Whether Slurm allocated the devices. If so, Slurm also limits the number of devices and the
    /// time of the job.
    pub(crate) has_gres: bool,
    /// Whether the hook repeats a request that is refused for lack of capacity, so that the refusal does not count.
    pub(crate) waits: bool,
}

/// A job on a node.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct JobKey {
    pub(crate) cluster: String,
    pub(crate) job: u32,
    pub(crate) node: String,
}
