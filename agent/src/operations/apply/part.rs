//! The data of an operation about one of its GPUs.

use std::sync::Arc;

use gpush_api::{ApiError, GpuInstance, GpuPlan, Mig, Reset, Step};
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
        GpuName { uuid: self.plan.uuid.clone(), label: self.label() }
    }

    /// Returns the name of the GPU for messages.
    pub(super) fn label(&self) -> String {
        format!("GPU {} ({})", self.plan.gpu, self.plan.uuid)
    }

    /// Returns the change of the GPU's MIG mode for a step.
    pub(super) fn mode_change(&self) -> ModeChange {
        let peers = self.peers().map(str::to_owned).collect();
        let completion = match &self.reset {
            _ if self.plan.waits_for_reboot() => Completion::Reboot,
            Some(_) => Completion::Reset,
            None => Completion::Driver,
        };
        ModeChange { position: self.position, gpu: self.gpu(), completion, peers }
    }

    /// Returns the UUIDs of the GPUs that are reset together with this GPU.
    pub(super) fn peers(&self) -> impl Iterator<Item = &str> {
        self.reset.iter().flat_map(|reset| &reset.together).map(|peer| peer.uuid.as_str())
    }

    /// Marks the GPU as degraded, because an operation and its rollback failed, or because the outcome of the operation
    /// is unknown.
    pub(super) fn degrade(&self, operation: &str, error: &ApiError) -> Change {
        let new = NewCondition {
            scope: Scope::Gpu(self.plan.uuid.clone()),
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
