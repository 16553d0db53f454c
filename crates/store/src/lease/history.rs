//! The limits for ended leases.

use super::LeaseRecord;
use crate::{error::StoreError, note::Bounds, record, tx::Tx};

/// All ended leases, each with its rank among the ended leases of the same user. Rank 1 is the
/// lease that ended last.
const RANKED: &str = "SELECT id, sequence, row_number() OVER (PARTITION BY uid ORDER BY sequence DESC) AS age \
                      FROM leases WHERE state = 'ended'";

impl Tx<'_> {
    /// Deletes the oldest ended leases beyond each user's limit. If all users together still have
    /// too many ended leases, first deletes those of the users with the most ended leases. So one
    /// user's leases never displace the latest leases of another user.
    pub(crate) fn prune_leases(&mut self, bounds: &Bounds) -> Result<usize, StoreError> {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let per_user = record::delete::<LeaseRecord>(
            self.connection,
            &format!("WHERE id IN (SELECT id FROM ({RANKED}) WHERE age > ?1)"),
            [number(bounds.leases_per_uid)],
        )?;
        let in_all = record::delete::<LeaseRecord>(
            self.connection,
            &format!("WHERE id IN (SELECT id FROM ({RANKED}) ORDER BY age, sequence DESC LIMIT -1 OFFSET ?1)"),
            [number(bounds.leases)],
        )?;
        Ok(per_user + in_all)
    }
}
