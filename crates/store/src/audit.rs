//! The audit trail. Each mutation adds one record, in the transaction of the mutation. Records
//! never change. The oldest records are deleted when there are too many, or when they are too old.
//!
//! Any user can cause many records: about the user's leases, about refused administrator requests, and about signals to
//! processes without a lease. So each of these kinds has a limit for each account: a user with all subordinate uids. Beyond the limit, a new record
//! replaces an older record of the same account and kind. A new record never replaces a record of an administrator's
//! action.

use gpush_api::Actor;
use jiff::Timestamp;
use serde_json::Value;

use crate::{
    account_limits::{self, AccountLimits, Limited},
    error::StoreError,
    note::Bounds,
    record::{self, Columns, Record},
    tx::{Tx, View},
};

/// Pattern for the actions of records about leases. Any user can cause such records.
pub(crate) const LEASES: &str = "lease.*";

/// Action of records about refused administrator requests.
pub(crate) const DENIED: &str = "access.denied";

/// Action of records about signals to processes without a lease. A user can start any number of such processes. The record
/// belongs to the user of the process.
pub(crate) const PROCESS_END: &str = "process.end";

/// Patterns of the actions whose records have a limit for each user.
const BY_USERS: [&str; 3] = [LEASES, DENIED, PROCESS_END];

/// A record to add.
#[derive(Debug, Clone, PartialEq)]
pub struct NewAudit {
    /// The user; `None` for gpushd itself.
    pub by: Option<Actor>,
    /// The action, such as `mig.apply`, `gpu.cordon`, `override.expire`.
    pub action: String,
    /// The object, such as a GPU's UUID, an operation, or `config`.
    pub object: String,
    /// The outcome, such as `accepted`, `done`, `refused`.
    pub result: String,
    /// Details for programs. A search for a device finds the record if the device's UUID is the value of `uuid`,
    /// `gpu_uuid` or `target`, or is in the list `gpu_uuids` or `targets`. The details of an operation contain a list
    /// `gpus` of objects with a `gpu_uuid`. A search for one of these GPUs finds all records of the operation.
    pub detail: Value,
}

/// A record of the audit trail.
#[derive(Debug, Clone, PartialEq)]
pub struct AuditRecord {
    /// Position in the trail.
    pub sequence: u64,
    /// System time when the record was added.
    pub at: Timestamp,
    /// The user; `None` for gpushd itself.
    pub by: Option<Actor>,
    /// The action.
    pub action: String,
    /// The object.
    pub object: String,
    /// The outcome.
    pub result: String,
    /// Details for programs, as in [`NewAudit`].
    pub detail: Value,
}

/// A selection of records.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditQuery {
    /// Only records after this sequence number.
    pub after: u64,
    /// Maximum number of records; 0 for no limit. The query returns the first records after
    /// `after`, or the last records if `latest` is set.
    pub limit: usize,
    /// Whether to select the last records instead of the first.
    pub latest: bool,
    /// Selects the records in which one of these values is the object, a GPU of the operation or lease, a target, the
    /// acting user, or the lease holder. If `objects` and `operations_of` are both empty, the query selects all
    /// records.
    pub objects: Vec<String>,
    /// Also selects the records of operations that concern one of the GPUs with these UUIDs.
    pub operations_of: Vec<String>,
    /// Only records from this time or later, by the system clock.
    pub since: Option<Timestamp>,
}

impl Record for AuditRecord {
    const TABLE: &'static str = "audit";
    const COLUMNS: &'static [&'static str] = &["sequence", "at", "actor", "action", "object", "result", "detail"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_number(self.sequence)?;
        columns.put_time(self.at);
        columns.put_json(&self.by)?;
        columns.put_text(&self.action);
        columns.put_text(&self.object);
        columns.put_text(&self.result);
        columns.put_json(&self.detail)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        Ok(Self {
            sequence: columns.number()?,
            at: columns.time()?,
            by: columns.json()?,
            action: columns.text()?,
            object: columns.text()?,
            result: columns.text()?,
            detail: columns.json()?,
        })
    }
}

impl View<'_> {
    /// Returns the selected records, oldest first.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn audit(&self, query: &AuditQuery) -> Result<Vec<AuditRecord>, StoreError> {
        let order = if query.latest { "DESC" } else { "ASC" };
        // A record with damaged JSON must not abort the search, so treat its details as empty. The seal (checksum) of
        // every record that the search returns is checked later.
        let detail = "iif(json_valid(audit.detail), audit.detail, '{}')";
        let wanted = "(SELECT value FROM json_each(?2))";
        let concerned = |gpus: &str| {
            format!(
                "SELECT record.object FROM audit AS record, \
                 json_each(iif(json_valid(record.detail), record.detail, '{{}}'), '$.gpus') AS gpu \
                 WHERE iif(gpu.type = 'object', gpu.value ->> 'gpu_uuid', NULL) IN {gpus}"
            )
        };
        let listed = |name: &str| {
            format!("EXISTS (SELECT 1 FROM json_each({detail}, '$.{name}') AS one WHERE one.value IN {wanted})")
        };
        let fields = ["uuid", "gpu_uuid", "target", "user"].map(|name| format!("{detail} ->> '{name}' IN {wanted}"));
        let named = [
            format!("object IN {wanted}"),
            format!("object IN ({})", concerned(wanted)),
            format!("iif(json_valid(audit.actor), audit.actor, '{{}}') ->> 'user' IN {wanted}"),
            listed("gpu_uuids"),
            listed("targets"),
            fields.join(" OR "),
            format!("object GLOB 'op-*' AND object IN ({})", concerned("(SELECT value FROM json_each(?5))")),
        ];
        let rest = format!(
            "WHERE sequence > ?1 AND at >= ?4 AND ((?2 = '[]' AND ?5 = '[]') OR {}) \
             ORDER BY sequence {order} LIMIT ?3",
            named.join(" OR ")
        );
        let json = |values: &[String]| serde_json::Value::from(values).to_string();
        let (objects, operations) = (json(&query.objects), json(&query.operations_of));
        let limit = if query.limit == 0 { -1 } else { i64::try_from(query.limit).unwrap_or(i64::MAX) };
        let after = i64::try_from(query.after).unwrap_or(i64::MAX);
        let since = query.since.map_or(i64::MIN, Timestamp::as_millisecond);
        let mut records =
            record::select(self.connection, &rest, (after, objects, limit, since, operations), self.sealed)?;
        if query.latest {
            records.reverse();
        }
        Ok(records)
    }
}

impl Tx<'_> {
    /// Adds a record and returns its sequence number.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn audit(&mut self, new: NewAudit) -> Result<u64, StoreError> {
        let sequence = self.next_sequence();
        record::put(
            self.connection,
            &AuditRecord {
                sequence,
                at: self.now,
                by: new.by,
                action: new.action,
                object: new.object,
                result: new.result,
                detail: new.detail,
            },
        )?;
        Ok(sequence)
    }

    /// Deletes the oldest records beyond the limits, and records that are too old. At least `audit_least` records stay,
    /// so that a wrong clock does not empty the trail. Records of actions that any user can perform have separate
    /// limits, for each kind and for each account.
    pub(crate) fn prune_audit(&mut self, bounds: &Bounds) -> Result<usize, StoreError> {
        let mut pruned = 0;
        for action in BY_USERS {
            pruned += self.prune_users(action, bounds)?;
            // No limit in number here: `prune_users` has applied the limits per account and for all accounts.
            pruned += self.prune_audit_of("action GLOB ?1", action, usize::MAX, bounds)?;
        }
        let others = "NOT EXISTS (SELECT 1 FROM json_each(?1) AS pattern WHERE action GLOB pattern.value)";
        let by_users = serde_json::Value::from(BY_USERS.to_vec()).to_string();
        Ok(pruned + self.prune_audit_of(others, &by_users, bounds.audit_most, bounds)?)
    }

    /// Deletes the records of an action beyond the limits per account and for all accounts together. A record belongs to the
    /// caller. If gpushd itself acted, the record belongs to the holder of the lease, or to the user of the process.
    fn prune_users(&mut self, action: &str, bounds: &Bounds) -> Result<usize, StoreError> {
        // A record with damaged JSON must not abort the deletion, so treat damaged fields as empty. The seal (checksum)
        // of every record is checked when the record is read.
        let field = |column: &str, path: &str| format!("iif(json_valid({column}), {column}, '{{}}') ->> '{path}'");
        let uid = format!("coalesce({}, {}, -1)", field("actor", "$.uid"), field("detail", "$.uid"));
        let records = format!("action GLOB '{action}'");
        let limited = Limited { records: &records, uid: &uid, exempt: "0", size: None };
        let limits = AccountLimits::new(bounds.audit_shares_per_account, bounds.audit_shares, bounds);
        account_limits::prune::<AuditRecord>(self.connection, limited, limits)
    }

    /// Deletes the oldest records beyond `most`. Of the other records, deletes those that are too old, but keeps at
    /// least `audit_least` records. Applies only to records whose action satisfies the SQL condition `of`, in which
    /// `?1` is `actions`.
    fn prune_audit_of(&mut self, of: &str, actions: &str, most: usize, bounds: &Bounds) -> Result<usize, StoreError> {
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let beyond = format!("(SELECT sequence FROM audit WHERE {of} ORDER BY sequence DESC LIMIT 1 OFFSET ?2)");
        let many = record::delete::<AuditRecord>(
            self.connection,
            &format!("WHERE {of} AND sequence <= {beyond}"),
            (actions, number(most)),
        )?;
        let oldest = self.now.checked_sub(bounds.audit_age).unwrap_or(Timestamp::MIN).as_millisecond();
        let old = record::delete::<AuditRecord>(
            self.connection,
            &format!("WHERE {of} AND sequence <= {beyond} AND at < ?3"),
            (actions, number(bounds.audit_least.min(most)), oldest),
        )?;
        Ok(many + old)
    }
}
