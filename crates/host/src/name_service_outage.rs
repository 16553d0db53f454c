//! Whether the name service answers. Logs when it stops answering, and when it answers again.
//!
//! ```text
//! answers ── a lookup fails, or takes longer than a request waits ──► does not answer ── a lookup succeeds ──► answers
//! ```
//!
//! Each kind of lookup has a separate state, because one source may answer while another does not.

use std::{
    collections::BTreeSet,
    sync::{Arc, MutexGuard},
    time::{Duration, Instant},
};

use gpush_locked::Locked;

/// Minimum time between two log entries about the beginning of an outage.
const LOG_PAUSE: Duration = Duration::from_secs(60);

/// The kinds of lookups that the name service does not answer. A handle; cloning it is cheap.
#[derive(Debug, Clone, Default)]
pub(crate) struct Outage(Arc<Locked<OutageState>>);

#[derive(Debug, Default)]
struct OutageState {
    unanswered: BTreeSet<&'static str>,
    /// Time of the last log entry about the beginning of an outage.
    logged: Option<Instant>,
    /// Whether the log says that the name service does not answer.
    is_logged: bool,
}

/// An entry for the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Entry {
    Began,
    Ended,
}

impl Outage {
    /// Notes that the name service did not answer a lookup. `kind` is what the lookup was for, such as `users`.
    pub(crate) fn unanswered(&self, kind: &'static str) {
        log(self.state().unanswered(kind, Instant::now()), kind);
    }

    /// Notes that the name service answered a lookup.
    pub(crate) fn answered(&self, kind: &'static str) {
        log(self.state().answered(kind), kind);
    }

    /// Returns the kinds of lookups that the name service does not answer.
    pub(crate) fn kinds(&self) -> Vec<&'static str> {
        self.state().unanswered.iter().copied().collect()
    }

    fn state(&self) -> MutexGuard<'_, OutageState> {
        self.0.lock()
    }
}

impl OutageState {
    fn unanswered(&mut self, kind: &'static str, now: Instant) -> Option<Entry> {
        let is_first = self.unanswered.is_empty();
        self.unanswered.insert(kind);
        let is_recent = self.logged.is_some_and(|logged| now.saturating_duration_since(logged) < LOG_PAUSE);
        if !is_first || self.is_logged || is_recent {
            return None;
        }
        (self.logged, self.is_logged) = (Some(now), true);
        Some(Entry::Began)
    }

    fn answered(&mut self, kind: &'static str) -> Option<Entry> {
        self.unanswered.remove(kind);
        let is_over = self.unanswered.is_empty() && std::mem::take(&mut self.is_logged);
        is_over.then_some(Entry::Ended)
    }
}

fn log(entry: Option<Entry>, kind: &'static str) {
    match entry {
        Some(Entry::Began) => tracing::warn!(
            "the name service of the host does not answer (lookup of {kind}): gpushd refuses requests that need the answer"
        ),
        Some(Entry::Ended) => tracing::info!("the name service of the host answers again"),
        None => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outage_is_logged_once_and_its_end_once() {
        let (mut state, start) = (OutageState::default(), Instant::now());
        assert_eq!(state.answered("users"), None);
        assert_eq!(state.unanswered("users", start), Some(Entry::Began));
        assert_eq!(state.unanswered("users", start + 2 * LOG_PAUSE), None);
        assert_eq!(state.unanswered("groups", start + 2 * LOG_PAUSE), None);
        assert_eq!(state.answered("users"), None, "groups are still unanswered");
        assert_eq!(state.answered("groups"), Some(Entry::Ended));
        assert_eq!(state.answered("groups"), None);
    }

    #[test]
    fn unstable_name_service_is_logged_at_most_once_a_minute() {
        let (mut state, start) = (OutageState::default(), Instant::now());
        let logged = (0..120_u64).filter(|second| {
            let entry = state.unanswered("users", start + Duration::from_secs(*second));
            state.answered("users");
            entry.is_some()
        });
        assert_eq!(logged.count(), 2);
    }
}
