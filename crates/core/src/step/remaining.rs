//! The steps that an interrupted operation must still execute.

use gpush_api::{GpuPlan, MigModeStep, Step};

/// Returns the plan that an interrupted operation must still execute. The MIG steps of this plan
/// come from `rest`, which was planned from a new reading. All other steps come from the `recorded`
/// plan and are repeated, for two reasons. No reading shows whether they are done. Everything that
/// a bracket stopped must remain stopped until the operation ends. Repeating these steps does no
/// harm.
///
/// The details of a reset come from the recorded plan. If no MIG step is left, the plan has no services and hooks.
#[must_use]
pub fn remaining(recorded: &GpuPlan, rest: GpuPlan) -> GpuPlan {
    let mut plan = GpuPlan { layout: recorded.layout.clone(), services: Vec::new(), hooks: Vec::new(), ..rest };
    plan.steps.retain(Step::changes_mig);
    if !plan.steps.is_empty() {
        (plan.services, plan.hooks) = (recorded.services.clone(), recorded.hooks.clone());
    }
    recorded.steps.iter().filter(|step| !step.changes_mig()).for_each(|step| plan.add(step.clone()));
    for step in &mut plan.steps {
        if let Step::MigMode(MigModeStep::Enable { reset, .. } | MigModeStep::Disable { reset, .. }) = step {
            *reset = recorded.reset().cloned().or(reset.take());
        }
    }
    plan
}

/// Returns how many steps of the `recorded` plan count as done before `remaining` is executed.
#[must_use]
pub fn done_before(recorded: &GpuPlan, remaining: &GpuPlan) -> u32 {
    recorded.total().saturating_sub(remaining.total())
}
