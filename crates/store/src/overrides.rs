//! Overrides: layouts set through the API. An override replaces the layout of the config until it is cleared or
//! expires.

use gpush_api::{Actor, GpuUuid};
use jiff::Timestamp;

use crate::{
    error::StoreError,
    record::{self, Columns, Record},
    tx::{Tx, View},
};

/// An override to record.
#[derive(Debug, Clone, PartialEq)]
pub struct NewOverride {
    /// UUID of the GPU.
    pub gpu_uuid: GpuUuid,
    /// Config rule that claims the GPU now, if any.
    pub rule: Option<String>,
    /// Layout in canonical text.
    pub layout: Vec<String>,
    /// The author.
    pub author: Actor,
    /// The author's reason.
    pub reason: String,
    /// Time at which the override expires; `None` if it never expires.
    pub expires_at: Option<Timestamp>,
}

/// An active override. Each GPU has at most one.
#[derive(Debug, Clone, PartialEq)]
pub struct Override {
    /// UUID of the GPU.
    pub gpu_uuid: GpuUuid,
    /// Config rule that claimed the GPU when the override was set, if any.
    pub rule: Option<String>,
    /// Layout in canonical text.
    pub layout: Vec<String>,
    /// The author.
    pub author: Actor,
    /// The author's reason.
    pub reason: String,
    /// Time at which the override was set.
    pub created_at: Timestamp,
    /// Time by the system clock at which the override expires; `None` if it never expires.
    pub expires_at: Option<Timestamp>,
    /// The generation that the override began.
    pub generation: u64,
    /// Sequence number of the override.
    pub sequence: u64,
}

impl Record for Override {
    const TABLE: &'static str = "overrides";
    const COLUMNS: &'static [&'static str] =
        &["gpu", "rule", "layout", "author", "reason", "created_at", "expires_at", "generation", "sequence"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_text(self.gpu_uuid.as_str());
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
            gpu_uuid: columns.text()?.into(),
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
    /// Returns the overrides in the order in which they were set. Includes expired overrides until they are cleared.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn overrides(&self) -> Result<Vec<Override>, StoreError> {
        record::select(self.connection, "ORDER BY sequence", [], self.sealed)
    }

    /// Returns the overrides that have expired.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn expired_overrides(&self) -> Result<Vec<Override>, StoreError> {
        let mut expired = self.overrides()?;
        expired.retain(|one| one.expires_at.is_some_and(|at| at <= self.now));
        Ok(expired)
    }
}

impl Tx<'_> {
    /// Sets an override. Replaces the GPU's previous override and increments the generation.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn set_override(&mut self, new: NewOverride) -> Result<Override, StoreError> {
        let generation = self.next_generation();
        let made = Override {
            gpu_uuid: new.gpu_uuid,
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

    /// Clears the override of a GPU. Increments the generation if the GPU had an override. If the override has expired,
    /// send this change through [`crate::Store::write_ending`].
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn clear_override(&mut self, gpu: &GpuUuid) -> Result<Option<Override>, StoreError> {
        let old = record::select::<Override>(self.connection, "WHERE gpu = ?1", [gpu.as_str()], true)?.pop();
        if old.is_some() {
            self.next_generation();
            record::delete::<Override>(self.connection, "WHERE gpu = ?1", [gpu.as_str()])?;
        }
        Ok(old)
    }
}
