//! Records of MPS targets: whether their daemons were stopped, and settings that override their rules. The module `shared_gpu`
//! records the compute mode that a GPU had before it was shared.

use gpush_api::TargetUuid;
use gpush_core::mps::MpsTargetRecord;

use crate::{
    error::StoreError,
    record::{self, Columns, Record},
    tx::{Tx, View},
};

impl Record for MpsTargetRecord {
    const TABLE: &'static str = "mps_targets";
    const COLUMNS: &'static [&'static str] = &["target", "stopped", "settings", "in_force"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_text(self.target.as_str());
        columns.put_json(&self.stopped)?;
        columns.put_json(&self.set)?;
        columns.put_json(&self.in_force)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self {
            target: columns.text()?.into(),
            stopped: columns.json()?,
            set: columns.json()?,
            in_force: columns.json()?,
        })
    }
}

impl View<'_> {
    /// Returns the records of targets, sorted by UUID.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn mps_targets(&self) -> Result<Vec<MpsTargetRecord>, StoreError> {
        record::select(self.connection, "ORDER BY target", [], self.sealed)
    }
}

impl Tx<'_> {
    /// Clears [`MpsTargetRecord::in_force`] if it names another boot. Deletes records that become empty.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn forget_mps_of_other_boots(&mut self) -> Result<(), StoreError> {
        for target in self.view().mps_targets()? {
            if target.in_force.as_deref().is_some_and(|boot_id| boot_id != self.boot_id) {
                self.set_mps_target(&MpsTargetRecord { in_force: None, ..target })?;
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
        target: &TargetUuid,
        change: impl FnOnce(MpsTargetRecord) -> MpsTargetRecord,
    ) -> Result<(), StoreError> {
        let known = self.view().mps_targets()?.into_iter().find(|known| known.target == *target);
        let known = known.unwrap_or_else(|| MpsTargetRecord { target: target.clone(), ..MpsTargetRecord::default() });
        self.set_mps_target(&change(known))
    }

    /// Replaces the record of a target. An empty record is deleted.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn set_mps_target(&mut self, target: &MpsTargetRecord) -> Result<(), StoreError> {
        self.next_sequence();
        let in_force = target.in_force.as_ref().map(|_| self.boot_id.to_owned());
        let target = &MpsTargetRecord { in_force, ..target.clone() };
        if *target == (MpsTargetRecord { target: target.target.clone(), ..MpsTargetRecord::default() }) {
            return record::delete::<MpsTargetRecord>(self.connection, "WHERE target = ?1", [target.target.as_str()])
                .map(|_| ());
        }
        record::put(self.connection, target)
    }
}
