//! Records of leases: users' shares of targets, including ended leases.
//!
//! ```text
//!  queue_lease ──► queued ──grant_lease───────────────────────────► active ──release_lease──► releasing
//!                    │  └──begin_lease──► granting ──activate_lease──► │  └─────revoke_lease─────► │
//!                    └──────────────────────┴──────────────────────────┴──end_lease──► ended ◄─────┘
//! ```
//!
//! A free share is granted by one commit. A grant that creates MIG devices takes two: the lease is `granting` from the
//! commit that begins its operation, and `active` from the one that ends it. The members of a lease are a column of
//! its row, so a lease is always whole.
//!
//! Numbers are never used twice in one database, and continue after those of a lost one. If nothing is known about a
//! lost one, [`crate::Store::epoch`] still differs, which is part of every name outside of the database.

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
mod read;

pub use read::LeaseHistory;

/// A lease to record.
#[derive(Debug, Clone, PartialEq)]
pub struct NewLease {
    /// The user who is admitted.
    pub holder: LeaseHolder,
    /// The caller.
    pub asked_by: Actor,
    /// Kind.
    pub kind: LeaseKind,
    /// The request.
    pub request: LeaseRequest,
    /// What its life depends on.
    pub binding: LeaseBinding,
}

/// Which lease is granted.
#[derive(Debug, Clone, PartialEq)]
pub enum LeaseSource {
    /// A new one.
    New(Box<NewLease>),
    /// One that is queued.
    Queued(LeaseId),
}

impl From<NewLease> for LeaseSource {
    fn from(new: NewLease) -> Self {
        Self::New(Box::new(new))
    }
}

/// What a grant records.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct LeaseTerms {
    /// Targets with their settings. For an instance that does not exist yet, only the known fields are set.
    pub members: Vec<LeaseMember>,
    /// When it expires, by the wall clock.
    pub expires_at: Option<Timestamp>,
}

/// A lease as recorded.
#[derive(Debug, Clone, PartialEq)]
pub struct LeaseRecord {
    /// Id.
    pub id: LeaseId,
    /// Sequence number of its last change.
    pub sequence: u64,
    /// The user who is admitted.
    pub holder: LeaseHolder,
    /// The caller.
    pub asked_by: Actor,
    /// Kind.
    pub kind: LeaseKind,
    /// State.
    pub state: LeaseState,
    /// Why it ends or ended.
    pub reason: Option<EndReason>,
    /// The request.
    pub request: LeaseRequest,
    /// Targets with their settings.
    pub members: Vec<LeaseMember>,
    /// What its life depends on.
    pub binding: LeaseBinding,
    /// Operation that creates its MIG devices.
    pub operation: Option<OperationId>,
    /// When it was requested.
    pub created_at: Timestamp,
    /// When it was granted.
    pub granted_at: Option<Timestamp>,
    /// When it expires, by the wall clock.
    pub expires_at: Option<Timestamp>,
    /// When it ended.
    pub ended_at: Option<Timestamp>,
    /// Its revocation.
    pub revocation: Option<LeaseRevocation>,
    /// Boot on which it was recorded: processes do not outlive a boot.
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
        // Not as JSON: the indexes are on it.
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
            state: state.ok_or_else(|| columns.corrupt("a state is not one"))?,
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
