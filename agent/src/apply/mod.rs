//! Applying layouts: from a request to an operation that ends in a layout read back.
//!
//! ```text
//! request ─► which GPUs ─► claim them ─► read each anew ─► plan each ─► every plan stands?
//!                              │                                            │ no: refused, nothing
//!                              └─ another operation's: refused,             │ touched, or queued
//!                                 or queued                                 ▼ yes
//!                       journal ─► operation: all GPUs at once, steps one by one
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `begin` | from a request to an operation on record |
//! | `queue` | operations that wait for GPUs, or for instances to be idle |
//! | `carry_out` | the operation as a whole: forward on all GPUs, or back on all |
//! | `forward` | the steps on one GPU |
//! | `back` | the previous layout on one GPU |
//! | `mode` | changes of MIG mode, and what is around them |
//! | `recover` | what an agent that died left half done |
//! | `step` | one step: the driver call, what it came to, whether it landed |

mod back;
mod begin;
mod carry_out;
mod forward;
mod mode;
pub(crate) mod queue;
mod recover;
mod step;

pub(crate) use self::{
    begin::{Order, begin},
    mode::{around::health as services_health, is_resetting, not_resetting},
    recover::take_over,
};

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use gpush_api::{ApiError, Gpu, GpuInstance, GpuPlan, Mig, PlanRequest, Plans, Refusal};
use gpush_core::{
    desired::{is_switched, needs_reset, plan_host, without_fabric_manager},
    plan,
};
use gpush_host::other_managers;
use gpush_nvml::Reading;
use gpush_store::{ConditionKind, GpuIntent, NewCondition, Scope};

use crate::{
    agent::Shared,
    caller::Viewer,
    lanes::{Need, Needs, Reserve},
    mps,
    operation::named_once,
    overrides::Lasting,
    state::{Change, HostState, Reason, RecoveryCheck},
    timeslice,
};

/// One GPU's part of an operation.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// Position in the operation's plans.
    pub(crate) position: usize,
    /// What to do.
    pub(crate) plan: GpuPlan,
    /// How the GPU was when the operation began: what a rollback restores. `None` on a part
    /// without MIG.
    pub(crate) before: Option<Mig>,
    /// What stood when the plan was made: what its steps begin with.
    pub(super) found: Vec<GpuInstance>,
    /// MIG mode then, in force and pending; `None` on a part without MIG.
    pub(super) mode: Option<(bool, bool)>,
    /// What stands when all of the operation's plan is carried out; ids of what is new mean nothing.
    pub(super) outcome: Vec<GpuInstance>,
    /// What becomes of the GPU's override when the operation ends well.
    pub(super) lasting: Option<Lasting>,
    /// Whether a change of its MIG mode may take a reset.
    pub(super) resets: bool,
}

impl Part {
    /// Of a plan made on `reading`, where `before` stood when the operation began.
    pub(crate) fn new(position: usize, plan: GpuPlan, before: Option<Mig>, reading: &Reading) -> Self {
        let found = reading.mig.as_ref().map(|mig| mig.instances.clone()).unwrap_or_default();
        let resets = plan.reset.is_some() || needs_reset(reading.identity.architecture);
        let outcome = plan::outcome(&found, &plan.steps);
        Self { position, plan, before, found, mode: modes(reading.mig.as_ref()), outcome, lasting: None, resets }
    }

    /// Of a plan that was made without claiming the GPU: it can't be carried out, only shown.
    pub(super) fn unseen(position: usize, plan: GpuPlan) -> Self {
        // Who is in the way was seen with the eyes of whoever asked; an operation is read by everybody.
        let plan = GpuPlan { refusal: None, error: None, steps: Vec::new(), keeps: Vec::new(), ..plan };
        let none = Vec::new;
        Self { position, plan, before: None, found: none(), mode: None, outcome: none(), lasting: None, resets: false }
    }

    /// As the journal has it, to be compared with what stands now.
    pub(crate) fn recorded(position: usize, intent: &GpuIntent) -> Self {
        let (plan, before) = (intent.plan.clone(), intent.before.clone());
        let (found, outcome) = (Vec::new(), outcome(intent));
        Self { position, plan, before, found, mode: None, outcome, lasting: None, resets: false }
    }

    /// The GPU in messages.
    pub(super) fn label(&self) -> String {
        format!("GPU {} ({})", self.plan.gpu, self.plan.uuid)
    }

    /// Marks the GPU as degraded: a change failed on it and its rollback too, or the outcome is not known.
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

    /// Whether carrying it out changes anything.
    pub(super) fn is_empty(&self) -> bool {
        self.plan.is_empty()
    }

    /// Whether nothing is, and nothing was, to be done: then there is nothing to take back.
    pub(super) fn is_untouched(&self) -> bool {
        let before = self.before.as_ref().map(|mig| mig.instances.as_slice()).unwrap_or_default();
        self.is_empty() && modes(self.before.as_ref()) == self.mode && back::shape(before) == back::shape(&self.found)
    }
}

impl RecoveryCheck for Part {
    fn passes(&self, reading: &Reading) -> Option<&'static str> {
        if forward::difference(self, reading).is_none() {
            return Some("as planned");
        }
        back::same(self.before.as_ref(), reading.mig.as_ref()).then_some("as before")
    }
}

/// MIG mode in force and pending.
fn modes(mig: Option<&Mig>) -> Option<(bool, bool)> {
    mig.map(|mig| (mig.enabled, mig.pending))
}

/// What stands when the plan of an operation on record is carried out on a GPU.
fn outcome(intent: &GpuIntent) -> Vec<GpuInstance> {
    let before = intent.before.as_ref().map(|mig| mig.instances.as_slice()).unwrap_or_default();
    plan::outcome(before, &intent.plan.steps)
}

/// Plans what `request` asks, without doing any of it, from readings as fresh as those of an
/// apply: a plan that says an instance is idle because it was so a second ago is no plan. A GPU
/// that can't be read, or that an operation is changing, has an error in place of steps and costs the
/// others nothing.
pub(crate) async fn plan(agent: &Shared, viewer: Viewer, request: &PlanRequest) -> Result<Plans, ApiError> {
    let gpus = free_gpus(agent, viewer, request).await?;
    let meant = planned(agent, &gpus, request).await;
    let meant = meant.map_err(|error| agent.state.now().explain_absent(&request.gpus, error))?;
    if agent.state.maintenance().is_some() {
        // Nothing can be read; each plan says so.
        return Ok(Plans { plans: meant });
    }
    mode::not_resetting(agent)?;
    let mut fresh = Vec::new();
    let mut unread = BTreeMap::new();
    // In the middle of a change nothing is read: that would wait for a step, and show half a layout.
    for plan in &meant {
        unread.extend(agent.operations.at_rest(plan.gpu, &plan.uuid).err().map(|error| (plan.uuid.clone(), error)));
    }
    let meant: Vec<GpuPlan> = meant.into_iter().filter(|plan| !unread.contains_key(&plan.uuid)).collect();
    let uuids: Vec<String> = meant.iter().map(|plan| plan.uuid.clone()).collect();
    for ((uuid, outcome), plan) in agent.readings.now(&uuids).await.into_iter().zip(&meant) {
        match outcome {
            Ok(reading) => fresh.push(reading),
            Err(error) => {
                unread.insert(uuid, unreadable(plan, &error.to_api()));
            }
        }
    }
    let gpus = renewed(agent, viewer, &fresh).await?;
    let mut plans = planned(agent, &gpus, request).await?;
    other_managers::refuse(&agent.host_root, &mut plans);
    mode::preflight::examine(agent, viewer, &gpus, &mut plans).await;
    for plan in &mut plans {
        // A change may have begun meanwhile.
        let changing = || agent.operations.at_rest(plan.gpu, &plan.uuid).err();
        if let Some(error) = unread.remove(&plan.uuid).or_else(changing) {
            *plan = plan.without_steps().refused(error);
        }
    }
    Ok(Plans { plans })
}

/// Adds to the reasons of a GPU how far the operation is that changes it, and which operations wait for it.
pub(crate) fn add_progress(agent: &Shared, host: &HostState, gpu: &mut Gpu) {
    gpu.reasons.extend(agent.queue.for_gpu(&gpu.uuid));
    let reasons = host.gpu(&gpu.uuid).map(|gpu| gpu.reasons.as_slice()).unwrap_or_default();
    let changing = reasons.iter().position(|reason| matches!(reason, Reason::Changing { .. }));
    let Some(reason) = changing.and_then(|at| gpu.reasons.get_mut(at)) else { return };
    let Some(progress) = agent.operations.progress(&gpu.uuid) else { return };
    *reason += &if progress.rolling_back {
        ": its steps are being taken back".to_owned()
    } else {
        format!(": {} of {} steps are done", progress.done, progress.total)
    };
}

/// Plans a request on GPUs as they were seen. Whether GPUs on NVSwitches are reset by themselves depends
/// on who looks after these: that is looked up where a plan has such a reset.
pub(super) async fn planned(agent: &Shared, gpus: &[Gpu], request: &PlanRequest) -> Result<Vec<GpuPlan>, ApiError> {
    planned_with_needs(agent, gpus, request).await.map(|(plans, _)| plans)
}

/// Plans a request as [`planned`] does. Also returns the lanes that the operation needs, each with what its plan takes
/// away there, which is told even of plans that are refused because somebody uses it.
pub(super) async fn planned_with_needs(
    agent: &Shared,
    gpus: &[Gpu],
    request: &PlanRequest,
) -> Result<(Vec<GpuPlan>, Needs), ApiError> {
    let config = agent.settings.config();
    let mut plans = plan_host(&config, gpus, request)?.plans;
    let on_switches =
        |plan: &GpuPlan| plan.reset.is_some() && gpus.iter().any(|gpu| gpu.uuid == plan.uuid && is_switched(gpu));
    if plans.iter().any(on_switches) && !mode::fabric_manager_runs(agent).await {
        without_fabric_manager(&config, gpus, &mut plans);
    }
    let mut needs: Needs =
        crate::operation::gpus(&plans).into_iter().map(|(_, uuid)| (uuid, Need::Lane(Reserve::Gpu))).collect();
    let is_used = |plan: &GpuPlan| matches!(plan.refusal, Some(Refusal::Blocked { .. } | Refusal::Held { .. }));
    let mut once_idle = Vec::new();
    if plans.iter().any(is_used) {
        let gpus: Vec<Gpu> = gpus.iter().cloned().map(without_processes).collect();
        once_idle = plan_host(&config, &gpus, request)?.plans;
    }
    for plan in &plans {
        let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == plan.uuid) else { continue };
        // What a refused plan would take away is told by the plan that is made once nobody uses it.
        let plan = once_idle.iter().find(|one| one.uuid == plan.uuid).filter(|_| is_used(plan)).unwrap_or(plan);
        needs.insert(plan.uuid.clone(), Need::Lane(mps::taken_away(&agent.mps, gpu, plan)));
    }
    mps::plan(&agent.mps, gpus, &mut plans);
    timeslice::plan(gpus, &mut plans);
    Ok((plans, needs))
}

/// A GPU as if no process used it.
fn without_processes(mut gpu: Gpu) -> Gpu {
    (gpu.processes, gpu.processes_known) = (Vec::new(), true);
    for instance in gpu.mig.iter_mut().flat_map(|mig| &mut mig.instances) {
        instance.processes.clear();
        instance.compute.iter_mut().for_each(|compute| compute.processes.clear());
    }
    gpu
}

/// All GPUs without the processes that hold them for no user. The MPS daemons of the GPUs that the request names are
/// asked now; of other GPUs their last answers count.
pub(super) async fn free_gpus(agent: &Shared, viewer: Viewer, request: &PlanRequest) -> Result<Vec<Gpu>, ApiError> {
    let host = agent.state.now();
    let names: Vec<&str> = request.gpus.iter().map(String::as_str).collect();
    let named = match names.as_slice() {
        [] => (0..host.gpus.len()).collect(),
        // A name that names no GPU is refused where the request is planned.
        names => host.positions(names).unwrap_or_default(),
    };
    let asked = named.into_iter().map(|at| host.gpus[at].gpu.uuid.clone()).collect();
    free_gpus_of(agent, viewer, &asked).await
}

/// All GPUs without the processes that hold them for no user. The MPS daemons of the GPUs in `asked` are asked now.
pub(super) async fn free_gpus_of(
    agent: &Shared,
    viewer: Viewer,
    asked: &BTreeSet<String>,
) -> Result<Vec<Gpu>, ApiError> {
    let observed = agent.readings.host().await?;
    Ok(observed.gpus_for_plans(viewer, &mps::idle(&agent.mps, asked).await))
}

/// The same, with the GPUs of the operation as in its own readings. It waits for no other GPU.
async fn renewed(agent: &Shared, viewer: Viewer, before: &[Arc<Reading>]) -> Result<Vec<Gpu>, ApiError> {
    let host = agent.readings.known();
    let is_listed = |reading: &Arc<Reading>| host.as_ref().is_ok_and(|host| host.gpu(&reading.identity.uuid).is_some());
    if !before.iter().all(is_listed) {
        agent.readings.host().await?;
    }
    let asked = before.iter().map(|reading| reading.identity.uuid.clone()).collect();
    Ok(agent.state.with(before).gpus_for_plans(viewer, &mps::idle(&agent.mps, &asked).await))
}

fn unreadable(plan: &GpuPlan, error: &ApiError) -> ApiError {
    let message =
        format!("GPU {} ({}) can't be read, so nothing is planned and nothing was changed", plan.gpu, plan.uuid);
    ApiError { message, causes: [vec![error.message.clone()], error.causes.clone()].concat(), ..error.clone() }
}
