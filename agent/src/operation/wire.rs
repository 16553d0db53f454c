//! An operation of the journal as the API shows it.

use gpush_api::{GpuPlan, Operation, StepState};
use gpush_store::{Intent, OperationId, OperationRecord};

/// A record with its intent.
pub(super) fn operation(record: OperationRecord, intent: Intent) -> Operation {
    Operation {
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
        notes: record.notes,
        error: record.error,
    }
}

/// The id that is written as `op-<number>`, and in no other way.
pub(crate) fn id(text: &str) -> Option<OperationId> {
    let id = OperationId(text.strip_prefix("op-")?.parse().ok()?);
    (id.to_string() == text).then_some(id)
}

/// The progress of a plan of which nothing is done.
pub(super) fn not_begun(plan: &GpuPlan) -> StepState {
    StepState {
        gpu: plan.gpu,
        done: 0,
        total: u32::try_from(plan.steps.len() + usize::from(plan.enables_mig) + usize::from(plan.disables_mig))
            .unwrap_or(u32::MAX),
        doing: None,
        rolling_back: false,
        error: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_written_in_one_way() {
        assert_eq!(id("op-7"), Some(OperationId(7)));
        for other in ["op-07", "op-+7", "op-", "7", "OP-7", "", "op-99999999999999999999"] {
            assert_eq!(id(other), None, "{other}");
        }
    }
}
