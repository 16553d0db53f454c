//! Rows of days. When a day is over, its hours are added to rows of the day, so that a report over a long period reads few
//! rows. The hours are deleted when they are old and in a closed bill. All sums are integers, so a fold loses nothing.

use std::collections::BTreeMap;

use gpush_api::LeaseKind;
use gpush_usage::{
    account::{GpuDay, LeaseDay, LeaseOwner, RequestDay, fold_gpus, fold_leases},
    ledger::{GpuHour, LeaseHour, RowBound},
    moment::DAY_MS,
};

use super::{OwnedHour, rows::time};
use crate::{
    error::{StoreError, from_sqlite},
    fact::{Fact, USAGE_FOLDED},
    record::{self, Columns, Record},
    tx::{Tx, View},
};

impl Record for LeaseDay {
    const TABLE: &'static str = "lease_days";
    const COLUMNS: &'static [&'static str] = &["day", "owner", "kind", "gpu", "sums"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_time(time(self.day_ms));
        columns.put_json(&self.owner)?;
        columns.put_text(self.kind.name());
        columns.put_text(self.gpu.as_str());
        columns.put_json(&self.sums)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        let (day_ms, owner, name) = (columns.time()?.as_millisecond(), columns.json()?, columns.text()?);
        let kind = LeaseKind::ALL.into_iter().find(|kind| kind.name() == name);
        let kind = kind.ok_or_else(|| columns.corrupt("a kind of lease is not valid"))?;
        Ok(Self { day_ms, owner, kind, gpu: columns.text()?.as_str().into(), sums: columns.json()? })
    }
}

impl Record for GpuDay {
    const TABLE: &'static str = "gpu_days";
    const COLUMNS: &'static [&'static str] = &["day", "gpu", "sums"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_time(time(self.day_ms));
        columns.put_text(self.gpu.as_str());
        columns.put_json(&self.sums)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        let (day_ms, gpu) = (columns.time()?.as_millisecond(), columns.text()?.as_str().into());
        Ok(Self { day_ms, gpu, sums: columns.json()? })
    }
}

/// The text for requests that were refused before their kind was known.
const NO_KIND: &str = "";

impl Record for RequestDay {
    const TABLE: &'static str = "owner_requests";
    const COLUMNS: &'static [&'static str] = &["day", "owner", "kind", "sums"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_time(time(self.day_ms));
        columns.put_json(&self.owner)?;
        columns.put_text(self.kind.map_or(NO_KIND, LeaseKind::name));
        columns.put_json(&self.sums)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        let (day_ms, owner, name) = (columns.time()?.as_millisecond(), columns.json()?, columns.text()?);
        let kind = LeaseKind::ALL.into_iter().find(|kind| kind.name() == name);
        if kind.is_none() && name != NO_KIND {
            return Err(columns.corrupt("a kind of lease is not valid"));
        }
        Ok(Self { day_ms, owner, kind, sums: columns.json()? })
    }
}

/// Selects the hours before a time that are not folded yet, also those that were recorded after the fold of their day.
const UNFOLDED: &str = "WHERE hour < ?1 AND (hour >= ?2 OR number >= ?3)";

impl Tx<'_> {
    /// Adds requests to those of their day.
    pub(super) fn add_owner_requests(&mut self, added: &RequestDay) -> Result<(), StoreError> {
        let owner = serde_json::to_string(&added.owner).map_err(|error| StoreError::Internal(error.to_string()))?;
        let key = (added.day_ms, owner, added.kind.map_or(NO_KIND, LeaseKind::name));
        let before =
            record::select::<RequestDay>(self.connection, "WHERE day = ?1 AND owner = ?2 AND kind = ?3", key, true)?;
        let mut sums = added.sums;
        before.into_iter().for_each(|row| sums += row.sums);
        record::put(self.connection, &RequestDay { sums, ..added.clone() })
    }

    /// Folds all hours before a time, which must be the start of a day, into rows of their days. Each hour is folded once.
    /// The hours stay. Returns the number of hours.
    ///
    /// # Errors
    /// Fails if the store cannot read or write a record.
    pub fn fold_days(&mut self, until_ms: i64) -> Result<usize, StoreError> {
        let until_ms = until_ms.div_euclid(DAY_MS) * DAY_MS;
        let before = self.view().folded_hours()?;
        if before.is_some_and(|before| before.until_ms >= until_ms) {
            return Ok(0);
        }
        let number = self.view().next_usage_row()?;
        let known = before.unwrap_or(RowBound { until_ms: i64::MIN, number: 0 });
        let unfolded = (until_ms, known.until_ms, i64::try_from(known.number).unwrap_or(i64::MAX));
        let connection = self.connection;
        let leases = record::select::<OwnedHour>(connection, UNFOLDED, unfolded, true)?;
        let gpus = record::select::<GpuHour>(connection, UNFOLDED, unfolded, true)?;
        let owners: BTreeMap<u64, &LeaseOwner> = leases.iter().map(|row| (row.hour.number, &row.owner)).collect();
        let without_owner = LeaseOwner::default();
        let owner = |hour: &LeaseHour| owners.get(&hour.number).copied().unwrap_or(&without_owner);
        for mut day in fold_leases(leases.iter().map(|row| &row.hour), owner) {
            let rest = "WHERE day = ?1 AND owner = ?2 AND kind = ?3 AND gpu = ?4";
            let text = serde_json::to_string(&day.owner).map_err(|error| StoreError::Internal(error.to_string()))?;
            let key = (day.day_ms, text, day.kind.name(), day.gpu.as_str());
            for earlier in record::select::<LeaseDay>(connection, rest, key, true)? {
                day.sums.merge(&earlier.sums);
            }
            record::put(connection, &day)?;
        }
        for mut day in fold_gpus(&gpus) {
            let key = (day.day_ms, day.gpu.as_str());
            for earlier in record::select::<GpuDay>(connection, "WHERE day = ?1 AND gpu = ?2", key, true)? {
                day.sums.merge(&earlier.sums);
            }
            record::put(connection, &day)?;
        }
        self.next_sequence();
        let value = serde_json::to_string(&RowBound { until_ms, number });
        let value = value.map_err(|error| StoreError::Internal(error.to_string()))?;
        record::put(connection, &Fact { name: USAGE_FOLDED.to_owned(), value })?;
        Ok(leases.len() + gpus.len())
    }

    /// Deletes the hours before a time that are folded into days and are in a closed bill. Returns their number.
    ///
    /// # Errors
    /// Fails if the store cannot delete the rows.
    pub fn delete_folded_hours(&mut self, before_ms: i64) -> Result<usize, StoreError> {
        let (folded, closed) = (self.view().folded_hours()?, self.view().closed_bills()?);
        let (Some(folded), Some(closed)) = (folded, closed) else { return Ok(0) };
        let until_ms = before_ms.min(folded.until_ms).min(closed.until_ms).div_euclid(DAY_MS) * DAY_MS;
        let number = i64::try_from(folded.number.min(closed.number)).unwrap_or(i64::MAX);
        let both = "WHERE hour < ?1 AND number < ?2";
        let deleted = record::delete::<OwnedHour>(self.connection, both, (until_ms, number))?
            + record::delete::<GpuHour>(self.connection, both, (until_ms, number))?;
        if deleted > 0 {
            self.next_sequence();
        }
        Ok(deleted)
    }

    /// Deletes the days before a time, and the oldest days of a table with too many rows.
    pub(super) fn delete_days(&mut self, from_ms: i64, most_rows: i64) -> Result<usize, StoreError> {
        let beyond = |table: &str| {
            format!("WHERE day < max(?1, ifnull((SELECT day FROM {table} ORDER BY day DESC LIMIT 1 OFFSET ?2), ?1))")
        };
        let limits = (from_ms, most_rows);
        Ok(record::delete::<LeaseDay>(self.connection, &beyond(LeaseDay::TABLE), limits)?
            + record::delete::<RequestDay>(self.connection, &beyond(RequestDay::TABLE), limits)?
            + record::delete::<GpuDay>(self.connection, &beyond(GpuDay::TABLE), limits)?)
    }
}

impl View<'_> {
    /// Returns which hours are folded into days; `None` before the first fold.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn folded_hours(&self) -> Result<Option<RowBound>, StoreError> {
        self.row_bound(USAGE_FOLDED)
    }

    /// Returns whether only the rows of the whole day that begins at a time are known, because its hours are deleted.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn is_only_a_day(&self, day_ms: i64) -> Result<bool, StoreError> {
        let sql = "SELECT (EXISTS (SELECT 1 FROM gpu_days WHERE day = ?1) \
                        OR EXISTS (SELECT 1 FROM lease_days WHERE day = ?1)) \
                   AND NOT EXISTS (SELECT 1 FROM gpu_hours WHERE hour >= ?1 AND hour < ?2) \
                   AND NOT EXISTS (SELECT 1 FROM lease_hours WHERE hour >= ?1 AND hour < ?2)";
        let day = (day_ms, day_ms.saturating_add(DAY_MS));
        self.connection.query_row(sql, day, |row| row.get(0)).map_err(|error| from_sqlite(&error))
    }

    /// Reads a bound of rows from the facts.
    pub(super) fn row_bound(&self, name: &str) -> Result<Option<RowBound>, StoreError> {
        let Some(text) = self.fact(name)? else { return Ok(None) };
        let damaged =
            |error: serde_json::Error| StoreError::DamagedUse { table: name.to_owned(), what: error.to_string() };
        serde_json::from_str(&text).map(Some).map_err(damaged)
    }

    /// Returns the rows of the days of leases that begin in a period. Times are in ms since 1970.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn lease_days(&self, from_ms: i64, until_ms: i64) -> Result<Vec<LeaseDay>, StoreError> {
        self.usage_rows("WHERE day >= ?1 AND day < ?2 ORDER BY day, owner, kind, gpu", (from_ms, until_ms))
    }

    /// Returns the requests of the days that begin in a period, by owner and kind. Times are in ms since 1970.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn owner_requests(&self, from_ms: i64, until_ms: i64) -> Result<Vec<RequestDay>, StoreError> {
        self.usage_rows("WHERE day >= ?1 AND day < ?2 ORDER BY day, owner, kind", (from_ms, until_ms))
    }

    /// Returns the rows of the days of GPUs that begin in a period. Times are in ms since 1970.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn gpu_days(&self, from_ms: i64, until_ms: i64) -> Result<Vec<GpuDay>, StoreError> {
        self.usage_rows("WHERE day >= ?1 AND day < ?2 ORDER BY day, gpu", (from_ms, until_ms))
    }
}
