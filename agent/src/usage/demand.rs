//! Who needs samples, and how often. Without a need, gpushd takes no samples.
//!
//! | need | interval | ends |
//! |---|---|---|
//! | a scrape of `/metrics` | 15 s | 5 minutes after the last one |
//! | `top`, and `status` while it watches | 1 s | 5 s after the last request |
//! | `lease show`, `usage` | one sample now | at once |
//!
//! The shortest interval of all needs counts, so ten open tops cause no more samples than one.

use std::time::Duration;

use gpush_locked::Locked;
use tokio::{sync::Notify, time::Instant};

/// Something that needs samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Need {
    /// Metrics are collected at intervals of up to 5 minutes.
    Scrape,
    /// A person watches the figures.
    Watch,
}

impl Need {
    /// All needs.
    const ALL: [Self; 2] = [Self::Scrape, Self::Watch];

    /// Returns the pause between two samples.
    pub(super) fn interval(self) -> Duration {
        match self {
            Self::Scrape => Duration::from_secs(15),
            Self::Watch => Duration::from_secs(1),
        }
    }

    /// Returns how long the need lasts after it was last noted.
    fn lasts(self) -> Duration {
        match self {
            Self::Scrape => Duration::from_secs(300),
            Self::Watch => Duration::from_secs(5),
        }
    }
}

/// The needs, each with the time when it was last noted.
#[derive(Debug, Default)]
pub(super) struct Demand {
    noted: Locked<[Option<Instant>; Need::ALL.len()]>,
    changed: Notify,
}

impl Demand {
    /// Notes a need.
    pub(super) fn note(&self, need: Need) {
        let now = Instant::now();
        let before = self.strictest(now);
        self.noted.lock()[need as usize] = Some(now);
        // The sampler waits only for a shorter interval than the present one.
        if before.is_none_or(|before| need.interval() < before.interval()) {
            self.changed.notify_one();
        }
    }

    /// Returns the need with the shortest interval; `None` if nothing needs samples at this time.
    pub(super) fn strictest(&self, now: Instant) -> Option<Need> {
        let noted = *self.noted.lock();
        let is_lasting =
            |need: &Need| noted[*need as usize].is_some_and(|at| now.saturating_duration_since(at) < need.lasts());
        Need::ALL.into_iter().filter(is_lasting).min_by_key(|need| need.interval())
    }

    /// Waits until samples are needed more often than before.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn shortest_interval_of_the_lasting_needs_counts() {
        let demand = Demand::default();
        let interval = || demand.strictest(Instant::now()).map(|need| need.interval().as_secs());
        assert_eq!(interval(), None);
        demand.note(Need::Scrape);
        assert_eq!(interval(), Some(15));
        demand.note(Need::Watch);
        assert_eq!(interval(), Some(1));
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(interval(), Some(15), "no client watches any more");
        tokio::time::advance(Duration::from_secs(295)).await;
        assert_eq!(interval(), None, "the last scrape was 5 minutes ago");
    }

    #[tokio::test(start_paused = true)]
    async fn only_a_shorter_interval_wakes_the_sampler() {
        let demand = Demand::default();
        let is_woken = || demand.changed().now_or_never().is_some();
        demand.note(Need::Scrape);
        assert!(is_woken());
        demand.note(Need::Scrape);
        assert!(!is_woken(), "ten scrapers cause no more samples than one");
        demand.note(Need::Watch);
        assert!(is_woken());
        demand.note(Need::Scrape);
        assert!(!is_woken());
    }
}
