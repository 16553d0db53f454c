//! The budget of ended leases.

use super::LeaseRecord;
use crate::{error::StoreError, note::Bounds, record, tx::Tx};

/// Ended leases with their age among those of their user; 1 is the last.
const RANKED: &str = "SELECT id, sequence, row_number() OVER (PARTITION BY uid ORDER BY sequence DESC) AS age \
                      FROM leases WHERE state = 'ended'";

impl Tx<'_> {
    /// Deletes the oldest ended leases beyond each user's budget; if there are still too many in total,
    /// it deletes those of the users with the most leases first. One user's leases never displace another's last ones.
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
