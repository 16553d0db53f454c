//! Conditions of GPUs that outlive the agent: cordoned, in maintenance, degraded, held; each with
//! its cause, so that what an administrator set is not cleared by an automatism, nor the reverse.

use gpush_api::Actor;
use jiff::Timestamp;

use crate::{
    error::StoreError,
    record::{self, Columns, Record},
    tx::{Tx, View},
};

/// What a condition is about.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// The host with all its GPUs.
    Host,
    /// One GPU, by UUID.
    Gpu(String),
}

impl Scope {
    fn name(&self) -> &str {
        match self {
            Self::Host => "host",
            Self::Gpu(uuid) => uuid,
        }
    }
}

/// Kind of condition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ConditionKind {
    /// No new work.
    Cordon,
    /// Nothing of ours touches it, no handle is kept.
    Maintenance,
    /// A change failed and its rollback too.
    Degraded,
    /// What was promised about it was lost.
    Held,
}

impl ConditionKind {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Cordon, Self::Maintenance, Self::Degraded, Self::Held];

    /// Name in the table.
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

/// A condition that shall be recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct NewCondition {
    /// About what.
    pub scope: Scope,
    /// Kind.
    pub kind: ConditionKind,
    /// What brought it about, for programs: `admin`, `xid-79`, `row-remap`, `op-12`.
    pub cause: String,
    /// Why, for people.
    pub reason: String,
    /// Who, if somebody did.
    pub by: Option<Actor>,
}

/// A condition in force.
#[derive(Debug, Clone, PartialEq)]
pub struct Condition {
    /// About what.
    pub scope: Scope,
    /// Kind.
    pub kind: ConditionKind,
    /// What brought it about.
    pub cause: String,
    /// Why.
    pub reason: String,
    /// Who, if somebody did.
    pub by: Option<Actor>,
    /// Since when.
    pub since: Timestamp,
    /// Boot in which it was set.
    pub boot_id: String,
    /// Sequence number of its setting.
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
            scope: if scope == Scope::Host.name() { Scope::Host } else { Scope::Gpu(scope) },
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
    /// Conditions in the order in which they were set.
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn conditions(&self) -> Result<Vec<Condition>, StoreError> {
        record::select(self.connection, "ORDER BY sequence", [], self.sealed)
    }
}

impl Tx<'_> {
    /// Sets a condition, in place of the one of the same scope, kind and cause.
    ///
    /// # Errors
    /// When it can't be written.
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

    /// Clears the conditions of a scope and kind, all or those of one cause; what they were.
    ///
    /// # Errors
    /// When it can't be written.
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

    /// Clears what a reboot mends: degraded GPUs, and those held for a loss, of any boot but this
    /// one. Instances and the promises about them don't outlive a boot. What an administrator set
    /// stays.
    ///
    /// # Errors
    /// When it can't be written.
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
