//! The exact search. It assigns a spot to each item, without overlaps, and keeps existing items
//! where possible.
//!
//! The planner uses the search for GPU instances on a GPU and for compute instances in a GPU
//! instance. Each requested item gets one of its possible spots, and no two items share a slice.
//! The search returns the assignment that destroys least. Among equal assignments, it prefers more
//! remaining room, then lower placements. Equal items form a group and take spots in ascending
//! order, so that the search examines no arrangement twice.
//!
//! The algorithm is branch and bound, over at most [`MOST_INSTANCES`] items. The bound is the
//! largest possible saving of the items that are not placed yet. The inner loop uses only masks and
//! integers, and allocates nothing.

use std::cmp::Reverse;

use crate::geometry::{MOST_INSTANCES, Slices};

use super::objective::Cost;
use super::room::Room;

/// A possible spot for an item of a group.
#[derive(Debug, Clone, Copy)]
pub(super) struct Candidate {
    /// Slices that the spot covers.
    pub(super) slices: Slices,
    /// Order among spots of equal cost: by start, then by profile id.
    pub(super) rank: u64,
    /// Cost that is saved if the same item already exists at this spot and is kept.
    pub(super) saving: Cost,
}

/// Returns the rank of a profile that starts at `start`.
pub(super) fn rank(start: u8, profile_id: u32) -> u64 {
    u64::from(start) << 32 | u64::from(profile_id)
}

/// Equal items.
#[derive(Debug)]
pub(super) struct ItemGroup {
    /// Number of items.
    pub(super) count: usize,
    /// Possible spots, sorted by start.
    pub(super) candidates: Vec<Candidate>,
}

/// The input of the search.
pub(super) struct SearchProblem<'a> {
    /// The requested items.
    pub(super) groups: &'a [ItemGroup],
    /// Cost of destroying all existing items.
    pub(super) destroy_all: Cost,
    /// Returns the room for later requests beside items at these spots. The order of the items is that of the groups.
    pub(super) room: &'a dyn Fn(&[Slices]) -> Room,
}

/// The best arrangement.
#[derive(Debug, Clone, Copy)]
pub(super) struct Answer {
    /// Cost of the arrangement.
    pub(super) cost: Cost,
    /// Index of each item's candidate, group by group.
    chosen: [u8; MOST_INSTANCES],
}

impl Answer {
    /// Returns the candidate index of item `n`. The numbers of items continue from one group to the
    /// next.
    pub(super) fn candidate(&self, n: usize) -> usize {
        usize::from(self.chosen[n])
    }
}

impl SearchProblem<'_> {
    /// Returns the best arrangement; `None` if no arrangement is possible.
    pub(super) fn solve(&self) -> Option<Answer> {
        let mut things = [0; MOST_INSTANCES];
        let mut most_saved = [Cost::NONE; MOST_INSTANCES + 1];
        let mut count = 0;
        for (index, group) in self.groups.iter().enumerate() {
            if count + group.count > MOST_INSTANCES || group.candidates.len() > usize::from(u8::MAX) {
                return None;
            }
            things[count..count + group.count].fill(index);
            count += group.count;
        }
        // Goes from the last item to the first. The last k items of a group save at most the sum of
        // the k largest savings of the group. This sum is the upper bound.
        let mut thing = count;
        for group in self.groups.iter().rev() {
            let after = most_saved[thing];
            let mut savings = [Cost::NONE; MOST_INSTANCES];
            for candidate in &group.candidates {
                insert_largest(&mut savings[..group.count], candidate.saving);
            }
            let mut sum = after;
            for saving in &savings[..group.count] {
                thing -= 1;
                sum += *saving;
                most_saved[thing] = sum;
            }
        }
        let mut search =
            PlanSearch { problem: self, things: &things[..count], most_saved, chosen: [0; MOST_INSTANCES], best: None };
        search.place(0, Slices::NONE, self.destroy_all);
        search.best.map(|best| Answer { cost: best.cost, chosen: best.chosen })
    }
}

/// Inserts a value into `largest`, which contains the largest values so far in descending order.
fn insert_largest(largest: &mut [Cost], mut value: Cost) {
    for kept in largest {
        if value > *kept {
            std::mem::swap(kept, &mut value);
        }
    }
}

struct BestArrangement {
    cost: Cost,
    room: Room,
    ranks: [u64; MOST_INSTANCES],
    chosen: [u8; MOST_INSTANCES],
}

struct PlanSearch<'a> {
    problem: &'a SearchProblem<'a>,
    /// Group of each item.
    things: &'a [usize],
    /// For each item, the largest possible saving of this item and all later items together.
    most_saved: [Cost; MOST_INSTANCES + 1],
    chosen: [u8; MOST_INSTANCES],
    best: Option<BestArrangement>,
}

impl PlanSearch<'_> {
    fn place(&mut self, thing: usize, taken: Slices, cost: Cost) {
        if self.best.as_ref().is_some_and(|best| cost - self.most_saved[thing] > best.cost) {
            return;
        }
        let Some(&group) = self.things.get(thing) else {
            return self.compare_with_best(cost);
        };
        let problem = self.problem;
        let after_twin = thing > 0 && self.things[thing - 1] == group;
        let first = if after_twin { usize::from(self.chosen[thing - 1]) + 1 } else { 0 };
        let candidates = &problem.groups[group].candidates;
        for (n, candidate) in candidates.iter().enumerate().skip(first) {
            if !candidate.slices.overlaps(taken) {
                self.chosen[thing] = n as u8;
                self.place(thing + 1, taken.union(candidate.slices), cost - candidate.saving);
            }
        }
    }

    /// Compares a complete arrangement with the best one so far.
    fn compare_with_best(&mut self, cost: Cost) {
        let mut spots = [Slices::NONE; MOST_INSTANCES];
        for (thing, group) in self.things.iter().enumerate() {
            spots[thing] = self.problem.groups[*group].candidates[usize::from(self.chosen[thing])].slices;
        }
        let room = (self.problem.room)(&spots[..self.things.len()]);
        let ranks = self.ranks();
        let better = self
            .best
            .as_ref()
            .is_none_or(|best| (cost, Reverse(room), &ranks) < (best.cost, Reverse(best.room), &best.ranks));
        if better {
            self.best = Some(BestArrangement { cost, room, ranks, chosen: self.chosen });
        }
    }

    /// Returns the ranks of all items in the arrangement, lowest first.
    fn ranks(&self) -> [u64; MOST_INSTANCES] {
        let mut ranks = [u64::MAX; MOST_INSTANCES];
        for (thing, group) in self.things.iter().enumerate() {
            ranks[thing] = self.problem.groups[*group].candidates[usize::from(self.chosen[thing])].rank;
        }
        ranks[..self.things.len()].sort_unstable();
        ranks
    }
}
