//! The cost of a placement: a list of counts, the most important first. The costs of several GPUs
//! are added. Costs are compared count by count.

use std::ops::Add;

use super::{PlacementPolicy, ends::Blocking};

/// A cost. The counts are compared in order, so the first count has the highest priority. The second one is a time: of two
/// costs that are added, the later time counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct PlacementCost([u64; 11]);

/// The most important counts of a cost: what must end (shares without a known end, the latest known end, all shares),
/// memory slices, compute slices, engines, and the room that is lost (`pack`) or the created instances (`spread`). No
/// further member makes one of them smaller.
pub(super) type Growth = [u64; 7];

/// Index of the latest known end in a cost.
const LATEST: usize = 1;

/// Number of counts that say what must end.
const BLOCKING: usize = 3;

/// The parts of a cost.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Parts {
    /// What must end first. Nothing, except in reservations.
    pub(super) blocking: Blocking,
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
        let Blocking { unknown, latest, shares } = self.blocking;
        let [unknown, shares] = [unknown, shares].map(u64::from);
        let [created, destroyed, slices, free, load] =
            [self.created, self.destroyed, self.destroyed_slices, self.free, self.load].map(u64::from);
        let lost = self.lost;
        PlacementCost(match policy {
            PlacementPolicy::Pack => {
                [unknown, latest, shares, memory, compute, engines, lost, created, destroyed, slices, free]
            }
            PlacementPolicy::Spread => {
                [unknown, latest, shares, memory, compute, engines, created, load, destroyed, slices, lost]
            }
        })
    }
}

impl PlacementCost {
    /// Returns the most important counts. Each further member increases them by at least its own counts.
    pub(super) fn growth(self) -> Growth {
        let [unknown, latest, shares, memory, compute, engines, seventh, ..] = self.0;
        [unknown, latest, shares, memory, compute, engines, seventh]
    }

    /// Returns the time at which the last share in the way ends; `None` if it is not known. 0 if nothing is in the way.
    pub(super) fn free_at(self) -> Option<u64> {
        let [unknown, latest, ..] = self.0;
        (unknown == 0).then_some(latest)
    }
}

impl Add for PlacementCost {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(sum(self.0, other.0))
    }
}

/// Returns the growth of two sets of members together.
pub(super) fn both(one: Growth, other: Growth) -> Growth {
    sum(one, other)
}

/// Returns a growth that is at most each of the two, and stays so if the same growth is added to all. A time is not added,
/// so the counts that say what must end are compared one by one.
pub(super) fn least(one: Growth, other: Growth) -> Growth {
    let rest = if one[BLOCKING..] <= other[BLOCKING..] { one } else { other };
    std::array::from_fn(|at| if at < BLOCKING { one[at].min(other[at]) } else { rest[at] })
}

fn sum<const N: usize>(one: [u64; N], other: [u64; N]) -> [u64; N] {
    std::array::from_fn(|at| if at == LATEST { one[at].max(other[at]) } else { one[at].saturating_add(other[at]) })
}
