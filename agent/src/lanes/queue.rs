//! The order of arrival of all operations and leases that wait for GPUs. This module does no I/O.
//!
//! An entry of the queue is an operation or a lease. An operation needs the lanes of one or several GPUs; a lease needs
//! parts of targets. Two entries conflict if they need the same GPU and cannot both get what they need there:
//!
//! | | lane | part of target T |
//! |---|---|---|
//! | lane | always | if the operation's last plan needs T, or the whole GPU, exclusively |
//! | part of target T | as above | if both need a part of T |
//!
//! An entry is *first* if it conflicts with no earlier entry that is first. Only first entries delay later entries. So
//! if an operation waits for one of its GPUs, it does not block its other GPUs.
//!
//! An entry that is first delays all later entries that conflict with it, even while it cannot begin itself. So no
//! later entry overtakes it. An entry waits only for earlier entries, so no new entry can delay it.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

/// A position in the order of arrival.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Ticket(pub(crate) u64);

/// The part of a GPU that an operation's last plan needs exclusively.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Reserve {
    /// These targets, by UUID.
    Targets(BTreeSet<String>),
    /// The whole GPU, because the plan changes the GPU's mode, or there is no plan yet.
    Gpu,
}

/// What an entry needs on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Need {
    /// An operation needs the lane of the GPU, and exclusive use of what [`Reserve`] names.
    Lane(Reserve),
    /// Parts of these targets, by UUID.
    Parts(BTreeSet<String>),
}

impl Need {
    /// Returns whether the entry reserves this target or needs a part of it.
    pub(crate) fn concerns(&self, target: &str) -> bool {
        match self {
            Self::Lane(Reserve::Gpu) => true,
            Self::Lane(Reserve::Targets(targets)) | Self::Parts(targets) => targets.contains(target),
        }
    }

    fn conflicts(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Lane(_), Self::Lane(_)) => true,
            (Self::Lane(reserve), Self::Parts(targets)) | (Self::Parts(targets), Self::Lane(reserve)) => {
                match reserve {
                    Reserve::Gpu => true,
                    Reserve::Targets(taken) => !taken.is_disjoint(targets),
                }
            }
            (Self::Parts(one), Self::Parts(other)) => !one.is_disjoint(other),
        }
    }
}

/// The needs of an entry, by UUID of the GPU.
pub(crate) type Needs = BTreeMap<String, Need>;

/// The kind of an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Waiter {
    /// The operation with this id.
    Operation(String),
    /// The lease with this id.
    Lease(String),
}

impl Waiter {
    /// Returns the id: `op-7`, `L17`.
    pub(crate) fn name(&self) -> &str {
        match self {
            Self::Operation(id) | Self::Lease(id) => id,
        }
    }
}

impl fmt::Display for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Operation(id) => write!(f, "operation {id}"),
            Self::Lease(id) => write!(f, "lease {id}"),
        }
    }
}

/// An entry of the queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct QueueEntry {
    pub(crate) waiter: Waiter,
    pub(crate) needs: Needs,
}

impl QueueEntry {
    /// Returns the UUID of a GPU on which the entry and `needs` conflict.
    fn conflict(&self, needs: &Needs) -> Option<&String> {
        let both = |(uuid, need): &(&String, &Need)| needs.get(*uuid).is_some_and(|other| other.conflicts(need));
        self.needs.iter().find(both).map(|(uuid, _)| uuid)
    }
}

/// The earlier entry that an entry waits for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Ahead {
    /// UUID of the GPU on which the two entries conflict.
    pub(crate) gpu: String,
    pub(crate) waiter: Waiter,
}

/// The entries, in the order of their arrival.
#[derive(Debug, Default)]
pub(crate) struct Queue {
    entries: BTreeMap<Ticket, QueueEntry>,
    next: u64,
}

impl Queue {
    /// Appends an entry.
    pub(crate) fn push(&mut self, entry: QueueEntry) -> Ticket {
        let ticket = Ticket(self.next);
        self.next += 1;
        self.entries.insert(ticket, entry);
        ticket
    }

    /// Returns all entries, in order.
    pub(crate) fn entries(&self) -> impl Iterator<Item = (Ticket, &QueueEntry)> {
        self.entries.iter().map(|(ticket, entry)| (*ticket, entry))
    }

    /// Replaces the needs of an entry. The entry keeps its position.
    pub(crate) fn set_needs(&mut self, ticket: Ticket, needs: Needs) {
        if let Some(entry) = self.entries.get_mut(&ticket) {
            entry.needs = needs;
        }
    }

    /// Removes an entry. Returns whether a later entry conflicts with it.
    pub(crate) fn remove(&mut self, ticket: Ticket) -> bool {
        let Some(removed) = self.entries.remove(&ticket) else { return false };
        self.entries.range(ticket..).any(|(_, later)| removed.conflict(&later.needs).is_some())
    }

    /// Returns the earlier entry that an entry waits for; `None` if the entry is first.
    pub(crate) fn ahead_of(&self, ticket: Ticket) -> Option<Ahead> {
        let entry = self.entries.get(&ticket)?;
        Self::conflict(self.first_before(Some(ticket)).into_iter(), &entry.needs)
    }

    /// Returns the entry that a new entry with these needs would wait for; `None` if the new entry would be first.
    pub(crate) fn would_wait_for(&self, needs: &Needs) -> Option<Ahead> {
        Self::conflict(self.first_before(None).into_iter(), needs)
    }

    fn conflict<'a>(mut first: impl Iterator<Item = &'a QueueEntry>, needs: &Needs) -> Option<Ahead> {
        first.find_map(|entry| {
            let gpu = entry.conflict(needs)?.clone();
            Some(Ahead { gpu, waiter: entry.waiter.clone() })
        })
    }

    /// Returns the entries that are *first*, in order: those before `end`, or all of them.
    fn first_before(&self, end: Option<Ticket>) -> Vec<&QueueEntry> {
        let mut first: Vec<&QueueEntry> = Vec::new();
        for (ticket, entry) in &self.entries {
            if end == Some(*ticket) {
                break;
            }
            if first.iter().all(|earlier| earlier.conflict(&entry.needs).is_none()) {
                first.push(entry);
            }
        }
        first
    }
}

#[cfg(test)]
mod tests {
    use proptest::{collection::btree_map, prelude::*};

    use super::*;

    fn gpu(index: u8) -> String {
        format!("GPU-{index}")
    }

    fn lane(gpus: &[u8], targets: &[&str]) -> Needs {
        let reserve = || Reserve::Targets(targets.iter().map(ToString::to_string).collect());
        gpus.iter().map(|index| (gpu(*index), Need::Lane(reserve()))).collect()
    }

    fn part(index: u8, target: &str) -> Needs {
        Needs::from([(gpu(index), Need::Parts(BTreeSet::from([target.to_owned()])))])
    }

    fn entry(id: &str, needs: Needs) -> QueueEntry {
        QueueEntry { waiter: Waiter::Operation(id.to_owned()), needs }
    }

    fn ahead(index: u8, id: &str) -> Option<Ahead> {
        Some(Ahead { gpu: gpu(index), waiter: Waiter::Operation(id.to_owned()) })
    }

    #[test]
    fn waiting_operation_blocks_later_leases_on_its_targets() {
        let mut queue = Queue::default();
        let operation = queue.push(entry("op-1", lane(&[0], &["MIG-a"])));
        assert_eq!(queue.ahead_of(operation), None);
        assert_eq!(queue.would_wait_for(&part(0, "MIG-a")), ahead(0, "op-1"));
        assert_eq!(queue.would_wait_for(&part(0, "MIG-b")), None, "it stays");
        assert_eq!(queue.would_wait_for(&part(1, "MIG-a")), None, "another GPU");
        queue.set_needs(operation, Needs::from([(gpu(0), Need::Lane(Reserve::Gpu))]));
        assert_eq!(queue.would_wait_for(&part(0, "MIG-b")), ahead(0, "op-1"), "a change of mode");
        assert!(!queue.remove(operation), "nothing was behind it");
        assert_eq!(queue.would_wait_for(&part(0, "MIG-a")), None);
    }

    #[test]
    fn earlier_lease_goes_before_the_operation() {
        let mut queue = Queue::default();
        let share = queue.push(QueueEntry { waiter: Waiter::Lease("L1".to_owned()), needs: part(0, "GPU-0") });
        let operation = queue.push(entry("op-1", lane(&[0], &["GPU-0"])));
        assert_eq!(queue.ahead_of(share), None);
        assert_eq!(queue.ahead_of(operation), Some(Ahead { gpu: gpu(0), waiter: Waiter::Lease("L1".to_owned()) }));
        assert!(queue.remove(share), "the operation was behind it");
        assert_eq!(queue.ahead_of(operation), None);
    }

    #[test]
    fn operation_on_several_gpus_waits_until_it_is_first_on_all() {
        let mut queue = Queue::default();
        let one = queue.push(entry("op-1", lane(&[0], &[])));
        let gang = queue.push(entry("op-2", lane(&[0, 1], &[])));
        let later = queue.push(entry("op-3", lane(&[1], &[])));
        assert_eq!(queue.ahead_of(gang), ahead(0, "op-1"));
        assert_eq!(queue.ahead_of(later), None, "GPU 1 is free until the gang can have both");
        queue.remove(one);
        assert_eq!(queue.ahead_of(gang), None);
        assert_eq!(queue.ahead_of(later), ahead(1, "op-2"));
    }

    fn any_need() -> impl Strategy<Value = Need> {
        let target = || prop_oneof![Just("a".to_owned()), Just("b".to_owned()), Just("c".to_owned())];
        prop_oneof![
            proptest::collection::btree_set(target(), 0..3).prop_map(|set| Need::Lane(Reserve::Targets(set))),
            Just(Need::Lane(Reserve::Gpu)),
            target().prop_map(|target| Need::Parts(BTreeSet::from([target]))),
        ]
    }

    fn any_needs() -> impl Strategy<Value = Needs> {
        btree_map((0..4_u8).prop_map(gpu), any_need(), 1..4)
    }

    fn conflict(one: &Needs, other: &Needs) -> bool {
        entry("", one.clone()).conflict(other).is_some()
    }

    proptest! {
        #[test]
        fn order_of_arrival_holds(all in proptest::collection::vec(any_needs(), 1..12), newcomer in any_needs()) {
            let mut queue = Queue::default();
            let mut tickets = Vec::new();
            let mut before: Vec<Option<Ahead>> = Vec::new();
            for (at, needs) in all.iter().enumerate() {
                let would_wait_for = queue.would_wait_for(needs);
                tickets.push(queue.push(entry(&at.to_string(), needs.clone())));
                let now: Vec<_> = tickets.iter().map(|ticket| queue.ahead_of(*ticket)).collect();
                // A later entry must not change what the earlier entries wait for.
                prop_assert_eq!(&now[..at], &before[..]);
                // A new entry waits for the entry that `would_wait_for` named before.
                prop_assert_eq!(&now[at], &would_wait_for);
                before = now;
            }
            prop_assert_eq!(&before[0], &None, "the first to come is first");
            let first: Vec<usize> = (0..all.len()).filter(|at| before[*at].is_none()).collect();
            for at in 0..all.len() {
                let held_back_by = first.iter().find(|earlier| **earlier < at && conflict(&all[**earlier], &all[at]));
                // Each entry waits only for the earliest *first* entry that it conflicts with.
                let waiter = held_back_by.map(|earlier| Waiter::Operation(earlier.to_string()));
                prop_assert_eq!(before[at].as_ref().map(|ahead| ahead.waiter.clone()), waiter);
            }
            let held_back = queue.would_wait_for(&newcomer).is_some();
            prop_assert_eq!(held_back, first.iter().any(|at| conflict(&all[*at], &newcomer)));
            // An entry is first when all entries before it have left the queue.
            for ticket in tickets {
                prop_assert_eq!(queue.ahead_of(ticket), None);
                queue.remove(ticket);
            }
        }
    }
}
