//! What stands against working with a GPU, or with all of them: somebody cordoned it, a change and
//! its rollback failed, what was promised about it was lost.
//!
//! Memory is what the agent works by; the store is what the next one starts with. A condition that
//! comes with the end of an operation is recorded in the transaction of that end.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use gpush_api::{Actor, ApiError};
use gpush_store::{Condition, ConditionKind, NewCondition, Scope, StoreError, Tx};
use jiff::Timestamp;

/// All conditions in force.
#[derive(Debug, Default)]
pub(crate) struct Conditions(Mutex<BTreeMap<Key, Standing>>);

type Key = (Scope, ConditionKind, String);

/// A condition in force.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Standing {
    /// What brought it about, for programs.
    pub(crate) cause: String,
    /// Why, for people.
    pub(crate) reason: String,
    /// Who, if somebody did.
    pub(crate) by: Option<Actor>,
    /// Since when.
    pub(crate) since: Timestamp,
}

/// A change of the conditions.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    /// This one is in force from now on.
    Set(NewCondition),
    /// Those of this scope and kind are no more; with a cause, only that one.
    Clear(Scope, ConditionKind, Option<String>),
}

impl Change {
    /// A change failed on the GPU, and its rollback too.
    pub(crate) fn degrade(uuid: &str, operation: &str, error: &ApiError) -> Self {
        let sentences: Vec<&str> = std::iter::once(&error.message).chain(&error.causes).map(String::as_str).collect();
        Self::Set(NewCondition {
            scope: Scope::Gpu(uuid.to_owned()),
            kind: ConditionKind::Degraded,
            cause: operation.to_owned(),
            reason: sentences.join("; "),
            by: None,
        })
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
            Self::Set(new) => tx.set_condition(new.clone()).map(|_| ()),
            Self::Clear(scope, kind, cause) => tx.clear_conditions(scope, *kind, cause.as_deref()).map(|_| ()),
        }
    }
}

impl Conditions {
    /// Those on record.
    pub(crate) fn of_the_store(recorded: Vec<Condition>) -> Self {
        let standing = recorded.into_iter().map(|one| {
            let standing = Standing { cause: one.cause.clone(), reason: one.reason, by: one.by, since: one.since };
            ((one.scope, one.kind, one.cause), standing)
        });
        Self(Mutex::new(standing.collect()))
    }

    fn standing(&self) -> MutexGuard<'_, BTreeMap<Key, Standing>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a change in. Whoever calls it sees to the record.
    pub(crate) fn take_in(&self, change: &Change) {
        let mut standing = self.standing();
        match change {
            Change::Set(new) => {
                let one = Standing {
                    cause: new.cause.clone(),
                    reason: new.reason.clone(),
                    by: new.by.clone(),
                    since: Timestamp::now(),
                };
                standing.insert((new.scope.clone(), new.kind, new.cause.clone()), one);
            }
            Change::Clear(scope, kind, cause) => standing.retain(|(other, of, by), _| {
                other != scope || of != kind || cause.as_ref().is_some_and(|cause| cause != by)
            }),
        }
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
}

#[cfg(test)]
mod tests {
    use gpush_api::Code;

    use super::*;

    #[test]
    fn a_condition_stands_until_it_is_cleared_by_kind_or_cause() {
        let conditions = Conditions::default();
        let error = ApiError::new(Code::DriverError, "GPU 0: it failed").cause("no reason");
        conditions.take_in(&Change::degrade("GPU-0", "op-1", &error));
        conditions.take_in(&Change::degrade("GPU-0", "op-2", &error));
        conditions.take_in(&Change::degrade("GPU-1", "op-2", &error));
        let reasons = |uuid| conditions.about(uuid, ConditionKind::Degraded).len();
        assert_eq!((reasons("GPU-0"), reasons("GPU-1"), reasons("GPU-2")), (2, 1, 0));
        assert_eq!(conditions.about("GPU-0", ConditionKind::Degraded)[0].reason, "GPU 0: it failed; no reason");
        assert!(conditions.about("GPU-0", ConditionKind::Cordon).is_empty());
        let one = Change::Clear(Scope::Gpu("GPU-0".to_owned()), ConditionKind::Degraded, Some("op-1".to_owned()));
        conditions.take_in(&one);
        assert_eq!(reasons("GPU-0"), 1);
        conditions.take_in(&Change::mend("GPU-0"));
        assert_eq!((reasons("GPU-0"), reasons("GPU-1")), (0, 1));
    }
}
