//! Conditions that restrict the use of a GPU or the host: cordons, maintenance, degraded GPUs.
//!
//! ```text
//! administrator ── cordon ─────────────────────► admin      ─┐
//! driver ───────── an Xid of cordon_xids ──────► xid-<n>     ├─► cordoned ── uncordon ─► none
//! a reading ────── a row remap waits or failed ► row-remap  ─┘      ▲                     │
//!                                                                   └── reported again ◄──┘
//! operation ────── its rollback failed ────────► degraded ── an operation succeeds, or a reading shows the GPU
//!                                                            as that operation planned it or as it was before
//! ```
//!
//! gpushd cordons a GPU only once for a fault that persists, such as a memory row that waits for a reset, and records
//! the fault. After an `uncordon`, gpushd does not cordon the GPU again for the same fault, not even after a restart.
//!
//! This module holds data only. [`Change::record`] writes a change to the store; the caller decides when.

use std::{collections::BTreeMap, fmt, sync::Arc};

use gpush_api::{Actor, Cordon, GpuUuid, Maintenance};
use gpush_nvml::{Reading, RemappedRows};
use gpush_store::{Condition, ConditionKind, NewCondition, Scope, StoreError, Tx};
use jiff::Timestamp;
use tokio::time::Instant;

/// Name of the cordon that gpushd sets because of a fault in the GPU's memory rows.
pub(super) const ROW_REMAP: &str = "row-remap";

/// Decides from a reading whether a degraded GPU is all right again.
pub(crate) trait RecoveryCheck: fmt::Debug + Send + Sync {
    /// Returns a description if the GPU is as the failed operation planned it, or as it was before that operation.
    /// Otherwise returns `None`.
    fn passes(&self, reading: &Reading) -> Option<&'static str>;
}

type ConditionKey = (Scope, ConditionKind, String);

/// The active conditions.
#[derive(Debug, Default)]
pub(crate) struct Conditions {
    in_force: BTreeMap<ConditionKey, ActiveCondition>,
    /// The state of each GPU's remapped memory rows as last recorded, by UUID.
    rows: BTreeMap<GpuUuid, RemappedRows>,
}

/// An active condition.
#[derive(Debug, Clone)]
struct ActiveCondition {
    reason: String,
    by: Option<Actor>,
    since: Timestamp,
    /// Time at which this process set the condition, by the monotonic clock. `None` if an earlier gpushd set it.
    set: Option<Instant>,
    /// Decides when a degraded GPU is all right again.
    check: Option<Arc<dyn RecoveryCheck>>,
}

/// A change of the conditions.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    /// Sets this condition.
    Set(NewCondition),
    /// Marks a GPU as degraded until the check says that the GPU is all right again.
    Degrade(NewCondition, Arc<dyn RecoveryCheck>),
    /// Clears the conditions of this scope and kind; with a cause, only the condition with this cause.
    Clear(Scope, ConditionKind, Option<String>),
}

impl Change {
    /// Returns the change that ends the degraded state of a GPU, after a successful operation.
    pub(crate) fn clear_degraded(uuid: &GpuUuid) -> Self {
        Self::Clear(Scope::Gpu(uuid.clone()), ConditionKind::Degraded, None)
    }

    /// Writes the change to the store.
    ///
    /// # Errors
    /// If the write fails.
    pub(crate) fn record(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        match self {
            Self::Set(new) | Self::Degrade(new, _) => tx.set_condition(new.clone()).map(|_| ()),
            Self::Clear(scope, kind, cause) => tx.clear_conditions(scope, *kind, cause.as_deref()).map(|_| ()),
        }
    }

    /// Returns the scope of the change.
    pub(super) fn scope(&self) -> &Scope {
        match self {
            Self::Set(new) | Self::Degrade(new, _) => &new.scope,
            Self::Clear(scope, ..) => scope,
        }
    }
}

/// What is new about a GPU's memory rows in a reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RowChange {
    /// Nothing is new.
    None,
    /// A change that gpushd only records.
    Noticed,
    /// A fault that cordons the GPU, with the reason.
    Fault(&'static str),
}

/// Conditions from the store. Degraded GPUs have a check that decides when they are all right again.
pub(crate) type Recorded = Vec<(Condition, Option<Arc<dyn RecoveryCheck>>)>;

impl Conditions {
    /// Restores the conditions that an earlier gpushd recorded.
    pub(crate) fn new(recorded: Recorded, rows: BTreeMap<GpuUuid, RemappedRows>) -> Self {
        let in_force = recorded.into_iter().map(|(one, check)| {
            let kept = ActiveCondition { reason: one.reason, by: one.by, since: one.since, set: None, check };
            ((one.scope, one.kind, one.cause), kept)
        });
        Self { in_force: in_force.collect(), rows }
    }

    /// Applies a change.
    pub(super) fn apply(&mut self, change: &Change) {
        match change {
            Change::Set(new) => self.set(new, None),
            Change::Degrade(new, check) => self.set(new, Some(Arc::clone(check))),
            Change::Clear(scope, kind, cause) => self.in_force.retain(|(other, of, by), _| {
                other != scope || of != kind || cause.as_ref().is_some_and(|cause| cause != by)
            }),
        }
    }

    fn set(&mut self, new: &NewCondition, check: Option<Arc<dyn RecoveryCheck>>) {
        let one = ActiveCondition {
            reason: new.reason.clone(),
            by: new.by.clone(),
            since: Timestamp::now(),
            set: Some(Instant::now()),
            check,
        };
        self.in_force.insert((new.scope.clone(), new.kind, new.cause.clone()), one);
    }

    /// Returns the cordons of a GPU.
    pub(super) fn cordons(&self, uuid: &GpuUuid) -> Vec<Cordon> {
        let cordon = |((_, _, cause), one): (&ConditionKey, &ActiveCondition)| Cordon {
            cause: cause.clone(),
            reason: one.reason.clone(),
            by: one.by.clone(),
            since: one.since,
        };
        self.about(uuid, ConditionKind::Cordon).map(cordon).collect()
    }

    /// Returns the errors that make a GPU degraded.
    pub(super) fn degraded(&self, uuid: &GpuUuid) -> Vec<String> {
        self.about(uuid, ConditionKind::Degraded).map(|(_, one)| one.reason.clone()).collect()
    }

    /// Returns the current maintenance of the host.
    pub(super) fn maintenance(&self) -> Option<Maintenance> {
        let mut found = self.in_force.iter().filter(|((_, kind, _), _)| *kind == ConditionKind::Maintenance);
        found.next().map(|(_, one)| Maintenance {
            reason: Some(one.reason.clone()).filter(|reason| !reason.is_empty()),
            by: one.by.clone(),
            since: one.since,
        })
    }

    /// Returns the conditions of a kind that apply to a GPU: the conditions of the GPU itself, and those of the whole
    /// host.
    fn about(&self, uuid: &GpuUuid, kind: ConditionKind) -> impl Iterator<Item = (&ConditionKey, &ActiveCondition)> {
        let here = move |scope: &Scope| match scope {
            Scope::Host => true,
            Scope::Gpu(other) => other == uuid,
        };
        self.in_force.iter().filter(move |((scope, of, _), _)| *of == kind && here(scope))
    }

    /// Clears the degraded states of a GPU that is all right again according to `reading`. Returns the changes to
    /// record.
    ///
    /// `begun` is the time at which the reading began. A condition that was set later stays.
    pub(super) fn check_recovery(&mut self, reading: &Reading, begun: Instant) -> Vec<Change> {
        let uuid = &reading.identity.uuid;
        let mut ended = Vec::new();
        for ((scope, kind, cause), one) in self.about(uuid, ConditionKind::Degraded) {
            let check = one.check.as_ref().filter(|_| one.set.is_none_or(|set| begun > set));
            let Some(stands) = check.and_then(|check| check.passes(reading)) else { continue };
            tracing::info!(gpu = uuid.as_str(), "GPU {uuid} is no longer degraded: after {cause} it is {stands}");
            ended.push(Change::Clear(scope.clone(), *kind, Some(cause.clone())));
        }
        ended.iter().for_each(|change| self.apply(change));
        ended
    }

    /// Stores the state of a GPU's memory rows in a reading. Returns what is new.
    pub(super) fn note_rows(&mut self, uuid: &GpuUuid, rows: RemappedRows) -> RowChange {
        let before = self.rows.get(uuid).copied().unwrap_or_default();
        if before == rows {
            return RowChange::None;
        }
        self.rows.insert(uuid.clone(), rows);
        let more = (rows.correctable, rows.uncorrectable) != (before.correctable, before.uncorrectable);
        if rows.failed && !before.failed {
            RowChange::Fault(
                "a bad row of its memory could not be replaced: no spare row is left, or the remapper failed",
            )
        } else if rows.pending && (!before.pending || more) {
            RowChange::Fault("the next reset replaces a bad row of its memory, which is in use until then")
        } else {
            RowChange::Noticed
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpush_api::GpuIndex;

    fn cordon(uuid: &str, cause: &str) -> Change {
        Change::Set(NewCondition {
            scope: Scope::Gpu(uuid.into()),
            kind: ConditionKind::Cordon,
            cause: cause.to_owned(),
            reason: format!("because of {cause}"),
            by: None,
        })
    }

    #[derive(Debug)]
    struct AlwaysPasses;

    impl RecoveryCheck for AlwaysPasses {
        fn passes(&self, _: &Reading) -> Option<&'static str> {
            Some("as before")
        }
    }

    fn reading(uuid: &str) -> Reading {
        let identity = gpush_nvml::Identity {
            index: GpuIndex(0),
            uuid: uuid.into(),
            pci: "0000:07:00.0".to_owned(),
            pci_id: 0x20b2_10de,
            pci_subsystem: None,
            minor: 0,
            name: "a GPU".to_owned(),
            architecture: gpush_api::Architecture::Ampere,
            passed_through: false,
        };
        Reading {
            identity,
            memory: gpush_api::Memory::default(),
            mig: None,
            compute_mode: None,
            processes: Vec::new(),
            processes_known: true,
            nvlink: None,
            sensors: gpush_api::Sensors::default(),
            rows: None,
            warnings: Vec::new(),
        }
    }

    #[test]
    fn degraded_gpu_recovers_only_by_a_later_reading() {
        let mut conditions = Conditions::default();
        let before = Instant::now();
        let new = NewCondition {
            scope: Scope::Gpu("GPU-0".into()),
            kind: ConditionKind::Degraded,
            cause: "op-1".to_owned(),
            reason: "it failed".to_owned(),
            by: None,
        };
        conditions.apply(&Change::Degrade(new, Arc::new(AlwaysPasses)));
        // Simulates that the wall clock was a day ahead when the condition was set. The comparison must not use the
        // wall clock.
        for one in conditions.in_force.values_mut() {
            one.since = Timestamp::now() + jiff::SignedDuration::from_hours(24);
        }
        assert!(conditions.check_recovery(&reading("GPU-0"), before).is_empty(), "the reading is from before");
        assert_eq!(conditions.degraded(&"GPU-0".into()), ["it failed"]);
        let later = Instant::now() + std::time::Duration::from_nanos(1);
        assert!(conditions.check_recovery(&reading("GPU-1"), later).is_empty(), "another GPU");
        assert_eq!(conditions.check_recovery(&reading("GPU-0"), later).len(), 1);
        assert!(conditions.degraded(&"GPU-0".into()).is_empty());
    }

    #[test]
    fn cordon_stays_until_cleared_by_kind_or_cause() {
        let mut conditions = Conditions::default();
        for change in [cordon("GPU-0", "admin"), cordon("GPU-0", "xid-79"), cordon("GPU-1", "xid-79")] {
            conditions.apply(&change);
        }
        let count = |conditions: &Conditions, uuid: &str| conditions.cordons(&uuid.into()).len();
        assert_eq!((count(&conditions, "GPU-0"), count(&conditions, "GPU-1"), count(&conditions, "GPU-2")), (2, 1, 0));
        assert_eq!(conditions.cordons(&"GPU-0".into())[0].reason, "because of admin");
        assert!(conditions.degraded(&"GPU-0".into()).is_empty());
        let gpu = || Scope::Gpu("GPU-0".into());
        conditions.apply(&Change::Clear(gpu(), ConditionKind::Cordon, Some("admin".to_owned())));
        assert_eq!(count(&conditions, "GPU-0"), 1);
        conditions.apply(&Change::Clear(gpu(), ConditionKind::Cordon, None));
        assert_eq!((count(&conditions, "GPU-0"), count(&conditions, "GPU-1")), (0, 1));
    }

    #[test]
    fn row_remap_is_a_fault_once_until_another_row_fails() {
        let mut conditions = Conditions::default();
        let rows = |correctable, pending, failed| RemappedRows { correctable, uncorrectable: 0, pending, failed };
        let mut seen = Vec::new();
        for rows in [
            rows(0, false, false),
            rows(1, false, false),
            rows(1, true, false),
            rows(1, true, false),
            rows(2, true, false),
            rows(2, true, true),
            rows(2, false, true),
        ] {
            seen.push(match conditions.note_rows(&"GPU-0".into(), rows) {
                RowChange::None => "none",
                RowChange::Noticed => "noticed",
                RowChange::Fault(_) => "fault",
            });
        }
        assert_eq!(seen, ["none", "noticed", "fault", "none", "fault", "fault", "noticed"]);
    }
}
