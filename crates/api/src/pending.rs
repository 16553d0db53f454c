//! Changes that a new rule requires, but that gpushd does not make yet because of leases.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{
    compute::{ComputeMode, TimesliceLevel},
    ids::{GpuIndex, TargetUuid},
    lease::LeaseId,
    mode::Mode,
};

/// A change of a GPU that the config or an override requires, but that gpushd does not make yet.
///
/// While leases hold the GPU under an earlier rule, the earlier rule stays in force for these leases. After their end,
/// gpushd makes the change with `auto_reconcile`, for an `apply`, after a reload of the config, or when gpushd starts
/// again.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PendingChange {
    /// What changes.
    #[serde(flatten)]
    pub aim: PendingAim,
    /// Leases that must end before the change; empty if the change waits for an `apply`.
    #[serde(rename = "lease_ids", default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<String>))]
    pub leases: Vec<LeaseId>,
}

/// What a pending change does to a GPU.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(tag = "change", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum PendingAim {
    /// The GPU gets another mode.
    Mode {
        /// The mode of the earlier rule, which stays in force for its leases.
        from: Mode,
        /// The mode of the new rule.
        mode: Mode,
    },
    /// A time-sliced GPU gets another level or compute mode.
    Timeslice {
        /// The level of the new rule.
        level: TimesliceLevel,
        /// The compute mode of the new rule; absent if the rule has none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        compute_mode: Option<ComputeMode>,
    },
    /// A MIG device gets an MPS daemon.
    ShareDevice {
        /// UUID of the MIG device.
        #[cfg_attr(feature = "openapi", schema(value_type = String))]
        uuid: TargetUuid,
        /// Name of the MIG device, such as `3g.40gb@4`.
        device: String,
    },
    /// A MIG device loses its MPS daemon.
    UnshareDevice {
        /// UUID of the MIG device.
        #[cfg_attr(feature = "openapi", schema(value_type = String))]
        uuid: TargetUuid,
        /// Name of the MIG device, such as `3g.40gb@4`.
        device: String,
    },
}

impl PendingAim {
    /// Returns the UUID of the MIG device that changes; `None` if the whole GPU changes.
    #[must_use]
    pub fn device(&self) -> Option<&TargetUuid> {
        match self {
            Self::Mode { .. } | Self::Timeslice { .. } => None,
            Self::ShareDevice { uuid, .. } | Self::UnshareDevice { uuid, .. } => Some(uuid),
        }
    }
}

impl PendingChange {
    /// Describes the change of the GPU with this index, as a clause: `GPU 3 changes from mode `exclusive` to `mps` when L12
    /// ends`.
    #[must_use]
    pub fn describe(&self, gpu: GpuIndex) -> String {
        let what = match &self.aim {
            PendingAim::Mode { from, mode: Mode::NoRule } => {
                format!("GPU {gpu} loses its rule with mode `{}`", from.name())
            }
            PendingAim::Mode { from, mode } => {
                format!("GPU {gpu} changes from mode `{}` to `{}`", from.name(), mode.name())
            }
            PendingAim::Timeslice { level, compute_mode: None } => {
                format!("GPU {gpu} changes to time-slice level `{level}`")
            }
            PendingAim::Timeslice { level, compute_mode: Some(mode) } => {
                format!("GPU {gpu} changes to time-slice level `{level}` and compute mode `{mode}`")
            }
            PendingAim::ShareDevice { device, .. } => format!("{gpu}:{device} becomes shared through MPS"),
            PendingAim::UnshareDevice { device, .. } => {
                format!("{gpu}:{device} stops being shared through MPS")
            }
        };
        format!("{what} {}", When(gpu, &self.leases))
    }
}

/// When a pending change is made.
struct When<'a>(GpuIndex, &'a [LeaseId]);

impl fmt::Display for When<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.1 {
            [] => write!(f, "with `gpushctl apply {}` (administrator)", self.0),
            [one] => write!(f, "when {one} ends"),
            [all @ .., last] => {
                let all: Vec<String> = all.iter().map(ToString::to_string).collect();
                write!(f, "when {} and {last} end", all.join(", "))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(aim: PendingAim, leases: &[u64]) -> PendingChange {
        PendingChange { aim, leases: leases.iter().copied().map(LeaseId).collect() }
    }

    #[test]
    fn pending_change_names_the_gpu_and_what_it_waits_for() {
        let mode = |leases: &[u64]| {
            change(PendingAim::Mode { from: Mode::Exclusive, mode: Mode::Mps }, leases).describe(GpuIndex(3))
        };
        assert_eq!(mode(&[12]), "GPU 3 changes from mode `exclusive` to `mps` when L12 ends");
        assert_eq!(mode(&[12, 14, 15]), "GPU 3 changes from mode `exclusive` to `mps` when L12, L14 and L15 end");
        assert_eq!(mode(&[]), "GPU 3 changes from mode `exclusive` to `mps` with `gpushctl apply 3` (administrator)");
        let device = PendingAim::ShareDevice { uuid: "MIG-1".into(), device: "3g.40gb@4".to_owned() };
        let text = "0:3g.40gb@4 becomes shared through MPS when L1 ends";
        assert_eq!(change(device, &[1]).describe(GpuIndex(0)), text);
    }

    #[test]
    fn pending_change_survives_the_wire() {
        let all = [
            PendingAim::Mode { from: Mode::Mps, mode: Mode::Timeslice },
            PendingAim::Timeslice { level: TimesliceLevel::Long, compute_mode: Some(ComputeMode::Prohibited) },
            PendingAim::ShareDevice { uuid: "MIG-1".into(), device: "3g.40gb@4".to_owned() },
            PendingAim::UnshareDevice { uuid: "MIG-1".into(), device: "3g.40gb@4".to_owned() },
        ];
        for aim in all {
            let one = change(aim, &[7]);
            let json = serde_json::to_value(&one).unwrap();
            assert_eq!(json["lease_ids"], serde_json::json!(["L7"]));
            assert_eq!(serde_json::from_value::<PendingChange>(json).unwrap(), one);
        }
    }
}
