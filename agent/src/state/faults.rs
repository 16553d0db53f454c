//! Faults that gpushd detects itself: a GPU with a fault is cordoned at once, and the cordon is recorded later.

use gpush_api::GpuUuid;
use std::collections::BTreeSet;

use gpush_nvml::RemappedRows;
use gpush_store::{AuditEvent, ConditionKind, DONE, NewCondition, Scope};

use super::{
    AffectedGpus, State,
    conditions::{self, Change, RowChange},
    sources::SnapshotSources,
};

impl State {
    /// Cordons a GPU because the driver reported a fault. Returns false if the GPU has this cordon already.
    pub(crate) fn cordon_for_fault(&self, uuid: &GpuUuid, cause: &str, reason: String) -> bool {
        self.update(|known| {
            let is_new = self.cordon_at_once(known, uuid, cause, reason, None);
            (AffectedGpus::Gpus(BTreeSet::from([uuid.clone()])), is_new)
        })
    }

    pub(super) fn apply_rows(&self, known: &mut SnapshotSources, uuid: &GpuUuid, rows: RemappedRows) {
        match known.conditions.note_rows(uuid, rows) {
            RowChange::None => {}
            RowChange::Noticed => self.record_rows(uuid, rows),
            RowChange::Fault(reason) => {
                self.cordon_at_once(known, uuid, conditions::ROW_REMAP, reason.to_owned(), Some(rows));
            }
        }
    }

    /// Records the state of a GPU's memory rows. Does not wait for the commit.
    fn record_rows(&self, uuid: &GpuUuid, rows: RemappedRows) {
        let (uuid, rows) = (uuid.clone(), serde_json::to_value(rows).unwrap_or_default());
        drop(self.0.store.write(move |tx| tx.record_observation(&uuid, rows.clone())));
    }

    /// Cordons a GPU because gpushd has detected a fault. The cordon takes effect even if it cannot be recorded.
    /// Returns false if the GPU has a cordon with this cause already.
    fn cordon_at_once(
        &self,
        known: &mut SnapshotSources,
        uuid: &GpuUuid,
        cause: &str,
        reason: String,
        noticed: Option<RemappedRows>,
    ) -> bool {
        if known.conditions.cordons(uuid).iter().any(|cordon| cordon.cause == cause) {
            if let Some(rows) = noticed {
                self.record_rows(uuid, rows);
            }
            return false;
        }
        tracing::warn!(gpu = uuid.as_str(), "GPU {uuid} is cordoned: {reason}");
        let event = AuditEvent::GpuCordon { cause: Some(cause.to_owned()), reason: Some(reason.clone()) };
        let audit = event.record(None, uuid, DONE);
        let change = Change::Set(NewCondition {
            scope: Scope::Gpu(uuid.clone()),
            kind: ConditionKind::Cordon,
            cause: cause.to_owned(),
            reason,
            by: None,
        });
        known.conditions.apply(&change);
        let uuid = uuid.clone();
        // Use the reserved space of the store, so that a full disk does not prevent the record.
        drop(self.0.store.write_ending(move |tx| {
            change.record(tx)?;
            if let Some(rows) = noticed {
                tx.record_observation(&uuid, serde_json::to_value(rows).unwrap_or_default())?;
            }
            tx.audit(audit.clone()).map(|_| ())
        }));
        true
    }
}
