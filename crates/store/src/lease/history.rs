//! The limits for ended leases.

use super::LeaseRecord;
use crate::{
    account_limits::{self, AccountLimits, Limited},
    error::StoreError,
    note::Bounds,
    tx::Tx,
};

impl Tx<'_> {
    /// Deletes the ended leases beyond the limits per account and for all accounts together.
    pub(crate) fn prune_leases(&mut self, bounds: &Bounds) -> Result<usize, StoreError> {
        let limited = Limited { records: "state = 'ended'", uid: "uid", exempt: "0" };
        let limits = AccountLimits::new(bounds.leases_per_account, bounds.leases, bounds);
        account_limits::prune::<LeaseRecord>(self.connection, limited, limits)
    }
}
