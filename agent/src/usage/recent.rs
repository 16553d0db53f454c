//! Leases that have ended a short time ago. Metrics show their final sums for 5 minutes, so that
//! scrapers can see them.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use gpush_usage::ledger::LeaseTotals;
use tokio::time::Instant;

use crate::state::OpenLease;

/// How long a lease is kept after its end.
const LASTS: Duration = Duration::from_secs(300);
/// Maximum number of leases that are kept.
const MOST: usize = 1000;

/// Leases that have ended, in the order of their ends.
#[derive(Debug, Default)]
pub(super) struct RecentlyEnded(VecDeque<(Instant, Arc<OpenLease>, LeaseTotals)>);

impl RecentlyEnded {
    /// Notes that a lease has ended.
    pub(super) fn note(&mut self, lease: Arc<OpenLease>, totals: LeaseTotals) {
        while self.0.len() >= MOST || self.0.front().is_some_and(|(at, ..)| at.elapsed() >= LASTS) {
            self.0.pop_front();
        }
        self.0.push_back((Instant::now(), lease, totals));
    }

    /// Returns the leases.
    pub(super) fn iter(&self) -> impl Iterator<Item = (&Arc<OpenLease>, &LeaseTotals)> {
        self.0.iter().filter(|(at, ..)| at.elapsed() < LASTS).map(|(_, lease, totals)| (lease, totals))
    }
}
