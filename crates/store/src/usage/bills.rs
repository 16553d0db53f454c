//! The inputs of bills after their months have ended: closed months, models of GPUs, and corrections.
//!
//! ```text
//! hours of an ended month, prices, models ──close_bills──► closed_bills (compressed, never changed)
//!                                                          bill_closed: rows that are in a closed bill
//! ```
//!
//! A closed month keeps its own rows, prices and models. So its bill does not change when hours are deleted or prices
//! change. Hours that are recorded later belong to the next month as corrections.

use std::io::{Read as _, Write as _};

use flate2::{Compression, read::ZlibDecoder, write::ZlibEncoder};
use gpush_api::GpuUuid;
use gpush_usage::{
    bill::{Adjustment, BilledGpu},
    ledger::RowBound,
};

use super::rows::time;
use crate::{
    error::StoreError,
    fact::{BILL_CLOSED, Fact},
    record::{self, Columns, Record},
    tx::{Tx, View},
};

/// Maximum size of a part of a closed month in bytes.
const PART: usize = 256 << 10;

/// A part of a closed month, compressed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClosedPart {
    /// Start of the month, in ms since 1970.
    month_ms: i64,
    /// Number of the part, from 0.
    part: u64,
    content: Vec<u8>,
}

impl Record for ClosedPart {
    const TABLE: &'static str = "closed_bills";
    const COLUMNS: &'static [&'static str] = &["month", "part", "content"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_time(time(self.month_ms));
        columns.put_number(self.part)?;
        columns.put_bytes(&self.content);
        Ok(())
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self { month_ms: columns.time()?.as_millisecond(), part: columns.number()?, content: columns.bytes()? })
    }
}

/// The model of a GPU. A GPU that the host no longer has keeps its row, because its hours are still billed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuModel {
    /// GPU.
    pub gpu: GpuUuid,
    /// Model and number of slices.
    pub billed: BilledGpu,
}

impl Record for GpuModel {
    const TABLE: &'static str = "gpu_models";
    const COLUMNS: &'static [&'static str] = &["gpu", "model", "slices"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_text(self.gpu.as_str());
        columns.put_text(&self.billed.model);
        columns.put_number(self.billed.slices.into())
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        let (gpu, model) = (columns.text()?.as_str().into(), columns.text()?);
        let slices = columns.number()?;
        let slices = u32::try_from(slices).map_err(|_| columns.corrupt("a number of slices is out of range"))?;
        Ok(Self { gpu, billed: BilledGpu { model, slices } })
    }
}

/// A correction of a bill, with its number.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BillCorrection {
    /// Number of the correction, from 1.
    pub number: u64,
    /// The line of the bill.
    pub adjustment: Adjustment,
}

impl Record for BillCorrection {
    const TABLE: &'static str = "bill_corrections";
    const COLUMNS: &'static [&'static str] = &["number", "at", "row"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_number(self.number)?;
        columns.put_time(time(self.adjustment.hour_ms));
        columns.put_json(&self.adjustment)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        let (number, _at) = (columns.number()?, columns.time()?);
        Ok(Self { number, adjustment: columns.json()? })
    }
}

/// The inputs of the bill of a closed month, compressed. Compression and decompression take long, so do not run them on
/// the thread of the store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClosedMonth {
    month_ms: i64,
    packed: Vec<u8>,
}

impl ClosedMonth {
    /// Compresses the document of a month. `month_ms` is the start of the month, in ms since 1970.
    ///
    /// # Errors
    /// The document cannot be compressed.
    pub fn new(month_ms: i64, content: &str) -> Result<Self, StoreError> {
        let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
        let packed = encoder.write_all(content.as_bytes()).and_then(|()| encoder.finish());
        let packed = packed.map_err(|error| StoreError::Internal(format!("cannot compress a bill: {error}")))?;
        Ok(Self { month_ms, packed })
    }

    /// Returns the document.
    ///
    /// # Errors
    /// The content is damaged.
    pub fn content(&self) -> Result<String, StoreError> {
        let mut content = String::new();
        let damaged = |error: std::io::Error| StoreError::DamagedUse {
            table: ClosedPart::TABLE.to_owned(),
            what: error.to_string(),
        };
        ZlibDecoder::new(self.packed.as_slice()).read_to_string(&mut content).map_err(damaged)?;
        Ok(content)
    }
}

impl Tx<'_> {
    /// Records the inputs of the bills of these months, and which hours are in closed bills. Does not change a month
    /// that is closed already.
    ///
    /// # Errors
    /// Fails if the store cannot write a record.
    pub fn close_bills(&mut self, months: &[ClosedMonth], closed: RowBound) -> Result<(), StoreError> {
        self.next_sequence();
        let connection = self.connection;
        let before = self.view().closed_bills()?.map_or(i64::MIN, |before| before.until_ms);
        for month in months.iter().filter(|month| month.month_ms >= before) {
            for (part, content) in (0..).zip(month.packed.chunks(PART)) {
                let content = content.to_owned();
                record::put(connection, &ClosedPart { month_ms: month.month_ms, part, content })?;
            }
        }
        let value = serde_json::to_string(&closed).map_err(|error| StoreError::Internal(error.to_string()))?;
        record::put(connection, &Fact { name: BILL_CLOSED.to_owned(), value })
    }

    /// Records a correction, and returns its number.
    ///
    /// # Errors
    /// Fails if the store cannot write the record.
    pub fn add_correction(&mut self, adjustment: Adjustment) -> Result<u64, StoreError> {
        let last: Vec<BillCorrection> = record::select(self.connection, "ORDER BY number DESC LIMIT 1", [], true)?;
        let number = last.first().map_or(1, |last| last.number + 1);
        self.next_sequence();
        record::put(self.connection, &BillCorrection { number, adjustment })?;
        Ok(number)
    }

    /// Deletes the bills of months that ended before a time, and the corrections of that time.
    pub(super) fn delete_bills_before(&mut self, from_ms: i64) -> Result<usize, StoreError> {
        // A month is at most 31 days long.
        let month_ms = from_ms.saturating_sub(31 * gpush_usage::moment::DAY_MS);
        Ok(record::delete::<ClosedPart>(self.connection, "WHERE month < ?1", [month_ms])?
            + record::delete::<BillCorrection>(self.connection, "WHERE at < ?1", [from_ms])?)
    }
}

impl View<'_> {
    /// Returns which hours are in closed bills; `None` before the first month is closed.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn closed_bills(&self) -> Result<Option<RowBound>, StoreError> {
        self.row_bound(BILL_CLOSED)
    }

    /// Returns the inputs of the bill of a closed month; `None` if the month has no rows, or is not closed.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn closed_month(&self, month_ms: i64) -> Result<Option<ClosedMonth>, StoreError> {
        let parts: Vec<ClosedPart> = self.usage_rows("WHERE month = ?1 ORDER BY part", [month_ms])?;
        if parts.is_empty() {
            return Ok(None);
        }
        let packed = parts.into_iter().flat_map(|part| part.content).collect();
        Ok(Some(ClosedMonth { month_ms, packed }))
    }

    /// Returns the models of all GPUs whose use is recorded.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn gpu_models(&self) -> Result<Vec<GpuModel>, StoreError> {
        self.usage_rows("ORDER BY gpu", [])
    }

    /// Returns the corrections of a period, in the order of their numbers. Times are in ms since 1970.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn bill_corrections(&self, from_ms: i64, until_ms: i64) -> Result<Vec<BillCorrection>, StoreError> {
        self.usage_rows("WHERE at >= ?1 AND at < ?2 ORDER BY number", (from_ms, until_ms))
    }
}
