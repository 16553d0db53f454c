//! An operation as a whole: forward on all its GPUs at once; if one fails, back on all.
//!
//! ```text
//! every GPU forward ──► all done ─────────────────────────────────► done
//!        │
//!        └─ one in trouble: the others stop before their next step
//!                 └─► back on each that was touched ──► all restored ──► rolled back
//!                                                   └─► some not ─────► failed
//! ```
//!
//! A GPU whose call has no answer yet does not stop the others: it may turn out to have landed.
//! One that is lost, or whose outcome stays unknown, is left as it is.

use std::{collections::BTreeMap, sync::Arc};

use gpush_api::{ApiError, Code, OperationState};
use gpush_store::{NewAudit, Tx};
use tokio::task::JoinSet;

use super::{
    Part,
    back::{back, modes_together},
    forward::{Forward, forward},
    mode,
    step::Trouble,
};
use crate::{agent::Shared, mps, operation::Ongoing, overrides, state::Change, timeslice};

/// Carries an operation out in the background. The agent does not end before it has.
pub(super) fn spawn(agent: &Shared, ongoing: Arc<Ongoing>, parts: Vec<Part>) {
    in_background(agent, ongoing, move |agent, ongoing| async move { carry_out(&agent, ongoing, &parts).await });
}

/// Runs the work of an operation so that the operation ends even if the work breaks off.
pub(super) fn in_background<F>(
    agent: &Shared,
    ongoing: Arc<Ongoing>,
    work: impl FnOnce(Shared, Arc<Ongoing>) -> F + Send + 'static,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let agent = Arc::clone(agent);
    let tasks = agent.tasks.clone();
    tasks.spawn(async move {
        let number = ongoing.number();
        let work = tokio::spawn(work(Arc::clone(&agent), ongoing));
        if let Err(error) = work.await {
            tracing::error!(op = %number, "the operation broke off: {error}");
            let message = format!("operation {number} broke off by a fault of gpushd");
            let error = ApiError::new(Code::Internal, message).hint("see the log of gpushd: `journalctl -u gpushd`");
            // It says in the log itself what can't be undone.
            let _told = mode::around::take_back(&agent, number, OperationState::Failed).await;
            mode::around::look_after(&agent, number, OperationState::Failed).await;
            agent.operations.abandon(number, error).await;
            agent.mps.let_go(&number.to_string());
        }
    });
}

/// Carries out an operation that is recorded as running.
pub(super) async fn carry_out(agent: &Shared, ongoing: Arc<Ongoing>, parts: &[Part]) {
    let operation = ongoing.snapshot();
    tracing::info!(
        op = operation.id,
        uid = operation.by.uid,
        "{} begins: {}",
        operation.kind,
        parts
            .iter()
            .map(|part| format!("GPU {}: {}", part.plan.gpu, part.plan.wanted()))
            .collect::<Vec<_>>()
            .join("; ")
    );
    let ends = the_way(agent, &ongoing, parts).await;
    let failed = ends.iter().find_map(|end| match end {
        Forward::Troubled(trouble) => Some(trouble.error().clone()),
        Forward::Done | Forward::Stopped => None,
    });
    let stopped = ends.iter().any(|end| matches!(end, Forward::Stopped));
    match failed.or_else(|| stopped.then(|| ongoing.why_cancelled())) {
        None => finish(agent, ongoing, parts, OperationState::Done, None).await,
        Some(why) => go_back(agent, ongoing, parts, &ends, why).await,
    }
}

/// All that leads to what is wanted: modes on, the steps on all GPUs at once, modes off.
async fn the_way(agent: &Shared, ongoing: &Arc<Ongoing>, parts: &[Part]) -> Vec<Forward> {
    let stopped = || parts.iter().map(|_| Forward::Stopped).collect::<Vec<_>>();
    let with = |mut ends: Vec<Forward>, troubled: BTreeMap<usize, Trouble>| {
        for (position, trouble) in troubled {
            ends[position] = Forward::Troubled(trouble);
        }
        ends
    };
    let plans: Vec<_> = parts.iter().map(|part| part.plan.clone()).collect();
    for told in timeslice::settled(&agent.timeslice, &timeslice::to_let_go(&agent.timeslice, &plans)).await {
        ongoing.note(told);
    }
    for part in parts.iter().filter(|part| !part.plan.stops_mps.is_empty()) {
        ongoing.progress(part.position, |progress| progress.doing = Some("ending its MPS daemons".to_owned()));
        if let Err(error) = mps::aside(&agent.mps, &ongoing.id(), &part.plan).await {
            return with(stopped(), BTreeMap::from([(part.position, Trouble::Failed(error))]));
        }
        ongoing.progress(part.position, |progress| (progress.doing, progress.done) = (None, progress.done + 1));
    }
    if let Err(error) = mode::around::prepare(agent, ongoing, parts).await {
        let first = parts.iter().find(|part| part.plan.reset.is_some()).map_or(0, |part| part.position);
        return with(stopped(), BTreeMap::from([(first, Trouble::Failed(error))]));
    }
    let on: Vec<&Part> = parts.iter().filter(|part| part.plan.enables_mig).collect();
    if !on.is_empty() {
        if ongoing.cancelled().is_cancelled() {
            return stopped();
        }
        let troubled = mode::carry_out(agent, ongoing, &on, true).await;
        if !troubled.is_empty() {
            return with(stopped(), troubled);
        }
    }
    let mut ends = all_forward(agent, ongoing, parts).await;
    for part in &on {
        // Where no reset is needed, whoever has the GPU open is noticed only now.
        if let Forward::Troubled(Trouble::Failed(error)) = &mut ends[part.position]
            && error.code == Code::Blocked
        {
            error.causes.extend(mode::preflight::suspects(agent, &part.plan.uuid).await);
        }
    }
    if !ends.iter().all(|end| matches!(end, Forward::Done)) {
        return ends;
    }
    let off: Vec<&Part> = parts.iter().filter(|part| part.plan.disables_mig).collect();
    if !off.is_empty() {
        if ongoing.cancelled().is_cancelled() {
            return stopped();
        }
        let troubled = mode::carry_out(agent, ongoing, &off, false).await;
        if !troubled.is_empty() {
            return with(ends, troubled);
        }
    }
    for part in parts.iter().filter(|part| part.plan.starts_mps) {
        if ongoing.cancelled().is_cancelled() {
            return stopped();
        }
        ongoing.progress(part.position, |progress| progress.doing = Some("starting its MPS daemon".to_owned()));
        let up = mps::bring_up(&agent.mps, &ongoing.id(), &part.plan.uuid).await;
        ongoing.progress(part.position, |progress| {
            progress.doing = None;
            match &up {
                Ok(()) => progress.done += 1,
                Err(error) => progress.error = Some(error.clone()),
            }
        });
        if let Err(error) = up {
            return with(ends, BTreeMap::from([(part.position, Trouble::Failed(error))]));
        }
    }
    ends
}

/// Restores what stood before, on all GPUs of an operation, because of `why`.
pub(super) async fn go_back(agent: &Shared, ongoing: Arc<Ongoing>, parts: &[Part], ends: &[Forward], why: ApiError) {
    if let Err(error) = ongoing.turn_back(&why).await {
        // What counts is what is done now; the next agent would try the way forward once more.
        tracing::warn!(op = ongoing.id(), "that it is taken back can't be recorded: {error}");
    }
    let broke = why.clone();
    let (state, error, changes) = all_back(agent, &ongoing, parts, ends, why).await;
    log(&ongoing, state, Some(&broke));
    end(agent, ongoing, parts, state, Some(error), changes).await;
}

/// Ends an operation that is not, or need not be, taken back.
pub(super) async fn finish(
    agent: &Shared,
    ongoing: Arc<Ongoing>,
    parts: &[Part],
    state: OperationState,
    error: Option<ApiError>,
) {
    log(&ongoing, state, error.as_ref());
    end(agent, ongoing, parts, state, error, Vec::new()).await;
}

/// Says in the log how an operation ended. What going back came to is there already, and in full:
/// an operation's own error names nobody, since everybody may read it.
fn log(ongoing: &Ongoing, state: OperationState, error: Option<&ApiError>) {
    let operation = ongoing.snapshot();
    match error {
        None => tracing::info!(op = operation.id, "{} is done", operation.kind),
        Some(error) => tracing::error!(
            op = operation.id,
            "{} ended {state}: {}",
            operation.kind,
            error.sentences().into_iter().chain(error.outcome.as_deref()).collect::<Vec<_>>().join("; ")
        ),
    }
}

/// Records the end, with all that follows from it.
async fn end(
    agent: &Shared,
    ongoing: Arc<Ongoing>,
    parts: &[Part],
    state: OperationState,
    error: Option<ApiError>,
    mut changes: Vec<Change>,
) {
    let operation = ongoing.snapshot();
    let id = ongoing.id();
    for part in parts {
        match state {
            OperationState::Done => changes.push(Change::mend(&part.plan.uuid)),
            // Rolled back to what stood before: a GPU that was degraded then still is.
            OperationState::RolledBack
            | OperationState::Failed
            | OperationState::Queued
            | OperationState::Waiting
            | OperationState::Running
            | OperationState::Cancelling
            | OperationState::Interrupted => {}
        }
        agent.readings.outdate(&part.plan.uuid);
    }
    agent.state.apply(&changes);
    if state == OperationState::Done {
        let plans: Vec<_> = parts.iter().map(|part| part.plan.clone()).collect();
        for told in mps::devices_serve(&agent.mps, &id, &plans).await {
            ongoing.note(told);
        }
        take_turns(agent, &ongoing, parts).await;
    }
    for told in mode::around::take_back(agent, ongoing.number(), state).await {
        ongoing.note(told);
    }
    mode::around::look_after(agent, ongoing.number(), state).await;
    let audit = NewAudit {
        by: None,
        action: operation.kind.clone(),
        object: operation.id.clone(),
        result: state.name().to_owned(),
        detail: error.as_ref().map_or(serde_json::Value::Null, |error| serde_json::json!({ "error": error.message })),
    };
    // What stands on a GPU is wanted of it only if it was reached.
    let lasting: Vec<_> = match state {
        OperationState::Done => {
            parts.iter().filter_map(|part| Some((part.plan.uuid.clone(), part.lasting.clone()?))).collect()
        }
        OperationState::RolledBack
        | OperationState::Failed
        | OperationState::Queued
        | OperationState::Waiting
        | OperationState::Running
        | OperationState::Cancelling
        | OperationState::Interrupted => Vec::new(),
    };
    let shared = match state {
        OperationState::Done => {
            let plans: Vec<_> = parts.iter().map(|part| part.plan.clone()).collect();
            mps::Lasting::of(&agent.mps, &plans)
        }
        OperationState::RolledBack
        | OperationState::Failed
        | OperationState::Queued
        | OperationState::Waiting
        | OperationState::Running
        | OperationState::Cancelling
        | OperationState::Interrupted => mps::Lasting::default(),
    };
    let recorded = shared.clone();
    let also = move |tx: &mut Tx<'_>| {
        recorded.record(tx)?;
        changes.iter().try_for_each(|change| change.record(tx))?;
        tx.audit(audit.clone())?;
        overrides::settle(tx, &operation, &lasting)
    };
    shared.take_in(&agent.mps);
    ongoing.end(state, error, also, |effects| agent.state.override_effects(&effects)).await;
    agent.mps.let_go(&id);
    agent.outside.helpers.forget(&id);
}

/// Sees to the levels and compute modes of GPUs that are shared by turns from now on.
async fn take_turns(agent: &Shared, ongoing: &Ongoing, parts: &[Part]) {
    let those: Vec<&Part> = parts.iter().filter(|part| part.plan.takes_turns).collect();
    for part in &those {
        ongoing.progress(part.position, |progress| progress.doing = Some("setting its time-slice level".to_owned()));
    }
    let uuids: Vec<String> = those.iter().map(|part| part.plan.uuid.clone()).collect();
    for told in timeslice::settled(&agent.timeslice, &uuids).await {
        ongoing.note(told);
    }
    for part in those {
        ongoing.progress(part.position, |progress| (progress.doing, progress.done) = (None, progress.done + 1));
    }
}

async fn all_forward(agent: &Shared, ongoing: &Arc<Ongoing>, parts: &[Part]) -> Vec<Forward> {
    // Cancelled with the operation, and by the first trouble.
    let abort = ongoing.cancelled().child_token();
    let mut tasks = JoinSet::new();
    for part in parts {
        let (agent, ongoing, part, abort) = (Arc::clone(agent), Arc::clone(ongoing), part.clone(), abort.clone());
        tasks.spawn(async move {
            let end = forward(&agent, &ongoing, &part, &abort).await;
            if let Forward::Troubled(_) = &end {
                abort.cancel();
            }
            (part.position, end)
        });
    }
    let mut ends: Vec<(usize, Forward)> = tasks.join_all().await;
    ends.sort_by_key(|(position, _)| *position);
    ends.into_iter().map(|(_, end)| end).collect()
}

async fn all_back(
    agent: &Shared,
    ongoing: &Arc<Ongoing>,
    parts: &[Part],
    ends: &[Forward],
    why: ApiError,
) -> (OperationState, ApiError, Vec<Change>) {
    let mut error = why;
    let id = ongoing.id();
    let mut changes = Vec::new();
    let mut tasks = JoinSet::new();
    let mut left = Vec::new();
    let mut going = Vec::new();
    for (part, end) in parts.iter().zip(ends) {
        match end {
            Forward::Troubled(Trouble::Lost(_)) => left.push((part.clone(), "is lost")),
            Forward::Troubled(Trouble::Unknown(trouble)) => {
                changes.push(part.degrade(&id, trouble));
                left.push((part.clone(), "is in a state that is not known"));
            }
            // Nothing was done on it, so there is nothing to take back, and what others did is theirs.
            Forward::Troubled(Trouble::Failed(_)) if part.is_untouched() => {
                left.push((part.clone(), "is left as it stands, since this operation has not changed it"));
            }
            Forward::Done | Forward::Stopped if part.is_untouched() => {}
            Forward::Done | Forward::Stopped | Forward::Troubled(Trouble::Failed(_)) => going.push(part),
        }
    }
    for part in &going {
        ongoing.progress(part.position, |progress| {
            progress.rolling_back = true;
            progress.doing = Some("restoring the previous layout".to_owned());
        });
    }
    modes_together(agent, &id, &going).await;
    for part in going {
        let (agent, ongoing, part) = (Arc::clone(agent), Arc::clone(ongoing), part.clone());
        tasks.spawn(async move {
            let back = back(&agent, &ongoing.id(), &part).await;
            ongoing.progress(part.position, |progress| {
                progress.doing = None;
                if let Err(trouble) = &back {
                    progress.error = Some(trouble.error().clone());
                }
            });
            (part, back)
        });
    }
    for (part, back) in tasks.join_all().await {
        let Err(trouble) = back else { continue };
        error.causes.push(trouble.error().message.clone());
        error.causes.extend(trouble.error().causes.iter().cloned());
        match trouble {
            Trouble::Lost(_) => left.push((part, "is lost")),
            Trouble::Failed(why) => {
                changes.push(part.degrade(&id, &why));
                left.push((part, "could not be given its previous layout back"));
            }
            Trouble::Unknown(why) => {
                changes.push(part.degrade(&id, &why));
                left.push((part, "may not have its previous layout back"));
            }
        }
    }
    if left.is_empty() {
        return (OperationState::RolledBack, error.outcome("the previous layout stands again, read back"), changes);
    }
    for (part, what) in &left {
        error.causes.push(format!("{} {what}", part.label()));
    }
    if error.hint.is_none() {
        let gpu = left[0].0.plan.gpu;
        error = error.hint(format!("see what stands with `gpushctl gpu show {gpu}`, then apply a layout again"));
    }
    (OperationState::Failed, error, changes)
}
