//! Settings of whole GPUs that gpushd changes while the GPUs are shared, and restores afterwards. gpushd records these
//! settings before the driver call, so that it knows after a restart which settings it changed.
//!
//! The driver resets the compute mode and the time-slice level at a reboot, so these records end with the boot.

use gpush_api::{ComputeMode, GpuUuid, Mode, TimesliceLevel};
use serde::{Deserialize, Serialize};

use crate::{
    error::StoreError,
    record::{self, Columns, Record},
    tx::{Tx, View},
};

/// The settings that gpushd made on a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SharedGpu {
    /// UUID of the GPU.
    pub gpu_uuid: GpuUuid,
    /// The compute mode, if gpushd set it.
    pub compute_mode: Option<ComputeModeSet>,
    /// The time-slice level, if gpushd set it. When gpushd restores the level, it always restores the driver's default.
    pub level: Option<LevelSet>,
    /// Boot on which the settings were made.
    pub boot_id: String,
}

/// A compute mode that gpushd set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeModeSet {
    /// The mode before the GPU was shared.
    pub before: ComputeMode,
    /// The mode that was set.
    pub set: ComputeMode,
    /// The mode that gpushd had set before `set`. This field is kept until gpushd reads `set` back from the driver.
    /// Until then, the GPU may have either mode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<ComputeMode>,
    /// The GPU mode for which gpushd set the compute mode. Only the code of that GPU mode restores
    /// the previous compute mode.
    pub by: Mode,
}

impl ComputeModeSet {
    /// Returns whether gpushd set this compute mode.
    #[must_use]
    pub fn is_ours(&self, mode: ComputeMode) -> bool {
        self.set == mode || self.last == Some(mode)
    }
}

/// A time-slice level that gpushd set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub struct LevelSet {
    /// The level that was set.
    pub set: TimesliceLevel,
    /// The level that gpushd had set before. It is kept until gpushd reads the new level back from the driver. Until
    /// then, the GPU may have either level.
    pub last: Option<TimesliceLevel>,
}

impl LevelSet {
    /// Returns whether gpushd set this level.
    #[must_use]
    pub fn is_ours(&self, level: TimesliceLevel) -> bool {
        self.set == level || self.last == Some(level)
    }
}

/// The form in the database. A level that was read back is stored as a single word.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum Written {
    Done(TimesliceLevel),
    Changing { set: TimesliceLevel, last: TimesliceLevel },
}

impl From<Written> for LevelSet {
    fn from(written: Written) -> Self {
        match written {
            Written::Done(set) => Self { set, last: None },
            Written::Changing { set, last } => Self { set, last: Some(last) },
        }
    }
}

impl From<LevelSet> for Written {
    fn from(LevelSet { set, last }: LevelSet) -> Self {
        match last {
            None => Self::Done(set),
            Some(last) => Self::Changing { set, last },
        }
    }
}

impl Record for SharedGpu {
    const TABLE: &'static str = "shared_gpus";
    const COLUMNS: &'static [&'static str] = &["gpu", "compute_mode", "level", "boot_id"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_text(self.gpu_uuid.as_str());
        columns.put_json(&self.compute_mode)?;
        columns.put_json(&self.level)?;
        columns.put_text(&self.boot_id);
        Ok(())
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self {
            gpu_uuid: columns.text()?.into(),
            compute_mode: columns.json()?,
            level: columns.json()?,
            boot_id: columns.text()?,
        })
    }
}

impl View<'_> {
    /// Returns the settings that gpushd made on GPUs, sorted by UUID.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn shared_gpus(&self) -> Result<Vec<SharedGpu>, StoreError> {
        record::select(self.connection, "ORDER BY gpu", [], self.sealed)
    }
}

impl Tx<'_> {
    /// Records the settings made on a GPU on this boot. Replaces the previous record, or deletes it if there are no
    /// settings.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn set_shared_gpu(&mut self, shared: SharedGpu) -> Result<SharedGpu, StoreError> {
        self.next_sequence();
        let shared = SharedGpu { boot_id: self.boot_id.to_owned(), ..shared };
        if shared.compute_mode.is_none() && shared.level.is_none() {
            record::delete::<SharedGpu>(self.connection, "WHERE gpu = ?1", [shared.gpu_uuid.as_str()])?;
        } else {
            record::put(self.connection, &shared)?;
        }
        Ok(shared)
    }

    /// Deletes the records of other boots.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn forget_shared_gpus_of_other_boots(&mut self) -> Result<(), StoreError> {
        for shared in self.view().shared_gpus()? {
            if shared.boot_id != self.boot_id {
                self.set_shared_gpu(SharedGpu { gpu_uuid: shared.gpu_uuid, ..SharedGpu::default() })?;
            }
        }
        Ok(())
    }
}
