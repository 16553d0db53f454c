//! Rows about whole leases.

use gpush_api::EndReason;
use serde::{Deserialize, Serialize};

use crate::ledger::LeaseTotals;

/// The owner that a lease is charged to. The store keeps it with the lease, because names can change later.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
pub struct LeaseOwner {
    /// User: the user of the account, also if the lease belongs to a subordinate uid.
    pub user: String,
    /// Primary group of the user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Slurm account of the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<String>,
    /// Slurm job, such as `cluster/1234`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub job: Option<String>,
}

/// An ended lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EndedLease {
    /// The owner that the lease is charged to.
    pub owner: LeaseOwner,
    /// Name of the job, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Why the lease ended.
    pub reason: EndReason,
    /// Time in the queue, in ms.
    pub waited_ms: u64,
    /// Totals of the lease.
    pub totals: LeaseTotals,
}
