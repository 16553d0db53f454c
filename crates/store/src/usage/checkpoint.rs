//! The checkpoint of the accounts, in parts: a record has a maximum size, and the accounts of many leases are larger.

use crate::{
    error::StoreError,
    record::{Columns, Record},
};

/// Maximum size of a part in bytes.
const PART: usize = 256 << 10;

/// A part of the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct CheckpointPart {
    /// Number of the part, from 0.
    pub(super) part: u64,
    pub(super) content: String,
}

impl Record for CheckpointPart {
    const TABLE: &'static str = "usage_checkpoint";
    const COLUMNS: &'static [&'static str] = &["part", "content"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_number(self.part)?;
        columns.put_text(&self.content);
        Ok(())
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self { part: columns.number()?, content: columns.text()? })
    }
}

/// Splits the checkpoint into parts, between two characters.
pub(super) fn split(content: &str) -> impl Iterator<Item = CheckpointPart> {
    let mut rest = content;
    (0..).map_while(move |part| {
        let end = rest.floor_char_boundary(PART);
        let (first, others) = rest.split_at(end);
        rest = others;
        (!first.is_empty()).then(|| CheckpointPart { part, content: first.to_owned() })
    })
}
