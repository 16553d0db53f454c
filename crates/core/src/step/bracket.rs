//! What surrounds the steps of an operation: opened before its first step, taken back at its end, whatever the end.
//!
//! ```text
//! opened:      time-slice levels ─► MPS daemons ─► services ─► hook after (noted) ─► hook before ─► steps
//! taken back:                       MPS daemons ◄─ services ◄─ hook after ◄──────────────────────── end
//! ```
//!
//! Services and hooks are noted in the journal before they are opened, so that the next gpushd takes them back. MPS
//! daemons and time-slice levels are taken back by their reconcilers, once the operation has ended.

use std::collections::BTreeMap;

use gpush_api::{GpuPlan, MpsStep, Phase, Step};
use serde::{Deserialize, Serialize};

use crate::config::ModeChange;

/// One part of what surrounds an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "bracket", rename_all = "snake_case")]
pub enum Bracket {
    /// Time-slice levels that no rule asks for after the operation are reset.
    Timeslice,
    /// An MPS daemon is stopped, as a step of a plan.
    MpsDaemon {
        /// Position of the plan in the operation.
        position: usize,
        /// The step.
        step: MpsStep,
    },
    /// A service is stopped, if it runs.
    Service {
        /// Its name.
        service: String,
    },
    /// Nothing is done; a hook runs when this is taken back.
    HookAfter {
        /// The program, absolute.
        program: String,
        /// Its environment.
        env: BTreeMap<String, String>,
    },
    /// A hook runs. Nothing is done when this is taken back.
    HookBefore {
        /// The program, absolute.
        program: String,
        /// Its environment.
        env: BTreeMap<String, String>,
    },
}

impl Bracket {
    /// Returns whether the journal notes the bracket before it is opened, so that any later gpushd takes it back.
    #[must_use]
    pub fn is_noted(&self) -> bool {
        match self {
            Self::Service { .. } | Self::HookAfter { .. } => true,
            Self::Timeslice | Self::MpsDaemon { .. } | Self::HookBefore { .. } => false,
        }
    }
}

/// Returns what surrounds an operation with these plans, in the order in which it is opened. Services and hooks surround
/// it only when it resets a GPU.
#[must_use]
pub fn brackets(plans: &[GpuPlan], operation: &str, change: &ModeChange) -> Vec<Bracket> {
    let mut brackets = vec![Bracket::Timeslice];
    for (position, plan) in plans.iter().enumerate() {
        brackets.extend(plan.phase(Phase::Before).filter_map(|step| match step {
            Step::Mps(step) => Some(Bracket::MpsDaemon { position, step: step.clone() }),
            Step::MigMode(_) | Step::Instance(_) | Step::Timeslice(_) => None,
        }));
    }
    if plans.iter().all(|plan| plan.reset().is_none()) {
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
        let uuids = plans.iter().filter(|plan| plan.mig_mode() == Some(enable)).map(|plan| plan.uuid.as_str());
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
