//! A recorded operation in the form of the API.

use gpush_api::{ApiError, EventPayload, GpuLayout, GpuPlan, Operation, OperationChange, OperationSummary, StepState};
use gpush_core::layout::layout_before;
use gpush_store::{GpuIntent, Intent, OperationId, OperationRecord};

/// Converts the journal's record of an operation to the API's type.
pub(super) fn operation(record: OperationRecord, intent: Intent) -> Operation {
    let begun = intent.begun.is_some();
    Operation {
        begun,
        layouts_before: if begun { layouts_before(&intent.gpus) } else { Vec::new() },
        id: record.id.to_string(),
        revision: record.revision,
        kind: record.kind,
        state: record.stage,
        by: record.by,
        created_at: record.created_at,
        ended_at: record.ended_at,
        reason: record.reason,
        plans: intent.gpus.into_iter().map(|gpu| gpu.plan).collect(),
        progress: record.progress,
        // The journal does not contain why an operation waits. After a restart, the next attempt to
        // begin finds the reasons again.
        waits_for: Vec::new(),
        notes: record.notes,
        error: record.error,
    }
}

/// Returns MIG mode and layout of each GPU before an operation.
pub(super) fn layouts_before(gpus: &[GpuIntent]) -> Vec<GpuLayout> {
    gpus.iter().filter_map(|gpu| Some(layout_before(&gpu.plan, gpu.before.as_ref()?))).collect()
}

/// Returns an event with an operation's current state. `note` is the note that was just added.
pub(super) fn event(operation: &Operation, note: Option<String>) -> EventPayload {
    EventPayload::Operation(Box::new(OperationChange {
        operation: OperationSummary::from(operation),
        progress: operation.progress.clone(),
        note,
    }))
}

/// Maximum number of causes in the error of an operation. The maximum for the error of one GPU is
/// [`FEW_CAUSES`]. So even with 64 GPUs, a record is well below the store's size limit.
pub(super) const MOST_CAUSES: usize = 64;
pub(super) const FEW_CAUSES: usize = 12;

/// Maximum length of one sentence in an error or note, in characters.
const LONGEST: usize = 500;

/// Shortens a sentence to [`LONGEST`] characters.
pub(super) fn cut(text: &str) -> String {
    match text.char_indices().nth(LONGEST) {
        None => text.to_owned(),
        Some((end, _)) => format!("{}…", &text[..end]),
    }
}

/// Shortens an error so that the journal can record it.
pub(super) fn bounded(mut error: ApiError, causes: usize) -> ApiError {
    error.errors = error.errors.into_iter().map(|one| bounded(one, FEW_CAUSES)).collect();
    let more = error.causes.len().saturating_sub(causes);
    error.causes.truncate(causes);
    error.causes.iter_mut().for_each(|cause| *cause = cut(cause));
    if more > 0 {
        error.causes.push(format!("{more} more"));
    }
    error.message = cut(&error.message);
    error
}

/// Parses an id in the form `op-<number>`.
pub(crate) fn id(text: &str) -> Option<OperationId> {
    let id = OperationId(text.strip_prefix("op-")?.parse().ok()?);
    (id.to_string() == text).then_some(id)
}

/// Returns the progress on a GPU before the first step of its plan.
pub(super) fn not_begun(plan: &GpuPlan) -> StepState {
    let (gpu, total) = (plan.gpu, plan.total());
    StepState { gpu, done: 0, total, doing: None, rolling_back: false, restored: false, error: None }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recorded_errors_are_bounded() {
        let mut error = ApiError::new(gpush_api::Code::Blocked, "ä".repeat(1000));
        error.causes = vec!["x".repeat(10_000); 100];
        let bounded = bounded(error, FEW_CAUSES);
        assert_eq!(bounded.message.chars().count(), LONGEST + 1);
        assert_eq!((bounded.causes.len(), bounded.causes[FEW_CAUSES].as_str()), (FEW_CAUSES + 1, "88 more"));
        assert!(bounded.causes.iter().all(|cause| cause.chars().count() <= LONGEST + 1));
        let whole = super::bounded(ApiError::several("several", vec![bounded.clone(); 2]), 3);
        assert!(whole.errors.iter().all(|one| one.message == bounded.message && one.causes.len() == FEW_CAUSES + 1));
        let small = ApiError::new(gpush_api::Code::Blocked, "short").cause("so");
        assert_eq!(super::bounded(small.clone(), 3), small);
    }

    #[test]
    fn operation_ids_have_one_spelling() {
        assert_eq!(id("op-7"), Some(OperationId(7)));
        for other in ["op-07", "op-+7", "op-", "7", "OP-7", "", "op-99999999999999999999"] {
            assert_eq!(id(other), None, "{other}");
        }
    }
}
