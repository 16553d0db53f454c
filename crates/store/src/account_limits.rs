//! Limits for the records that any user can cause: per account, and for all accounts together.
//!
//! Beyond a limit, the oldest records of an account are deleted. If all accounts together have too many records, those of
//! the accounts with the most records are deleted first. So one user's records never displace the latest records of
//! another user.
//!
//! Records of a uid whose account is not known yet do not count for an account, because gpushd must not delete the
//! records of the wrong account. But all these records together have the limits of all accounts. Otherwise a user
//! with more uids than gpushd can resolve could fill the disk.

use rusqlite::Connection;

use crate::{
    error::StoreError,
    note::Bounds,
    record::{self, Record},
};

/// The number of kinds of records that share the bytes of an account: answers, and audit records about leases, refused
/// attempts and signals. Each kind may have an equal part of the bytes.
const KINDS: usize = 4;

/// Maximum number of records, and their maximum size in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AccountLimits {
    per_account: usize,
    in_all: usize,
    account_bytes: usize,
    all_bytes: usize,
}

impl AccountLimits {
    /// Returns the limits of one kind of records.
    pub(crate) fn new(per_account: usize, in_all: usize, bounds: &Bounds) -> Self {
        let (account_bytes, all_bytes) = (bounds.account_bytes / KINDS, bounds.all_bytes / KINDS);
        Self { per_account, in_all, account_bytes, all_bytes }
    }

    /// Returns the limits of ended leases. They have their own bytes, because they are kept for a long time.
    pub(crate) fn of_leases(bounds: &Bounds) -> Self {
        Self {
            per_account: bounds.leases_per_account,
            in_all: bounds.leases,
            account_bytes: bounds.account_lease_bytes,
            all_bytes: bounds.lease_bytes,
        }
    }
}

/// The records that limits apply to, as SQL.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limited<'a> {
    /// Condition for the records.
    pub(crate) records: &'a str,
    /// Expression for the uid whose account has the record.
    pub(crate) uid: &'a str,
    /// Condition for records that do not count for the limits of all accounts.
    pub(crate) exempt: &'a str,
    /// Column with the size of the record in bytes; `None` if the table has no such column. An index with this column
    /// makes the limits of a large table cheap.
    pub(crate) size: Option<&'a str>,
}

/// Deletes the records beyond the limits, and returns their number.
pub(crate) fn prune<R: Record>(
    connection: &Connection,
    limited: Limited<'_>,
    limits: AccountLimits,
) -> Result<usize, StoreError> {
    let Limited { records, uid, exempt, size } = limited;
    let AccountLimits { per_account, in_all, account_bytes, all_bytes } = limits;
    let sizes: Vec<String> =
        R::COLUMNS.iter().map(|column| format!("ifnull(length(CAST({column} AS BLOB)), 0)")).collect();
    let (table, size) = (R::TABLE, size.map_or_else(|| sizes.join(" + "), str::to_owned));
    let beyond = format!(
        "WITH counted AS (SELECT sequence, account({uid}) AS account, {exempt} AS exempt, {size} AS size \
             FROM {table} WHERE {records}), \
         ranked AS (SELECT sequence, account, exempt, size, row_number() OVER own AS age, sum(size) OVER own AS bytes \
             FROM counted WINDOW own AS (PARTITION BY account ORDER BY sequence DESC)), \
         placed AS (SELECT sequence, row_number() OVER whole AS place, sum(size) OVER whole AS bytes FROM ranked \
             WHERE account NOT NULL AND NOT exempt AND age <= {per_account} AND bytes <= {account_bytes} \
             WINDOW whole AS (ORDER BY age, sequence DESC)) \
         SELECT sequence FROM ranked WHERE account NOT NULL AND (age > {per_account} OR bytes > {account_bytes}) \
         UNION ALL SELECT sequence FROM ranked WHERE account IS NULL AND (age > {in_all} OR bytes > {all_bytes}) \
         UNION ALL SELECT sequence FROM placed WHERE place > {in_all} OR bytes > {all_bytes}"
    );
    record::delete::<R>(connection, &format!("WHERE sequence IN ({beyond})"), [])
}
