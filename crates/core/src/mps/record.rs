//! What is recorded about an MPS target.

use gpush_api::{Actor, MpsSettings, TargetUuid};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// The record that a user stopped an MPS daemon, with the deadline for its clients.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MpsStopped {
    /// The user who stopped the daemon.
    pub by: Actor,
    /// Time at which gpushd ends the remaining clients; `None` without a deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_at: Option<Timestamp>,
}

/// MPS settings that override the settings of a config rule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MpsSet {
    /// The new settings.
    pub settings: MpsSettings,
    /// The rule's settings when the override was set. If the rule changes, the override no longer applies.
    pub rule: MpsSettings,
}

/// The record of a target.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MpsTargetRecord {
    /// GPU or MIG device by UUID.
    pub target: TargetUuid,
    /// Set if a user stopped the daemon, until a user starts it.
    pub stopped: Option<MpsStopped>,
    /// Settings that override the rule's.
    pub set: Option<MpsSet>,
    /// Id of the boot during which an operation started the MPS daemon of a whole GPU. If the field is set when the
    /// record is written, the store replaces its value with the current boot.
    pub in_force: Option<String>,
}
