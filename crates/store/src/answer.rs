//! Answers kept under the caller's idempotency key, so that a request that is sent again, also to
//! the agent after this one, is answered again and not carried out again.

use jiff::Timestamp;
use serde_json::Value;

use crate::{
    error::StoreError,
    note::Bounds,
    operation::OperationId,
    record::{self, Columns, Record, digest},
    tx::{Tx, View},
};

/// An answer that shall be kept.
#[derive(Debug, Clone, PartialEq)]
pub struct NewAnswer<'a> {
    /// Whose key: keys of different users never meet.
    pub uid: u32,
    /// The key.
    pub key: String,
    /// The request (method, path, body), to tell when a key is used for another one.
    pub request: &'a [u8],
    /// Operation that it began.
    pub operation: Option<OperationId>,
    /// HTTP status.
    pub status: u16,
    /// Body.
    pub body: Value,
    /// Until when it is kept.
    pub expires_at: Timestamp,
}

/// A kept answer.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredAnswer {
    /// Whose key.
    pub uid: u32,
    /// The key.
    pub key: String,
    /// Operation that the request began.
    pub operation: Option<OperationId>,
    /// HTTP status.
    pub status: u16,
    /// Body.
    pub body: Value,
    /// When it was given.
    pub created_at: Timestamp,
    /// Until when it is kept.
    pub expires_at: Timestamp,
    /// Sequence number of its keeping.
    pub sequence: u64,
    request: String,
}

/// What is known of a key.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// Nothing: carry the request out.
    None,
    /// It was answered: say the same.
    Known(Box<StoredAnswer>),
    /// The key was used for another request: refuse.
    OtherRequest,
}

impl Record for StoredAnswer {
    const TABLE: &'static str = "answers";
    const COLUMNS: &'static [&'static str] =
        &["uid", "name", "request", "operation", "status", "body", "created_at", "expires_at", "sequence"];

    fn write(&self, columns: &mut Columns) -> Result<(), StoreError> {
        columns.put_number(u64::from(self.uid))?;
        columns.put_text(&self.key);
        columns.put_text(&self.request);
        columns.put_json(&self.operation)?;
        columns.put_number(u64::from(self.status))?;
        columns.put_json(&self.body)?;
        columns.put_time(self.created_at);
        columns.put_time(self.expires_at);
        columns.put_number(self.sequence)
    }

    fn read(columns: &mut Columns) -> Result<Self, StoreError> {
        let uid = u32::try_from(columns.number()?).map_err(|_| columns.corrupt("a uid is out of range"))?;
        Ok(Self {
            uid,
            key: columns.text()?,
            request: columns.text()?,
            operation: columns.json()?,
            status: u16::try_from(columns.number()?).map_err(|_| columns.corrupt("a status is out of range"))?,
            body: columns.json()?,
            created_at: columns.time()?,
            expires_at: columns.time()?,
            sequence: columns.number()?,
        })
    }
}

fn fingerprint(request: &[u8]) -> String {
    // The length beside the digest: 64 bits are meant for accidents, not for attackers, and a
    // caller's own keys are all that it could confuse.
    format!("{:016x}-{}", digest(request), request.len())
}

impl View<'_> {
    /// What is known of a user's key for this request.
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn answer(&self, uid: u32, key: &str, request: &[u8]) -> Result<Answer, StoreError> {
        let rest = "WHERE uid = ?1 AND name = ?2";
        let found = record::select::<StoredAnswer>(self.connection, rest, (uid, key), self.sealed)?.pop();
        Ok(match found {
            None => Answer::None,
            Some(kept) if kept.expires_at <= self.now => Answer::None,
            Some(kept) if kept.request != fingerprint(request) => Answer::OtherRequest,
            Some(kept) => Answer::Known(Box::new(kept)),
        })
    }
}

impl Tx<'_> {
    /// What is known of a user's key for this request, within the transaction that will answer it:
    /// of two that come at once, one sees the other's.
    ///
    /// # Errors
    /// When the store can't be read.
    pub fn answer(&self, uid: u32, key: &str, request: &[u8]) -> Result<Answer, StoreError> {
        self.view().answer(uid, key, request)
    }

    /// Keeps an answer.
    ///
    /// # Errors
    /// When it can't be written.
    pub fn keep_answer(&mut self, new: NewAnswer<'_>) -> Result<(), StoreError> {
        let kept = StoredAnswer {
            uid: new.uid,
            key: new.key,
            operation: new.operation,
            status: new.status,
            body: new.body,
            created_at: self.now,
            expires_at: new.expires_at,
            sequence: self.next_sequence(),
            request: fingerprint(new.request),
        };
        record::put(self.connection, &kept)
    }

    /// Deletes answers that expired, and the oldest beyond the budgets.
    ///
    /// Each user has a budget. Where the answers of all users are too many, the users with most of them lose
    /// theirs first: a request of one user never makes the answer of another user be forgotten as long as that
    /// user has fewer. Answers to root and to the agent's own user count towards neither total.
    pub(crate) fn prune_answers(&mut self, bounds: &Bounds) -> Result<usize, StoreError> {
        let expired =
            record::delete::<StoredAnswer>(self.connection, "WHERE expires_at <= ?1", [self.now.as_millisecond()])?;
        let ranked = "SELECT uid, sequence, row_number() OVER (PARTITION BY uid ORDER BY sequence DESC) AS age \
                      FROM answers";
        let number = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
        let per_user = record::delete::<StoredAnswer>(
            self.connection,
            &format!("WHERE sequence IN (SELECT sequence FROM ({ranked}) WHERE age > ?1)"),
            [number(bounds.answers_per_uid)],
        )?;
        let own = i64::from(nix::unistd::geteuid().as_raw());
        let in_all = record::delete::<StoredAnswer>(
            self.connection,
            &format!(
                "WHERE sequence IN (SELECT sequence FROM ({ranked}) WHERE uid NOT IN (0, ?1) \
                 ORDER BY age, sequence DESC LIMIT -1 OFFSET ?2)"
            ),
            [own, number(bounds.answers)],
        )?;
        Ok(expired + per_user + in_all)
    }
}
