//! Steps of a plan, and the phases that order them.
//!
//! ```text
//! before ──► MIG on ──► instances ──► MIG off ──► after
//!   │          │           │             │          └ MPS daemon started, time-slice set
//!   │          └───────────┼─────────────┴ all GPUs of the operation together: a reset may need its whole group
//!   │                      └ each GPU separately: destroy, then create
//!   └ MPS daemons stopped; services and hooks around a change that open handles block
//! ```
//!
//! A plan lists its steps in this order. An operation executes a phase on all of its GPUs before it begins the next
//! phase.

use serde::{Deserialize, Serialize};

use crate::{
    ids::{GpuIndex, GpuUuid, TargetUuid},
    placement::Placement,
};

/// A phase of an operation. Phases are executed in this order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Phase {
    /// MPS daemons, and services that would block a MIG change, are stopped.
    Before,
    /// MIG mode is enabled, on all GPUs of the operation together.
    MigOn,
    /// Instances are destroyed and created, on each GPU separately.
    Instances,
    /// MIG mode is disabled, on all GPUs of the operation together.
    MigOff,
    /// Sharing of the whole GPU is set up.
    After,
}

impl Phase {
    /// All phases, in order.
    pub const ALL: [Self; 5] = [Self::Before, Self::MigOn, Self::Instances, Self::MigOff, Self::After];
}

/// One step of a plan. The variant is the kind of object that the step changes. In JSON, the field
/// `do` names the step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Step {
    /// Changes an MPS daemon.
    Mps(MpsStep),
    /// Changes MIG mode.
    MigMode(MigModeStep),
    /// Changes a MIG instance.
    Instance(InstanceStep),
    /// Changes how a whole GPU is time-sliced.
    Timeslice(TimesliceStep),
}

/// A step that changes an MPS daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum MpsStep {
    /// Stop an MPS daemon whose target the plan removes. The daemon stays stopped until the
    /// operation ends.
    #[serde(rename = "stop_mps_daemon")]
    StopDaemon {
        /// UUID of the daemon's target: a MIG device or a whole GPU.
        #[cfg_attr(feature = "openapi", schema(value_type = String))]
        uuid: TargetUuid,
        /// Target as text, such as `GPU 0` or `MIG device 0:2g.20gb@2`.
        label: String,
    },
    /// Start an MPS daemon.
    #[serde(rename = "start_mps_daemon")]
    StartDaemon {
        /// Name of the MIG device, such as `2g.20gb@2`; absent for the daemon of the whole GPU. The step has no UUID,
        /// because an earlier step may create the device.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        device: Option<String>,
    },
}

/// A step that changes MIG mode.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum MigModeStep {
    /// Enable MIG mode.
    #[serde(rename = "enable_mig")]
    Enable {
        /// GPU reset after which the new mode is effective; absent if no reset is needed or possible.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reset: Option<Reset>,
        /// Whether the new mode is effective only after a reboot of the host, a virtual machine that cannot reset the GPU.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        at_reboot: bool,
    },
    /// Disable MIG mode.
    #[serde(rename = "disable_mig")]
    Disable {
        /// GPU reset after which the new mode is effective; absent if no reset is needed or possible.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reset: Option<Reset>,
        /// Whether the new mode is effective only after a reboot of the host, a virtual machine that cannot reset the GPU.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        at_reboot: bool,
    },
}

/// A step that creates or destroys a MIG instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do", rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum InstanceStep {
    /// Destroy a compute instance.
    DestroyCompute {
        /// GPU instance id.
        gi: u32,
        /// Compute instance id.
        ci: u32,
        /// Profile name.
        profile: String,
        /// UUID of the MIG device that the step destroys; absent if the driver reported none.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
        uuid: Option<TargetUuid>,
    },
    /// Destroy a GPU instance. Its compute instances were destroyed by earlier steps.
    DestroyGpuInstance {
        /// GPU instance id.
        gi: u32,
        /// Profile name.
        profile: String,
        /// Placement in memory slices.
        placement: Placement,
    },
    /// Create a GPU instance at a placement.
    CreateGpuInstance {
        /// Profile name.
        profile: String,
        /// Profile id.
        profile_id: u32,
        /// Placement in memory slices.
        placement: Placement,
    },
    /// Create a compute instance in the GPU instance that has the placement `gi_placement`.
    CreateCompute {
        /// Placement of the GPU instance. The id cannot identify a new instance, because the driver
        /// chooses the id at creation.
        gi_placement: Placement,
        /// Profile name.
        profile: String,
        /// NVML compute instance profile index.
        profile_id: u32,
        /// Placement in compute slots; absent if the driver chooses it.
        #[serde(skip_serializing_if = "Option::is_none")]
        placement: Option<Placement>,
    },
}

/// A step that changes how a whole GPU is time-sliced.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "do")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum TimesliceStep {
    /// Set the time-slice level and the compute mode of the GPU's rule.
    #[serde(rename = "set_timeslice")]
    Set,
    /// Restore the level and the compute mode from before the GPU was time-sliced.
    #[serde(rename = "clear_timeslice")]
    Clear,
}

impl Step {
    /// Returns the phase that the step belongs to.
    #[must_use]
    pub fn phase(&self) -> Phase {
        match self {
            Self::Mps(MpsStep::StopDaemon { .. }) => Phase::Before,
            Self::MigMode(MigModeStep::Enable { .. }) => Phase::MigOn,
            Self::Instance(_) => Phase::Instances,
            Self::MigMode(MigModeStep::Disable { .. }) => Phase::MigOff,
            Self::Mps(MpsStep::StartDaemon { .. }) | Self::Timeslice(_) => Phase::After,
        }
    }

    /// Returns whether the step changes MIG mode or MIG instances.
    #[must_use]
    pub fn changes_mig(&self) -> bool {
        match self {
            Self::MigMode(_) | Self::Instance(_) => true,
            Self::Mps(_) | Self::Timeslice(_) => false,
        }
    }
}

impl MigModeStep {
    /// Returns whether the step enables MIG mode. If false, the step disables MIG mode.
    #[must_use]
    pub fn enables(&self) -> bool {
        match self {
            Self::Enable { .. } => true,
            Self::Disable { .. } => false,
        }
    }

    /// Returns the reset that the step needs.
    #[must_use]
    pub fn reset(&self) -> Option<&Reset> {
        match self {
            Self::Enable { reset, .. } | Self::Disable { reset, .. } => reset.as_ref(),
        }
    }

    /// Returns whether the new mode is effective only after a reboot of the host.
    #[must_use]
    pub fn at_reboot(&self) -> bool {
        match self {
            Self::Enable { at_reboot, .. } | Self::Disable { at_reboot, .. } => *at_reboot,
        }
    }

    /// Returns the reset that the step needs, so that the caller can complete it.
    pub fn reset_mut(&mut self) -> Option<&mut Reset> {
        match self {
            Self::Enable { reset, .. } | Self::Disable { reset, .. } => reset.as_mut(),
        }
    }
}

impl InstanceStep {
    /// Returns the id of the GPU instance that the step destroys, or whose compute instance it destroys.
    #[must_use]
    pub fn destroys(&self) -> Option<u32> {
        match self {
            Self::DestroyCompute { gi, .. } | Self::DestroyGpuInstance { gi, .. } => Some(*gi),
            Self::CreateGpuInstance { .. } | Self::CreateCompute { .. } => None,
        }
    }
}

impl From<InstanceStep> for Step {
    fn from(step: InstanceStep) -> Self {
        Self::Instance(step)
    }
}

/// A GPU reset, and the GPUs that it affects.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Reset {
    /// Other GPUs that are reset at the same time. They must be idle and have no instances.
    #[serde(default)]
    pub together: Vec<Peer>,
}

/// A GPU that is reset together with another one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Peer {
    /// Index of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = u32))]
    pub gpu: GpuIndex,
    /// UUID of the GPU.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub gpu_uuid: GpuUuid,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_each_kind() -> Vec<Step> {
        let placement = Placement { start: 0, size: 4 };
        let profile = || "3g.40gb".to_owned();
        let reset = Some(Reset { together: vec![Peer { gpu: GpuIndex(1), gpu_uuid: "GPU-1".into() }] });
        vec![
            Step::Mps(MpsStep::StopDaemon { uuid: "GPU-1".into(), label: "GPU 0".to_owned() }),
            Step::MigMode(MigModeStep::Enable { reset, at_reboot: false }),
            Step::Instance(InstanceStep::DestroyCompute { gi: 1, ci: 0, profile: profile(), uuid: None }),
            Step::Instance(InstanceStep::DestroyGpuInstance { gi: 1, profile: profile(), placement }),
            Step::Instance(InstanceStep::CreateGpuInstance { profile: profile(), profile_id: 9, placement }),
            Step::Instance(InstanceStep::CreateCompute {
                gi_placement: placement,
                profile: profile(),
                profile_id: 2,
                placement: None,
            }),
            Step::MigMode(MigModeStep::Disable { reset: None, at_reboot: true }),
            Step::Mps(MpsStep::StartDaemon { device: None }),
            Step::Mps(MpsStep::StartDaemon { device: Some("2g.20gb@2".to_owned()) }),
            Step::Timeslice(TimesliceStep::Set),
            Step::Timeslice(TimesliceStep::Clear),
        ]
    }

    #[test]
    fn step_of_each_kind_survives_the_wire() {
        let names = [
            "stop_mps_daemon",
            "enable_mig",
            "destroy_compute",
            "destroy_gpu_instance",
            "create_gpu_instance",
            "create_compute",
            "disable_mig",
            "start_mps_daemon",
            "start_mps_daemon",
            "set_timeslice",
            "clear_timeslice",
        ];
        for (step, name) in std::iter::zip(of_each_kind(), names) {
            let json = serde_json::to_value(&step).unwrap();
            assert_eq!(json["do"], name);
            assert_eq!(serde_json::from_value::<Step>(json).unwrap(), step);
        }
        assert!(serde_json::from_str::<Step>("{\"do\": \"reboot\"}").is_err());
    }

    /// Different parts of gpushd add steps in any order. The plan must still order the steps by phase, and keep the
    /// order of the steps within a phase.
    #[test]
    fn plan_keeps_phase_order_however_steps_are_added() {
        let steps = of_each_kind();
        for first in 0..steps.len() {
            for stride in [1, 2, 4, 5, 7, 8] {
                let order = (0..steps.len()).map(|n| (first + n * stride) % steps.len());
                let mut plan = crate::GpuPlan::default();
                order.clone().for_each(|at| plan.add(steps[at].clone()));
                assert!(plan.steps.is_sorted_by_key(Step::phase), "{plan:?}");
                for phase in Phase::ALL {
                    let added = order.clone().map(|at| &steps[at]).filter(|step| step.phase() == phase);
                    assert!(plan.phase(phase).eq(added), "{plan:?}");
                }
                assert_eq!(plan.total() as usize, steps.len());
            }
        }
    }
}
