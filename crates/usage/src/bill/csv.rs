//! A bill as CSV: RFC 4180, times in UTC (ISO 8601), decimals with a point.
//!
//! A cell of text that begins with `=`, `+`, `-`, `@`, a tab or a carriage return gets a leading `'`. Without it, a
//! spreadsheet would execute what a user has written. Numbers are never guarded.

use rust_decimal::Decimal;

use super::{
    lines::{Bill, BillLine},
    quantity::{kilowatt_hours, rounded, seconds, time},
};
use crate::share::GPU_UNITS;

/// Error of the CSV writer.
pub use ::csv::Error as CsvError;

/// A table that is written line by line.
pub(super) struct Table {
    writer: ::csv::Writer<Vec<u8>>,
}

impl Table {
    /// Begins a table with a line of column names.
    pub(super) fn new<'a>(columns: impl IntoIterator<Item = &'a str>) -> Result<Self, CsvError> {
        let mut writer = ::csv::WriterBuilder::new().terminator(::csv::Terminator::CRLF).from_writer(Vec::new());
        writer.write_record(columns)?;
        Ok(Self { writer })
    }

    pub(super) fn line(&mut self, cells: &[String]) -> Result<(), CsvError> {
        self.writer.write_record(cells)
    }

    pub(super) fn finish(self) -> Result<String, CsvError> {
        let bytes = self.writer.into_inner().map_err(|error| CsvError::from(error.into_error()))?;
        // All cells are UTF-8, so this loses nothing.
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

/// Guards a cell of text.
pub(super) fn text(cell: &str) -> String {
    if cell.starts_with(['=', '+', '-', '@', '\t', '\r']) { format!("'{cell}") } else { cell.to_owned() }
}

/// Formats a number without an exponent.
pub(super) fn number(value: Decimal) -> String {
    value.normalize().to_string()
}

/// Returns the charged part of a GPU.
pub(super) fn part(line: &BillLine) -> Decimal {
    rounded(Decimal::from(line.charged_units) / Decimal::from(GPU_UNITS))
}

const COLUMNS: [&str; 24] = [
    "charge",
    "period_start",
    "period_end",
    "lease",
    "user",
    "group",
    "account",
    "job",
    "kind",
    "gpu",
    "gpu_model",
    "target",
    "share",
    "busy_seconds",
    "idle_seconds",
    "empty_seconds",
    "unknown_seconds",
    "slice_hours",
    "price_per_slice_hour",
    "amount",
    "currency",
    "energy_kwh",
    "energy_method",
    "description",
];

/// Returns the bill as CSV.
///
/// # Errors
/// The writer fails.
pub fn bill_csv(bill: &Bill) -> Result<String, CsvError> {
    let mut table = Table::new(COLUMNS)?;
    for line in &bill.lines {
        let owner = line.of.owner.as_ref();
        let optional = |cell: Option<&String>| cell.map(|cell| text(cell)).unwrap_or_default();
        let decimal = |value: Option<Decimal>| value.map(number).unwrap_or_default();
        let usage = |value: String| if line.kind.is_some() { value } else { String::new() };
        table.line(&[
            line.charge.name().to_owned(),
            time(line.from_ms),
            time(line.until_ms),
            line.of.lease.map(|lease| lease.to_string()).unwrap_or_default(),
            optional(owner.map(|owner| &owner.user)),
            optional(owner.and_then(|owner| owner.group.as_ref())),
            optional(owner.and_then(|owner| owner.account.as_ref())),
            optional(owner.and_then(|owner| owner.job.as_ref())),
            line.kind.map(|kind| kind.name().to_owned()).unwrap_or_default(),
            line.gpu.as_ref().map(|gpu| text(gpu.as_str())).unwrap_or_default(),
            optional(line.model.as_ref().map(|model| &model.model)),
            line.target.as_ref().map(|target| text(target.as_str())).unwrap_or_default(),
            usage(number(part(line))),
            usage(number(seconds(line.times.busy_ms))),
            usage(number(seconds(line.times.idle_ms))),
            usage(number(seconds(line.times.empty_ms))),
            usage(number(seconds(line.times.unknown_ms))),
            decimal(line.quantity),
            decimal(line.unit_price),
            number(line.amount),
            bill.currency.clone().unwrap_or_default(),
            line.gpu.as_ref().map(|_| number(kilowatt_hours(line.energy_mj))).unwrap_or_default(),
            usage(line.energy_method.name().to_owned()),
            text(&line.description),
        ])?;
    }
    table.finish()
}
