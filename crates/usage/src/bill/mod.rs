//! Bills of a calendar month (UTC) from rows of hours.
//!
//! ```text
//! LeaseHour + owner ──► share × time, by price ──► BillLine, one for each row ──► CSV, FOCUS 1.2, sums
//! GpuHour           ──► capacity that no lease was charged for ─┘
//! ```
//!
//! A month is closed some time after its end. From then on, gpushd makes its bill from a stored document
//! ([`MonthInputs`]), and rows that are recorded later for that month become corrections in a later month.
//!
//! | model | quantity |
//! |---|---|
//! | `requested` | charged share × held time |
//! | `used` | charged share × busy and unknown time; the unused time is in separate columns |
//! | `flat` | only the price per lease, once for each lease and month |
//!
//! All quantities and amounts are decimals. GPU hours have nine decimals, slice hours are GPU hours × slices, and an
//! amount is exactly slice hours × price. The order of the lines depends only on the rows, so the bill of a closed
//! month stays the same, byte for byte.

mod csv;
mod focus;
mod inputs;
mod lines;
mod month;
mod price;
mod quantity;
mod summary;

pub use self::csv::{CsvError, bill_csv};
pub use focus::{FOCUS_COLUMNS, FocusSite, focus_csv};
pub use gpush_api::BillModel;
pub use inputs::MonthInputs;
pub use lines::{Adjustment, Bill, BillLine, BillRows, BilledGpu, ChargeKind, LineOwner, bill};
pub use month::{BadMonth, Month};
pub use price::{Price, PriceError, PriceList};
pub use quantity::{gpu_hours, kilowatt_hours, seconds, slice_hours};
pub use summary::{BillSum, BillSummary, SummaryLine, summary};

#[cfg(test)]
mod tests;
