//! Rows about requests: how many were granted and refused, and how long they waited.

use std::ops::AddAssign;

use gpush_api::LeaseKind;
use serde::{Deserialize, Serialize};

use super::ended::LeaseOwner;

/// Sums about requests for leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
pub struct RequestSums {
    /// Number of granted requests.
    pub granted: u64,
    /// Number of requests that were refused or cancelled, or that have timed out.
    pub refused: u64,
    /// Time in the queue of granted and refused requests, in ms.
    pub waited_ms: u64,
}

impl RequestSums {
    /// Adds a request.
    pub fn add(&mut self, is_granted: bool, waited_ms: u64) {
        *(if is_granted { &mut self.granted } else { &mut self.refused }) += 1;
        self.waited_ms = self.waited_ms.saturating_add(waited_ms);
    }
}

impl AddAssign for RequestSums {
    fn add_assign(&mut self, other: Self) {
        self.granted += other.granted;
        self.refused += other.refused;
        self.waited_ms = self.waited_ms.saturating_add(other.waited_ms);
    }
}

/// The requests of one owner for leases of one kind, on one UTC day.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestDay {
    /// Start of the day on which the requests were granted or refused, in ms since 1970.
    pub day_ms: i64,
    /// The owner of the requests.
    pub owner: LeaseOwner,
    /// Kind of the leases; `None` if the request was refused before its kind was known.
    pub kind: Option<LeaseKind>,
    /// Sums.
    pub sums: RequestSums,
}
