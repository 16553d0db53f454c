//! Single facts about the store and the host: schema, last boot, what was lost.

use std::path::PathBuf;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

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

/// That a database was lost. While this stands, nobody knows what was promised about the GPUs: the
/// managed ones are `held`.
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
}

pub(crate) const LOST: &str = "lost";
const BOOT: &str = "boot_id";

impl View<'_> {
    pub(crate) fn fact(&self, name: &str) -> Result<Option<String>, StoreError> {
        let facts = record::select::<Fact>(self.connection, "WHERE name = ?1", [name], self.sealed)?;
        Ok(facts.into_iter().next().map(|fact| fact.value))
    }

    /// Boot id that was last recorded with [`Tx::record_boot`].
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn last_boot(&self) -> Result<Option<String>, StoreError> {
        self.fact(BOOT)
    }

    /// What was lost and is not accepted yet.
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn lost(&self) -> Result<Option<Lost>, StoreError> {
        let Some(text) = self.fact(LOST)? else { return Ok(None) };
        let corrupt =
            |error: serde_json::Error| StoreError::Corrupt { table: LOST.to_owned(), what: error.to_string() };
        serde_json::from_str(&text).map(Some).map_err(corrupt)
    }
}

impl Tx<'_> {
    /// Records the boot in which we run, once what has to be done at a new boot is done or
    /// journalled.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn record_boot(&mut self, boot_id: &str) -> Result<(), StoreError> {
        self.next_sequence();
        record::put(self.connection, &Fact { name: BOOT.to_owned(), value: boot_id.to_owned() })
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
