//! Idempotency keys: gpushd does not execute a repeated request with the same `Idempotency-Key` again. The repeated
//! request gets the same operation, or the current state of the object of the first request. gpushd recognizes a
//! repeated request even after a restart.

use std::{collections::HashMap, sync::Arc};

use gpush_api::{ApiError, Code};
use gpush_locked::Locked;
use gpush_store::{Answer, NewAnswer, OperationId, Store, StoreError, StoredAnswer, Tx};
use jiff::SignedDuration;
use serde::Serialize;
use tokio::sync::OwnedMutexGuard;

/// The header that carries a key.
pub(crate) const HEADER: &str = "idempotency-key";

/// Maximum length of a key, in bytes.
const LONGEST: usize = 128;

/// Maximum number of requests with the same key that wait for the answer to the first one. Each waiting request uses
/// memory, even if its client has disconnected.
const MOST_REPEATS: usize = 8;

/// How long gpushd stores the answer to a request.
const RETENTION: SignedDuration = SignedDuration::from_hours(24);

/// A key and its request.
#[derive(Debug, Clone)]
pub(crate) struct Key {
    uid: u32,
    key: String,
    request: Vec<u8>,
}

impl Key {
    /// Records that the request started `operation`. A repeated request then gets this operation.
    ///
    /// # Errors
    /// If the response cannot be recorded.
    pub(crate) fn record_operation(&self, tx: &mut Tx<'_>, operation: OperationId) -> Result<(), StoreError> {
        self.record(tx, Some(operation), 202, serde_json::Value::Null)
    }

    /// Records that the request created the object with this number, such as a lease. A repeated request then gets this
    /// object.
    ///
    /// # Errors
    /// If the response cannot be recorded.
    pub(crate) fn record_number(&self, tx: &mut Tx<'_>, number: u64) -> Result<(), StoreError> {
        self.record(tx, None, 200, number.into())
    }

    /// Records that the request was executed.
    ///
    /// # Errors
    /// If the record cannot be written.
    pub(crate) fn record_done(&self, tx: &mut Tx<'_>) -> Result<(), StoreError> {
        self.record(tx, None, 200, serde_json::Value::Null)
    }

    fn record(
        &self,
        tx: &mut Tx<'_>,
        operation: Option<OperationId>,
        status: u16,
        body: serde_json::Value,
    ) -> Result<(), StoreError> {
        let expires_at = tx.now().checked_add(RETENTION).unwrap_or(jiff::Timestamp::MAX);
        tx.keep_answer(NewAnswer {
            uid: self.uid,
            key: self.key.clone(),
            request: &self.request,
            operation,
            status,
            // Store at most the number of the object, because a repeated request gets the current state of the object.
            body,
            expires_at,
        })
    }
}

/// Recorded responses, and the keys of requests in flight. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Idempotency {
    store: Store,
    in_flight: Arc<Locked<Locks>>,
}

/// Locks for the keys of requests in flight. The map's key is the uid of the caller and the idempotency key.
type Locks = HashMap<(u32, String), Arc<tokio::sync::Mutex<()>>>;

impl Idempotency {
    /// Creates the handle. `store` contains the recorded responses.
    pub(crate) fn new(store: Store) -> Self {
        Self { store, in_flight: Arc::default() }
    }

    /// Waits until no other request with this key is in flight, and returns a guard. Until the guard is dropped, other
    /// requests with the key wait.
    ///
    /// # Errors
    /// If [`MOST_REPEATS`] requests with this key already wait.
    pub(crate) async fn lock(&self, key: &Key) -> Result<OwnedMutexGuard<()>, ApiError> {
        let lock = {
            let mut locks = self.in_flight.lock();
            locks.retain(|_, lock| Arc::strong_count(lock) > 1);
            let lock = locks.entry((key.uid, key.key.clone())).or_default();
            // The map has one reference to the lock, and the first request has another.
            let repeats = Arc::strong_count(lock).saturating_sub(2);
            if repeats >= MOST_REPEATS {
                let message = format!(
                    "{repeats} more requests with the key {:?} already wait for the answer to the first one",
                    key.key
                );
                return Err(ApiError::new(Code::Unavailable, message)
                    .hint("wait until one of these requests is answered, or use a new key for each request")
                    .retryable());
            }
            Arc::clone(lock)
        };
        Ok(lock.lock_owned().await)
    }

    /// Returns the operation that an earlier request with this key started. The caller must hold the lock of the key.
    ///
    /// # Errors
    /// If the key was used for another request.
    pub(crate) async fn operation(&self, key: &Key) -> Result<Option<OperationId>, ApiError> {
        Ok(self.answer(key).await?.and_then(|answer| answer.operation))
    }

    /// Returns the number of the object that an earlier request with this key created. The caller must hold the lock of
    /// the key.
    ///
    /// # Errors
    /// If the key was used for another request.
    pub(crate) async fn number(&self, key: &Key) -> Result<Option<u64>, ApiError> {
        Ok(self.answer(key).await?.and_then(|answer| answer.body.as_u64()))
    }

    /// Returns whether an earlier request with this key was executed. The caller must hold the lock of the key.
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

/// The unparsed value of the header `Idempotency-Key`.
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
            let message = format!("the header {HEADER} must have 1 to {LONGEST} visible ASCII characters");
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

#[cfg(test)]
mod tests {
    use gpush_store::Options;

    use super::*;

    #[tokio::test]
    async fn repeats_of_a_key_wait_up_to_a_limit() {
        let scratch = tempfile::tempdir().unwrap();
        let idempotency = Idempotency::new(Store::open(scratch.path(), Options::default()).unwrap().store);
        let key = |uid, name: &str| Key { uid, key: name.to_owned(), request: Vec::new() };
        let first = idempotency.lock(&key(1000, "a")).await.unwrap();
        let mut repeats: Vec<_> = (0..MOST_REPEATS)
            .map(|_| {
                let (idempotency, key) = (idempotency.clone(), key(1000, "a"));
                tokio::spawn(async move { idempotency.lock(&key).await.map(drop) })
            })
            .collect();
        let one_more = loop {
            tokio::task::yield_now().await;
            // Try again until all of these requests wait for the lock.
            match tokio::time::timeout(std::time::Duration::ZERO, idempotency.lock(&key(1000, "a"))).await {
                Ok(answered) => break answered.unwrap_err(),
                Err(_) => continue,
            }
        };
        assert_eq!((one_more.code, one_more.retryable), (Code::Unavailable, true));
        // Requests with another key, or with the same key from another user, do not wait.
        idempotency.lock(&key(1000, "b")).await.unwrap();
        idempotency.lock(&key(1001, "a")).await.unwrap();
        drop(first);
        for repeat in repeats.drain(..) {
            repeat.await.unwrap().unwrap();
        }
        idempotency.lock(&key(1000, "a")).await.unwrap();
    }
}
