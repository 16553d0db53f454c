//! The rollback of an operation: restores the previous layout on every GPU that the operation may have changed.
//!
//! If a GPU is lost or in an unknown state, gpushd does not roll it back.

use std::sync::Arc;

use gpush_api::{ApiError, OperationState};
use tokio::task::JoinSet;

use super::{
    part::Part,
    phases::{PartOutcome, changed_modes},
    restore::{restore_modes_together, restore_previous_layout},
};
use crate::{
    modes::{
        Trouble,
        mig::{MigMode, reset::Purpose},
    },
    operations::operation::OperationHandle,
    state::Change,
};

/// Restores the GPUs of an operation that failed with the error `why`. Returns how the operation ends: its state, its
/// error, and the changed conditions of its GPUs.
pub(super) async fn all(
    mig: &MigMode,
    ongoing: &Arc<OperationHandle>,
    parts: &[Part],
    ends: &[PartOutcome],
    why: ApiError,
) -> (OperationState, ApiError, Vec<Change>) {
    let mut error = why;
    let id = ongoing.id();
    let mut changes = Vec::new();
    let mut left = Vec::new();
    let mut changed = Vec::new();
    for (part, end) in parts.iter().zip(ends) {
        match end {
            PartOutcome::Troubled(Trouble::Lost(_)) => left.push((part.clone(), "is lost")),
            PartOutcome::Troubled(Trouble::Unknown(trouble)) => {
                changes.push(part.degrade(&id, trouble));
                left.push((part.clone(), "is in an unknown state"));
            }
            // This operation has not changed the GPU, and gpushd does not undo changes by other programs.
            PartOutcome::Troubled(Trouble::Failed(_) | Trouble::InUse(_)) if part.is_untouched() => {
                left.push((part.clone(), "stays as it is: this operation has not changed it"));
            }
            PartOutcome::Done | PartOutcome::Stopped if part.is_untouched() => {}
            PartOutcome::Done
            | PartOutcome::Stopped
            | PartOutcome::Troubled(Trouble::Failed(_) | Trouble::InUse(_)) => changed.push(part),
        }
    }
    for (part, trouble) in restore(mig, ongoing, &changed).await {
        error.causes.push(trouble.error().message.clone());
        error.causes.extend(trouble.error().causes.iter().cloned());
        match trouble {
            Trouble::Lost(_) => left.push((part, "is lost")),
            Trouble::Failed(why) | Trouble::InUse(why) => {
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
        let show = match left.as_slice() {
            [(part, _)] => format!("gpushctl gpu show {}", part.plan.gpu),
            _ => "gpushctl status".to_owned(),
        };
        error = error.hint(format!("run `{show}` to see the present layout, then apply a layout again"));
    }
    (OperationState::Failed, error, changes)
}

/// Restores GPUs concurrently. Returns the GPUs that could not be restored.
async fn restore(mig: &MigMode, ongoing: &Arc<OperationHandle>, parts: &[&Part]) -> Vec<(Part, Trouble)> {
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
        let mig = mig.clone();
        let (ongoing, part, changes) = (Arc::clone(ongoing), (*part).clone(), changes.clone());
        tasks.spawn(async move {
            let id = ongoing.id();
            let purpose = Purpose { operation: &id, changes: &changes, cancel: None };
            let back = restore_previous_layout(&mig, &purpose, &part).await;
            ongoing.progress(part.position, |progress| {
                progress.doing = None;
                match &back {
                    Ok(_) => progress.restored = true,
                    Err(trouble) => progress.error = Some(trouble.error().clone()),
                }
            });
            back.err().map(|trouble| (part, trouble))
        });
    }
    tasks.join_all().await.into_iter().flatten().collect()
}
