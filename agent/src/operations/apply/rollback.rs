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
        match PartRollback::of(end, part.is_untouched()) {
            PartRollback::Nothing => {}
            PartRollback::Restore => changed.push(part),
            PartRollback::Leave(why) => left.push((part.clone(), why)),
            PartRollback::Degrade(trouble, why) => {
                changes.push(part.degrade(&id, trouble));
                left.push((part.clone(), why));
            }
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
    let (state, error) = rollback_end(error, &left);
    (state, error, changes)
}

/// What the rollback does with a GPU.
#[derive(Debug, PartialEq, Eq)]
enum PartRollback<'a> {
    /// The operation has not changed the GPU.
    Nothing,
    /// Restores the previous layout.
    Restore,
    /// Does not change the GPU. The text completes the sentence "GPU 0 …".
    Leave(&'static str),
    /// Does not change the GPU, and marks it as degraded because of this error.
    Degrade(&'a ApiError, &'static str),
}

impl<'a> PartRollback<'a> {
    /// `is_untouched` is whether the operation has not changed the GPU.
    fn of(end: &'a PartOutcome, is_untouched: bool) -> Self {
        match (end, is_untouched) {
            (PartOutcome::Troubled(Trouble::Lost(_)), _) => Self::Leave("is lost"),
            (PartOutcome::Troubled(Trouble::Unknown(trouble)), _) => Self::Degrade(trouble, "is in an unknown state"),
            // gpushd does not undo changes by other programs.
            (PartOutcome::Troubled(Trouble::Failed(_) | Trouble::InUse(_)), true) => {
                Self::Leave("stays as it is: this operation has not changed it")
            }
            (PartOutcome::Done | PartOutcome::Stopped, true) => Self::Nothing,
            (
                PartOutcome::Done
                | PartOutcome::Stopped
                | PartOutcome::Troubled(Trouble::Failed(_) | Trouble::InUse(_)),
                false,
            ) => Self::Restore,
        }
    }
}

/// Returns the state and the error of an operation after its rollback. `left` contains the GPUs that do not have their
/// previous layout, each with a text that completes the sentence "GPU 0 …".
fn rollback_end(mut error: ApiError, left: &[(Part, &str)]) -> (OperationState, ApiError) {
    if left.is_empty() {
        return (OperationState::RolledBack, error.outcome("the previous layout was restored and read back"));
    }
    error.causes.extend(left.iter().map(|(part, what)| format!("{} {what}", part.label())));
    if error.hint.is_none() {
        let show = match left {
            [(part, _)] => format!("gpushctl gpu show {}", part.plan.gpu),
            _ => "gpushctl status".to_owned(),
        };
        error = error.hint(format!("run `{show}` to see the present layout, then apply a layout again"));
    }
    (OperationState::Failed, error)
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

#[cfg(test)]
mod tests {
    use gpush_api::{Code, GpuIndex, GpuPlan};

    use super::*;

    fn error() -> ApiError {
        ApiError::new(Code::DriverError, "creating failed")
    }

    fn part(gpu: u32) -> Part {
        Part::unseen(0, GpuPlan { gpu: GpuIndex(gpu), gpu_uuid: format!("GPU-{gpu}").into(), ..GpuPlan::default() })
    }

    #[test]
    fn only_changed_gpus_of_known_state_are_restored() {
        let (unknown, lost, failed) =
            (Trouble::Unknown(error()), Trouble::Lost(error()), || PartOutcome::Troubled(Trouble::Failed(error())));
        let (unknown, lost) = (PartOutcome::Troubled(unknown), PartOutcome::Troubled(lost));
        for is_untouched in [true, false] {
            assert_eq!(PartRollback::of(&lost, is_untouched), PartRollback::Leave("is lost"));
            let degraded = PartRollback::Degrade(&error(), "is in an unknown state");
            assert_eq!(PartRollback::of(&unknown, is_untouched), degraded);
        }
        for end in [PartOutcome::Done, PartOutcome::Stopped] {
            assert_eq!(PartRollback::of(&end, true), PartRollback::Nothing, "{end:?}");
            assert_eq!(PartRollback::of(&end, false), PartRollback::Restore, "{end:?}");
        }
        assert_eq!(PartRollback::of(&failed(), false), PartRollback::Restore);
        assert!(matches!(PartRollback::of(&failed(), true), PartRollback::Leave(_)), "another program has changed it");
    }

    #[test]
    fn rollback_of_all_gpus_has_an_outcome_and_no_hint() {
        let (state, ended) = rollback_end(error(), &[]);
        assert_eq!((state, ended.hint.is_none()), (OperationState::RolledBack, true));
        assert_eq!(ended.outcome.as_deref(), Some("the previous layout was restored and read back"));
    }

    #[test]
    fn failed_rollback_names_each_gpu_and_a_command() {
        let (state, one) = rollback_end(error(), &[(part(3), "is lost")]);
        assert_eq!((state, one.outcome), (OperationState::Failed, None));
        assert_eq!(one.causes, ["GPU 3 (GPU-3) is lost"]);
        assert!(one.hint.unwrap().contains("`gpushctl gpu show 3`"));
        let (_, two) = rollback_end(error(), &[(part(3), "is lost"), (part(4), "may not have its previous layout")]);
        assert_eq!(two.causes, ["GPU 3 (GPU-3) is lost", "GPU 4 (GPU-4) may not have its previous layout"]);
        assert!(two.hint.unwrap().contains("`gpushctl status`"));
        // The hint of the failed step is more specific.
        let (_, hinted) = rollback_end(error().hint("end the process"), &[(part(3), "is lost")]);
        assert_eq!(hinted.hint.as_deref(), Some("end the process"));
    }
}
