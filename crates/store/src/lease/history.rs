//! The limits for ended leases.

use super::LeaseRecord;
use crate::{error::StoreError, note::Bounds, record, tx::Tx};

/// All ended leases of known accounts, each with its rank among the ended leases of the same account. Rank 1 is the
/// lease that ended last.
const RANKED: &str = "SELECT id, sequence, row_number() OVER (PARTITION BY account ORDER BY sequence DESC) AS age \
                      FROM (SELECT id, sequence, account(uid) AS account FROM leases WHERE state = 'ended') \
                      WHERE account NOT NULL";

impl Tx<'_> {
    /// Deletes the oldest ended leases beyond each account's limit. If all accounts together still have
    /// too many ended leases, first deletes those of the accounts with the most ended leases. So one
    /// user's leases never displace the latest leases of another user.
    pub(crate) fn prune_leases(&mut self, bounds: &Bounds) -> Result<usize, StoreError> {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let per_account = record::delete::<LeaseRecord>(
            self.connection,
            &format!("WHERE id IN (SELECT id FROM ({RANKED}) WHERE age > ?1)"),
            [number(bounds.leases_per_account)],
        )?;
        let in_all = record::delete::<LeaseRecord>(
            self.connection,
            &format!("WHERE id IN (SELECT id FROM ({RANKED}) ORDER BY age, sequence DESC LIMIT -1 OFFSET ?1)"),
            [number(bounds.leases)],
        )?;
        Ok(per_account + in_all)
    }
}
