//! What the agent itself knows to be wrong with a GPU: a change failed on it, and its rollback
//! too. It stands until a later change succeeds, or the agent starts anew and judges by drift.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use gpush_api::ApiError;

/// Degraded GPUs by UUID, with the reason.
#[derive(Debug, Default)]
pub(crate) struct Conditions(Mutex<BTreeMap<String, ApiError>>);

impl Conditions {
    /// A change failed, and its rollback too.
    pub(crate) fn degrade(&self, uuid: &str, error: ApiError) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(uuid.to_owned(), error);
    }

    /// The GPU is as somebody wanted it.
    pub(crate) fn mend(&self, uuid: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(uuid);
    }

    /// Why the GPU is degraded, if it is.
    pub(crate) fn of(&self, uuid: &str) -> Option<ApiError> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(uuid).cloned()
    }
}
