//! What gpushd sets on whole GPUs for as long as they are shared, and what goes back when that is over:
//! on record before the driver is asked for it, so that whoever comes after knows what was ours.
//!
//! The driver forgets compute mode and time-slice level with a reboot, and so do these records: what is
//! found then is what there was before.

use gpush_api::{ComputeMode, Mode, TimesliceLevel};
use serde::{Deserialize, Serialize};

use crate::{
    error::StoreError,
    record::{self, Columns, Record},
    tx::{Tx, View},
};

/// What was set on a GPU.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SharedGpu {
    /// GPU by UUID.
    pub gpu: String,
    /// Its compute mode.
    pub compute_mode: Option<ComputeModeSet>,
    /// Its time-slice level; the one to go back to is always the driver's own.
    pub level: Option<LevelSet>,
    /// Boot in which that was.
    pub boot_id: String,
}

/// A compute mode that was set in place of another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeModeSet {
    /// What was there.
    pub before: ComputeMode,
    /// What was set.
    pub set: ComputeMode,
    /// What was set before that, until the change was read back: the GPU may have either.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last: Option<ComputeMode>,
    /// For the sake of which mode of the GPU's rule: that one puts it back.
    pub by: Mode,
}

impl ComputeModeSet {
    /// Whether a compute mode is of our making.
    #[must_use]
    pub fn is_ours(&self, mode: ComputeMode) -> bool {
        self.set == mode || self.last == Some(mode)
    }
}

/// A time-slice level that was set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Written", into = "Written")]
pub struct LevelSet {
    /// What was set.
    pub set: TimesliceLevel,
    /// What was set before that, until the change was read back: the GPU may have either.
    pub last: Option<TimesliceLevel>,
}

impl LevelSet {
    /// Whether a level is of our making.
    #[must_use]
    pub fn is_ours(&self, level: TimesliceLevel) -> bool {
        self.set == level || self.last == Some(level)
    }
}

/// As it stands in the database: a level that was read back is a word.
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
        columns.put_text(&self.gpu);
        columns.put_json(&self.compute_mode)?;
        columns.put_json(&self.level)?;
        columns.put_text(&self.boot_id);
        Ok(())
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self {
            gpu: columns.text()?,
            compute_mode: columns.json()?,
            level: columns.json()?,
            boot_id: columns.text()?,
        })
    }
}

impl View<'_> {
    /// What was set on GPUs, by UUID.
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn shared_gpus(&self) -> Result<Vec<SharedGpu>, StoreError> {
        record::select(self.connection, "ORDER BY gpu", [], self.sealed)
    }
}

impl Tx<'_> {
    /// Records what is set on a GPU on this boot, in place of what was; nothing of it any more, when it
    /// says nothing.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn set_shared_gpu(&mut self, shared: SharedGpu) -> Result<SharedGpu, StoreError> {
        self.next_sequence();
        let shared = SharedGpu { boot_id: self.boot_id.to_owned(), ..shared };
        if shared.compute_mode.is_none() && shared.level.is_none() {
            record::delete::<SharedGpu>(self.connection, "WHERE gpu = ?1", [&shared.gpu])?;
        } else {
            record::put(self.connection, &shared)?;
        }
        Ok(shared)
    }

    /// Forgets what was set on any boot but this one.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn forget_shared_gpus_of_other_boots(&mut self) -> Result<(), StoreError> {
        for shared in self.view().shared_gpus()? {
            if shared.boot_id != self.boot_id {
                self.set_shared_gpu(SharedGpu { gpu: shared.gpu, ..SharedGpu::default() })?;
            }
        }
        Ok(())
    }
}
