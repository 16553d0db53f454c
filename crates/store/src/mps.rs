//! MPS targets: whether their daemons were stopped, and settings that override their rules. The module `shared_gpu`
//! records the compute mode that a GPU had before it was shared.

use gpush_api::{Actor, MpsSettings};
use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use crate::{
    error::StoreError,
    record::{self, Columns, Record},
    tx::{Tx, View},
};

/// The record that a user stopped an MPS daemon, with the deadline for its clients.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MpsStopped {
    /// The user who stopped the daemon.
    pub by: Actor,
    /// Time at which gpushd ends the remaining clients; `None` without a deadline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub end_at: Option<Timestamp>,
}

/// MPS settings that override the settings of a config rule.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct MpsSet {
    /// The new settings.
    pub settings: MpsSettings,
    /// The rule's settings when the override was set. If the rule changes, the override no longer applies.
    pub rule: MpsSettings,
}

/// The record of a target.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct MpsTarget {
    /// GPU or MIG device by UUID.
    pub target: String,
    /// Set if a user stopped the daemon, until a user starts it.
    pub stopped: Option<MpsStopped>,
    /// Settings that override the rule's.
    pub set: Option<MpsSet>,
    /// Id of the boot during which an operation started the MPS daemon of a whole GPU. If the field is set when the
    /// record is written, the store replaces its value with the current boot.
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
    /// Returns the records of targets, sorted by UUID.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn mps_targets(&self) -> Result<Vec<MpsTarget>, StoreError> {
        record::select(self.connection, "ORDER BY target", [], self.sealed)
    }
}

impl Tx<'_> {
    /// Clears [`MpsTarget::in_force`] if it names another boot. Deletes records that become empty.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn forget_mps_of_other_boots(&mut self) -> Result<(), StoreError> {
        for target in self.view().mps_targets()? {
            if target.in_force.as_deref().is_some_and(|boot_id| boot_id != self.boot_id) {
                self.set_mps_target(&MpsTarget { in_force: None, ..target })?;
            }
        }
        Ok(())
    }

    /// Changes the record of a target.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn change_mps_target(
        &mut self,
        target: &str,
        change: impl FnOnce(MpsTarget) -> MpsTarget,
    ) -> Result<(), StoreError> {
        let known = self.view().mps_targets()?.into_iter().find(|known| known.target == target);
        let known = known.unwrap_or_else(|| MpsTarget { target: target.to_owned(), ..MpsTarget::default() });
        self.set_mps_target(&change(known))
    }

    /// Replaces the record of a target. An empty record is deleted.
    ///
    /// # Errors
    /// The record cannot be written.
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
