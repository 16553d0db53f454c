//! The store's progress: the last numbers, and the time of the last commit.

use jiff::Timestamp;

use crate::{
    error::StoreError,
    record::{Columns, Record},
};

/// The store's progress. Its table has one row, which is written with every commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Head {
    /// Sequence number of the last change.
    pub(crate) sequence: u64,
    /// Last operation number.
    pub(crate) operation: u64,
    /// Generation of the overrides and other desired state outside the config file.
    pub(crate) generation: u64,
    /// Time of the last commit.
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
