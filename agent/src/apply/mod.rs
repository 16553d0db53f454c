//! Applying layouts: from a request to an operation that ends in a layout read back.
//!
//! ```text
//! request ─► which GPUs ─► reserve them ─► read each anew ─► plan each ─► every plan stands?
//!                              │                                              │ no: refused,
//!                              └─ another operation's: refused                │ nothing touched
//!                                                                             ▼ yes
//!                                             operation: all GPUs at once, steps one by one
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `carry_out` | the operation as a whole: forward on all GPUs, or back on all |
//! | `forward` | the steps on one GPU |
//! | `back` | the previous layout on one GPU |
//! | `recover` | what an agent that died left half done |
//! | `step` | one step: the driver call, what it came to, whether it landed |

mod back;
mod carry_out;
mod forward;
mod recover;
mod step;

pub(crate) use self::recover::take_over;

use std::{collections::BTreeMap, sync::Arc};

use gpush_api::{ApiError, Code, Gpu, GpuInstance, GpuPlan, Mig, Operation, PlanRequest};
use gpush_core::desired::plan_host;
use gpush_nvml::Reading;
use gpush_store::{GpuIntent, Intent, NewAudit};

use crate::{
    agent::Shared,
    auth::Asker,
    operation::{self, New},
    view,
};

/// One GPU's part of an operation.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// Position in the operation's plans.
    pub(super) position: usize,
    /// What to do.
    pub(super) plan: GpuPlan,
    /// How the GPU was when the operation began: what a rollback restores. `None` on a part
    /// without MIG.
    pub(super) before: Option<Mig>,
    /// What stood when the plan was made: what its steps begin with.
    pub(super) stands: Vec<GpuInstance>,
}

impl Part {
    /// Of a plan made on `reading`, where `before` stood when the operation began.
    pub(crate) fn new(position: usize, plan: GpuPlan, before: Option<Mig>, reading: &Reading) -> Self {
        let stands = reading.mig.as_ref().map(|mig| mig.instances.clone()).unwrap_or_default();
        Self { position, plan, before, stands }
    }

    /// The GPU in messages.
    pub(super) fn label(&self) -> String {
        format!("GPU {} ({})", self.plan.gpu, self.plan.uuid)
    }

    /// Whether carrying it out changes anything.
    pub(super) fn is_empty(&self) -> bool {
        self.plan.steps.is_empty() && !self.plan.enables_mig
    }

    /// Whether nothing is, and nothing was, to be done: then there is nothing to take back.
    pub(super) fn is_untouched(&self) -> bool {
        let before = self.before.as_ref().map(|mig| mig.instances.as_slice()).unwrap_or_default();
        self.is_empty() && back::shape(before) == back::shape(&self.stands)
    }
}

/// Plans what `request` asks, without doing any of it, from readings as fresh as those of an
/// apply: a plan that says an instance is idle because it was so a second ago is no plan. A GPU
/// that can't be read has an error in place of steps and costs the others nothing.
pub(crate) async fn plan(agent: &Shared, asker: &Asker, request: &PlanRequest) -> Result<gpush_api::Plans, ApiError> {
    let config = agent.settings.config();
    let gpus = view::gpus(agent, asker).await?;
    let meant = plan_host(&config, &gpus, request)?.plans;
    let uuids: Vec<String> = meant.iter().map(|plan| plan.uuid.clone()).collect();
    let mut fresh = Vec::new();
    let mut unread = BTreeMap::new();
    for ((uuid, outcome), plan) in agent.observer.now(&uuids).await.into_iter().zip(&meant) {
        match outcome {
            Ok(reading) => fresh.push(reading),
            Err(error) => {
                unread.insert(uuid, unreadable(plan, &error.to_api()));
            }
        }
    }
    let gpus = renewed(agent, asker, &fresh).await?;
    let mut plans = plan_host(&config, &gpus, request)?;
    for plan in &mut plans.plans {
        if let Some(error) = unread.remove(&plan.uuid) {
            *plan = GpuPlan {
                steps: Vec::new(),
                keeps: Vec::new(),
                enables_mig: false,
                refusal: None,
                error: Some(error),
                ..plan.clone()
            };
        }
    }
    Ok(plans)
}

/// Begins to carry out what `request` asks. Once it is called it goes through, whether or not
/// anybody waits for it: an operation that is recorded is carried out.
///
/// # Errors
/// When it is refused; then nothing was touched.
pub(crate) async fn begin(
    agent: &Shared,
    asker: &Asker,
    kind: &str,
    request: &PlanRequest,
) -> Result<Operation, ApiError> {
    let (shared, asker, kind, request) = (Arc::clone(agent), asker.clone(), kind.to_owned(), request.clone());
    let beginning = agent.tasks.spawn(async move { begin_recorded(&shared, &asker, &kind, &request).await });
    beginning.await.unwrap_or_else(|error| {
        Err(ApiError::new(Code::Internal, "the operation could not be begun by a fault of gpushd")
            .cause(error.to_string())
            .hint("see the log of gpushd: `journalctl -u gpushd`"))
    })
}

async fn begin_recorded(
    agent: &Shared,
    asker: &Asker,
    kind: &str,
    request: &PlanRequest,
) -> Result<Operation, ApiError> {
    let stopping = || {
        ApiError::new(Code::Unavailable, "gpushd is stopping and begins nothing new")
            .hint("ask again when it has started: `systemctl status gpushd`")
            .retryable()
    };
    if agent.stopping.is_cancelled() {
        return Err(stopping());
    }
    let config = agent.settings.config();
    let gpus = view::gpus(agent, asker).await?;
    let meant = plan_host(&config, &gpus, request)?.plans;
    let claim = agent.operations.claim(&operation::gpus(&meant))?;

    let uuids: Vec<String> = meant.iter().map(|plan| plan.uuid.clone()).collect();
    let mut readings = Vec::new();
    for ((_, outcome), plan) in agent.observer.now(&uuids).await.into_iter().zip(&meant) {
        readings.push(outcome.map_err(|error| unreadable(plan, &error.to_api()))?);
    }
    let gpus = renewed(agent, asker, &readings).await?;
    let plans = plan_host(&config, &gpus, request)?.plans;
    if plans.iter().map(|plan| &plan.uuid).ne(&uuids) {
        let error = ApiError::new(Code::Conflict, "which GPUs are meant has changed while they were planned");
        return Err(error.hint("ask again").retryable());
    }
    if let Some(error) = refusal(&plans) {
        return Err(error);
    }

    let by = asker.actor(agent.people.user(asker.peer.uid).await);
    let parts: Vec<Part> = std::iter::zip(plans, &readings)
        .enumerate()
        .map(|(position, (plan, reading))| Part::new(position, plan, bare(reading), reading))
        .collect();
    let new = New {
        kind: kind.to_owned(),
        by: by.clone(),
        reason: None,
        intent: intent(&parts),
        also: audited(kind.to_owned(), by, &parts),
    };
    if agent.stopping.is_cancelled() {
        return Err(stopping());
    }
    let ongoing = agent.operations.begin(claim, new).await?;
    let operation = ongoing.snapshot();
    carry_out::spawn(agent, ongoing, parts);
    Ok(operation)
}

/// How a GPU is, as far as a rollback needs it.
fn bare(reading: &Reading) -> Option<Mig> {
    let mut mig = reading.mig.clone()?;
    mig.profiles.clear();
    for instance in &mut mig.instances {
        instance.processes.clear();
        instance.memory = None;
        instance.compute.iter_mut().for_each(|compute| compute.processes.clear());
    }
    Some(mig)
}

/// The whole of it, for the journal.
fn intent(parts: &[Part]) -> Intent {
    let gpus = parts.iter().map(|part| GpuIntent { before: part.before.clone(), plan: part.plan.clone() });
    Intent { gpus: gpus.collect(), more: serde_json::Value::Null }
}

/// The record of the audit trail that goes with a new operation.
fn audited(action: String, by: gpush_api::Actor, parts: &[Part]) -> operation::Also {
    let gpus: Vec<_> =
        parts.iter().map(|part| serde_json::json!({ "gpu": part.plan.uuid, "layout": part.plan.layout })).collect();
    Box::new(move |tx, record| {
        let audit = NewAudit {
            by: Some(by.clone()),
            action: action.clone(),
            object: record.id.to_string(),
            result: "accepted".to_owned(),
            detail: serde_json::json!({ "gpus": gpus }),
        };
        tx.audit(audit).map(|_| ())
    })
}

/// All GPUs, those of the operation as in its own readings.
async fn renewed(agent: &Shared, asker: &Asker, before: &[Arc<Reading>]) -> Result<Vec<Gpu>, ApiError> {
    let mut host = view::host(agent).await?;
    for reading in before {
        if let Some(sight) = host.gpus.iter_mut().find(|sight| sight.identity.uuid == reading.identity.uuid) {
            sight.reading = Some(Arc::clone(reading));
            sight.error = None;
        }
    }
    Ok(view::compose(agent, asker, host))
}

fn unreadable(plan: &GpuPlan, error: &ApiError) -> ApiError {
    let message =
        format!("GPU {} ({}) can't be read, so nothing is planned and nothing was changed", plan.gpu, plan.uuid);
    ApiError { message, causes: [vec![error.message.clone()], error.causes.clone()].concat(), ..error.clone() }
}

/// Why the plans as a whole can't be carried out: the first refusal, with the others as causes.
fn refusal(plans: &[GpuPlan]) -> Option<ApiError> {
    let mut errors = plans.iter().filter_map(|plan| plan.error.as_ref());
    let mut first = errors.next()?.clone();
    for other in errors {
        first.causes.push(other.message.clone());
        first.causes.extend(other.causes.iter().cloned());
    }
    if plans.len() > 1 {
        first.causes.push("no GPU was touched, since not every plan stands".to_owned());
    }
    Some(first)
}
