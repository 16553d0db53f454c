//! Requests that are sent again: under the same `Idempotency-Key` a user gets the same operation, or
//! what the request was about as it is by then, also from the agent after this one, and nothing is
//! carried out twice.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use axum::{extract::FromRequestParts, http::request::Parts};
use gpush_api::{ApiError, Code, Operation};
use gpush_store::{Answer, NewAnswer, OperationId, StoreError, StoredAnswer, Tx};
use jiff::SignedDuration;
use serde::Serialize;
use tokio::sync::OwnedMutexGuard;

use crate::{agent::Shared, http::failure::Failure};

/// The header that carries a key.
const HEADER: &str = "idempotency-key";

/// Longest key, in bytes.
const LONGEST: usize = 128;

/// How long an answer is kept.
const KEPT: SignedDuration = SignedDuration::from_hours(24);

/// A key together with the request that it stands for.
#[derive(Debug, Clone)]
pub(crate) struct Key {
    uid: u32,
    key: String,
    request: Vec<u8>,
}

impl Key {
    /// Records that `operation` answers the request.
    ///
    /// # Errors
    /// When it can't be recorded.
    pub(crate) fn keep(&self, tx: &mut Tx<'_>, operation: OperationId) -> Result<(), StoreError> {
        self.record(tx, Some(operation), 202, serde_json::Value::Null)
    }

    /// Records that what has this number answers the request.
    ///
    /// # Errors
    /// When it can't be recorded.
    pub(crate) fn keep_with(&self, tx: &mut Tx<'_>, number: u64) -> Result<(), StoreError> {
        self.record(tx, None, 200, number.into())
    }

    /// Records that the request was carried out at once.
    ///
    /// # Errors
    /// When it can't be recorded.
    pub(crate) fn keep_done(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        self.record(tx, None, 200, serde_json::Value::Null)
    }

    fn record(
        &self,
        tx: &mut Tx<'_>,
        operation: Option<OperationId>,
        status: u16,
        body: serde_json::Value,
    ) -> Result<(), StoreError> {
        let expires_at = tx.now().checked_add(KEPT).unwrap_or(jiff::Timestamp::MAX);
        tx.keep_answer(NewAnswer {
            uid: self.uid,
            key: self.key.clone(),
            request: &self.request,
            operation,
            status,
            // What it was about, as it is whenever it is asked, says it better: it is named at most.
            body,
            expires_at,
        })
    }

    /// Waits until no other request with this key is being answered, and keeps others waiting until
    /// dropped: what was sent again while the first is still under way waits for its answer.
    pub(crate) async fn turn(&self, agent: &Shared) -> OwnedMutexGuard<()> {
        let turn = {
            let mut turns = agent.under_way.0.lock().unwrap_or_else(PoisonError::into_inner);
            turns.retain(|_, turn| Arc::strong_count(turn) > 1);
            Arc::clone(turns.entry((self.uid, self.key.clone())).or_default())
        };
        turn.lock_owned().await
    }

    /// The operation that answered the request, as it is now. To be asked in its turn.
    ///
    /// # Errors
    /// When the key was used for another request, or the operation is forgotten.
    pub(crate) async fn answered(&self, agent: &Shared) -> Result<Option<Operation>, ApiError> {
        match self.kept(agent).await?.and_then(|kept| kept.operation) {
            Some(operation) => agent.operations.get(&operation.to_string()).await.map(Some),
            None => Ok(None),
        }
    }

    /// The number of what answered the request. To be asked in its turn.
    ///
    /// # Errors
    /// When the key was used for another request.
    pub(crate) async fn answered_with(&self, agent: &Shared) -> Result<Option<u64>, ApiError> {
        Ok(self.kept(agent).await?.and_then(|kept| kept.body.as_u64()))
    }

    /// Whether the request was carried out before.
    ///
    /// # Errors
    /// When the key was used for another request.
    pub(crate) async fn is_done(&self, agent: &Shared) -> Result<bool, ApiError> {
        Ok(self.kept(agent).await?.is_some())
    }

    async fn kept(&self, agent: &Shared) -> Result<Option<StoredAnswer>, ApiError> {
        let own = self.clone();
        match agent.store.read(move |view| view.answer(own.uid, &own.key, &own.request)).await? {
            Answer::None => Ok(None),
            Answer::OtherRequest => {
                Err(ApiError::new(Code::Conflict, format!("the key {:?} was used for another request", self.key))
                    .hint("give each request a key of its own; the same key only to send the same again"))
            }
            Answer::Known(kept) => Ok(Some(*kept)),
        }
    }
}

/// Requests with a key that are being answered, or wait for their turn.
#[derive(Debug, Default)]
pub(crate) struct UnderWay(Mutex<Turns>);

/// Whose turn it is, by uid and key.
type Turns = HashMap<(u32, String), Arc<tokio::sync::Mutex<()>>>;

/// What the header says, before it is known for which request.
#[derive(Debug)]
pub(crate) struct Header(Option<String>);

impl Header {
    /// The key of `request` to `path`, asked by `uid`; `None` when none was given.
    pub(crate) fn of<T: Serialize>(self, uid: u32, path: &str, request: &T) -> Option<Key> {
        let mut bytes = path.as_bytes().to_vec();
        bytes.push(0);
        bytes.extend(serde_json::to_vec(request).unwrap_or_default());
        self.0.map(|key| Key { uid, key, request: bytes })
    }
}

impl<S: Send + Sync> FromRequestParts<S> for Header {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Failure> {
        let Some(value) = parts.headers.get(HEADER) else { return Ok(Self(None)) };
        let key = value.to_str().unwrap_or_default();
        if key.is_empty() || key.len() > LONGEST || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            let message = format!("the header {HEADER} is not 1 to {LONGEST} visible ASCII characters");
            return Err(Failure::from(ApiError::new(Code::BadRequest, message).hint("a UUID does well")));
        }
        Ok(Self(Some(key.to_owned())))
    }
}
