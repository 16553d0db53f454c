//! A request that gpushd executes at once, and what gpushd records about the request: caller, reason and idempotency
//! key.

use gpush_api::{Actor, ApiError, Code};
use gpush_store::{NewAudit, StoreError, Tx};

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
    /// the transaction of the change.
    pub(crate) fn recorded(
        self,
        action: &'static str,
        object: String,
    ) -> impl FnMut(&mut Tx<'_>) -> Result<(), StoreError> + Send + 'static {
        self.recorded_with(action, object, serde_json::Map::new())
    }

    /// Does the same as [`Self::recorded`], and adds `detail` to the audit record.
    pub(crate) fn recorded_with(
        self,
        action: &'static str,
        object: String,
        mut what: serde_json::Map<String, serde_json::Value>,
    ) -> impl FnMut(&mut Tx<'_>) -> Result<(), StoreError> + Send + 'static {
        let Self { by, reason, key } = self;
        what.insert("reason".to_owned(), reason.into());
        let detail = serde_json::Value::Object(what);
        move |tx| {
            if let Some(key) = &key {
                key.record_done(tx)?;
            }
            let audit = NewAudit {
                by: Some(by.clone()),
                action: action.to_owned(),
                object: object.clone(),
                result: "done".to_owned(),
                detail: detail.clone(),
            };
            tx.audit(audit).map(|_| ())
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
