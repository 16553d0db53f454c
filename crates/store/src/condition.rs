//! Conditions of GPUs that survive restarts: cordoned, in maintenance, degraded, held. Each
//! condition has a cause, and conditions can be cleared by cause. So gpushd does not clear a
//! condition that an administrator set, and an administrator does not clear a condition that gpushd
//! set.

use gpush_api::{Actor, GpuUuid};
use jiff::Timestamp;

use crate::{
    error::StoreError,
    record::{self, Columns, Record},
    tx::{Tx, View},
};

/// The object of a condition.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// The host with all its GPUs.
    Host,
    /// One GPU, by UUID.
    Gpu(GpuUuid),
}

impl Scope {
    fn name(&self) -> &str {
        match self {
            Self::Host => "host",
            Self::Gpu(uuid) => uuid.as_str(),
        }
    }
}

/// The kind of a condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConditionKind {
    /// The GPU takes no new work.
    Cordon,
    /// gpushd does not use the GPU, and has no open driver handle for it.
    Maintenance,
    /// A change and its rollback failed.
    Degraded,
    /// The database was lost, together with the record of grants and operations on the GPU.
    Held,
}

impl ConditionKind {
    /// All kinds.
    pub const ALL: [Self; 4] = [Self::Cordon, Self::Maintenance, Self::Degraded, Self::Held];

    /// Returns the name of the kind in the database.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Cordon => "cordon",
            Self::Maintenance => "maintenance",
            Self::Degraded => "degraded",
            Self::Held => "held",
        }
    }
}

/// A condition to record.
#[derive(Debug, Clone, PartialEq)]
pub struct NewCondition {
    /// Object.
    pub scope: Scope,
    /// Kind.
    pub kind: ConditionKind,
    /// Cause for programs, such as `admin`, `xid-79`, `row-remap`, `op-12`.
    pub cause: String,
    /// Reason for users.
    pub reason: String,
    /// The user who set the condition, if any.
    pub by: Option<Actor>,
}

/// An active condition.
#[derive(Debug, Clone, PartialEq)]
pub struct Condition {
    /// Object.
    pub scope: Scope,
    /// Kind.
    pub kind: ConditionKind,
    /// Cause for programs.
    pub cause: String,
    /// Reason for users.
    pub reason: String,
    /// The user who set the condition, if any.
    pub by: Option<Actor>,
    /// Time at which the condition was set.
    pub since: Timestamp,
    /// Boot on which the condition was set.
    pub boot_id: String,
    /// Sequence number of the condition.
    pub sequence: u64,
}

impl Record for Condition {
    const TABLE: &'static str = "conditions";
    const COLUMNS: &'static [&'static str] =
        &["scope", "kind", "cause", "reason", "actor", "since", "boot_id", "sequence"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_text(self.scope.name());
        columns.put_text(self.kind.name());
        columns.put_text(&self.cause);
        columns.put_text(&self.reason);
        columns.put_json(&self.by)?;
        columns.put_time(self.since);
        columns.put_text(&self.boot_id);
        columns.put_number(self.sequence)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        let scope = columns.text()?;
        let kind = columns.text()?;
        Ok(Self {
            scope: if scope == Scope::Host.name() { Scope::Host } else { Scope::Gpu(scope.into()) },
            kind: ConditionKind::ALL
                .into_iter()
                .find(|known| known.name() == kind)
                .ok_or_else(|| columns.corrupt(&format!("there is no condition {kind:?}")))?,
            cause: columns.text()?,
            reason: columns.text()?,
            by: columns.json()?,
            since: columns.time()?,
            boot_id: columns.text()?,
            sequence: columns.number()?,
        })
    }
}

impl View<'_> {
    /// Returns the conditions in the order in which they were set.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn conditions(&self) -> Result<Vec<Condition>, StoreError> {
        record::select(self.connection, "ORDER BY sequence", [], self.sealed)
    }
}

impl Tx<'_> {
    /// Sets a condition. Replaces a condition with the same object, kind and cause.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn set_condition(&mut self, new: NewCondition) -> Result<Condition, StoreError> {
        let set = Condition {
            scope: new.scope,
            kind: new.kind,
            cause: new.cause,
            reason: new.reason,
            by: new.by,
            since: self.now,
            boot_id: self.boot_id.to_owned(),
            sequence: self.next_sequence(),
        };
        record::put(self.connection, &set)?;
        Ok(set)
    }

    /// Clears and returns an object's conditions of one kind: all of them, or only those with one cause.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn clear_conditions(
        &mut self,
        scope: &Scope,
        kind: ConditionKind,
        cause: Option<&str>,
    ) -> Result<Vec<Condition>, StoreError> {
        let mut cleared = self.view().conditions()?;
        cleared.retain(|one| one.scope == *scope && one.kind == kind && cause.is_none_or(|cause| one.cause == cause));
        for one in &cleared {
            self.next_sequence();
            let key = [scope.name(), kind.name(), &one.cause];
            record::delete::<Condition>(self.connection, "WHERE scope = ?1 AND kind = ?2 AND cause = ?3", key)?;
        }
        Ok(cleared)
    }

    /// Clears `Degraded` and `Held` conditions that were set on earlier boots. The reboot removed the MIG instances and
    /// grants that caused them. Cordons and maintenance stay.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn forget_conditions_of_other_boots(&mut self, boot_id: &str) -> Result<(), StoreError> {
        for one in self.view().conditions()? {
            let mended = match one.kind {
                ConditionKind::Degraded | ConditionKind::Held => one.boot_id != boot_id,
                ConditionKind::Cordon | ConditionKind::Maintenance => false,
            };
            if mended {
                self.clear_conditions(&one.scope, one.kind, Some(&one.cause))?;
            }
        }
        Ok(())
    }
}
