//! One GPU's part of an operation.

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
    modes::{GpuName, mig::mode::ModeChange},
    operation::named_once,
    overrides::Lasting,
    state::{Change, RecoveryCheck},
};

/// One GPU's part of an operation.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// Position in the operation's plans.
    pub(crate) position: usize,
    /// What to do.
    pub(crate) plan: GpuPlan,
    /// The GPU when the operation began, which a rollback restores. `None` on a part without MIG.
    pub(crate) before: Option<Mig>,
    /// The GPU when the plan was made: its steps begin there. `None` on a part without MIG.
    pub(super) found: Option<Mig>,
    /// The instances after all steps of the operation's plan. The ids of new ones mean nothing.
    pub(super) outcome: Vec<GpuInstance>,
    /// What becomes of the GPU's override when the operation succeeds.
    pub(super) lasting: Option<Lasting>,
    /// The reset that a change of the MIG mode may take, forward and back; `None` when it takes none.
    pub(super) reset: Option<Reset>,
}

impl Part {
    /// Creates the part of a plan that was made on `reading`. `before` is the GPU when the operation began.
    pub(crate) fn new(position: usize, plan: GpuPlan, before: Option<Mig>, reading: &Reading) -> Self {
        let outcome = plan::outcome(instances(reading.mig.as_ref()), plan.instance_steps());
        let reset = possible_reset(&plan, None, Some(reading));
        Self { position, plan, before, found: reading.mig.clone(), outcome, lasting: None, reset }
    }

    /// Creates the part of a plan that was made without claiming the GPU. It can only be shown.
    pub(super) fn unseen(position: usize, plan: GpuPlan) -> Self {
        // Every user can read an operation, but its plan was made for the caller only.
        let steps = plan.steps.into_iter().filter(|step| !matches!(step, Step::Instance(_))).collect();
        let plan = GpuPlan { refusal: None, error: None, steps, keeps: Vec::new(), ..plan };
        Self { position, plan, before: None, found: None, outcome: Vec::new(), lasting: None, reset: None }
    }

    /// Creates the part that the journal has, to be compared with a reading.
    pub(crate) fn recorded(position: usize, intent: &GpuIntent) -> Self {
        let (plan, before) = (intent.plan.clone(), intent.before.clone());
        Self { position, plan, before, found: None, outcome: outcome(intent), lasting: None, reset: None }
    }

    /// Creates the part of an interrupted operation. `plan` is what remains of it, planned from `reading`.
    pub(super) fn interrupted(
        position: usize,
        intent: &GpuIntent,
        plan: GpuPlan,
        reading: Option<&Reading>,
        lasting: Option<Lasting>,
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

    /// Returns the GPU as steps name it.
    pub(super) fn gpu(&self) -> GpuName {
        GpuName { uuid: self.plan.uuid.clone(), label: self.label() }
    }

    /// Returns the GPU in messages.
    pub(super) fn label(&self) -> String {
        format!("GPU {} ({})", self.plan.gpu, self.plan.uuid)
    }

    /// Returns a change of the GPU's MIG mode, as a step takes it.
    pub(super) fn mode_change(&self) -> ModeChange {
        let peers = self.peers().map(str::to_owned).collect();
        ModeChange { position: self.position, gpu: self.gpu(), may_reset: self.reset.is_some(), peers }
    }

    /// Returns the UUIDs of the GPUs that are reset together with this one.
    pub(super) fn peers(&self) -> impl Iterator<Item = &str> {
        self.reset.iter().flat_map(|reset| &reset.together).map(|peer| peer.uuid.as_str())
    }

    /// Marks the GPU as degraded: a change and its rollback failed on it, or the outcome is not known.
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

    /// Returns whether the plan has no step.
    pub(super) fn is_empty(&self) -> bool {
        self.plan.is_empty()
    }

    /// Returns whether the operation has not changed the GPU and has nothing to change, so that there is nothing to
    /// take back.
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

/// Returns the instances after the plan of an operation that the journal has.
pub(super) fn outcome(intent: &GpuIntent) -> Vec<GpuInstance> {
    plan::outcome(instances(intent.before.as_ref()), intent.plan.instance_steps())
}

/// Returns the instances of a GPU; none where it has no MIG.
pub(super) fn instances(mig: Option<&Mig>) -> &[GpuInstance] {
    mig.map(|mig| mig.instances.as_slice()).unwrap_or_default()
}

/// Returns the reset that a change of the MIG mode may take: the one that the journal has, the plan's, or that of the
/// GPU's architecture.
fn possible_reset(plan: &GpuPlan, recorded: Option<&Reset>, reading: Option<&Reading>) -> Option<Reset> {
    let by_architecture = || {
        let needed = reading.is_some_and(|reading| needs_reset(reading.identity.architecture));
        needed.then(Reset::default)
    };
    recorded.or(plan.reset()).cloned().or_else(by_architecture)
}
