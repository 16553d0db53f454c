//! Answers to scrapes that follow each other closely. So many scrapers cost no more than one.

use std::{collections::BTreeMap, time::Duration};

use axum::body::Bytes;
use gpush_locked::Locked;
use gpush_openmetrics::Format;
use tokio::time::Instant;

use super::Scope;

/// How long an answer is used again.
const LASTS: Duration = Duration::from_secs(1);

/// The last answers.
#[derive(Debug, Default)]
pub(super) struct Cache(Locked<BTreeMap<(Scope, bool), (Instant, Bytes)>>);

impl Cache {
    /// Returns the text for a scope and a format. Composes it if the last one is too old. Concurrent callers wait for each
    /// other.
    pub(super) fn text(&self, scope: Scope, format: Format, compose: impl FnOnce() -> String) -> Bytes {
        let key = (scope, format == Format::OpenMetrics);
        let mut last = self.0.lock();
        if let Some((_, text)) = last.get(&key).filter(|(at, _)| at.elapsed() < LASTS) {
            return text.clone();
        }
        let text = Bytes::from(compose());
        last.insert(key, (Instant::now(), text.clone()));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn answer_is_used_again_for_a_second_and_never_for_another_scope() {
        let cache = Cache::default();
        let text = |scope, format, text: &str| cache.text(scope, format, || text.to_owned());
        assert_eq!(text(Scope::Devices, Format::Classic, "one"), "one");
        assert_eq!(text(Scope::Devices, Format::Classic, "two"), "one");
        assert_eq!(text(Scope::All, Format::Classic, "three"), "three");
        assert_eq!(text(Scope::Devices, Format::OpenMetrics, "four"), "four");
        tokio::time::advance(LASTS).await;
        assert_eq!(text(Scope::Devices, Format::Classic, "five"), "five");
    }
}
