//! Persistent state of MPS: the shares of targets, and an administrator's changes of a target that override its
//! rule. The GPU's previous compute mode is recorded in `shared_gpu`.

use gpush_api::{Actor, MpsSettings};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    error::StoreError,
    record::{self, Columns, Record},
    tx::{Tx, View},
};

/// A process, identified by pid and start time, because pids are reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ProcessId {
    /// Pid.
    pub pid: u32,
    /// Its start, in clock ticks since the boot.
    pub start: u64,
}

/// A share to record.
#[derive(Debug, Clone, PartialEq)]
pub struct NewMpsShare {
    /// GPU or MIG device by UUID.
    pub target: String,
    /// The holder.
    pub by: Actor,
    /// The limits of its clients.
    pub settings: MpsSettings,
    /// The process whose end ends the share.
    pub process: Option<ProcessId>,
    /// When it expires.
    pub expires_at: Option<Timestamp>,
}

/// A recorded share.
#[derive(Debug, Clone, PartialEq)]
pub struct MpsShare {
    /// Its number, never used twice.
    pub id: u64,
    /// GPU or MIG device by UUID.
    pub target: String,
    /// The holder.
    pub by: Actor,
    /// The limits of its clients.
    pub settings: MpsSettings,
    /// When it was taken.
    pub created_at: Timestamp,
    /// The process whose end ends the share.
    pub process: Option<ProcessId>,
    /// When it expires, by the system clock.
    pub expires_at: Option<Timestamp>,
    /// Boot on which it was taken: clients do not outlive a boot.
    pub boot_id: String,
}

impl Record for MpsShare {
    const TABLE: &'static str = "mps_shares";
    const COLUMNS: &'static [&'static str] =
        &["id", "target", "actor", "settings", "created_at", "process", "expires_at", "boot_id"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_number(self.id)?;
        columns.put_text(&self.target);
        columns.put_json(&self.by)?;
        columns.put_json(&self.settings)?;
        columns.put_time(self.created_at);
        columns.put_json(&self.process)?;
        columns.put_time_or_null(self.expires_at);
        columns.put_text(&self.boot_id);
        Ok(())
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self {
            id: columns.number()?,
            target: columns.text()?,
            by: columns.json()?,
            settings: columns.json()?,
            created_at: columns.time()?,
            process: columns.json()?,
            expires_at: columns.time_or_null()?,
            boot_id: columns.text()?,
        })
    }
}

/// The stop of a daemon, with a deadline for its clients.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MpsStopped {
    /// The user who stopped it.
    pub by: Actor,
    /// When the remaining clients are ended; `None` without a deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_at: Option<Timestamp>,
}

/// Settings that override those of a rule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MpsSet {
    /// The new settings.
    pub settings: MpsSettings,
    /// The rule's settings at that time: if the rule changes, it is effective again.
    pub rule: MpsSettings,
}

/// The record of a target, except its shares.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MpsTarget {
    /// GPU or MIG device by UUID.
    pub target: String,
    /// Set while its daemon is stopped on request, until a user starts it.
    pub stopped: Option<MpsStopped>,
    /// Settings that override the rule's.
    pub set: Option<MpsSet>,
    /// Boot on which an operation started the daemon of a whole GPU. The store records the current boot.
    pub in_force: Option<String>,
}

impl Record for MpsTarget {
    const TABLE: &'static str = "mps_targets";
    const COLUMNS: &'static [&'static str] = &["target", "stopped", "settings", "in_force"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_text(&self.target);
        columns.put_json(&self.stopped)?;
        columns.put_json(&self.set)?;
        columns.put_json(&self.in_force)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self { target: columns.text()?, stopped: columns.json()?, set: columns.json()?, in_force: columns.json()? })
    }
}

impl View<'_> {
    /// Returns the shares in the order in which they were taken, including expired ones.
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn mps_shares(&self) -> Result<Vec<MpsShare>, StoreError> {
        record::select(self.connection, "ORDER BY id", [], self.sealed)
    }

    /// Returns the records of targets, by UUID.
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn mps_targets(&self) -> Result<Vec<MpsTarget>, StoreError> {
        record::select(self.connection, "ORDER BY target", [], self.sealed)
    }
}

impl Tx<'_> {
    /// Records a share.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn take_mps_share(&mut self, new: NewMpsShare) -> Result<MpsShare, StoreError> {
        let taken = MpsShare {
            id: self.next_sequence(),
            target: new.target,
            by: new.by,
            settings: new.settings,
            created_at: self.now,
            process: new.process,
            expires_at: new.expires_at,
            boot_id: self.boot_id.to_owned(),
        };
        record::put(self.connection, &taken)?;
        Ok(taken)
    }

    /// Ends a share and returns it. An ending: send it through [`crate::Store::write_ending`].
    ///
    /// # Errors
    /// When it can't be written.
    pub fn end_mps_share(&mut self, id: u64) -> Result<Option<MpsShare>, StoreError> {
        let key = i64::try_from(id).map_err(|_| StoreError::Internal(format!("{id} is too large")))?;
        let old = record::select::<MpsShare>(self.connection, "WHERE id = ?1", [key], true)?.pop();
        if old.is_some() {
            self.next_sequence();
            record::delete::<MpsShare>(self.connection, "WHERE id = ?1", [key])?;
        }
        Ok(old)
    }

    /// Ends the shares of other boots, and deletes which daemons were started on them.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn forget_mps_of_other_boots(&mut self) -> Result<(), StoreError> {
        for target in self.view().mps_targets()? {
            if target.in_force.as_deref().is_some_and(|boot_id| boot_id != self.boot_id) {
                self.set_mps_target(&MpsTarget { in_force: None, ..target })?;
            }
        }
        for share in self.view().mps_shares()? {
            if share.boot_id != self.boot_id {
                self.end_mps_share(share.id)?;
            }
        }
        Ok(())
    }

    /// Changes the record of a target.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn change_mps_target(
        &mut self,
        target: &str,
        change: impl FnOnce(MpsTarget) -> MpsTarget,
    ) -> Result<(), StoreError> {
        let known = self.view().mps_targets()?.into_iter().find(|known| known.target == target);
        let known = known.unwrap_or_else(|| MpsTarget { target: target.to_owned(), ..MpsTarget::default() });
        self.set_mps_target(&change(known))
    }

    /// Sets the record of a target, and deletes it if it is empty.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn set_mps_target(&mut self, target: &MpsTarget) -> Result<(), StoreError> {
        self.next_sequence();
        let in_force = target.in_force.as_ref().map(|_| self.boot_id.to_owned());
        let target = &MpsTarget { in_force, ..target.clone() };
        if *target == (MpsTarget { target: target.target.clone(), ..MpsTarget::default() }) {
            return record::delete::<MpsTarget>(self.connection, "WHERE target = ?1", [&target.target]).map(|_| ());
        }
        record::put(self.connection, target)
    }
}
