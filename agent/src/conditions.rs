//! What the agent itself knows to be wrong with a GPU: a change failed on it, and its rollback
//! too, or what became of it is not known. It stands until a later change succeeds, or the agent
//! starts anew and judges by drift. Where only the outcome was not known, it stands until a reading
//! shows that it was good.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use gpush_api::ApiError;
use gpush_nvml::Reading;
use jiff::Timestamp;

use crate::apply::Part;

/// Degraded GPUs by UUID.
#[derive(Debug, Default)]
pub(crate) struct Conditions(Mutex<BTreeMap<String, Condition>>);

#[derive(Debug)]
struct Condition {
    why: ApiError,
    since: Timestamp,
    /// What was under way, when what became of it is not known.
    open: Option<Part>,
}

impl Conditions {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Condition>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A change failed, and its rollback too.
    pub(crate) fn degrade(&self, uuid: &str, why: ApiError) {
        self.all().insert(uuid.to_owned(), Condition { why, since: Timestamp::now(), open: None });
    }

    /// What became of a change is not known.
    pub(crate) fn leave_open(&self, part: &Part, why: ApiError) {
        let condition = Condition { why, since: Timestamp::now(), open: Some(part.clone()) };
        self.all().insert(part.plan.uuid.clone(), condition);
    }

    /// The GPU is as somebody wanted it.
    pub(crate) fn mend(&self, uuid: &str) {
        self.all().remove(uuid);
    }

    /// Takes in a reading that was begun at `at`, while no call could change the GPU any more.
    pub(crate) fn consider(&self, reading: &Reading, at: Timestamp) {
        let uuid = &reading.identity.uuid;
        let mut all = self.all();
        let Some(condition) = all.get(uuid).filter(|condition| at > condition.since) else { return };
        let Some(stands) = condition.open.as_ref().and_then(|part| part.stands(reading)) else { return };
        all.remove(uuid);
        drop(all);
        tracing::info!(gpu = uuid, "what had become of it was not known: it stands {stands}");
    }

    /// Why the GPU is degraded, if it is.
    pub(crate) fn of(&self, uuid: &str) -> Option<ApiError> {
        self.all().get(uuid).map(|condition| condition.why.clone())
    }
}
