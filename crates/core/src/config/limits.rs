//! `[limits]`: how many requests users may send.

use toml::de::DeTable;

use super::reader::Reader;

/// `[limits]`. The limits count per account: a user with all subordinate uids. They do not apply to administrators.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestLimits {
    /// Number of changing requests that an account may send at once.
    pub changes_burst: u32,
    /// Number of changing requests per second that an account may send after a burst.
    pub changes_per_second: u32,
}

impl Default for RequestLimits {
    fn default() -> Self {
        Self { changes_burst: 50, changes_per_second: 5 }
    }
}

pub(super) fn read(reader: &mut Reader<'_>, table: &DeTable<'_>) -> RequestLimits {
    let default = RequestLimits::default();
    RequestLimits {
        changes_burst: reader.number(table, "changes_burst", 1..=10_000, default.changes_burst),
        changes_per_second: reader.number(table, "changes_per_second", 1..=1000, default.changes_per_second),
    }
}

/// Returns the keys with their values as TOML.
pub(super) fn written(limits: &RequestLimits) -> [(&'static str, String); 2] {
    [("changes_burst", limits.changes_burst.to_string()), ("changes_per_second", limits.changes_per_second.to_string())]
}
