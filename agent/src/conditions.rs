//! What stands against working with a GPU, or with all of them: somebody cordoned it, a change and
//! its rollback failed, what was promised about it was lost.
//!
//! Memory is what the agent works by; the store is what the next one starts with. A condition that
//! comes with the end of an operation is recorded in the transaction of that end. A degraded GPU is
//! well again when an operation on it ends well, and also when a reading shows it as the operation
//! that left it so wanted it, or as it was before: a call without an answer may have landed.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use gpush_api::{Actor, ApiError, Cordon, Maintenance};
use gpush_nvml::{Reading, RemappedRows};
use gpush_store::{Condition, ConditionKind, NewCondition, Scope, Store, StoreError, Tx};
use jiff::Timestamp;
use tokio::time::Instant;

use crate::{apply::Part, operation::named_once};

/// All conditions in force.
#[derive(Debug)]
pub(crate) struct Conditions {
    store: Store,
    standing: Mutex<BTreeMap<Key, Standing>>,
    /// Held while a change that somebody asked for is recorded, so that memory takes changes in in
    /// the order in which they are on record.
    order: tokio::sync::Mutex<()>,
    /// Memory rows of each GPU as last noticed, by UUID.
    noticed: Mutex<BTreeMap<String, RemappedRows>>,
}

type Key = (Scope, ConditionKind, String);

/// A condition in force.
#[derive(Debug, Clone)]
pub(crate) struct Standing {
    /// What brought it about, for programs.
    pub(crate) cause: String,
    /// Why, for people.
    pub(crate) reason: String,
    /// Who, if somebody did.
    pub(crate) by: Option<Actor>,
    /// Since when.
    pub(crate) since: Timestamp,
    /// The same by this process's own clock, which nobody sets; `None` when an earlier one set it.
    set: Option<Instant>,
    /// What was under way when the GPU was left degraded.
    open: Option<Part>,
}

/// A change of the conditions.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    /// This one is in force from now on.
    Set(NewCondition),
    /// So is this one, of a GPU that is neither as planned nor as before, as far as is known.
    Degrade(NewCondition, Box<Part>),
    /// Those of this scope and kind are no more; with a cause, only that one.
    Clear(Scope, ConditionKind, Option<String>),
}

impl Change {
    /// A change failed on the GPU, and its rollback too, or what became of it is not known.
    pub(crate) fn degrade(part: &Part, operation: &str, error: &ApiError) -> Self {
        let new = NewCondition {
            scope: Scope::Gpu(part.plan.uuid.clone()),
            kind: ConditionKind::Degraded,
            cause: operation.to_owned(),
            reason: named_once(error.clone(), std::slice::from_ref(&part.plan)).sentences().join("; "),
            by: None,
        };
        Self::Degrade(new, Box::new(part.clone()))
    }

    /// The GPU is as somebody wanted it.
    pub(crate) fn mend(uuid: &str) -> Self {
        Self::Clear(Scope::Gpu(uuid.to_owned()), ConditionKind::Degraded, None)
    }

    /// Records it.
    ///
    /// # Errors
    /// When it can't be written.
    pub(crate) fn record(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        match self {
            Self::Set(new) | Self::Degrade(new, _) => tx.set_condition(new.clone()).map(|_| ()),
            Self::Clear(scope, kind, cause) => tx.clear_conditions(scope, *kind, cause.as_deref()).map(|_| ()),
        }
    }
}

impl Conditions {
    /// Those on record, each degraded GPU with what was under way on it.
    pub(crate) fn of_the_store(
        store: Store,
        recorded: Vec<(Condition, Option<Part>)>,
        noticed: BTreeMap<String, RemappedRows>,
    ) -> Self {
        let standing = recorded.into_iter().map(|(one, open)| {
            let standing = Standing {
                cause: one.cause.clone(),
                reason: one.reason,
                by: one.by,
                since: one.since,
                set: None,
                open,
            };
            ((one.scope, one.kind, one.cause), standing)
        });
        let standing = Mutex::new(standing.collect());
        Self { store, standing, order: tokio::sync::Mutex::default(), noticed: Mutex::new(noticed) }
    }

    fn standing(&self) -> MutexGuard<'_, BTreeMap<Key, Standing>> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records a change with what `also` records beside it, then takes it in. `ending` is for a
    /// change that takes a condition away: it is recorded on a full disk too.
    ///
    /// # Errors
    /// When it can't be recorded; then nothing has changed.
    pub(crate) async fn change(
        &self,
        change: Change,
        mut also: impl FnMut(&mut Tx<'_>) -> Result<(), StoreError> + Send + 'static,
    ) -> Result<(), ApiError> {
        let _order = self.order.lock().await;
        let recorded = change.clone();
        match change {
            Change::Set(_) | Change::Degrade(..) => {
                let write = move |tx: &mut Tx<'_>| {
                    recorded.record(tx)?;
                    also(tx)
                };
                self.store.write(write).await?;
                self.take_in(&change);
            }
            Change::Clear(scope, kind, cause) => {
                let of = scope.clone();
                let write = move |tx: &mut Tx<'_>| {
                    let cleared = tx.clear_conditions(&of, kind, cause.as_deref())?;
                    also(tx)?;
                    Ok(cleared)
                };
                // One that gpushd has set meanwhile is on record after this, and stays.
                for cleared in self.store.write_ending(write).await? {
                    self.take_in(&Change::Clear(scope.clone(), kind, Some(cleared.cause)));
                }
            }
        }
        Ok(())
    }

    /// Takes a change in that gpushd makes by itself, and sees to the record without waiting for it.
    pub(crate) fn change_at_once(
        &self,
        change: Change,
        mut also: impl FnMut(&mut Tx<'_>) -> Result<(), StoreError> + Send + 'static,
    ) {
        self.take_in(&change);
        // It must not fail for want of space: what it guards against is there all the same.
        drop(self.store.write_ending(move |tx| {
            change.record(tx)?;
            also(tx)
        }));
    }

    /// Takes in what a reading says of a GPU's memory rows; what was noticed before.
    pub(crate) fn notice(&self, uuid: &str, rows: RemappedRows) -> RemappedRows {
        let mut noticed = self.noticed.lock().unwrap_or_else(PoisonError::into_inner);
        if noticed.get(uuid).copied().unwrap_or_default() == rows {
            return rows;
        }
        noticed.insert(uuid.to_owned(), rows).unwrap_or_default()
    }

    /// Records what was noticed, without waiting for it.
    pub(crate) fn record_notice(&self, uuid: &str, rows: RemappedRows) {
        let uuid = uuid.to_owned();
        let rows = serde_json::to_value(rows).unwrap_or_default();
        drop(self.store.write(move |tx| tx.notice(&uuid, rows.clone())));
    }

    /// Takes a change in. Whoever calls it sees to the record.
    pub(crate) fn take_in(&self, change: &Change) {
        match change {
            Change::Set(new) => self.set(new, None),
            Change::Degrade(new, part) => self.set(new, Some((**part).clone())),
            Change::Clear(scope, kind, cause) => self.standing().retain(|(other, of, by), _| {
                other != scope || of != kind || cause.as_ref().is_some_and(|cause| cause != by)
            }),
        }
    }

    fn set(&self, new: &NewCondition, open: Option<Part>) {
        let one = Standing {
            cause: new.cause.clone(),
            reason: new.reason.clone(),
            by: new.by.clone(),
            since: Timestamp::now(),
            set: Some(Instant::now()),
            open,
        };
        self.standing().insert((new.scope.clone(), new.kind, new.cause.clone()), one);
    }

    /// What keeps new work off a GPU.
    pub(crate) fn cordons(&self, uuid: &str) -> Vec<Cordon> {
        let cordon = |one: Standing| Cordon { cause: one.cause, reason: one.reason, by: one.by, since: one.since };
        self.about(uuid, ConditionKind::Cordon).into_iter().map(cordon).collect()
    }

    /// The maintenance that the host is in.
    pub(crate) fn maintenance(&self) -> Option<Maintenance> {
        let standing = self.standing();
        let mut found = standing.iter().filter(|((_, kind, _), _)| *kind == ConditionKind::Maintenance);
        found.next().map(|(_, one)| Maintenance {
            reason: Some(one.reason.clone()).filter(|reason| !reason.is_empty()),
            by: one.by.clone(),
            since: one.since,
        })
    }

    /// Those of a kind about a GPU, or about the host.
    pub(crate) fn about(&self, uuid: &str, kind: ConditionKind) -> Vec<Standing> {
        let here = |scope: &Scope| match scope {
            Scope::Host => true,
            Scope::Gpu(other) => other == uuid,
        };
        let standing = self.standing();
        standing.iter().filter(|((scope, of, _), _)| *of == kind && here(scope)).map(|(_, one)| one.clone()).collect()
    }

    /// Takes in a reading that was begun at `begun`, while no call could change the GPU any more.
    pub(crate) fn consider(&self, reading: &Reading, begun: Instant) {
        let uuid = &reading.identity.uuid;
        for one in self.about(uuid, ConditionKind::Degraded) {
            let open = one.open.as_ref().filter(|_| one.set.is_none_or(|set| begun > set));
            let Some(stands) = open.and_then(|part| part.stands(reading)) else { continue };
            tracing::info!(gpu = uuid, "it is degraded no longer: after {} it stands {stands}", one.cause);
            let change = Change::Clear(Scope::Gpu(uuid.clone()), ConditionKind::Degraded, Some(one.cause));
            self.take_in(&change);
            // Lost, it is found out again by the next agent's first reading.
            drop(self.store.write_ending(move |tx| change.record(tx)));
        }
    }
}

#[cfg(test)]
mod tests {
    use gpush_store::Options;

    use super::*;

    fn cordon(uuid: &str, cause: &str) -> Change {
        Change::Set(NewCondition {
            scope: Scope::Gpu(uuid.to_owned()),
            kind: ConditionKind::Cordon,
            cause: cause.to_owned(),
            reason: format!("because of {cause}"),
            by: None,
        })
    }

    /// A GPU without MIG, as an operation that wanted nothing of it finds it.
    fn nothing_wanted(uuid: &str) -> (Part, Reading) {
        let identity = gpush_nvml::Identity {
            index: 0,
            uuid: uuid.to_owned(),
            pci: "0000:07:00.0".to_owned(),
            pci_id: 0x20b2_10de,
            pci_subsystem: None,
            minor: 0,
            name: "a GPU".to_owned(),
            architecture: gpush_api::Architecture::Ampere,
        };
        let reading = Reading {
            identity,
            memory: gpush_api::Memory::default(),
            mig: None,
            compute_mode: None,
            processes: Vec::new(),
            processes_known: true,
            nvlink: None,
            rows: None,
            warnings: Vec::new(),
        };
        let plan = gpush_api::GpuPlan { uuid: uuid.to_owned(), name: "a GPU".to_owned(), ..Default::default() };
        (Part::new(0, plan, None, &reading), reading)
    }

    #[test]
    fn only_a_reading_begun_after_a_gpu_was_degraded_mends_it_whatever_the_wall_clock_says() {
        let scratch = tempfile::tempdir().unwrap();
        let store = Store::open(scratch.path(), Options::default()).unwrap().store;
        let conditions = Conditions::of_the_store(store, Vec::new(), BTreeMap::new());
        let (part, reading) = nothing_wanted("GPU-0");
        let before = Instant::now();
        let why = ApiError::new(gpush_api::Code::DriverError, "it failed");
        conditions.take_in(&Change::degrade(&part, "op-1", &why));
        // As if it was degraded tomorrow, by a clock that was set back since.
        for one in conditions.standing().values_mut() {
            one.since = Timestamp::now() + jiff::SignedDuration::from_hours(24);
        }
        let degraded = || conditions.about("GPU-0", ConditionKind::Degraded).len();
        conditions.consider(&reading, before);
        assert_eq!(degraded(), 1, "a reading from before says nothing");
        conditions.consider(&reading, Instant::now() + std::time::Duration::from_nanos(1));
        assert_eq!(degraded(), 0);
    }

    #[test]
    fn a_condition_stands_until_it_is_cleared_by_kind_or_cause() {
        let scratch = tempfile::tempdir().unwrap();
        let store = Store::open(scratch.path(), Options::default()).unwrap().store;
        let conditions = Conditions::of_the_store(store, Vec::new(), BTreeMap::new());
        for change in [cordon("GPU-0", "admin"), cordon("GPU-0", "xid-79"), cordon("GPU-1", "xid-79")] {
            conditions.take_in(&change);
        }
        let count = |uuid| conditions.about(uuid, ConditionKind::Cordon).len();
        assert_eq!((count("GPU-0"), count("GPU-1"), count("GPU-2")), (2, 1, 0));
        assert_eq!(conditions.about("GPU-0", ConditionKind::Cordon)[0].reason, "because of admin");
        assert!(conditions.about("GPU-0", ConditionKind::Degraded).is_empty());
        let gpu = || Scope::Gpu("GPU-0".to_owned());
        conditions.take_in(&Change::Clear(gpu(), ConditionKind::Cordon, Some("admin".to_owned())));
        assert_eq!(count("GPU-0"), 1);
        conditions.take_in(&Change::Clear(gpu(), ConditionKind::Cordon, None));
        assert_eq!((count("GPU-0"), count("GPU-1")), (0, 1));
    }
}
