//! Pure functions for the steps of a plan.
//!
//! ```text
//! step ──► describe         words for progress and errors
//!      ──► verify(reading)  done | not done | may still take effect
//!
//! recorded plan + plan from a fresh reading ──► remaining   the steps that an interrupted operation still has to execute
//! plans + config ──► brackets   actions around the steps of an operation
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `verify` | whether a reading shows that a step, or a whole plan, is done |
//! | `remaining` | the steps that an interrupted operation still has to execute |
//! | `bracket` | actions before and after the steps of an operation |

mod bracket;
mod remaining;
#[cfg(test)]
mod tests;
mod verify;

pub use bracket::{Bracket, brackets, hook_environment};
pub use remaining::{done_before, remaining};
pub use verify::{Instances, Verdict, difference, same_layout, verify_instance, verify_mode};

use gpush_api::{InstanceStep, MpsStep, Step, TimesliceStep};

/// Describes a step, in words that can follow "while" or precede "failed".
#[must_use]
pub fn describe(step: &Step) -> String {
    match step {
        Step::Mps(MpsStep::StopDaemon { label, .. }) => format!("stopping the MPS daemon of {label}"),
        Step::Mps(MpsStep::StartDaemon { device: None }) => "starting the MPS daemon of the GPU".to_owned(),
        Step::Mps(MpsStep::StartDaemon { device: Some(device) }) => format!("starting the MPS daemon of {device}"),
        Step::MigMode(step) => describe_mode(step.enables()).to_owned(),
        Step::Instance(step) => describe_instance(step),
        Step::Timeslice(TimesliceStep::Set) => "setting the time-slice level".to_owned(),
        Step::Timeslice(TimesliceStep::Clear) => "restoring the time-slice level and the compute mode".to_owned(),
    }
}

/// Describes a change of MIG mode.
#[must_use]
pub fn describe_mode(enable: bool) -> &'static str {
    if enable { "switching MIG mode on" } else { "switching MIG mode off" }
}

/// Describes a step on an instance.
#[must_use]
pub fn describe_instance(step: &InstanceStep) -> String {
    match step {
        InstanceStep::DestroyCompute { gi, ci, profile, .. } => {
            format!("destroying compute instance {ci} ({profile}) of GPU instance {gi}")
        }
        InstanceStep::DestroyGpuInstance { gi, profile, placement } => {
            format!("destroying GPU instance {gi} ({profile}@{})", placement.start)
        }
        InstanceStep::CreateGpuInstance { profile, placement, .. } => {
            format!("creating GPU instance {profile}@{}", placement.start)
        }
        InstanceStep::CreateCompute { gi_placement, profile, placement: None, .. } => {
            format!("creating compute instance {profile} in the GPU instance at {}", gi_placement.start)
        }
        InstanceStep::CreateCompute { gi_placement, profile, placement: Some(at), .. } => format!(
            "creating compute instance {profile} at slot {} in the GPU instance at {}",
            at.start, gi_placement.start
        ),
    }
}
