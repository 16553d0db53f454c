//! The steps that an interrupted operation still has to execute.

use gpush_api::{GpuPlan, MigModeStep, Step};

/// Returns the plan that an interrupted operation still has to execute. Its MIG steps come from `rest`, which was
/// planned from a fresh reading. All other steps come from the `recorded` plan. They are repeated for two reasons: no
/// reading shows whether they are done, and anything that a bracket stopped must stay stopped until the operation ends.
/// Repeating them does no harm.
///
/// The details of a reset come from the recorded plan.
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

/// Returns the number of steps of the `recorded` plan that count as done while `remaining` is not executed yet.
#[must_use]
pub fn done_before(recorded: &GpuPlan, remaining: &GpuPlan) -> u32 {
    recorded.total().saturating_sub(remaining.total())
}
