//! A request that gpushd executes at once, and what gpushd records about the request: caller, reason and idempotency
//! key.

use gpush_api::{Actor, ApiError, Code};
use gpush_store::{AuditEvent, DONE, StoreError, Tx};

use crate::requests::idempotency::Key;

/// Maximum length of a reason, in characters.
const LONGEST_REASON: usize = 500;

/// A request that changes something.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) by: Actor,
    pub(crate) reason: Option<String>,
    pub(crate) key: Option<Key>,
}

impl Request {
    /// Returns a function that writes the audit record and the response for the idempotency key. Call the function in
    /// the transaction of the change. `event` makes the event of the record from the reason of the request.
    pub(crate) fn recorded(
        self,
        object: String,
        event: impl FnOnce(Option<String>) -> AuditEvent,
    ) -> impl FnMut(&mut Tx<'_>) -> Result<(), StoreError> + Send + 'static {
        let Self { by, reason, key } = self;
        let audit = event(reason).record(Some(by), object, DONE);
        move |tx| {
            if let Some(key) = &key {
                key.record_done(tx)?;
            }
            tx.audit(audit.clone()).map(|_| ())
        }
    }
}

/// Checks the reason of a request, and converts it to the form that gpushd records and shows.
///
/// # Errors
/// If the reason is too long.
pub(crate) fn reason(text: &str) -> Result<String, ApiError> {
    let shown = gpush_api::text::plain(text.trim());
    if shown.chars().count() > LONGEST_REASON {
        let message = format!("the reason is longer than {LONGEST_REASON} characters");
        return Err(ApiError::new(Code::BadRequest, message).hint("shorten it"));
    }
    Ok(shown)
}
