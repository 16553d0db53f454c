//! The queue: one order of arrival for queued leases and queued operations.
//!
//! ```text
//! push ──► entries in order ──schedule(host)──► Grant      the lease can be granted now
//!                                               Ready      the operation is first on all its GPUs
//!                                               Waits      its reservation, and the earlier entries it waits for
//!                                               Never      the host could not fulfil it even if all leases ended
//! ```
//!
//! Each pass goes through the entries in order, on a copy of the host:
//!
//! - An entry that can be granted occupies its assignment.
//! - An entry that cannot be granted reserves capacity on GPUs where no earlier entry has a
//!   reservation. A lease reserves the assignment for which the fewest occupied shares must become
//!   free. It never reserves more than it requested. An operation reserves all targets that its
//!   last plan removes or changes.
//! - Later entries are placed on the remaining capacity. So a later, smaller request can be granted
//!   at once, but never delays an earlier entry.
//!
//! Further rules:
//!
//! - A gang, or an operation on several GPUs, reserves nothing until it is the first entry on all
//!   of its GPUs. So two such entries cannot wait for each other.
//! - No later entry is placed on a reservation. So the number of occupied shares that an entry
//!   waits for never grows, and later entries cannot overtake that entry indefinitely.
//! - A grant that creates instances claims its GPUs. These GPUs accept grants again in the first
//!   pass after the operation of the grant.
//! - The queue itself holds no capacity. The caller reserves the capacity of a granted assignment
//!   before the next pass.
//!
//! Within one pass, GPUs are identified by index. The caller updates the entries if an index
//! changes.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::lease::placement::{
    Assignment, Closed, Host, Member, NoAssignment, PlacementPolicy, PlacementRequest, place,
};

/// Position in the order of arrival: the sequence number of the entry's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// The targets on one GPU that the last plan of a queued operation removes or changes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ClaimedTargets {
    /// Targets with these UUIDs.
    Targets(BTreeSet<String>),
    /// The whole GPU: the plan changes its mode or resets it, or there is no plan yet.
    Gpu,
}

/// A queued entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueuedEntry {
    /// A lease.
    Lease(PlacementRequest),
    /// An operation. By GPU index, the targets that the operation removes or changes.
    Operation(BTreeMap<u32, ClaimedTargets>),
}

/// The result of one pass for an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The lease can be granted now.
    Grant(Assignment),
    /// The operation is the first entry on all its GPUs. It can begin if nothing in use blocks it.
    Ready,
    /// The entry waits.
    Waits {
        /// Assignment that is reserved for the entry; `None` until the entry is first in the queue
        /// of every one of its GPUs.
        reserves: Option<Assignment>,
        /// Earlier entries that have reservations on GPUs that this entry could use.
        behind: Vec<Ticket>,
        /// Why a lease cannot be placed now.
        why: Option<NoAssignment>,
    },
    /// The host could not fulfil the request even if all leases ended.
    Never(NoAssignment),
}

/// Queued entries, in order of arrival.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Queue {
    entries: BTreeMap<Ticket, QueuedEntry>,
}

impl Queue {
    /// Adds an entry. If an entry with the same ticket exists, replaces it at the same position.
    pub fn push(&mut self, ticket: Ticket, waiting: QueuedEntry) {
        self.entries.insert(ticket, waiting);
    }

    /// Removes and returns an entry. Call this when the entry was granted or cancelled, or when its client has
    /// disconnected.
    pub fn remove(&mut self, ticket: Ticket) -> Option<QueuedEntry> {
        self.entries.remove(&ticket)
    }

    /// Returns the entries in order.
    pub fn entries(&self) -> impl Iterator<Item = (Ticket, &QueuedEntry)> {
        self.entries.iter().map(|(ticket, waiting)| (*ticket, waiting))
    }

    /// Returns the position of an entry; 1 is the first.
    #[must_use]
    pub fn position(&self, ticket: Ticket) -> Option<usize> {
        self.entries.contains_key(&ticket).then(|| self.entries.range(..=ticket).count())
    }

    /// Decides on every entry, in order.
    #[must_use]
    pub fn schedule(&self, host: &Host, policy: PlacementPolicy) -> Schedule {
        let mut pass = Pass::new(host, policy);
        let free = |pass: &Pass| -> BTreeSet<String> { pass.host.free_devices().map(str::to_owned).collect() };
        let (mut outcomes, mut takers, mut before) = (Vec::new(), BTreeMap::new(), free(&pass));
        for (ticket, waiting) in &self.entries {
            let outcome = pass.decide(*ticket, waiting);
            let left = free(&pass);
            takers.extend(before.difference(&left).map(|uuid| (uuid.clone(), *ticket)));
            before = left;
            outcomes.push((*ticket, outcome));
        }
        Schedule { outcomes, host: pass.host, takers }
    }
}

/// The decisions of one pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// The decision on each entry, in order.
    pub outcomes: Vec<(Ticket, Outcome)>,
    /// The host as a new request sees it: with the grants and reservations of all entries.
    pub host: Host,
    /// The free MIG devices that entries take or reserve, each with the first such entry.
    pub takers: BTreeMap<String, Ticket>,
}

/// One pass through the entries.
struct Pass {
    policy: PlacementPolicy,
    /// The host with the grants and reservations of earlier entries.
    host: Host,
    /// For each GPU index, the first entry that has a reservation on the GPU.
    heads: BTreeMap<u32, Ticket>,
    /// Requests that could not be placed in this pass. Capacity only decreases during a pass, so
    /// equal requests cannot be placed either.
    failed: HashSet<PlacementRequest>,
}

impl Pass {
    fn new(host: &Host, policy: PlacementPolicy) -> Self {
        Self { policy, host: host.clone(), heads: BTreeMap::new(), failed: HashSet::new() }
    }

    fn decide(&mut self, ticket: Ticket, waiting: &QueuedEntry) -> Outcome {
        match waiting {
            QueuedEntry::Operation(takes) => self.operation(ticket, takes),
            QueuedEntry::Lease(wanted) => self.lease(ticket, wanted),
        }
    }

    fn operation(&mut self, ticket: Ticket, takes: &BTreeMap<u32, ClaimedTargets>) -> Outcome {
        let behind = self.entries_on(takes.keys().copied());
        if !behind.is_empty() {
            return Outcome::Waits { reserves: None, behind, why: None };
        }
        for (gpu, takes) in takes {
            self.heads.insert(*gpu, ticket);
            self.reserve_targets(*gpu, takes);
        }
        Outcome::Ready
    }

    fn lease(&mut self, ticket: Ticket, wanted: &PlacementRequest) -> Outcome {
        let candidates = self.candidates(wanted);
        let key = wanted.key();
        let why = if self.failed.contains(&key) {
            None
        } else {
            match place(&self.host, wanted, self.policy) {
                Ok(assignment) => {
                    self.grant(&assignment, wanted.holder);
                    return Outcome::Grant(assignment);
                }
                Err(why @ NoAssignment::Busy { .. }) => Some(why),
                // Let the request wait if an operation has claimed a GPU. When the operation ends, the offers of the
                // GPU may be different.
                Err(why) if self.is_closed(wanted) => Some(why),
                Err(why) => return Outcome::Never(why),
            }
        };
        self.failed.insert(key);
        let behind = self.entries_on(candidates.iter().copied());
        let free: BTreeSet<u32> = candidates.into_iter().filter(|gpu| !self.heads.contains_key(gpu)).collect();
        let reserves = if free.is_empty() {
            None
        } else {
            let restricted = PlacementRequest { gpus: Some(free), ..wanted.clone() };
            self.host.reservation(&restricted, self.policy)
        };
        if let Some(assignment) = &reserves {
            self.heads.extend(assignment.gpus().into_iter().map(|gpu| (gpu, ticket)));
            self.host.reserve(assignment, wanted.holder);
        }
        Outcome::Waits { reserves, behind, why }
    }

    /// Occupies an assignment. If the assignment creates instances, its operation claims the GPUs
    /// of these instances.
    fn grant(&mut self, assignment: &Assignment, holder: u32) {
        self.host.occupy(assignment, holder);
        let creates = |member: &&Member| matches!(member, Member::Create { .. });
        let claimed: BTreeSet<u32> = assignment.members.iter().filter(creates).map(Member::gpu).collect();
        for gpu in self.host.gpus.iter_mut().filter(|gpu| claimed.contains(&gpu.index)) {
            gpu.closed = gpu.closed.or(Some(Closed::Claimed));
        }
    }

    /// Returns the indexes of the GPUs that a request could use.
    fn candidates(&self, wanted: &PlacementRequest) -> BTreeSet<u32> {
        let kind = wanted.share.kind();
        let selected = |index: &u32| wanted.gpus.as_ref().is_none_or(|gpus| gpus.contains(index));
        let offering = self.host.gpus.iter().filter(|gpu| gpu.kinds().any(|offered| offered == kind));
        offering.map(|gpu| gpu.index).filter(selected).collect()
    }

    /// Returns whether any GPU that the request may use is closed.
    fn is_closed(&self, wanted: &PlacementRequest) -> bool {
        let selected = |index: u32| wanted.gpus.as_ref().is_none_or(|gpus| gpus.contains(&index));
        self.host.gpus.iter().any(|gpu| gpu.closed.is_some() && selected(gpu.index))
    }

    /// Returns the entries that have reservations on these GPUs, in order.
    fn entries_on(&self, gpus: impl Iterator<Item = u32>) -> Vec<Ticket> {
        let heads: BTreeSet<Ticket> = gpus.filter_map(|gpu| self.heads.get(&gpu).copied()).collect();
        heads.into_iter().collect()
    }

    /// Reserves the targets on a GPU that an operation removes or changes.
    fn reserve_targets(&mut self, index: u32, takes: &ClaimedTargets) {
        let Some(gpu) = self.host.gpus.iter_mut().find(|gpu| gpu.index == index) else { return };
        match takes {
            ClaimedTargets::Gpu => gpu.closed = gpu.closed.or(Some(Closed::Claimed)),
            ClaimedTargets::Targets(targets) => {
                let instances = gpu.mig.iter_mut().flat_map(|mig| &mut mig.instances);
                for device in instances.flat_map(|instance| &mut instance.devices) {
                    device.free &= !targets.contains(&device.uuid);
                }
                // The target is marked as full but is not removed, so that a request for this
                // target waits instead of failing.
                for mps in gpu.mps.iter_mut().filter(|mps| targets.contains(&mps.target)) {
                    mps.leases = mps.leases.max(mps.most_leases);
                }
                if targets.contains(&gpu.uuid) {
                    gpu.closed = gpu.closed.or(Some(Closed::Claimed));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
