//! The rollback of an operation: restores the previous layout on every GPU that the operation may have changed.
//!
//! A GPU that is lost or in an unknown state is not rolled back.

use std::sync::Arc;

use gpush_api::{ApiError, OperationState};
use tokio::task::JoinSet;

use super::{
    back::{back, restore_modes_together},
    part::Part,
    phases::{Forward, changed_modes},
};
use crate::{
    modes::{
        Trouble,
        mig::{MigMode, reset::Purpose},
    },
    operation::Ongoing,
    state::Change,
};

/// Restores the GPUs of an operation because of the error `why`. Returns the final state of the
/// operation, its error, and the changes of the conditions of its GPUs.
pub(super) async fn all(
    mig: &MigMode,
    ongoing: &Arc<Ongoing>,
    parts: &[Part],
    ends: &[Forward],
    why: ApiError,
) -> (OperationState, ApiError, Vec<Change>) {
    let mut error = why;
    let id = ongoing.id();
    let mut changes = Vec::new();
    let mut left = Vec::new();
    let mut changed = Vec::new();
    for (part, end) in parts.iter().zip(ends) {
        match end {
            Forward::Troubled(Trouble::Lost(_)) => left.push((part.clone(), "is lost")),
            Forward::Troubled(Trouble::Unknown(trouble)) => {
                changes.push(part.degrade(&id, trouble));
                left.push((part.clone(), "is in an unknown state"));
            }
            // The operation changed nothing on this GPU, and changes by others are not reverted.
            Forward::Troubled(Trouble::Failed(_)) if part.is_untouched() => {
                left.push((part.clone(), "stays as it is: this operation has not changed it"));
            }
            Forward::Done | Forward::Stopped if part.is_untouched() => {}
            Forward::Done | Forward::Stopped | Forward::Troubled(Trouble::Failed(_)) => changed.push(part),
        }
    }
    for (part, trouble) in restore(mig, ongoing, &changed).await {
        error.causes.push(trouble.error().message.clone());
        error.causes.extend(trouble.error().causes.iter().cloned());
        match trouble {
            Trouble::Lost(_) => left.push((part, "is lost")),
            Trouble::Failed(why) => {
                changes.push(part.degrade(&id, &why));
                left.push((part, "could not be rolled back to its previous layout"));
            }
            Trouble::Unknown(why) => {
                changes.push(part.degrade(&id, &why));
                left.push((part, "may not have its previous layout"));
            }
        }
    }
    if left.is_empty() {
        return (OperationState::RolledBack, error.outcome("the previous layout was restored and read back"), changes);
    }
    for (part, what) in &left {
        error.causes.push(format!("{} {what}", part.label()));
    }
    if error.hint.is_none() {
        let gpu = left[0].0.plan.gpu;
        error = error.hint(format!("see the present layout with `gpushctl gpu show {gpu}`, then apply a layout again"));
    }
    (OperationState::Failed, error, changes)
}

/// Restores GPUs concurrently. Returns the GPUs that could not be restored.
async fn restore(mig: &MigMode, ongoing: &Arc<Ongoing>, parts: &[&Part]) -> Vec<(Part, Trouble)> {
    for part in parts {
        ongoing.progress(part.position, |progress| {
            progress.rolling_back = true;
            progress.doing = Some("restoring the previous layout".to_owned());
        });
    }
    let (id, changes) = (ongoing.id(), changed_modes(ongoing));
    restore_modes_together(mig, &Purpose { operation: &id, changes: &changes, cancel: None }, parts).await;
    let mut tasks = JoinSet::new();
    for part in parts {
        let (mig, ongoing, part, changes) = (mig.clone(), Arc::clone(ongoing), (*part).clone(), changes.clone());
        tasks.spawn(async move {
            let id = ongoing.id();
            let back = back(&mig, &Purpose { operation: &id, changes: &changes, cancel: None }, &part).await;
            ongoing.progress(part.position, |progress| {
                progress.doing = None;
                if let Err(trouble) = &back {
                    progress.error = Some(trouble.error().clone());
                }
            });
            back.err().map(|trouble| (part, trouble))
        });
    }
    tasks.join_all().await.into_iter().flatten().collect()
}
