//! The data of an operation about one of its GPUs.

use std::sync::Arc;

use gpush_api::{ApiError, GpuInstance, GpuPlan, GpuUuid, Mig, Reset, Step};
use gpush_core::{
    desired::needs_reset,
    plan,
    step::{difference, same_layout},
};
use gpush_nvml::Reading;
use gpush_store::{ConditionKind, GpuIntent, NewCondition, Scope};

use crate::{
    modes::{
        GpuName,
        mig::mode_change::{Completion, ModeChange},
    },
    operations::{operation::named_once, overrides::OverrideChange},
    state::{Change, RecoveryCheck},
};

/// The data of an operation about one of its GPUs.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// Position in the operation's plans.
    pub(crate) position: usize,
    pub(crate) plan: GpuPlan,
    /// MIG state when the operation began. A rollback restores this state. `None` if the GPU does
    /// not support MIG.
    pub(crate) before: Option<Mig>,
    /// MIG state when the plan was made. The steps start from this state. `None` if the GPU does
    /// not support MIG.
    pub(super) found: Option<Mig>,
    /// The GPU instances after all steps of the plan. The ids of new instances are placeholders.
    pub(super) outcome: Vec<GpuInstance>,
    /// The change of the GPU's override, applied if the operation succeeds.
    pub(super) lasting: Option<OverrideChange>,
    /// The reset that a change of the MIG mode may need, in the steps or in a rollback. `None` if no reset is needed.
    pub(super) reset: Option<Reset>,
}

impl Part {
    /// Creates the part of an operation for a plan that was made from `reading`. `before` is the GPU's MIG state when
    /// the operation began.
    pub(crate) fn new(position: usize, plan: GpuPlan, before: Option<Mig>, reading: &Reading) -> Self {
        let outcome = plan::outcome(instances(reading.mig.as_ref()), plan.instance_steps());
        let reset = possible_reset(&plan, None, Some(reading));
        Self { position, plan, before, found: reading.mig.clone(), outcome, lasting: None, reset }
    }

    /// Creates the data for an operation that waits in the queue. The plan is for display only.
    pub(super) fn unseen(position: usize, plan: GpuPlan) -> Self {
        // Every user can read the operation, but the steps on instances may contain details that only the caller may
        // see. So remove these steps.
        let steps = plan.steps.into_iter().filter(|step| !matches!(step, Step::Instance(_))).collect();
        let plan = GpuPlan { refusal: None, error: None, steps, keeps: Vec::new(), ..plan };
        Self { position, plan, before: None, found: None, outcome: Vec::new(), lasting: None, reset: None }
    }

    /// Creates the data from the journal, only to compare the GPU's current state with the recorded states.
    pub(crate) fn recorded(position: usize, intent: &GpuIntent) -> Self {
        let (plan, before) = (intent.plan.clone(), intent.before.clone());
        Self { position, plan, before, found: None, outcome: outcome(intent), lasting: None, reset: None }
    }

    /// Creates the data for an interrupted operation. `plan` has only the steps that, according to `reading`, are not
    /// done yet.
    pub(super) fn interrupted(
        position: usize,
        intent: &GpuIntent,
        plan: GpuPlan,
        reading: Option<&Reading>,
        lasting: Option<OverrideChange>,
    ) -> Self {
        Self {
            position,
            before: intent.before.clone(),
            found: reading.and_then(|reading| reading.mig.clone()),
            outcome: outcome(intent),
            lasting,
            reset: possible_reset(&plan, intent.plan.reset(), reading),
            plan,
        }
    }

    /// Returns the name of the GPU for steps.
    pub(super) fn gpu(&self) -> GpuName {
        GpuName { uuid: self.plan.gpu_uuid.clone(), label: self.label() }
    }

    /// Returns the name of the GPU for messages.
    pub(super) fn label(&self) -> String {
        format!("GPU {} ({})", self.plan.gpu, self.plan.gpu_uuid)
    }

    /// Returns the change of the GPU's MIG mode for a step.
    pub(super) fn mode_change(&self) -> ModeChange {
        let peers = self.peers().cloned().collect();
        let completion = match &self.reset {
            _ if self.plan.waits_for_reboot() => Completion::Reboot,
            Some(_) => Completion::Reset,
            None => Completion::Driver,
        };
        ModeChange { position: self.position, gpu: self.gpu(), completion, peers }
    }

    /// Returns the UUIDs of the GPUs that are reset together with this GPU.
    pub(super) fn peers(&self) -> impl Iterator<Item = &GpuUuid> {
        self.reset.iter().flat_map(|reset| &reset.together).map(|peer| &peer.gpu_uuid)
    }

    /// Marks the GPU as degraded, because an operation and its rollback failed, or because the outcome of the operation
    /// is unknown.
    pub(super) fn degrade(&self, operation: &str, error: &ApiError) -> Change {
        let new = NewCondition {
            scope: Scope::Gpu(self.plan.gpu_uuid.clone()),
            kind: ConditionKind::Degraded,
            cause: operation.to_owned(),
            reason: named_once(error.clone(), std::slice::from_ref(&self.plan)).sentences().join("; "),
            by: None,
        };
        Change::Degrade(new, Arc::new(self.clone()))
    }

    /// Returns whether the plan has no steps.
    pub(super) fn is_empty(&self) -> bool {
        self.plan.is_empty()
    }

    /// Returns whether the operation has not changed the GPU and has no steps for it. A GPU without changes needs no
    /// rollback.
    pub(super) fn is_untouched(&self) -> bool {
        self.is_empty() && same_layout(self.before.as_ref(), self.found.as_ref())
    }
}

impl RecoveryCheck for Part {
    fn passes(&self, reading: &Reading) -> Option<&'static str> {
        let now = reading.mig.as_ref();
        if difference(&self.plan, &self.label(), now).is_none() {
            return Some("as planned");
        }
        same_layout(self.before.as_ref(), now).then_some("as before")
    }
}

/// Returns the GPU instances after all steps of a recorded plan.
pub(super) fn outcome(intent: &GpuIntent) -> Vec<GpuInstance> {
    plan::outcome(instances(intent.before.as_ref()), intent.plan.instance_steps())
}

/// Returns the instances of a GPU; an empty slice if the GPU does not support MIG.
pub(super) fn instances(mig: Option<&Mig>) -> &[GpuInstance] {
    mig.map(|mig| mig.instances.as_slice()).unwrap_or_default()
}

/// Returns the reset that a change of the MIG mode may need: the reset in the journal, else the reset in the plan, else
/// a reset if the GPU's architecture requires one.
fn possible_reset(plan: &GpuPlan, recorded: Option<&Reset>, reading: Option<&Reading>) -> Option<Reset> {
    let by_architecture = || {
        let needed = reading
            .is_some_and(|reading| needs_reset(reading.identity.architecture) && !reading.identity.passed_through);
        needed.then(Reset::default)
    };
    recorded.or(plan.reset()).cloned().or_else(by_architecture)
}

#[cfg(test)]
mod tests {
    use gpush_api::{ApiError, Architecture, Code, GpuIndex, MigModeStep, Peer};

    use super::*;
    use crate::modes::scene::{mig_gpu, plan_layout, plan_mig_off, process, reading, whole_gpu};

    fn reset(peers: &[u32]) -> Reset {
        Reset {
            together: peers
                .iter()
                .map(|gpu| Peer { gpu: GpuIndex(*gpu), gpu_uuid: format!("GPU-{gpu}").into() })
                .collect(),
        }
    }

    fn enabling(reset: Option<Reset>, at_reboot: bool) -> GpuPlan {
        GpuPlan { steps: vec![Step::MigMode(MigModeStep::Enable { reset, at_reboot })], ..GpuPlan::default() }
    }

    /// The rollback of an instance may need the reset that the steps did not need.
    #[test]
    fn possible_reset_is_that_of_journal_else_plan_else_gpu() {
        let (plain, planned) = (enabling(None, false), enabling(Some(reset(&[1])), false));
        let ampere = reading(&whole_gpu());
        let on = |architecture, passed_through| {
            let mut reading = reading(&whole_gpu());
            (reading.identity.architecture, reading.identity.passed_through) = (architecture, passed_through);
            reading
        };
        assert_eq!(possible_reset(&planned, Some(&reset(&[2])), Some(&ampere)), Some(reset(&[2])));
        assert_eq!(possible_reset(&planned, None, Some(&ampere)), Some(reset(&[1])));
        assert_eq!(possible_reset(&plain, None, Some(&ampere)), Some(reset(&[])));
        assert_eq!(possible_reset(&plain, None, Some(&on(Architecture::Hopper, false))), None);
        assert_eq!(possible_reset(&plain, None, Some(&on(Architecture::Ampere, true))), None, "a virtual machine");
        assert_eq!(possible_reset(&plain, None, None), None, "the GPU cannot be read");
    }

    #[test]
    fn mig_mode_change_in_a_vm_is_completed_by_a_reboot() {
        let completion = |plan: GpuPlan, reset| Part { reset, ..Part::unseen(0, plan) }.mode_change().completion;
        assert_eq!(completion(enabling(None, false), None), Completion::Driver);
        assert_eq!(completion(enabling(None, false), Some(reset(&[]))), Completion::Reset);
        assert_eq!(completion(enabling(None, true), Some(reset(&[]))), Completion::Reboot);
        let together = Part { reset: Some(reset(&[1, 2])), ..Part::unseen(0, enabling(None, false)) };
        assert_eq!(together.mode_change().peers, ["GPU-1", "GPU-2"]);
    }

    /// Every user may read the operation.
    #[test]
    fn waiting_operation_shows_no_instance_and_no_refusal() {
        let mut gpu = mig_gpu(&["3g.40gb@4"]);
        let plan = plan_mig_off(&gpu);
        assert!(plan.instance_steps().next().is_some());
        let unseen = Part::unseen(0, plan);
        assert!(unseen.plan.instance_steps().next().is_none() && unseen.plan.mig_mode() == Some(false));
        gpu.mig.as_mut().unwrap().instances[0].compute[0].processes.push(process(4711));
        let refused = plan_mig_off(&gpu);
        assert!(serde_json::to_string(&refused).unwrap().contains("4711"));
        assert!(!serde_json::to_string(&Part::unseen(0, refused).plan).unwrap().contains("4711"));
    }

    #[test]
    fn gpu_recovers_with_the_planned_or_the_previous_layout() {
        let before = mig_gpu(&["3g.40gb@4"]);
        let (planned, other) = (mig_gpu(&["7g.80gb"]), mig_gpu(&["2g.20gb@0"]));
        let part = Part::new(0, plan_layout(&before, &["7g.80gb"]), before.mig.clone(), &reading(&before));
        assert_eq!(part.passes(&reading(&planned)), Some("as planned"));
        assert_eq!(part.passes(&reading(&before)), Some("as before"));
        assert_eq!(part.passes(&reading(&other)), None);
        assert_eq!(part.passes(&reading(&whole_gpu())), None, "MIG mode is off");
    }

    #[test]
    fn gpu_is_untouched_only_without_steps_and_changes() {
        let (before, after) = (mig_gpu(&["3g.40gb@4"]), mig_gpu(&["7g.80gb"]));
        let part = |plan, found| Part::new(0, plan, before.mig.clone(), &reading(found));
        assert!(part(plan_layout(&before, &["3g.40gb@4"]), &before).is_untouched());
        assert!(!part(plan_layout(&before, &["7g.80gb"]), &before).is_untouched(), "it has steps");
        // The interrupted operation has executed all its steps.
        assert!(!part(plan_layout(&after, &["7g.80gb"]), &after).is_untouched(), "it has changed");
    }

    #[test]
    fn instances_after_an_interrupted_plan_are_those_of_the_journal() {
        let (before, half_way) = (mig_gpu(&["3g.40gb@4", "2g.20gb@0"]), mig_gpu(&["3g.40gb@4"]));
        let intent = GpuIntent { before: before.mig.clone(), plan: plan_layout(&before, &["4g.40gb", "3g.40gb"]) };
        let rest = plan_layout(&half_way, &["4g.40gb", "3g.40gb"]);
        let part = Part::interrupted(0, &intent, rest, Some(&reading(&half_way)), None);
        let starts = |instances: &[GpuInstance]| instances.iter().map(|one| one.placement.start).collect::<Vec<_>>();
        assert_eq!((starts(&part.outcome), starts(instances(part.found.as_ref()))), (vec![4, 0], vec![4]));
        assert_eq!(part.outcome, Part::recorded(0, &intent).outcome);
    }

    #[test]
    fn degraded_gpu_is_named_once_in_its_reason() {
        let gpu = whole_gpu();
        let part = Part::unseen(0, plan_layout(&gpu, &["7g.80gb"]));
        let error = ApiError::new(Code::DriverError, format!("{}: creating failed", part.label()))
            .cause(format!("{} is in use", part.label()));
        let Change::Degrade(condition, _) = part.degrade("op-3", &error) else { panic!("degraded") };
        assert_eq!((condition.cause.as_str(), condition.scope), ("op-3", Scope::Gpu("GPU-0".into())));
        assert_eq!(condition.reason, "GPU 0 (GPU-0): creating failed; GPU 0 is in use");
    }
}
