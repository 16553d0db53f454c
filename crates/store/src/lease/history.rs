//! The limits for ended leases.

use super::LeaseRecord;
use crate::{
    account_limits::{self, AccountLimits, Limited},
    error::StoreError,
    note::Bounds,
    record,
    tx::Tx,
};

impl Tx<'_> {
    /// Deletes the ended leases beyond the limits per account and for all accounts together.
    pub(crate) fn prune_leases(&mut self, bounds: &Bounds) -> Result<usize, StoreError> {
        let limited = Limited { records: "state = 'ended'", uid: "uid", exempt: "0", size: Some("size") };
        account_limits::prune::<LeaseRecord>(self.connection, limited, AccountLimits::of_leases(bounds))
    }

    /// Deletes the leases that ended before a time, in ms since 1970.
    pub(crate) fn delete_leases_before(&mut self, ended_ms: i64) -> Result<usize, StoreError> {
        record::delete::<LeaseRecord>(self.connection, "WHERE state = 'ended' AND ended_at < ?1", [ended_ms])
    }
}
