//! The needs for samples, and their intervals. Without a need, gpushd takes no samples.
//!
//! | need | interval | ends |
//! |---|---|---|
//! | a scrape of `/metrics` | 15 s | 5 minutes after the last one |
//! | the sums of open leases (`[history]`), policies that end leases (`[idle]`, `over_limit`) | 15 s | with the last lease |
//! | a free GPU whose power without work is not known | 15 s | after 4 samples at the latest |
//! | `top`, and other clients that watch | 1 s | 5 s after the last request |
//!
//! The shortest interval of all needs counts, so ten open tops cause no more samples than one.

use std::time::Duration;

use gpush_locked::Locked;
use tokio::{sync::Notify, time::Instant};

/// Something that needs samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Need {
    /// Metrics were scraped in the last 5 minutes.
    Scrape,
    /// The sums of open leases are recorded, or a policy acts on them.
    Record,
    /// A person watches the figures.
    Watch,
}

impl Need {
    /// The needs that clients note.
    const NOTED: [Self; 2] = [Self::Scrape, Self::Watch];

    /// Returns the pause between two samples.
    pub(super) fn interval(self) -> Duration {
        match self {
            Self::Scrape | Self::Record => Duration::from_secs(15),
            Self::Watch => Duration::from_secs(1),
        }
    }

    /// Returns how long the need lasts after it was last noted.
    fn lasts(self) -> Duration {
        match self {
            Self::Scrape => Duration::from_secs(300),
            Self::Watch => Duration::from_secs(5),
            Self::Record => Duration::MAX,
        }
    }
}

/// All present needs together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Needs {
    /// Pause between two samples.
    pub(super) interval: Duration,
    /// Longest pause that can follow while any of the needs lasts. Each sample announces it, so no time counts as
    /// unknown after a client stops watching.
    pub(super) promised: Duration,
    /// Whether a person watches, and wants all figures.
    pub(super) is_watched: bool,
    /// Whether metrics are collected.
    pub(super) is_scraped: bool,
}

/// The needs, each with the time when it was last noted.
#[derive(Debug, Default)]
pub(super) struct Demand {
    noted: Locked<[Option<Instant>; 3]>,
    changed: Notify,
}

impl Demand {
    /// Notes a need.
    pub(super) fn note(&self, need: Need) {
        let now = Instant::now();
        let before = self.needs(now, false);
        self.noted.lock()[need as usize] = Some(now);
        // The sampler waits only for a shorter interval than the present one.
        if before.is_none_or(|before| need.interval() < before.interval) {
            self.changed.notify_one();
        }
    }

    /// Returns all needs at this time together; `None` if nothing needs samples. `records` says whether open leases or
    /// free GPUs need samples.
    pub(super) fn needs(&self, now: Instant, records: bool) -> Option<Needs> {
        let noted = *self.noted.lock();
        let is_lasting =
            |need: &Need| noted[*need as usize].is_some_and(|at| now.saturating_duration_since(at) < need.lasts());
        let lasting = Need::NOTED.into_iter().filter(is_lasting).chain(records.then_some(Need::Record));
        let intervals: Vec<Duration> = lasting.map(Need::interval).collect();
        let (is_watched, is_scraped) = (is_lasting(&Need::Watch), is_lasting(&Need::Scrape));
        let (interval, promised) = (intervals.iter().min().copied()?, intervals.iter().max().copied()?);
        Some(Needs { interval, promised, is_watched, is_scraped })
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
        let seconds = |records| {
            let needs = demand.needs(Instant::now(), records)?;
            Some((needs.interval.as_secs(), needs.promised.as_secs(), needs.is_watched))
        };
        assert_eq!(seconds(false), None);
        assert_eq!(seconds(true), Some((15, 15, false)));
        demand.note(Need::Watch);
        assert_eq!(seconds(false), Some((1, 1, true)));
        demand.note(Need::Scrape);
        assert_eq!(seconds(false), Some((1, 15, true)), "the next sample can come 15 s later");
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(seconds(false), Some((15, 15, false)), "no client watches any more");
        tokio::time::advance(Duration::from_secs(295)).await;
        assert_eq!(seconds(false), None, "the last scrape was 5 minutes ago");
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
