//! Kinds, states and end reasons of leases.

use std::fmt;

use serde::{Deserialize, Serialize};

/// Kind of a lease: how it shares a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum LeaseKind {
    /// MIG devices.
    Mig,
    /// A part of an MPS daemon's target.
    Mps,
    /// A time-slice replica of a GPU.
    Timeslice,
    /// Whole GPUs.
    Whole,
}

impl LeaseKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Mig, Self::Mps, Self::Timeslice, Self::Whole];

    /// Returns the name in JSON, in requests and in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mig => "mig",
            Self::Mps => "mps",
            Self::Timeslice => "timeslice",
            Self::Whole => "whole",
        }
    }

    /// Returns what prevents a holder from using more than a share of this kind.
    #[must_use]
    pub fn enforcement(self) -> Enforcement {
        match self {
            Self::Mig => Enforcement::Hardware,
            Self::Mps => Enforcement::MpsCeiling,
            Self::Timeslice => Enforcement::None,
            Self::Whole => Enforcement::Exclusive,
        }
    }
}

impl fmt::Display for LeaseKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What prevents the holder of a lease from using more than the share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Enforcement {
    /// The GPU hardware: it isolates memory, compute and faults of MIG devices.
    Hardware,
    /// Ceilings that the MPS daemon and the client's environment set. For a client that changes its
    /// environment, only the daemon's ceiling applies.
    MpsCeiling,
    /// Exclusive use: gpushd grants no other lease on the GPU.
    Exclusive,
    /// Nothing: gpushd only counts replicas. Memory and compute time have no limit.
    None,
}

/// Whether only the processes of a lease can open its devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum DeviceAccess {
    /// The scope of the lease opens only its own devices, and probes have shown that login sessions and other leases
    /// cannot open them. Services and containers are not limited.
    Verified,
    /// The scope of the lease opens only its own devices, but the host does not deny them to login sessions.
    Unverified,
}

/// State of a lease.
///
/// `queued → granting → active → releasing → ended`. A lease that ends early skips some of these
/// states.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum LeaseState {
    /// The lease waits for capacity.
    Queued,
    /// The capacity is reserved; the grant is being recorded, or the MIG devices are being created.
    Granting,
    /// The holder may use the share.
    Active,
    /// No new process is admitted; processes of the lease may still run.
    Releasing,
    /// The capacity is free.
    Ended,
}

impl LeaseState {
    /// All states, in order.
    pub const ALL: [Self; 5] = [Self::Queued, Self::Granting, Self::Active, Self::Releasing, Self::Ended];

    /// Returns the name in JSON and in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Queued => "queued",
            Self::Granting => "granting",
            Self::Active => "active",
            Self::Releasing => "releasing",
            Self::Ended => "ended",
        }
    }

    /// Returns whether the lease occupies capacity.
    #[must_use]
    pub fn holds_capacity(self) -> bool {
        match self {
            Self::Granting | Self::Active | Self::Releasing => true,
            Self::Queued | Self::Ended => false,
        }
    }
}

impl fmt::Display for LeaseState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Reason for the end of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum EndReason {
    /// The holder released the lease, or the process, scope or job that it was bound to ended.
    Released,
    /// The lease reached its end time.
    Expired,
    /// An administrator revoked the lease.
    Revoked,
    /// The request was cancelled before the grant, or the waiting client disconnected.
    Cancelled,
    /// The lease was not granted within the time that the request allowed.
    TimedOut,
    /// The host was rebooted.
    Rebooted,
    /// The driver lost a GPU of the lease.
    GpuLost,
    /// The grant failed.
    Failed,
}

impl EndReason {
    /// All reasons.
    pub const ALL: [Self; 8] = [
        Self::Released,
        Self::Expired,
        Self::Revoked,
        Self::Cancelled,
        Self::TimedOut,
        Self::Rebooted,
        Self::GpuLost,
        Self::Failed,
    ];

    /// Returns the name in JSON and in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Released => "released",
            Self::Expired => "expired",
            Self::Revoked => "revoked",
            Self::Cancelled => "cancelled",
            Self::TimedOut => "timed_out",
            Self::Rebooted => "rebooted",
            Self::GpuLost => "gpu_lost",
            Self::Failed => "failed",
        }
    }
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_equal_their_json() {
        let json = |value: serde_json::Value| value.as_str().map(str::to_owned);
        for kind in LeaseKind::ALL {
            assert_eq!(json(serde_json::to_value(kind).unwrap()).as_deref(), Some(kind.name()));
        }
        for state in LeaseState::ALL {
            assert_eq!(json(serde_json::to_value(state).unwrap()).as_deref(), Some(state.name()));
        }
        for reason in EndReason::ALL {
            assert_eq!(json(serde_json::to_value(reason).unwrap()).as_deref(), Some(reason.name()));
        }
    }
}
