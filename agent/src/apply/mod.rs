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
//! | `step` | one step: the driver call, what it came to, whether it landed |

mod back;
mod carry_out;
mod forward;
mod step;

use std::{collections::BTreeMap, sync::Arc};

use gpush_api::{ApiError, Code, Gpu, GpuPlan, Operation, PlanRequest};
use gpush_core::desired::plan_host;
use gpush_nvml::Reading;

use crate::{agent::Shared, auth::Asker, view};

/// One GPU's part of an operation.
#[derive(Debug, Clone)]
pub(crate) struct Part {
    /// Position in the operation's plans.
    pub(crate) position: usize,
    /// What to do.
    pub(crate) plan: GpuPlan,
    /// How the GPU was when it was planned: what a rollback restores.
    pub(crate) before: Arc<Reading>,
}

impl Part {
    /// The GPU in messages.
    pub(super) fn label(&self) -> String {
        format!("GPU {} ({})", self.plan.gpu, self.plan.uuid)
    }

    /// How the GPU stands by a reading, when it is as it shall be after the operation, or as it was
    /// before it.
    pub(crate) fn stands(&self, reading: &Reading) -> Option<&'static str> {
        if forward::difference(self, reading).is_none() {
            return Some("as planned");
        }
        back::same(&self.before, reading).then_some("as before")
    }

    /// Whether carrying it out changes anything.
    pub(super) fn is_empty(&self) -> bool {
        self.plan.steps.is_empty() && !self.plan.enables_mig
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

/// Begins to carry out what `request` asks.
///
/// # Errors
/// When it is refused; then nothing was touched.
pub(crate) async fn begin(
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
    let reservation = agent.operations.reserve(&meant.iter().map(|p| (p.gpu, p.uuid.clone())).collect::<Vec<_>>())?;

    let uuids: Vec<String> = meant.iter().map(|plan| plan.uuid.clone()).collect();
    let mut before = Vec::new();
    for ((_, outcome), plan) in agent.observer.now(&uuids).await.into_iter().zip(&meant) {
        before.push(outcome.map_err(|error| unreadable(plan, &error.to_api()))?);
    }
    let gpus = renewed(agent, asker, &before).await?;
    let plans = plan_host(&config, &gpus, request)?.plans;
    if plans.iter().map(|plan| &plan.uuid).ne(&uuids) {
        let error = ApiError::new(Code::Conflict, "which GPUs are meant has changed while they were planned");
        return Err(error.hint("ask again").retryable());
    }
    if let Some(error) = refusal(&plans) {
        return Err(error);
    }

    let actor = asker.actor(agent.people.user(asker.peer.uid).await);
    // Nothing is awaited from here on: either the operation exists and is carried out, or neither.
    if agent.stopping.is_cancelled() {
        return Err(stopping());
    }
    let parts = plans.iter().cloned().zip(before).enumerate();
    let parts = parts.map(|(position, (plan, before))| Part { position, plan, before }).collect();
    let ongoing = reservation.begin(kind, actor, plans);
    let operation = ongoing.snapshot();
    carry_out::spawn(agent, ongoing, parts);
    Ok(operation)
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
