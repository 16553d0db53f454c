//! Operations that can't begin yet: another one has their GPUs, or instances in their way are in use.
//!
//! ```text
//!              ┌───────────────── a second later, or when a GPU is let go ────────────────┐
//!              ▼                                                                          │
//! queued ─► one look at the host, then each in the order in which they were asked for: ───┤
//!              ├─ its plan stands, its GPUs are nobody's ─► claim, read anew ─► running    │
//!              ├─ it is blocked, or its GPUs are taken ───► waiting ──────────────────────┘
//!              └─ refused for good, cancelled, too long ──► rolled back
//! ```
//!
//! All of them are looked after by one task, with one look at the host: those that were asked for
//! first go first, and however many there are cost the driver no more. They hold nothing while they
//! wait: GPUs in use are no reason to keep others from changing them. They go on after a restart of
//! gpushd. Nothing of them was done before they start, so they can be cancelled without a trace.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use gpush_api::{ApiError, Code, Gpu, OperationState};
use gpush_store::OperationId;
use jiff::Timestamp;
use tokio::{
    sync::Notify,
    time::{Instant, sleep, timeout},
};

use super::begin::{Order, Ready, intent, may_pass, refusal};
use crate::{
    agent::Shared,
    caller::Viewer,
    modes::mig::reset::not_resetting,
    operation::{self, Ongoing},
};

/// Between two looks at instances that are in use. The driver tells nobody when they become idle.
const LOOK: Duration = Duration::from_secs(1);

/// How many may wait.
const MOST: usize = 256;

/// Those that wait.
#[derive(Debug, Default)]
pub(crate) struct Line {
    waiting: Mutex<BTreeMap<OperationId, Waiting>>,
    /// Somebody came, or wants to leave.
    stirred: Notify,
}

#[derive(Debug, Clone)]
struct Waiting {
    ongoing: Arc<Ongoing>,
    order: Order,
    until: Instant,
    /// Not to be tried before: it had its GPUs and let go of them again, which rings for everybody in
    /// line, itself included.
    again: Instant,
    /// Why it could not begin so far.
    last: Option<ApiError>,
}

impl Line {
    fn waiting(&self) -> MutexGuard<'_, BTreeMap<OperationId, Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those that wait for a GPU, in a sentence each: whoever changes it now is overtaken by them.
    pub(crate) fn for_gpu(&self, uuid: &str) -> Vec<String> {
        let waiting = self.waiting();
        let sentence = |one: &Waiting| {
            let operation = one.ongoing.snapshot();
            let plan = operation.plans.iter().find(|plan| plan.uuid == uuid)?;
            let layout = if plan.layout.is_empty() { "another layout".to_owned() } else { plan.layout.join(",") };
            Some(format!("operation {} waits for it, to make it {layout}", operation.id))
        };
        waiting.values().filter_map(sentence).collect()
    }

    /// Whether nobody waits.
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting().is_empty()
    }

    /// Whether another one may wait.
    ///
    /// # Errors
    /// When there are too many.
    pub(super) fn has_room(&self) -> Result<(), ApiError> {
        let waiting = self.waiting().len();
        if waiting < MOST {
            return Ok(());
        }
        Err(ApiError::new(Code::Unavailable, format!("{waiting} operations wait already; no more may"))
            .hint("`gpushctl operation list` shows them; cancel what is not wanted: `gpushctl operation cancel op-N`")
            .retryable())
    }

    /// Puts an operation, recorded as queued or waiting, into the line. It was asked for at `since`.
    pub(crate) fn enter(&self, ongoing: &Arc<Ongoing>, order: Order, since: Timestamp) {
        self.insert(ongoing, order, since, Instant::now());
    }

    fn insert(&self, ongoing: &Arc<Ongoing>, order: Order, since: Timestamp, again: Instant) {
        let spent = Duration::try_from(Timestamp::now().duration_since(since)).unwrap_or_default();
        let until = Instant::now() + order.wait.unwrap_or_default().saturating_sub(spent);
        let waiting = Waiting { ongoing: Arc::clone(ongoing), order, until, again, last: None };
        self.waiting().insert(ongoing.number(), waiting);
        self.stirred.notify_one();
    }

    /// Lets one rest until the next look.
    fn rest(&self, id: OperationId) {
        if let Some(waiting) = self.waiting().get_mut(&id) {
            waiting.again = Instant::now() + LOOK;
        }
    }

    /// Somebody wants to leave.
    pub(crate) fn stir(&self) {
        self.stirred.notify_one();
    }
}

/// Looks after the line until the agent stops; what waits then goes on waiting in the next agent.
pub(crate) async fn run(agent: Shared) {
    let let_go = agent.operations.let_go();
    loop {
        let pause = async {
            if agent.line.waiting().is_empty() {
                std::future::pending::<()>().await;
            }
            sleep(LOOK).await;
        };
        tokio::select! {
            biased;
            () = agent.stopping.cancelled() => return,
            () = agent.line.stirred.notified() => {}
            () = let_go.notified() => {}
            () = pause => {}
        }
        round(&agent).await;
    }
}

/// One look for all of them.
async fn round(agent: &Shared) {
    let mut all: Vec<Waiting> = agent.line.waiting().values().cloned().collect();
    if all.is_empty() {
        return;
    }
    all.retain(|one| {
        let id = one.ongoing.id();
        let over = if one.ongoing.cancelled().is_cancelled() {
            Some(one.ongoing.why_cancelled())
        } else if one.until <= Instant::now() {
            Some(too_long(&id, one.order.wait.unwrap_or_default()))
        } else {
            None
        };
        let Some(error) = over else { return true };
        leave(agent, one, error);
        false
    });
    all.retain(|one| one.again <= Instant::now());
    if all.is_empty() {
        return;
    }
    // What they wait for is read by everybody, so it is seen with nobody's eyes.
    let gpus = match agent.planner.gpus(Viewer::Agent).await {
        Ok(gpus) => gpus,
        Err(error) => return all.iter().for_each(|one| still(agent, one, &error)),
    };
    for one in all {
        if agent.stopping.is_cancelled() {
            return;
        }
        match attempt(agent, &one, &gpus).await {
            Ok(ready) => start(agent, one, ready),
            Err(error) if passes(&error) => still(agent, &one, &error),
            Err(error) => leave(agent, &one, error),
        }
    }
}

/// Whether waiting may help: another operation ends, an instance becomes idle, the driver answers.
fn passes(error: &ApiError) -> bool {
    may_pass(error)
        || matches!(error.code, Code::DriverUnavailable | Code::DriverTimeout)
        || error.code == Code::Unavailable && error.retryable
}

async fn attempt(agent: &Shared, one: &Waiting, gpus: &[Gpu]) -> Result<Ready, ApiError> {
    not_resetting(&agent.outside)?;
    let meant = agent.planner.planned(gpus, &one.order.request).await?;
    // As last seen; only what seems possible is worth a claim and a fresh reading.
    if let Some(error) = refusal(&meant) {
        return Err(error);
    }
    let claim = agent.operations.claim(&operation::gpus(&meant))?;
    let ready = Ready::look(agent, Viewer::Agent, &one.order, &meant, claim).await;
    if ready.is_err() {
        agent.line.rest(one.ongoing.number());
    }
    ready
}

fn start(agent: &Shared, one: Waiting, ready: Ready) {
    agent.line.waiting().remove(&one.ongoing.number());
    let Waiting { ongoing, order, .. } = one;
    let agent = Arc::clone(agent);
    agent.executor.clone().in_background(ongoing, move |executor, ongoing| async move {
        let Ready { parts, claim } = ready;
        let plans = parts.iter().map(|part| part.plan.clone()).collect();
        let error = match ongoing.start(claim, intent(&order, &parts), plans).await {
            Ok(()) => return executor.run(ongoing, &parts).await,
            Err(_) if ongoing.cancelled().is_cancelled() => ongoing.why_cancelled(),
            // It is on record that it was cancelled, and will be told in a moment: nothing else ends what
            // stands in line.
            Err(error) if error.code == Code::Conflict => match timeout(LOOK, ongoing.cancelled().cancelled()).await {
                Ok(()) => ongoing.why_cancelled(),
                Err(_) => error,
            },
            // A disk that is full for a moment is no reason to give up what waited for hours.
            Err(error) if error.retryable => {
                tracing::warn!(op = ongoing.id(), "it can't begin yet: {error}");
                let since = ongoing.snapshot().created_at;
                return agent.line.insert(&ongoing, order, since, Instant::now() + LOOK);
            }
            Err(error) => error,
        };
        let error = error.outcome("nothing of it was done");
        executor.finish(ongoing, &[], OperationState::RolledBack, Some(error)).await;
    });
}

/// It can't begin yet.
fn still(agent: &Shared, one: &Waiting, why: &ApiError) {
    let mut waiting = agent.line.waiting();
    let Some(kept) = waiting.get_mut(&one.ongoing.number()) else { return };
    let news = kept.last.as_ref().is_none_or(|last| last.sentences() != why.sentences());
    kept.last = Some(why.clone());
    drop(waiting);
    if !news {
        return;
    }
    one.ongoing.waits(&why.sentences().join("; "));
    if one.ongoing.snapshot().state == OperationState::Queued {
        let ongoing = Arc::clone(&one.ongoing);
        tokio::spawn(async move {
            if let Err(error) = ongoing.advance(OperationState::Waiting).await {
                tracing::debug!(op = ongoing.id(), "that it waits is not recorded: {error}");
            }
        });
    }
}

/// It is not to be, or can't be.
fn leave(agent: &Shared, one: &Waiting, mut error: ApiError) {
    let kept = agent.line.waiting().remove(&one.ongoing.number());
    if let Some(last) = kept.and_then(|kept| kept.last) {
        error.causes.push(last.message);
        error.causes.extend(last.causes);
        error.errors = last.errors;
    }
    let error = error.outcome("nothing of it was done");
    agent.executor.in_background(Arc::clone(&one.ongoing), move |executor, ongoing| async move {
        executor.finish(ongoing, &[], OperationState::RolledBack, Some(error)).await;
    });
}

fn too_long(id: &str, patience: Duration) -> ApiError {
    ApiError::new(Code::TimedOut, format!("operation {id} could not begin within {} s", patience.as_secs()))
        .hint("end what is in its way, or ask for it with a longer --wait")
        .retryable()
}
