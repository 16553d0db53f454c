//! Idempotency keys: a repeated request with the same `Idempotency-Key` is not executed again. It gets the same
//! operation, or the current state of its object. This also holds after a restart.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use gpush_api::{ApiError, Code};
use gpush_store::{Answer, NewAnswer, OperationId, Store, StoreError, StoredAnswer, Tx};
use jiff::SignedDuration;
use serde::Serialize;
use tokio::sync::OwnedMutexGuard;

/// The header that carries a key.
pub(crate) const HEADER: &str = "idempotency-key";

/// Maximum length of a key, in bytes.
const LONGEST: usize = 128;

/// How long a response is stored.
const KEPT: SignedDuration = SignedDuration::from_hours(24);

/// A key and its request.
#[derive(Debug, Clone)]
pub(crate) struct Key {
    uid: u32,
    key: String,
    request: Vec<u8>,
}

impl Key {
    /// Records `operation` as the response to the request.
    ///
    /// # Errors
    /// If it cannot be recorded.
    pub(crate) fn keep(&self, tx: &mut Tx<'_>, operation: OperationId) -> Result<(), StoreError> {
        self.record(tx, Some(operation), 202, serde_json::Value::Null)
    }

    /// Records the number of the created object as the response to the request.
    ///
    /// # Errors
    /// If it cannot be recorded.
    pub(crate) fn keep_with(&self, tx: &mut Tx<'_>, number: u64) -> Result<(), StoreError> {
        self.record(tx, None, 200, number.into())
    }

    /// Records that the request was executed.
    ///
    /// # Errors
    /// If it cannot be recorded.
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
            // A repeated request gets the current state of the object, so at most its number is stored.
            body,
            expires_at,
        })
    }
}

/// Recorded responses, and the keys of requests in flight. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Idempotency {
    store: Store,
    in_flight: Arc<Mutex<Locks>>,
}

/// Locks of the keys of requests in flight, by uid and key.
type Locks = HashMap<(u32, String), Arc<tokio::sync::Mutex<()>>>;

impl Idempotency {
    /// Creates the handle for the responses in `store`. No request is in flight.
    pub(crate) fn new(store: Store) -> Self {
        Self { store, in_flight: Arc::default() }
    }

    /// Locks a key until the returned guard is dropped. A repeated request waits here until the first one has finished.
    pub(crate) async fn lock(&self, key: &Key) -> OwnedMutexGuard<()> {
        let lock = {
            let mut locks = self.in_flight.lock().unwrap_or_else(PoisonError::into_inner);
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            Arc::clone(locks.entry((key.uid, key.key.clone())).or_default())
        };
        lock.lock_owned().await
    }

    /// Returns the operation that answered the request. The caller must hold the lock of the key.
    ///
    /// # Errors
    /// If the key was used for another request.
    pub(crate) async fn operation(&self, key: &Key) -> Result<Option<OperationId>, ApiError> {
        Ok(self.answer(key).await?.and_then(|answer| answer.operation))
    }

    /// Returns the number of the object in the recorded response. The caller must hold the lock of the key.
    ///
    /// # Errors
    /// If the key was used for another request.
    pub(crate) async fn number(&self, key: &Key) -> Result<Option<u64>, ApiError> {
        Ok(self.answer(key).await?.and_then(|answer| answer.body.as_u64()))
    }

    /// Returns whether the request was executed before. The caller must hold the lock of the key.
    ///
    /// # Errors
    /// If the key was used for another request.
    pub(crate) async fn is_done(&self, key: &Key) -> Result<bool, ApiError> {
        Ok(self.answer(key).await?.is_some())
    }

    async fn answer(&self, key: &Key) -> Result<Option<StoredAnswer>, ApiError> {
        let own = key.clone();
        match self.store.read(move |view| view.answer(own.uid, &own.key, &own.request)).await? {
            Answer::None => Ok(None),
            Answer::OtherRequest => {
                Err(ApiError::new(Code::Conflict, format!("the key {:?} was used for another request", key.key))
                    .hint("use a new key for each request, and the same key only to repeat a request"))
            }
            Answer::Known(answer) => Ok(Some(*answer)),
        }
    }
}

/// The value of the header, before the request is parsed.
#[derive(Debug)]
pub(crate) struct Header(Option<String>);

impl Header {
    /// Parses the value of the header, if the header is present.
    ///
    /// # Errors
    /// If the value is not a valid key.
    pub(crate) fn parse(value: Option<&[u8]>) -> Result<Self, ApiError> {
        let Some(value) = value else { return Ok(Self(None)) };
        let key = std::str::from_utf8(value).unwrap_or_default();
        if key.is_empty() || key.len() > LONGEST || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
            let message = format!("the header {HEADER} is not 1 to {LONGEST} visible ASCII characters");
            return Err(ApiError::new(Code::BadRequest, message).hint("use a UUID"));
        }
        Ok(Self(Some(key.to_owned())))
    }

    /// Returns the key of `request` to `path` from `uid`; `None` if the header is absent.
    pub(crate) fn of<T: Serialize>(self, uid: u32, path: &str, request: &T) -> Option<Key> {
        let mut bytes = path.as_bytes().to_vec();
        bytes.push(0);
        bytes.extend(serde_json::to_vec(request).unwrap_or_default());
        self.0.map(|key| Key { uid, key, request: bytes })
    }
}
