//! The stored form of the rows: the columns by which rows are selected, and the row itself as JSON.

use gpush_usage::{
    account::EndedLease,
    ledger::{GpuHour, UnusedSpan},
};
use jiff::Timestamp;

use super::{OwnedHour, RequestCount};
use crate::{
    error::StoreError,
    record::{Columns, Record},
};

pub(super) fn time(ms: i64) -> Timestamp {
    Timestamp::from_millisecond(ms).unwrap_or(if ms < 0 { Timestamp::MIN } else { Timestamp::MAX })
}

impl Record for OwnedHour {
    const TABLE: &'static str = "lease_hours";
    const COLUMNS: &'static [&'static str] = &["number", "hour", "owner", "row"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_number(self.hour.number)?;
        columns.put_time(time(self.hour.hour_ms));
        columns.put_json(&self.owner)?;
        columns.put_json(&self.hour)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        let (_number, _hour) = (columns.number()?, columns.time()?);
        Ok(Self { owner: columns.json()?, hour: columns.json()? })
    }
}

impl Record for GpuHour {
    const TABLE: &'static str = "gpu_hours";
    const COLUMNS: &'static [&'static str] = &["number", "hour", "row"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_number(self.number)?;
        columns.put_time(time(self.hour_ms));
        columns.put_json(self)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        let (_number, _hour) = (columns.number()?, columns.time()?);
        columns.json()
    }
}

impl Record for UnusedSpan {
    const TABLE: &'static str = "unused_times";
    const COLUMNS: &'static [&'static str] = &["lease", "since", "until", "row"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_number(self.lease.0)?;
        columns.put_time(time(self.from_ms));
        columns.put_time(time(self.until_ms));
        columns.put_json(self)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        let (_lease, _since, _until) = (columns.number()?, columns.time()?, columns.time()?);
        columns.json()
    }
}

impl Record for EndedLease {
    const TABLE: &'static str = "lease_totals";
    const COLUMNS: &'static [&'static str] = &["lease", "ended", "row"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_number(self.totals.lease.0)?;
        columns.put_time(time(self.totals.until_ms));
        columns.put_json(self)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        let (_lease, _ended) = (columns.number()?, columns.time()?);
        columns.json()
    }
}

impl Record for RequestCount {
    const TABLE: &'static str = "request_days";
    const COLUMNS: &'static [&'static str] = &["day", "kind", "profile", "result", "count"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_time(time(self.day_ms));
        columns.put_text(&self.kind);
        columns.put_text(&self.profile);
        columns.put_text(&self.result);
        columns.put_number(self.count)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self {
            day_ms: columns.time()?.as_millisecond(),
            kind: columns.text()?,
            profile: columns.text()?,
            result: columns.text()?,
            count: columns.number()?,
        })
    }
}
