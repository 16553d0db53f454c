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

use std::sync::Arc;

use gpush_api::{ApiError, Code, OperationState};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::{
    Part,
    back::back,
    forward::{Forward, forward},
    step::Trouble,
};
use crate::{agent::Shared, operation::Ongoing};

/// Carries an operation out in the background. The agent does not end before it has.
pub(super) fn spawn(agent: &Shared, ongoing: Ongoing, parts: Vec<Part>) {
    let tasks = agent.tasks.clone();
    let agent = Arc::clone(agent);
    tasks.spawn(async move {
        let id = ongoing.id();
        let work = tokio::spawn(carry_out(Arc::clone(&agent), ongoing, parts));
        if let Err(error) = work.await {
            tracing::error!(op = id, "the operation broke off: {error}");
            let message = format!("operation {id} broke off by a fault of gpushd");
            agent.operations.abandon(&id, ApiError::new(Code::Internal, message).hint("see the log of gpushd"));
        }
    });
}

async fn carry_out(agent: Shared, ongoing: Ongoing, parts: Vec<Part>) {
    let operation = ongoing.snapshot();
    tracing::info!(
        op = operation.id,
        uid = operation.by.uid,
        "{} begins: {}",
        operation.kind,
        parts
            .iter()
            .map(|p| format!("GPU {} to {}", p.plan.gpu, p.plan.layout.join(",")))
            .collect::<Vec<_>>()
            .join("; ")
    );
    ongoing.update(|operation| operation.state = OperationState::Running);
    let ongoing = Arc::new(ongoing);
    let ends = all_forward(&agent, &ongoing, &parts).await;
    let failed = ends.iter().find_map(|end| match end {
        Forward::Troubled(trouble) => Some(trouble.clone()),
        Forward::Done | Forward::Stopped => None,
    });
    let broke = failed.as_ref().map(|trouble| trouble.error().clone());
    let (state, error) = match failed {
        None => (OperationState::Done, None),
        Some(trouble) => {
            let (state, error) = all_back(&agent, &ongoing, &parts, &ends, trouble).await;
            (state, Some(error))
        }
    };
    for part in &parts {
        match state {
            OperationState::Done => agent.conditions.mend(&part.plan.uuid),
            // Rolled back to what stood before: a GPU that was degraded then still is.
            OperationState::RolledBack | OperationState::Queued | OperationState::Running | OperationState::Failed => {}
        }
        agent.observer.outdate(&part.plan.uuid);
    }
    // What going back came to is in the log already, holders included.
    match &broke {
        None => tracing::info!(op = operation.id, "{} is done", operation.kind),
        Some(error) => tracing::error!(
            op = operation.id,
            "{} ended {state:?}: {error}{}",
            operation.kind,
            error.causes.iter().map(|cause| format!("; {cause}")).collect::<String>()
        ),
    }
    // Every task that shared it has ended.
    if let Some(ongoing) = Arc::into_inner(ongoing) {
        ongoing.end(state, error);
    }
}

async fn all_forward(agent: &Shared, ongoing: &Arc<Ongoing>, parts: &[Part]) -> Vec<Forward> {
    let abort = CancellationToken::new();
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
    trouble: Trouble,
) -> (OperationState, ApiError) {
    let mut error = trouble.error().clone();
    let mut tasks = JoinSet::new();
    let mut left = Vec::new();
    for (part, end) in parts.iter().zip(ends) {
        match end {
            Forward::Troubled(Trouble::Lost(_)) => left.push((part.clone(), "is lost")),
            Forward::Troubled(Trouble::Unknown(trouble)) => {
                agent.conditions.leave_open(part, trouble.clone());
                left.push((part.clone(), "is in a state that is not known"));
            }
            // Nothing was done on it, so there is nothing to take back, and what others did is theirs.
            Forward::Troubled(Trouble::Failed(_)) if part.is_empty() => {
                left.push((part.clone(), "is left as it stands, since this operation has not changed it"));
            }
            Forward::Done | Forward::Stopped if part.is_empty() => {}
            Forward::Done | Forward::Stopped | Forward::Troubled(Trouble::Failed(_)) => {
                let (agent, ongoing, part) = (Arc::clone(agent), Arc::clone(ongoing), part.clone());
                tasks.spawn(async move {
                    ongoing.progress(part.position, |progress| {
                        progress.rolling_back = true;
                        progress.doing = Some("restoring the previous layout".to_owned());
                    });
                    let back = back(&agent, &part).await;
                    ongoing.progress(part.position, |progress| {
                        progress.doing = None;
                        if let Err(trouble) = &back {
                            progress.error = Some(trouble.error().clone());
                        }
                    });
                    (part, back)
                });
            }
        }
    }
    for (part, back) in tasks.join_all().await {
        let Err(trouble) = back else { continue };
        error.causes.push(trouble.error().message.clone());
        error.causes.extend(trouble.error().causes.iter().cloned());
        match trouble {
            Trouble::Lost(_) => left.push((part, "is lost")),
            Trouble::Failed(why) => {
                agent.conditions.degrade(&part.plan.uuid, why);
                left.push((part, "could not be given its previous layout back"));
            }
            Trouble::Unknown(why) => {
                agent.conditions.leave_open(&part, why);
                left.push((part, "may not have its previous layout back"));
            }
        }
    }
    if left.is_empty() {
        error.causes.push("the previous layout stands again, read back".to_owned());
        return (OperationState::RolledBack, error);
    }
    for (part, what) in &left {
        error.causes.push(format!("{} {what}", part.label()));
    }
    if error.hint.is_none() {
        let gpu = left[0].0.plan.gpu;
        error = error.hint(format!("see what stands with `gpushctl gpu show {gpu}`, then apply a layout again"));
    }
    (OperationState::Failed, error)
}
