//! The order of arrival of all leases and operations that wait for GPUs.

use gpush_api::{GpuIndex, GpuUuid};
use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet},
};

use crate::lease::placement::{Host, PlacementRequest};

use super::{
    limits::can_use_one,
    need::{FirstEntries, Needs, conflict},
    waiter::{Ticket, Waiter},
};

/// An entry of the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QueuedEntry {
    /// The operation or lease.
    pub waiter: Waiter,
    /// The request of a lease; `None` for an operation, and for a lease whose request is not known yet. In a copy for a pass,
    /// also `None` while the grant is being recorded, and while the request exceeds a quota.
    pub wanted: Option<PlacementRequest>,
    /// What an operation needs according to its last plan, or what the last pass reserved for a lease.
    pub needs: Needs,
    /// The longest time in seconds for which a lease occupies its capacity after the grant; `None` if it has no end.
    pub lasts: Option<u64>,
    /// How often later requests got capacity on GPUs that this lease could use.
    pub overtaken: u32,
}

/// The earlier entry that an entry waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ahead {
    /// UUID of a GPU on which the two entries conflict.
    pub gpu_uuid: GpuUuid,
    /// The earlier entry.
    pub waiter: Waiter,
}

/// The entries, in the order of their arrival.
#[derive(Debug, Clone, Default)]
pub struct Queue {
    entries: BTreeMap<Ticket, QueuedEntry>,
    /// Number of entries that have ever been added.
    added: u64,
}

impl PartialEq for Queue {
    /// Two queues with equal entries are equal, even if other entries have left one of them.
    fn eq(&self, other: &Self) -> bool {
        self.entries == other.entries
    }
}

impl Queue {
    /// Adds an entry at the end.
    pub fn push(&mut self, waiter: Waiter, wanted: Option<PlacementRequest>, needs: Needs) -> Ticket {
        self.added += 1;
        let ticket = Ticket(self.added);
        self.entries.insert(ticket, QueuedEntry { waiter, wanted, needs, lasts: None, overtaken: 0 });
        ticket
    }

    /// Returns the entries in order.
    pub fn entries(&self) -> impl Iterator<Item = (Ticket, &QueuedEntry)> {
        self.entries.iter().map(|(ticket, entry)| (*ticket, entry))
    }

    /// Returns an entry.
    #[must_use]
    pub fn get(&self, ticket: Ticket) -> Option<&QueuedEntry> {
        self.entries.get(&ticket)
    }

    /// Returns the position of an entry; 1 is the first.
    #[must_use]
    pub fn position(&self, ticket: Ticket) -> Option<usize> {
        self.entries.contains_key(&ticket).then(|| self.entries.range(..=ticket).count())
    }

    /// Replaces the request of a lease. The entry keeps its position.
    pub fn set_wanted(&mut self, ticket: Ticket, wanted: PlacementRequest) {
        if let Some(entry) = self.entries.get_mut(&ticket) {
            entry.wanted = Some(wanted);
        }
    }

    /// Sets the longest time in seconds for which a lease occupies its capacity after the grant.
    pub fn set_lasts(&mut self, ticket: Ticket, lasts: Option<u64>) {
        if let Some(entry) = self.entries.get_mut(&ticket) {
            entry.lasts = lasts;
        }
    }

    /// Sets how often later requests have overtaken a lease, for example before a restart.
    pub fn set_overtaken(&mut self, ticket: Ticket, overtaken: u32) {
        if let Some(entry) = self.entries.get_mut(&ticket) {
            entry.overtaken = overtaken;
        }
    }

    /// Notes that a request got capacity on these GPUs. `ticket` is its entry; `None` for a request that did not wait. The
    /// earlier leases that could use one of these GPUs were overtaken.
    pub fn note_grant(&mut self, ticket: Option<Ticket>, host: &Host, gpus: &BTreeSet<GpuIndex>) {
        let is_earlier = |other: Ticket| ticket.is_none_or(|ticket| other < ticket);
        for (_, entry) in self.entries.iter_mut().filter(|(other, _)| is_earlier(**other)) {
            let Some(wanted) = &entry.wanted else { continue };
            if can_use_one(host, gpus, wanted) {
                entry.overtaken = entry.overtaken.saturating_add(1);
            }
        }
    }

    /// Replaces the needs of an entry. The entry keeps its position. Returns whether the needs have changed.
    pub fn set_needs(&mut self, ticket: Ticket, needs: Needs) -> bool {
        let Some(entry) = self.entries.get_mut(&ticket) else { return false };
        std::mem::replace(&mut entry.needs, needs) != entry.needs
    }

    /// Removes an entry. Returns whether a later entry conflicts with it.
    pub fn remove(&mut self, ticket: Ticket) -> bool {
        let Some(removed) = self.entries.remove(&ticket) else { return false };
        self.entries.range(ticket..).any(|(_, later)| conflict(&removed.needs, &later.needs).is_some())
    }

    /// Returns for each operation the earlier entry that it waits for; `None` if the operation is first.
    pub fn operations(&self) -> impl Iterator<Item = (Ticket, Option<Ahead>)> {
        let mut first = FirstEntries::default();
        self.entries.iter().filter_map(move |(ticket, entry)| {
            let ahead = match entry.waiter {
                Waiter::Operation(_) => Some((*ticket, self.ahead(&first, &entry.needs))),
                Waiter::Lease(_) => None,
            };
            first.add(*ticket, Cow::Borrowed(&entry.needs));
            ahead
        })
    }

    /// Returns the entry that a new entry with these needs would wait for; `None` if the new entry would be first.
    #[must_use]
    pub fn would_wait_for(&self, needs: &Needs) -> Option<Ahead> {
        let mut first = FirstEntries::default();
        self.entries.iter().for_each(|(ticket, entry)| first.add(*ticket, Cow::Borrowed(&entry.needs)));
        self.ahead(&first, needs)
    }

    fn ahead(&self, first: &FirstEntries<'_>, needs: &Needs) -> Option<Ahead> {
        let (ticket, gpu) = first.ahead_of(needs)?;
        Some(Ahead { gpu_uuid: gpu.clone(), waiter: self.entries.get(&ticket)?.waiter.clone() })
    }

    /// Returns a copy for a pass. It contains the requests of only those leases that need capacity now. A pass decides
    /// again what these leases reserve, so their needs are left out.
    #[must_use]
    pub fn for_pass(&self, needs_capacity: impl Fn(Ticket) -> bool) -> Self {
        let mut copy = self.clone();
        for (ticket, entry) in &mut copy.entries {
            if entry.wanted.is_some() && needs_capacity(*ticket) {
                entry.needs = Needs::new();
            } else {
                entry.wanted = None;
            }
        }
        copy
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::TargetUuid;
    use std::collections::BTreeSet;

    use proptest::{collection::btree_map, prelude::*};

    use super::*;
    use crate::schedule::{ClaimedTargets, Need};

    fn gpu(index: u8) -> GpuUuid {
        format!("GPU-{index}").into()
    }

    fn lane(gpus: &[u8], targets: &[&str]) -> Needs {
        let claimed = || ClaimedTargets::Targets(targets.iter().map(|target| TargetUuid::from(*target)).collect());
        gpus.iter().map(|index| (gpu(*index), Need::Lane(claimed()))).collect()
    }

    fn part(index: u8, target: &str) -> Needs {
        Needs::from([(gpu(index), Need::Parts(BTreeSet::from([target.into()])))])
    }

    fn push(queue: &mut Queue, id: &str, needs: Needs) -> Ticket {
        queue.push(Waiter::Operation(id.to_owned()), None, needs)
    }

    fn ahead(index: u8, id: &str) -> Option<Ahead> {
        Some(Ahead { gpu_uuid: gpu(index), waiter: Waiter::Operation(id.to_owned()) })
    }

    fn ahead_of(queue: &Queue, ticket: Ticket) -> Option<Ahead> {
        queue.operations().find(|(one, _)| *one == ticket).expect("an operation").1
    }

    #[test]
    fn waiting_operation_blocks_later_leases_on_its_targets() {
        let mut queue = Queue::default();
        let operation = push(&mut queue, "op-1", lane(&[0], &["MIG-a"]));
        assert_eq!(ahead_of(&queue, operation), None);
        assert_eq!(queue.would_wait_for(&part(0, "MIG-a")), ahead(0, "op-1"));
        assert_eq!(queue.would_wait_for(&part(0, "MIG-b")), None, "it stays");
        assert_eq!(queue.would_wait_for(&part(1, "MIG-a")), None, "another GPU");
        let whole = Needs::from([(gpu(0), Need::Lane(ClaimedTargets::Gpu))]);
        assert!(queue.set_needs(operation, whole.clone()));
        assert!(!queue.set_needs(operation, whole), "the same needs");
        assert_eq!(queue.would_wait_for(&part(0, "MIG-b")), ahead(0, "op-1"), "a change of mode");
        assert!(!queue.remove(operation), "nothing was behind it");
        assert_eq!(queue.would_wait_for(&part(0, "MIG-a")), None);
    }

    #[test]
    fn earlier_lease_goes_before_the_operation() {
        let mut queue = Queue::default();
        let lease = queue.push(Waiter::Lease("L1".to_owned()), None, part(0, "GPU-0"));
        let operation = push(&mut queue, "op-1", lane(&[0], &["GPU-0"]));
        let expected = Some(Ahead { gpu_uuid: gpu(0), waiter: Waiter::Lease("L1".to_owned()) });
        assert_eq!(queue.operations().collect::<Vec<_>>(), [(operation, expected)]);
        assert_eq!((queue.position(operation), queue.position(Ticket(9))), (Some(2), None));
        assert!(queue.remove(lease), "the operation was behind it");
        assert_eq!((ahead_of(&queue, operation), queue.position(operation)), (None, Some(1)));
    }

    #[test]
    fn operation_on_several_gpus_waits_until_it_is_first_on_all() {
        let mut queue = Queue::default();
        let one = push(&mut queue, "op-1", lane(&[0], &[]));
        let gang = push(&mut queue, "op-2", lane(&[0, 1], &[]));
        let later = push(&mut queue, "op-3", lane(&[1], &[]));
        assert_eq!(ahead_of(&queue, gang), ahead(0, "op-1"));
        assert_eq!(ahead_of(&queue, later), None, "GPU 1 is free until the gang can have both");
        queue.remove(one);
        assert_eq!(ahead_of(&queue, gang), None);
        assert_eq!(ahead_of(&queue, later), ahead(1, "op-2"));
    }

    fn any_need() -> impl Strategy<Value = Need> {
        let target = || prop_oneof![Just("a"), Just("b"), Just("c")].prop_map(TargetUuid::from);
        prop_oneof![
            proptest::collection::btree_set(target(), 0..3).prop_map(|set| Need::Lane(ClaimedTargets::Targets(set))),
            Just(Need::Lane(ClaimedTargets::Gpu)),
            target().prop_map(|target| Need::Parts(BTreeSet::from([target]))),
        ]
    }

    fn any_needs() -> impl Strategy<Value = Needs> {
        btree_map((0..4_u8).prop_map(gpu), any_need(), 1..4)
    }

    proptest! {
        #[test]
        fn order_of_arrival_holds(all in proptest::collection::vec(any_needs(), 1..12), newcomer in any_needs()) {
            let mut queue = Queue::default();
            let mut tickets = Vec::new();
            let mut before: Vec<Option<Ahead>> = Vec::new();
            for (at, needs) in all.iter().enumerate() {
                let would_wait_for = queue.would_wait_for(needs);
                tickets.push(push(&mut queue, &at.to_string(), needs.clone()));
                let now: Vec<_> = queue.operations().map(|(_, ahead)| ahead).collect();
                // A later entry must not change what the earlier entries wait for.
                prop_assert_eq!(&now[..at], &before[..]);
                // A new entry waits for the entry that `would_wait_for` named before.
                prop_assert_eq!(&now[at], &would_wait_for);
                before = now;
            }
            prop_assert_eq!(&before[0], &None, "the first to come is first");
            let conflicts = |one: &Needs, other: &Needs| conflict(one, other).is_some();
            let first: Vec<usize> = (0..all.len()).filter(|at| before[*at].is_none()).collect();
            for at in 0..all.len() {
                let held_back_by = first.iter().find(|earlier| **earlier < at && conflicts(&all[**earlier], &all[at]));
                // Each entry waits only for the earliest *first* entry that it conflicts with.
                let waiter = held_back_by.map(|earlier| Waiter::Operation(earlier.to_string()));
                prop_assert_eq!(before[at].as_ref().map(|ahead| ahead.waiter.clone()), waiter);
            }
            let held_back = queue.would_wait_for(&newcomer).is_some();
            prop_assert_eq!(held_back, first.iter().any(|at| conflicts(&all[*at], &newcomer)));
            // An entry is first when all entries before it have left the queue.
            for ticket in tickets {
                prop_assert_eq!(ahead_of(&queue, ticket), None);
                queue.remove(ticket);
            }
        }
    }
}
