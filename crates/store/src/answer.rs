//! Answers stored under the caller's idempotency key. A repeated request gets the same answer and is not executed
//! again, even after a restart.

use jiff::Timestamp;
use serde_json::Value;

use crate::{
    account_limits::{self, AccountLimits, Limited},
    error::StoreError,
    note::Bounds,
    operation::OperationId,
    record::{self, Columns, Record, digest},
    tx::{Tx, View},
};

/// An answer to store.
#[derive(Debug, Clone, PartialEq)]
pub struct NewAnswer<'a> {
    /// User who sent the key. The answers of two users are separate, even if the users send equal keys.
    pub uid: u32,
    /// The key.
    pub key: String,
    /// The request (method, path, body). The store uses the request to detect a key that is reused
    /// for a different request.
    pub request: &'a [u8],
    /// Operation that the request started, if any.
    pub operation: Option<OperationId>,
    /// HTTP status.
    pub status: u16,
    /// Body.
    pub body: Value,
    /// Time from which the answer may be deleted.
    pub expires_at: Timestamp,
}

/// A stored answer.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredAnswer {
    /// Owner of the key.
    pub uid: u32,
    /// The key.
    pub key: String,
    /// Operation that the request started, if any.
    pub operation: Option<OperationId>,
    /// HTTP status.
    pub status: u16,
    /// Body.
    pub body: Value,
    /// Time at which the answer was given.
    pub created_at: Timestamp,
    /// Time from which the answer may be deleted.
    pub expires_at: Timestamp,
    /// Sequence number of the answer.
    pub sequence: u64,
    request: String,
}

/// The result of looking up a key.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// The key is unknown: execute the request.
    None,
    /// The request was already answered: give the same answer.
    Known(Box<StoredAnswer>),
    /// The key was used for a different request: refuse.
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
    // The digest and the length detect a key that a caller reuses by accident. A deliberate collision is harmless: the
    // caller only gets an answer to an earlier request of the same user.
    format!("{:016x}-{}", digest(request), request.len())
}

impl View<'_> {
    /// Looks up the answer that is stored under a user's idempotency key.
    ///
    /// # Errors
    /// The store cannot be read.
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

    /// Returns whether the user has an unexpired answer whose body is this number.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn has_answer_with(&self, uid: u32, number: u64) -> Result<bool, StoreError> {
        let rest = "WHERE uid = ?1 AND body = ?2";
        let found = record::select::<StoredAnswer>(self.connection, rest, (uid, number.to_string()), self.sealed)?;
        Ok(found.iter().any(|kept| kept.expires_at > self.now))
    }
}

impl Tx<'_> {
    /// Looks up a user's key inside the transaction that will store the answer. If two requests use the key at the same
    /// time, the second request finds the answer to the first.
    ///
    /// # Errors
    /// The store cannot be read.
    pub fn answer(&self, uid: u32, key: &str, request: &[u8]) -> Result<Answer, StoreError> {
        self.view().answer(uid, key, request)
    }

    /// Stores an answer.
    ///
    /// # Errors
    /// The record cannot be written.
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

    /// Deletes expired answers, and the answers beyond the limits per account and for all accounts together. Answers to
    /// root and to gpushd's own user do not count for the limits of all accounts together.
    pub(crate) fn prune_answers(&mut self, bounds: &Bounds) -> Result<usize, StoreError> {
        let expired =
            record::delete::<StoredAnswer>(self.connection, "WHERE expires_at <= ?1", [self.now.as_millisecond()])?;
        let exempt = format!("uid IN (0, {})", nix::unistd::geteuid());
        let limited = Limited { records: "1", uid: "uid", exempt: &exempt, size: None };
        let limits = AccountLimits::new(bounds.answers_per_account, bounds.answers, bounds);
        Ok(expired + account_limits::prune::<StoredAnswer>(self.connection, limited, limits)?)
    }
}
