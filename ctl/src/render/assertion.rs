//! The result of `gpushctl mig apply --check`: plans of a check that changes nothing.

use gpush_api::{ApiError, Gpu, GpuPlan, Plans, Refusal};

use super::{Appearance, plan, trouble};

/// Draws the plans of a check. If the layout is impossible only because instances or the GPU are in use, draws a
/// difference, because the check does not apply the layout.
pub(crate) fn checked(plans: &Plans, gpus: &[Gpu], look: &Appearance) -> String {
    plan::draw(plans, gpus, trouble_of_check, look)
}

/// Draws the error of a plan. If the layout is only blocked, says that the GPU differs, and what must be idle before an
/// apply.
fn trouble_of_check(plan: &GpuPlan, error: &ApiError, look: &Appearance) -> Vec<String> {
    let needs = match &plan.refusal {
        Some(Refusal::Blocked { blockers }) => {
            let mut names: Vec<String> =
                blockers.iter().map(|one| format!("{}@{}", one.profile, one.placement.start)).collect();
            names.dedup();
            format!("{} must be idle", names.join(" and "))
        }
        Some(Refusal::Held { .. }) => "the GPU must be idle".to_owned(),
        Some(_) | None => return plan::trouble_of_plan(plan, error, look),
    };
    let mut difference = error.clone();
    difference.message = format!("GPU {} does not have this layout; to apply it, {needs}", plan.gpu);
    trouble::lines("differs", &difference, 2, look)
}

#[cfg(test)]
mod tests {
    use gpush_api::Code;

    use super::*;
    use crate::render::{Charset, fixtures};

    /// Earlier fault: the check said that it cannot apply the layout.
    #[test]
    fn blocked_layout_is_a_difference() {
        let mut plan = fixtures::plan_without_steps(0);
        plan.error = Some(ApiError::new(Code::Blocked, "MIG mode of GPU 0 can't be changed").cause("held by pid 7"));
        let text = |plan: &GpuPlan| {
            let plans = Plans { plans: vec![plan.clone()] };
            fixtures::plain(&checked(&plans, &[], &fixtures::look(80, Charset::Ascii)))
        };
        assert!(text(&plan).contains("\n  refused: MIG mode of GPU 0 can't be changed\n"), "{}", text(&plan));
        plan.refusal = Some(Refusal::Held { holders: Vec::new(), leases: Vec::new() });
        let held = text(&plan);
        let expected =
            "\n  differs: GPU 0 does not have this layout; to apply it, the GPU must be idle\n    cause: held by";
        assert!(held.contains(expected), "{held}");
    }
}
