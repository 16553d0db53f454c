//! Single facts about the store and the host: schema, last boot, what was lost.

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

/// A name and its value.
#[derive(Debug)]
pub(crate) struct Fact {
    /// Name.
    pub(crate) name: String,
    /// Value.
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

/// How far the store has come; the one row of its table, written with every commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Head {
    /// Last sequence number given to a change.
    pub(crate) sequence: u64,
    /// Last operation number.
    pub(crate) operation: u64,
    /// Generation of what is wanted beside the config.
    pub(crate) generation: u64,
    /// Clock at the last commit.
    pub(crate) at: Timestamp,
}

impl Record for Head {
    const TABLE: &'static str = "head";
    const COLUMNS: &'static [&'static str] = &["id", "sequence", "operation", "generation", "at"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_number(1)?;
        columns.put_number(self.sequence)?;
        columns.put_number(self.operation)?;
        columns.put_number(self.generation)?;
        columns.put_time(self.at);
        Ok(())
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        if columns.number()? != 1 {
            return Err(columns.corrupt("there is more than one head"));
        }
        Ok(Self {
            sequence: columns.number()?,
            operation: columns.number()?,
            generation: columns.number()?,
            at: columns.time()?,
        })
    }
}

/// A loss of recorded state that is not accepted yet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lost {
    /// When it was noticed.
    pub at: Timestamp,
    /// Boot in which it was noticed: promises about GPUs don't outlive a boot.
    pub boot_id: String,
    /// What was wrong.
    pub cause: String,
    /// Where the damaged database is kept, if there was one.
    pub kept: Option<PathBuf>,
    /// Whether promises of the boot may be among it: then the managed GPUs are `held`. A loss that is found
    /// on a new boot concerns overrides, cordons and the audit trail only.
    #[serde(default = "held_by_default")]
    pub holds: bool,
}

/// Older databases recorded only losses that hold GPUs.
fn held_by_default() -> bool {
    true
}

/// Since when it is known who was given what, where a loss was accepted in this boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KnownSince {
    /// The kernel's id of the boot.
    pub boot_id: String,
    /// Clock ticks since that boot, as the starts of processes are counted.
    pub ticks: u64,
}

/// What was done of the layouts that a boot wants.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BootRecord {
    /// The kernel's id of the boot.
    pub boot_id: String,
    /// GPUs, by UUID, on which no layout of this boot is due any more: they have it, it was
    /// refused for good, or no rule claims them.
    pub settled: BTreeSet<String>,
    /// Whether none is due on any GPU.
    pub complete: bool,
}

impl BootRecord {
    /// Of a boot on which nothing was done yet.
    #[must_use]
    pub fn new(boot_id: String) -> Self {
        Self { boot_id, settled: BTreeSet::new(), complete: false }
    }
}

pub(crate) const LOST: &str = "lost";
/// Id of the database.
pub(crate) const STORE: &str = "store_id";
/// Id of the machine on which the database was last open.
pub(crate) const MACHINE: &str = "machine_id";
/// Number of the last lease.
pub(crate) const LAST_LEASE: &str = "last_lease";
const BOOT: &str = "boot";
const NOTICED: &str = "noticed";
const KNOWN_SINCE: &str = "known_since";

fn corrupt(fact: &str, error: &serde_json::Error) -> StoreError {
    StoreError::Corrupt { table: fact.to_owned(), what: error.to_string() }
}

impl View<'_> {
    pub(crate) fn fact(&self, name: &str) -> Result<Option<String>, StoreError> {
        let facts = record::select::<Fact>(self.connection, "WHERE name = ?1", [name], self.sealed)?;
        Ok(facts.into_iter().next().map(|fact| fact.value))
    }

    /// The boot that was last recorded with [`Tx::record_boot`].
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn last_boot(&self) -> Result<Option<BootRecord>, StoreError> {
        let Some(text) = self.fact(BOOT)? else { return Ok(None) };
        serde_json::from_str(&text).map(Some).map_err(|error| corrupt(BOOT, &error))
    }

    /// What was last noticed about each GPU, by UUID: see [`Tx::notice`].
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn noticed(&self) -> Result<BTreeMap<String, Value>, StoreError> {
        let Some(text) = self.fact(NOTICED)? else { return Ok(BTreeMap::new()) };
        serde_json::from_str(&text).map_err(|error| corrupt(NOTICED, &error))
    }

    /// Since when it is known who was given what; `None` when nothing was ever lost.
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn known_since(&self) -> Result<Option<KnownSince>, StoreError> {
        let Some(text) = self.fact(KNOWN_SINCE)? else { return Ok(None) };
        serde_json::from_str(&text).map(Some).map_err(|error| corrupt(KNOWN_SINCE, &error))
    }

    /// What was lost and is not accepted yet.
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn lost(&self) -> Result<Option<Lost>, StoreError> {
        let Some(text) = self.fact(LOST)? else { return Ok(None) };
        serde_json::from_str(&text).map(Some).map_err(|error| corrupt(LOST, &error))
    }
}

impl Tx<'_> {
    /// Records how far the layouts of a boot are, in place of what was recorded of any boot.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn record_boot(&mut self, boot: &BootRecord) -> Result<(), StoreError> {
        self.next_sequence();
        let value = serde_json::to_string(boot).map_err(|error| StoreError::Internal(error.to_string()))?;
        record::put(self.connection, &Fact { name: BOOT.to_owned(), value })
    }

    /// Records what was noticed about a GPU, in place of what was before: a fault that lasts is
    /// acted on once, and not again by each agent that finds it still there.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn notice(&mut self, uuid: &str, what: Value) -> Result<(), StoreError> {
        let mut noticed = self.view().noticed()?;
        noticed.insert(uuid.to_owned(), what);
        self.next_sequence();
        let value = serde_json::to_string(&noticed).map_err(|error| StoreError::Internal(error.to_string()))?;
        record::put(self.connection, &Fact { name: NOTICED.to_owned(), value })
    }

    /// Records since when it is known who was given what.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn record_known_since(&mut self, since: &KnownSince) -> Result<(), StoreError> {
        self.next_sequence();
        let value = serde_json::to_string(since).map_err(|error| StoreError::Internal(error.to_string()))?;
        record::put(self.connection, &Fact { name: KNOWN_SINCE.to_owned(), value })
    }

    /// Goes on after a loss; what it was. `None` when nothing was lost.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn accept_loss(&mut self) -> Result<Option<Lost>, StoreError> {
        let lost = self.view().lost()?;
        if lost.is_some() {
            self.next_sequence();
            record::delete::<Fact>(self.connection, "WHERE name = ?1", [LOST])?;
        }
        Ok(lost)
    }
}
