//! The cost of a placement: a list of counts, the most important first. The costs of several GPUs
//! are added. Costs are compared count by count.

use std::ops::Add;

use super::PlacementPolicy;

/// A cost. The counts are compared in order, so the first count has the highest priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct PlacementCost([u64; 9]);

/// The most important counts of a cost: blocked, memory slices, compute slices, engines, and the room that is lost
/// (`pack`) or the created instances (`spread`). No further member makes one of them smaller.
pub(super) type Growth = [u64; 5];

/// The parts of a cost.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Parts {
    /// Number of occupied instances and shares that must become free first. Always zero, except in
    /// reservations.
    pub(super) blocked: u32,
    /// Free GPU instances that are destroyed.
    pub(super) destroyed: u32,
    /// Memory slices of the destroyed instances.
    pub(super) destroyed_slices: u32,
    /// Size of the granted devices: memory slices, compute slices, engines.
    pub(super) size: [u32; 3],
    pub(super) created: u32,
    /// Room that the assignment takes from later requests: see `Room::later` in `plan::room`.
    pub(super) lost: u64,
    /// Free memory slices on the chosen GPUs. The lower the number, the fuller are these GPUs.
    pub(super) free: u32,
    /// Memory slices that are already occupied on the member's GPU, summed over all members.
    pub(super) load: u32,
}

impl Parts {
    /// Returns the cost, with its counts in the order of the policy.
    pub(super) fn cost(self, policy: PlacementPolicy) -> PlacementCost {
        let [memory, compute, engines] = self.size.map(u64::from);
        let [blocked, created, destroyed, slices, free, load] =
            [self.blocked, self.created, self.destroyed, self.destroyed_slices, self.free, self.load].map(u64::from);
        PlacementCost(match policy {
            PlacementPolicy::Pack => [blocked, memory, compute, engines, self.lost, created, destroyed, slices, free],
            PlacementPolicy::Spread => [blocked, memory, compute, engines, created, load, destroyed, slices, self.lost],
        })
    }
}

impl PlacementCost {
    /// Returns the most important counts. Each further member increases them by at least its own counts.
    pub(super) fn growth(self) -> Growth {
        let [blocked, memory, compute, engines, fifth, ..] = self.0;
        [blocked, memory, compute, engines, fifth]
    }
}

impl Add for PlacementCost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        let mut sum = self.0;
        for (sum, other) in sum.iter_mut().zip(other.0) {
            *sum = sum.saturating_add(other);
        }
        Self(sum)
    }
}
