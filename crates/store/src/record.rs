//! Rows with a seal: a checksum over the table's name and all columns.
//!
//! SQLite detects damage to the structure of its file, but not to the values in the file. The store
//! accepts a row only if its seal is correct. So a flipped bit in an expiry or a layout becomes an
//! error, and never a wrong value. Records are read and written as a whole.

use std::fmt::Write as _;

use jiff::Timestamp;
use rusqlite::{Connection, Params, params_from_iter, types::Value};
use serde::{Serialize, de::DeserializeOwned};

use crate::error::{StoreError, from_sqlite};

/// Maximum size of one record in bytes. Real records are much smaller: a host of 16 GPUs with full plans needs about
/// 200 kB.
pub(crate) const LARGEST: usize = 1 << 20;

/// Computes the 64-bit FNV-1a digest. Each step is a bijection, so damage to a single byte always changes the result.
pub(crate) fn digest(bytes: &[u8]) -> u64 {
    absorb(0xcbf2_9ce4_8422_2325, bytes)
}

fn absorb(mut state: u64, bytes: &[u8]) -> u64 {
    for byte in bytes {
        state = (state ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
    }
    state
}

fn seal(table: &str, values: &[Value]) -> i64 {
    let mut state = digest(table.as_bytes());
    for value in values {
        let (kind, length) = match value {
            Value::Null => (0u8, 0),
            Value::Integer(_) => (1, 8),
            Value::Real(_) => (2, 8),
            Value::Text(text) => (3, text.len()),
            Value::Blob(blob) => (4, blob.len()),
        };
        state = absorb(state, &[kind]);
        state = absorb(state, &(length as u64).to_le_bytes());
        state = match value {
            Value::Null => state,
            Value::Integer(number) => absorb(state, &number.to_le_bytes()),
            Value::Real(number) => absorb(state, &number.to_bits().to_le_bytes()),
            Value::Text(text) => absorb(state, text.as_bytes()),
            Value::Blob(blob) => absorb(state, blob),
        };
    }
    state.cast_signed()
}

/// A type that is stored as a row of a table.
pub(crate) trait Record: Sized {
    const TABLE: &'static str;
    /// Columns without the seal, in the order of [`Record::write`].
    const COLUMNS: &'static [&'static str];
    /// Writes the columns.
    fn write(&self, columns: &mut Columns) -> Result<(), StoreError>;
    /// Reads the columns.
    fn read(columns: &mut Columns) -> Result<Self, StoreError>;
}

/// The columns of one row. They are written or read in order.
pub(crate) struct Columns {
    table: &'static str,
    values: Vec<Value>,
    next: usize,
}

impl Columns {
    /// Adds a number.
    pub(crate) fn put_number(&mut self, number: u64) -> Result<(), StoreError> {
        let number = i64::try_from(number).map_err(|_| StoreError::Internal(format!("{number} is too large")))?;
        self.values.push(Value::Integer(number));
        Ok(())
    }

    /// Adds a text.
    pub(crate) fn put_text(&mut self, text: &str) {
        self.values.push(Value::Text(text.to_owned()));
    }

    /// Adds a point in time, in milliseconds since 1970.
    pub(crate) fn put_time(&mut self, time: Timestamp) {
        self.values.push(milliseconds(time));
    }

    /// Adds a point in time that may be absent.
    pub(crate) fn put_time_or_null(&mut self, time: Option<Timestamp>) {
        self.values.push(time.map_or(Value::Null, milliseconds));
    }

    /// Adds a value as JSON.
    pub(crate) fn put_json<T: Serialize>(&mut self, value: &T) -> Result<(), StoreError> {
        let text = serde_json::to_string(value)
            .map_err(|error| StoreError::Internal(format!("cannot write a record of {}: {error}", self.table)))?;
        self.values.push(Value::Text(text));
        Ok(())
    }

    /// Adds bytes.
    pub(crate) fn put_bytes(&mut self, bytes: &[u8]) {
        self.values.push(Value::Blob(bytes.to_owned()));
    }

    fn take(&mut self) -> Result<Value, StoreError> {
        let value = self.values.get_mut(self.next).map(|value| std::mem::replace(value, Value::Null));
        self.next += 1;
        value.ok_or_else(|| self.corrupt("a column is missing"))
    }

    /// Reads a number.
    pub(crate) fn number(&mut self) -> Result<u64, StoreError> {
        match self.take()? {
            Value::Integer(number) => u64::try_from(number).map_err(|_| self.corrupt("a number is negative")),
            Value::Null | Value::Real(_) | Value::Text(_) | Value::Blob(_) => Err(self.corrupt(
                "a number is not \
                valid",
            )),
        }
    }

    /// Reads a text.
    pub(crate) fn text(&mut self) -> Result<String, StoreError> {
        match self.take()? {
            Value::Text(text) => Ok(text),
            Value::Null | Value::Real(_) | Value::Integer(_) | Value::Blob(_) => Err(self.corrupt(
                "a text is not \
                valid",
            )),
        }
    }

    /// Reads bytes.
    pub(crate) fn bytes(&mut self) -> Result<Vec<u8>, StoreError> {
        match self.take()? {
            Value::Blob(bytes) => Ok(bytes),
            Value::Null | Value::Real(_) | Value::Integer(_) | Value::Text(_) => {
                Err(self.corrupt("a value is not bytes"))
            }
        }
    }

    /// Reads a point in time.
    pub(crate) fn time(&mut self) -> Result<Timestamp, StoreError> {
        self.time_or_null()?.ok_or_else(|| self.corrupt("a time is absent"))
    }

    /// Reads a point in time that may be absent.
    pub(crate) fn time_or_null(&mut self) -> Result<Option<Timestamp>, StoreError> {
        match self.take()? {
            Value::Null => Ok(None),
            Value::Integer(ms) => {
                Timestamp::from_millisecond(ms).map(Some).map_err(|_| self.corrupt("a time is out of range"))
            }
            Value::Real(_) | Value::Text(_) | Value::Blob(_) => Err(self.corrupt("a time is not valid")),
        }
    }

    /// Reads a value that was written as JSON.
    pub(crate) fn json<T: DeserializeOwned>(&mut self) -> Result<T, StoreError> {
        let text = self.text()?;
        serde_json::from_str(&text).map_err(|error| self.corrupt(&error.to_string()))
    }

    /// Returns the error about damage to this record.
    pub(crate) fn corrupt(&self, what: &str) -> StoreError {
        StoreError::Corrupt { table: self.table.to_owned(), what: what.to_owned() }
    }
}

/// Converts a time to milliseconds. A value within the first or last second of a [`Timestamp`]'s
/// range might not be read back. So the function limits the time to the whole seconds of this
/// range.
fn milliseconds(time: Timestamp) -> Value {
    let (first, last) = (Timestamp::MIN.as_second() * 1000, Timestamp::MAX.as_second() * 1000);
    Value::Integer(time.as_millisecond().clamp(first, last))
}

/// Reads the records that `rest` (`WHERE … ORDER BY …`) selects. If `sealed` is false, the seals are not checked: a
/// newer gpushd wrote the database, and its rows may have unknown columns.
pub(crate) fn select<R: Record>(
    connection: &Connection,
    rest: &str,
    parameters: impl Params,
    sealed: bool,
) -> Result<Vec<R>, StoreError> {
    let sql = format!("SELECT {}, seal FROM {} {rest}", R::COLUMNS.join(", "), R::TABLE);
    let mut statement = connection.prepare_cached(&sql).map_err(|error| from_sqlite(&error))?;
    let mut rows = statement.query(parameters).map_err(|error| from_sqlite(&error))?;
    let mut records = Vec::new();
    while let Some(row) = rows.next().map_err(|error| from_sqlite(&error))? {
        let values = (0..R::COLUMNS.len()).map(|index| row.get(index)).collect::<Result<Vec<Value>, _>>();
        let seal_read: Result<i64, _> = row.get(R::COLUMNS.len());
        let corrupt = |what: String| StoreError::Corrupt { table: R::TABLE.to_owned(), what };
        let values = values.map_err(|error| corrupt(error.to_string()))?;
        if sealed && seal_read != Ok(seal(R::TABLE, &values)) {
            return Err(corrupt("its checksum does not match".to_owned()));
        }
        records.push(R::read(&mut Columns { table: R::TABLE, values, next: 0 })?);
    }
    Ok(records)
}

/// Writes a record. Replaces the record with the same key.
pub(crate) fn put<R: Record>(connection: &Connection, record: &R) -> Result<(), StoreError> {
    let mut columns = Columns { table: R::TABLE, values: Vec::with_capacity(R::COLUMNS.len() + 1), next: 0 };
    record.write(&mut columns)?;
    let mut values = columns.values;
    if values.len() != R::COLUMNS.len() {
        return Err(StoreError::Internal(format!("{} columns for {}", values.len(), R::TABLE)));
    }
    // Refuse a record that cannot be read back, because the next start would treat it as damage. For example, JSON from
    // a caller can be nested deeper than the parser accepts.
    let columns = &mut Columns { table: R::TABLE, values: values.clone(), next: 0 };
    if let Err(error) = R::read(columns) {
        return Err(StoreError::Unreadable { table: R::TABLE, cause: error.to_string() });
    }
    let length = |value: &Value| match value {
        Value::Text(text) => text.len(),
        Value::Blob(bytes) => bytes.len(),
        Value::Null | Value::Integer(_) | Value::Real(_) => 8,
    };
    let bytes = values.iter().map(length).sum();
    if bytes > LARGEST {
        return Err(StoreError::TooLarge { table: R::TABLE, bytes, most: LARGEST });
    }
    values.push(Value::Integer(seal(R::TABLE, &values)));
    let mut sql = format!("INSERT OR REPLACE INTO {} ({}, seal) VALUES (?1", R::TABLE, R::COLUMNS.join(", "));
    for number in 2..=values.len() {
        let _ = write!(sql, ", ?{number}");
    }
    sql.push(')');
    execute(connection, &sql, params_from_iter(values)).map(|_| ())
}

/// Deletes the rows that `rest` selects, and returns their number.
pub(crate) fn delete<R: Record>(
    connection: &Connection,
    rest: &str,
    parameters: impl Params,
) -> Result<usize, StoreError> {
    execute(connection, &format!("DELETE FROM {} {rest}", R::TABLE), parameters)
}

fn execute(connection: &Connection, sql: &str, parameters: impl Params) -> Result<usize, StoreError> {
    let mut statement = connection.prepare_cached(sql).map_err(|error| from_sqlite(&error))?;
    statement.execute(parameters).map_err(|error| from_sqlite(&error))
}
