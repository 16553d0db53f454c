//! Overrides: what was asked for through the API and stands above the config until it is cleared
//! or expires.

use gpush_api::Actor;
use jiff::Timestamp;

use crate::{
    error::StoreError,
    record::{self, Columns, Record},
    tx::{Tx, View},
};

/// An override that shall be recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct NewOverride {
    /// GPU by UUID.
    pub gpu: String,
    /// Config rule that claimed the GPU when it was made, if one did.
    pub rule: Option<String>,
    /// Layout in canonical text.
    pub layout: Vec<String>,
    /// Who made it.
    pub author: Actor,
    /// Why, in the author's words.
    pub reason: String,
    /// When it ends by itself.
    pub expires_at: Option<Timestamp>,
}

/// An override in force. One a GPU.
#[derive(Debug, Clone, PartialEq)]
pub struct Override {
    /// GPU by UUID.
    pub gpu: String,
    /// Config rule that claimed the GPU when it was made.
    pub rule: Option<String>,
    /// Layout in canonical text.
    pub layout: Vec<String>,
    /// Who made it.
    pub author: Actor,
    /// Why.
    pub reason: String,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it ends by itself, by the wall clock.
    pub expires_at: Option<Timestamp>,
    /// Generation that it made.
    pub generation: u64,
    /// Sequence number of its making.
    pub sequence: u64,
}

impl Record for Override {
    const TABLE: &'static str = "overrides";
    const COLUMNS: &'static [&'static str] =
        &["gpu", "rule", "layout", "author", "reason", "created_at", "expires_at", "generation", "sequence"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_text(&self.gpu);
        columns.put_json(&self.rule)?;
        columns.put_json(&self.layout)?;
        columns.put_json(&self.author)?;
        columns.put_text(&self.reason);
        columns.put_time(self.created_at);
        columns.put_time_or_null(self.expires_at);
        columns.put_number(self.generation)?;
        columns.put_number(self.sequence)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self {
            gpu: columns.text()?,
            rule: columns.json()?,
            layout: columns.json()?,
            author: columns.json()?,
            reason: columns.text()?,
            created_at: columns.time()?,
            expires_at: columns.time_or_null()?,
            generation: columns.number()?,
            sequence: columns.number()?,
        })
    }
}

impl View<'_> {
    /// Overrides in the order in which they were made, those past their expiry included: they end
    /// when somebody clears them.
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn overrides(&self) -> Result<Vec<Override>, StoreError> {
        record::select(self.connection, "ORDER BY sequence", [], self.sealed)
    }

    /// Overrides whose time has come.
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn expired_overrides(&self) -> Result<Vec<Override>, StoreError> {
        let mut expired = self.overrides()?;
        expired.retain(|one| one.expires_at.is_some_and(|at| at <= self.now));
        Ok(expired)
    }
}

impl Tx<'_> {
    /// Makes an override, in place of the GPU's one before; a new generation.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn set_override(&mut self, new: NewOverride) -> Result<Override, StoreError> {
        let generation = self.next_generation();
        let made = Override {
            gpu: new.gpu,
            rule: new.rule,
            layout: new.layout,
            author: new.author,
            reason: new.reason,
            created_at: self.now,
            expires_at: new.expires_at,
            generation,
            sequence: self.head.sequence,
        };
        record::put(self.connection, &made)?;
        Ok(made)
    }

    /// Ends the override of a GPU; a new generation if there was one. Expiry is an ending: send it
    /// through [`crate::Store::write_ending`].
    ///
    /// # Errors
    /// When it can't be written.
    pub fn clear_override(&mut self, gpu: &str) -> Result<Option<Override>, StoreError> {
        let old = record::select::<Override>(self.connection, "WHERE gpu = ?1", [gpu], true)?.pop();
        if old.is_some() {
            self.next_generation();
            record::delete::<Override>(self.connection, "WHERE gpu = ?1", [gpu])?;
        }
        Ok(old)
    }
}
