//! The JSON of the answers to `GET /v1/gpus`, until a GPU changes. Many clients poll this list, and its JSON is large.

use gpush_api::GpuUuid;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use axum::body::Bytes;
use gpush_locked::Locked;

use crate::{
    requests::caller::Viewer,
    state::{GpuSnapshot, Observed},
};

/// Maximum number of stored answers: for administrators, users without processes, and some users with processes.
const MOST: usize = 8;

/// The stored answers. A handle, cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct GpuListCache(Arc<Locked<StoredLists>>);

#[derive(Debug, Default)]
struct StoredLists {
    /// The GPUs that the answers show. A snapshot of the host without a change of its GPUs shares them.
    gpus: Vec<Arc<GpuSnapshot>>,
    /// The answers by viewer, and by the UUIDs of the GPUs that gpushd was still reading.
    answers: BTreeMap<(Viewer, BTreeSet<GpuUuid>), Bytes>,
}

impl StoredLists {
    fn show(&self, observed: &Observed) -> bool {
        let gpus = &observed.host.gpus;
        self.gpus.len() == gpus.len() && self.gpus.iter().zip(gpus).all(|(one, other)| Arc::ptr_eq(one, other))
    }
}

impl GpuListCache {
    /// Returns the stored answer for a viewer.
    pub(super) fn get(&self, observed: &Observed, viewer: Viewer) -> Option<Bytes> {
        let stored = self.0.lock();
        if !stored.show(observed) {
            return None;
        }
        stored.answers.get(&(viewer, observed.late.clone())).cloned()
    }

    /// Stores the answer for a viewer. Drops the answers about earlier GPUs.
    pub(super) fn insert(&self, observed: &Observed, viewer: Viewer, json: Bytes) {
        let mut stored = self.0.lock();
        if !stored.show(observed) {
            *stored = StoredLists { gpus: observed.host.gpus.clone(), answers: BTreeMap::new() };
        }
        if stored.answers.len() < MOST {
            stored.answers.insert((viewer, observed.late.clone()), json);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::{
        State,
        tests::{cordon, list, read},
    };

    const JSON: Bytes = Bytes::from_static(b"[]");

    fn observed(state: &State, late: &[&str]) -> Observed {
        Observed { host: state.now(), late: late.iter().map(|uuid| GpuUuid::from(*uuid)).collect() }
    }

    fn two_gpus() -> State {
        let state = State::empty();
        list(&state, &[0, 1]);
        read(&state, 0);
        read(&state, 1);
        state
    }

    #[test]
    fn answer_is_stored_for_its_viewer_and_its_late_gpus() {
        let (state, cache) = (two_gpus(), GpuListCache::default());
        cache.insert(&observed(&state, &[]), Viewer::Admin, JSON);
        assert!(cache.get(&observed(&state, &[]), Viewer::Admin).is_some());
        assert!(cache.get(&observed(&state, &["GPU-1"]), Viewer::Admin).is_none());
        assert!(cache.get(&observed(&state, &[]), Viewer::Agent).is_none());
    }

    #[test]
    fn answer_is_dropped_when_a_gpu_changes() {
        let (state, cache) = (two_gpus(), GpuListCache::default());
        cache.insert(&observed(&state, &[]), Viewer::Admin, JSON);
        let before = observed(&state, &[]);
        state.apply(&[cordon("GPU-1")]);
        assert!(cache.get(&observed(&state, &[]), Viewer::Admin).is_none());
        cache.insert(&observed(&state, &[]), Viewer::Agent, JSON);
        assert!(cache.get(&before, Viewer::Admin).is_none());
    }

    #[test]
    fn answer_stays_while_only_other_parts_of_the_host_change() {
        let (state, cache) = (two_gpus(), GpuListCache::default());
        cache.insert(&observed(&state, &[]), Viewer::Admin, JSON);
        let before = state.now();
        state.change_leases(|table| table.begin_to_queue(1000));
        assert!(!Arc::ptr_eq(&before, &state.now()));
        assert!(cache.get(&observed(&state, &[]), Viewer::Admin).is_some());
    }

    #[test]
    fn number_of_stored_answers_is_limited() {
        let (state, cache) = (two_gpus(), GpuListCache::default());
        (0..100).for_each(|uid| cache.insert(&observed(&state, &[]), Viewer::User(uid), JSON));
        assert_eq!(cache.0.lock().answers.len(), MOST);
    }
}
