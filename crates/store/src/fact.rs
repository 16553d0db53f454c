//! Single values about the store and the host: schema, last boot, losses.

use gpush_api::GpuUuid;
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    error::StoreError,
    record::{self, Columns, Record},
    tx::{Tx, View},
};

#[derive(Debug)]
pub(crate) struct Fact {
    pub(crate) name: String,
    pub(crate) value: String,
}

impl Record for Fact {
    const TABLE: &'static str = "facts";
    const COLUMNS: &'static [&'static str] = &["name", "value"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_text(&self.name);
        columns.put_text(&self.value);
        Ok(())
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self { name: columns.text()?, value: columns.text()? })
    }
}

/// A loss of recorded state that no administrator has accepted yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    /// Time of detection.
    pub at: Timestamp,
    /// Boot on which the loss was detected. Grants and operations do not outlive a boot.
    pub boot_id: String,
    /// The cause.
    pub cause: String,
    /// Path of the damaged database that was set aside, if there was one.
    pub kept: Option<PathBuf>,
    /// Whether grants and operations of this boot may be lost. If so, the managed GPUs are `held`. A loss that is
    /// detected on a new boot affects only overrides, cordons and the audit trail.
    #[serde(default = "held_by_default")]
    pub holds: bool,
}

/// Returns the default for a loss that an older gpushd recorded: true, because older versions recorded only losses for
/// which GPUs are held.
fn held_by_default() -> bool {
    true
}

/// The time from which the record of grants is complete. The store sets this time when an administrator accepts a loss
/// on the same boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownSince {
    /// The kernel's id of the boot.
    pub boot_id: String,
    /// Clock ticks since boot, comparable with the start times of processes.
    pub ticks: u64,
}

/// Progress of applying the desired layouts after a boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootRecord {
    /// The kernel's id of the boot.
    pub boot_id: String,
    /// UUIDs of the GPUs that need no further change on this boot: the GPU has its layout, gpushd no longer tries to
    /// apply the layout, or no rule claims the GPU.
    pub settled: BTreeSet<GpuUuid>,
    /// UUIDs of the settled GPUs that were still in use. gpushd continues to try to apply their layouts.
    #[serde(default)]
    pub waiting: BTreeSet<GpuUuid>,
    /// Whether every GPU is settled.
    pub complete: bool,
}

impl BootRecord {
    /// Creates the record of a boot on which no layout was applied yet.
    #[must_use]
    pub fn new(boot_id: String) -> Self {
        Self { boot_id, settled: BTreeSet::new(), waiting: BTreeSet::new(), complete: false }
    }
}

pub(crate) const LOST: &str = "lost";
/// Id of the database.
pub(crate) const STORE: &str = "store_id";
/// Id of the machine on which the database was last open.
pub(crate) const MACHINE: &str = "machine_id";
/// Number of the last lease.
pub(crate) const LAST_LEASE: &str = "last_lease";
/// Sequence number of the last checkpoint of the use.
pub(crate) const USAGE_SEQUENCE: &str = "usage_sequence";
/// Which hours are folded into days.
pub(crate) const USAGE_FOLDED: &str = "usage_folded";
/// Which hours are in closed bills.
pub(crate) const BILL_CLOSED: &str = "bill_closed";
const BOOT: &str = "boot";
const OBSERVATIONS: &str = "noticed";
const KNOWN_SINCE: &str = "known_since";

fn corrupt(fact: &str, error: &serde_json::Error) -> StoreError {
    StoreError::Corrupt { table: fact.to_owned(), what: error.to_string() }
}

impl View<'_> {
    pub(crate) fn fact(&self, name: &str) -> Result<Option<String>, StoreError> {
        let facts = record::select::<Fact>(self.connection, "WHERE name = ?1", [name], self.sealed)?;
        Ok(facts.into_iter().next().map(|fact| fact.value))
    }

    /// Returns the boot that was last recorded with [`Tx::record_boot`].
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn last_boot(&self) -> Result<Option<BootRecord>, StoreError> {
        let Some(text) = self.fact(BOOT)? else { return Ok(None) };
        serde_json::from_str(&text).map(Some).map_err(|error| corrupt(BOOT, &error))
    }

    /// Returns the last recorded observation of each GPU, by UUID: see [`Tx::record_observation`].
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn observations(&self) -> Result<BTreeMap<GpuUuid, Value>, StoreError> {
        let Some(text) = self.fact(OBSERVATIONS)? else { return Ok(BTreeMap::new()) };
        serde_json::from_str(&text).map_err(|error| corrupt(OBSERVATIONS, &error))
    }

    /// Returns the time from which the record of grants is complete. Returns `None` if no record of
    /// a grant was ever lost.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn known_since(&self) -> Result<Option<KnownSince>, StoreError> {
        let Some(text) = self.fact(KNOWN_SINCE)? else { return Ok(None) };
        serde_json::from_str(&text).map(Some).map_err(|error| corrupt(KNOWN_SINCE, &error))
    }

    /// Returns the loss that is not accepted yet, if there is one.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn lost(&self) -> Result<Option<Lost>, StoreError> {
        let Some(text) = self.fact(LOST)? else { return Ok(None) };
        serde_json::from_str(&text).map(Some).map_err(|error| corrupt(LOST, &error))
    }
}

impl Tx<'_> {
    /// Records the layout progress of a boot. Replaces the record of any previous boot.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn record_boot(&mut self, boot: &BootRecord) -> Result<(), StoreError> {
        self.next_sequence();
        let value = serde_json::to_string(boot).map_err(|error| StoreError::Internal(error.to_string()))?;
        record::put(self.connection, &Fact { name: BOOT.to_owned(), value })
    }

    /// Records an observation about a GPU. Replaces the previous observation. gpushd uses this record to react to a
    /// lasting fault only once, and not again after each restart.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn record_observation(&mut self, uuid: &GpuUuid, what: Value) -> Result<(), StoreError> {
        let mut noticed = self.view().observations()?;
        noticed.insert(uuid.clone(), what);
        self.next_sequence();
        let value = serde_json::to_string(&noticed).map_err(|error| StoreError::Internal(error.to_string()))?;
        record::put(self.connection, &Fact { name: OBSERVATIONS.to_owned(), value })
    }

    /// Sets the time from which the record of grants is complete.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn record_known_since(&mut self, since: &KnownSince) -> Result<(), StoreError> {
        self.next_sequence();
        let value = serde_json::to_string(since).map_err(|error| StoreError::Internal(error.to_string()))?;
        record::put(self.connection, &Fact { name: KNOWN_SINCE.to_owned(), value })
    }

    /// Accepts a loss and returns it; `None` if nothing was lost.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn accept_loss(&mut self) -> Result<Option<Lost>, StoreError> {
        let lost = self.view().lost()?;
        if lost.is_some() {
            self.next_sequence();
            record::delete::<Fact>(self.connection, "WHERE name = ?1", [LOST])?;
        }
        Ok(lost)
    }
}
