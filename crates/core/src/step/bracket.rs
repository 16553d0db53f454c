//! Brackets: actions around the steps of an operation. A bracket is opened before the first step,
//! and closed when the operation ends, even if the operation fails.
//!
//! ```text
//! opened:      time-slice levels ─► MPS daemons ─► services ─► hook after (noted) ─► hook before ─► steps
//! closed:                           MPS daemons ◄─ services ◄─ hook after ◄──────────────────────── end
//! ```
//!
//! gpushd records services and hooks in the journal before it opens their brackets, so that the
//! next gpushd can close them. The reconcilers of MPS daemons and time-slice levels close the other
//! brackets after the operation has ended.

use std::collections::BTreeMap;

use gpush_api::{GpuPlan, MpsStep, Phase, Step};
use serde::{Deserialize, Serialize};

use crate::config::ModeChange;

/// One bracket of an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "bracket", rename_all = "snake_case")]
pub enum Bracket {
    /// When opened, resets time-slice levels that no rule needs after the operation.
    Timeslice,
    /// When opened, stops an MPS daemon. This stop is a step of a plan.
    MpsDaemon {
        /// Position of the plan in the operation.
        position: usize,
        /// The step.
        step: MpsStep,
    },
    /// When opened, stops a service if it is running.
    Service {
        /// Name of the service.
        service: String,
    },
    /// Does nothing when opened, and runs a hook when closed.
    HookAfter {
        /// Absolute path of the program.
        program: String,
        /// Environment of the program.
        env: BTreeMap<String, String>,
    },
    /// Runs a hook when opened, and does nothing when closed.
    HookBefore {
        /// Absolute path of the program.
        program: String,
        /// Environment of the program.
        env: BTreeMap<String, String>,
    },
}

impl Bracket {
    /// Returns whether gpushd records the bracket in the journal before opening it, so that a later
    /// gpushd can close it.
    #[must_use]
    pub fn is_recorded(&self) -> bool {
        match self {
            Self::Service { .. } | Self::HookAfter { .. } => true,
            Self::Timeslice | Self::MpsDaemon { .. } | Self::HookBefore { .. } => false,
        }
    }
}

/// Returns the brackets of an operation with these plans, in the order in which they are opened.
/// Services and hooks are included only if a plan has services, hooks or a reset. A plan that an earlier version recorded
/// has only the reset.
#[must_use]
pub fn brackets(plans: &[GpuPlan], operation: &str, change: &ModeChange) -> Vec<Bracket> {
    let mut brackets = vec![Bracket::Timeslice];
    for (position, plan) in plans.iter().enumerate() {
        brackets.extend(plan.phase(Phase::Before).filter_map(|step| match step {
            Step::Mps(step) => Some(Bracket::MpsDaemon { position, step: step.clone() }),
            Step::MigMode(_) | Step::Instance(_) | Step::Timeslice(_) => None,
        }));
    }
    let has_none = |plan: &GpuPlan| plan.services.is_empty() && plan.hooks.is_empty() && plan.reset().is_none();
    if plans.iter().all(has_none) {
        return brackets;
    }
    brackets.extend(change.services.iter().map(|service| Bracket::Service { service: service.clone() }));
    let env = |phase| hook_environment(plans, operation, phase);
    brackets
        .extend(change.after.iter().map(|program| Bracket::HookAfter { program: program.clone(), env: env("after") }));
    let before = |program: &String| Bracket::HookBefore { program: program.clone(), env: env("before") };
    brackets.extend(change.before.iter().map(before));
    brackets
}

/// Returns the environment of a hook. `phase` is `before` or `after`.
#[must_use]
pub fn hook_environment(plans: &[GpuPlan], operation: &str, phase: &str) -> BTreeMap<String, String> {
    let switched = |enable: bool| {
        let uuids = plans.iter().filter(|plan| plan.mig_mode() == Some(enable)).map(|plan| plan.gpu_uuid.as_str());
        uuids.collect::<Vec<_>>().join(",")
    };
    let facts = [
        ("GPUSH_OPERATION", operation.to_owned()),
        ("GPUSH_PHASE", phase.to_owned()),
        ("GPUSH_MIG_ON", switched(true)),
        ("GPUSH_MIG_OFF", switched(false)),
    ];
    facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()
}
