//! What an interrupted operation still has to do.

use gpush_api::{GpuPlan, MigModeStep, Step};

/// Returns the plan that an interrupted operation still has to execute: the MIG steps of `rest`, which was planned from
/// a fresh reading, and the other steps of the `recorded` plan. Those are repeated, because no reading shows them, and
/// because what a bracket stopped must stay stopped until the operation ends. Repeating them does no harm.
///
/// A reset disturbs what it was recorded to disturb.
#[must_use]
pub fn remaining(recorded: &GpuPlan, rest: GpuPlan) -> GpuPlan {
    let mut plan = GpuPlan { layout: recorded.layout.clone(), ..rest };
    plan.steps.retain(Step::changes_mig);
    recorded.steps.iter().filter(|step| !step.changes_mig()).for_each(|step| plan.add(step.clone()));
    for step in &mut plan.steps {
        if let Step::MigMode(MigModeStep::Enable { reset } | MigModeStep::Disable { reset }) = step {
            *reset = recorded.reset().cloned().or(reset.take());
        }
    }
    plan
}

/// Returns how many steps of the `recorded` plan count as done while `remaining` is still to be executed.
#[must_use]
pub fn done_before(recorded: &GpuPlan, remaining: &GpuPlan) -> u32 {
    recorded.total().saturating_sub(remaining.total())
}
