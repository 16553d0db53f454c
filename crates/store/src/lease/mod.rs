//! Records of leases: users' shares of targets, including ended leases.
//!
//! ```text
//!  queue_lease ──► queued ──grant_lease───────────────────────────► active ──release_lease──► releasing
//!                    │  └──begin_lease──► granting ──activate_lease──► │  └─────revoke_lease─────► │
//!                    └──────────────────────┴──────────────────────────┴──end_lease──► ended ◄─────┘
//! ```
//!
//! Granting a free share takes one commit. A grant that creates MIG devices takes two commits. The first commit begins
//! the operation and makes the lease `granting`. The second commit ends the operation and makes the lease `active`. The
//! members of a lease are in one column of the lease's row, so the list of members is always complete.
//!
//! A database never uses a lease number twice. A database that replaces a lost database continues after the lost
//! numbers. If the lost numbers are not known, the new database may use them again. So every name of a lease outside
//! the database contains [`crate::Store::epoch`], which differs in the new database.

use gpush_api::{
    Actor, EndReason, LeaseBinding, LeaseHolder, LeaseId, LeaseKind, LeaseMember, LeaseRequest, LeaseRevocation,
    LeaseState,
};
use jiff::Timestamp;

use crate::{
    error::StoreError,
    operation::OperationId,
    record::{Columns, Record},
};

mod change;
mod history;
mod notices_and_keeps;
mod read;

pub use read::LeaseHistory;

/// A lease to record.
#[derive(Debug, Clone, PartialEq)]
pub struct NewLease {
    /// The user who gets the share.
    pub holder: LeaseHolder,
    /// The caller.
    pub asked_by: Actor,
    /// Kind.
    pub kind: LeaseKind,
    /// The request.
    pub request: LeaseRequest,
    /// The process, scope or job that the lease depends on.
    pub binding: LeaseBinding,
}

/// Whether a grant creates a new lease record or changes the record of a queued lease.
#[derive(Debug, Clone, PartialEq)]
pub enum LeaseSource {
    /// A new lease.
    New(Box<NewLease>),
    /// A queued lease.
    Queued(LeaseId),
}

impl From<NewLease> for LeaseSource {
    fn from(new: NewLease) -> Self {
        Self::New(Box::new(new))
    }
}

/// The values that a grant records.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LeaseTerms {
    /// Targets with their settings. For an instance that does not exist yet, only the known fields are set.
    pub members: Vec<LeaseMember>,
    /// Time by the system clock at which the lease expires.
    pub expires_at: Option<Timestamp>,
}

/// A lease as recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct LeaseRecord {
    /// Id.
    pub id: LeaseId,
    /// Sequence number of the last change.
    pub sequence: u64,
    /// The user who gets the share.
    pub holder: LeaseHolder,
    /// The caller.
    pub asked_by: Actor,
    /// Kind.
    pub kind: LeaseKind,
    /// State.
    pub state: LeaseState,
    /// Why the lease ends or ended.
    pub reason: Option<EndReason>,
    /// The request.
    pub request: LeaseRequest,
    /// Targets with their settings.
    pub members: Vec<LeaseMember>,
    /// The process, scope or job that the lease depends on.
    pub binding: LeaseBinding,
    /// Operation that creates the lease's MIG devices.
    pub operation: Option<OperationId>,
    /// Time at which the lease was requested.
    pub created_at: Timestamp,
    /// Time at which the lease was granted.
    pub granted_at: Option<Timestamp>,
    /// Time by the system clock at which the lease expires.
    pub expires_at: Option<Timestamp>,
    /// Time at which the lease ended.
    pub ended_at: Option<Timestamp>,
    /// The revocation, if there was one.
    pub revocation: Option<LeaseRevocation>,
    /// Boot on which the lease was recorded. Processes do not outlive a boot.
    pub boot_id: String,
}

impl Record for LeaseRecord {
    const TABLE: &'static str = "leases";
    const COLUMNS: &'static [&'static str] = &[
        "id",
        "sequence",
        "uid",
        "user",
        "asked_by",
        "kind",
        "state",
        "reason",
        "request",
        "members",
        "binding",
        "operation",
        "created_at",
        "granted_at",
        "expires_at",
        "ended_at",
        "revocation",
        "boot_id",
    ];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_number(self.id.0)?;
        columns.put_number(self.sequence)?;
        columns.put_number(self.holder.uid.into())?;
        columns.put_json(&self.holder.user)?;
        columns.put_json(&self.asked_by)?;
        columns.put_json(&self.kind)?;
        // The state is text and not JSON, because indexes use it.
        columns.put_text(self.state.name());
        columns.put_json(&self.reason)?;
        columns.put_json(&self.request)?;
        columns.put_json(&self.members)?;
        columns.put_json(&self.binding)?;
        columns.put_json(&self.operation.map(|operation| operation.0))?;
        columns.put_time(self.created_at);
        columns.put_time_or_null(self.granted_at);
        columns.put_time_or_null(self.expires_at);
        columns.put_time_or_null(self.ended_at);
        columns.put_json(&self.revocation)?;
        columns.put_text(&self.boot_id);
        Ok(())
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        let id = LeaseId(columns.number()?);
        let sequence = columns.number()?;
        let uid = columns.number()?;
        let uid = u32::try_from(uid).map_err(|_| columns.corrupt("a uid is out of range"))?;
        let holder = LeaseHolder { uid, user: columns.json()? };
        let (asked_by, kind) = (columns.json()?, columns.json()?);
        let name = columns.text()?;
        let state = LeaseState::ALL.into_iter().find(|state| state.name() == name);
        Ok(Self {
            id,
            sequence,
            holder,
            asked_by,
            kind,
            state: state.ok_or_else(|| columns.corrupt("a lease state is not valid"))?,
            reason: columns.json()?,
            request: columns.json()?,
            members: columns.json()?,
            binding: columns.json()?,
            operation: columns.json::<Option<u64>>()?.map(OperationId),
            created_at: columns.time()?,
            granted_at: columns.time_or_null()?,
            expires_at: columns.time_or_null()?,
            ended_at: columns.time_or_null()?,
            revocation: columns.json()?,
            boot_id: columns.text()?,
        })
    }
}

#[cfg(test)]
mod tests;
