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

use gpush_api::{Actor, ApiError};
use gpush_nvml::Reading;
use gpush_store::{Condition, ConditionKind, NewCondition, Scope, Store, StoreError, Tx};
use jiff::Timestamp;

use crate::apply::Part;

/// All conditions in force.
#[derive(Debug)]
pub(crate) struct Conditions {
    store: Store,
    standing: Mutex<BTreeMap<Key, Standing>>,
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
        let sentences: Vec<&str> = std::iter::once(&error.message).chain(&error.causes).map(String::as_str).collect();
        let new = NewCondition {
            scope: Scope::Gpu(part.plan.uuid.clone()),
            kind: ConditionKind::Degraded,
            cause: operation.to_owned(),
            reason: sentences.join("; "),
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
    pub(crate) fn of_the_store(store: Store, recorded: Vec<(Condition, Option<Part>)>) -> Self {
        let standing = recorded.into_iter().map(|(one, open)| {
            let standing =
                Standing { cause: one.cause.clone(), reason: one.reason, by: one.by, since: one.since, open };
            ((one.scope, one.kind, one.cause), standing)
        });
        Self { store, standing: Mutex::new(standing.collect()) }
    }

    fn standing(&self) -> MutexGuard<'_, BTreeMap<Key, Standing>> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
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
            open,
        };
        self.standing().insert((new.scope.clone(), new.kind, new.cause.clone()), one);
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

    /// Takes in a reading that was begun at `at`, while no call could change the GPU any more.
    pub(crate) fn consider(&self, reading: &Reading, at: Timestamp) {
        let uuid = &reading.identity.uuid;
        for one in self.about(uuid, ConditionKind::Degraded) {
            let open = one.open.as_ref().filter(|_| at > one.since);
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

    #[test]
    fn a_condition_stands_until_it_is_cleared_by_kind_or_cause() {
        let scratch = tempfile::tempdir().unwrap();
        let store = Store::open(scratch.path(), Options::default()).unwrap().store;
        let conditions = Conditions::of_the_store(store, Vec::new());
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
