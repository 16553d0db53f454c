//! The queue: one order of arrival for waiting leases and waiting operations.
//!
//! ```text
//! push ──► entries in order ──schedule(host)──► Grant      the lease can be granted now
//!                                               Ready      the operation is first on all its GPUs
//!                                               Waits      its reservation, and the earlier entries it waits for
//!                                               Never      the host cannot fulfil it any more
//! ```
//!
//! One pass goes through the entries in order, on a copy of the host:
//!
//! - An entry that can be granted occupies its assignment.
//! - An entry that cannot be granted reserves capacity, on GPUs where no earlier entry has a reservation. A waiting
//!   lease reserves one assignment, for which the fewest occupied shares must become free. It never reserves more than
//!   it requested. An operation reserves everything that its last plan takes away.
//! - Later entries are placed on the rest. So a later, smaller request can be granted at once, and never delays an
//!   earlier one.
//!
//! Further rules:
//!
//! - A gang, or an operation on several GPUs, reserves nothing until it is first on all of them. So two gangs cannot
//!   wait for each other.
//! - Nothing new is placed on a reservation. So an entry never has to wait for more, and later entries cannot overtake
//!   it indefinitely.
//! - A grant that creates instances claims its GPUs. The next pass after its operation continues there.
//! - The queue holds no capacity itself. The caller reserves a granted assignment before it schedules again.
//!
//! Within one pass, GPUs are identified by index. The caller updates the entries if an index changes.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use crate::lease::placement::{Assignment, Closed, Host, Member, NoAssignment, Policy, Wanted, place};

/// Position in the order of arrival: the sequence number of the entry's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// What the last plan of a waiting operation takes away on a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Takes {
    /// These targets, by UUID.
    Targets(BTreeSet<String>),
    /// The whole GPU, because the plan changes its mode or resets it, or is not known yet.
    Gpu,
}

/// A waiting entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Waiting {
    /// A lease.
    Lease(Wanted),
    /// An operation. The map contains what it takes away, by GPU index.
    Operation(BTreeMap<u32, Takes>),
}

/// The result of one pass for an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The lease can be granted now.
    Grant(Assignment),
    /// The operation is first on all its GPUs. It can begin if no use there blocks it.
    Ready,
    /// The entry waits.
    Waits {
        /// The assignment that is reserved for it; `None` while it is not first on all its GPUs.
        reserves: Option<Assignment>,
        /// Earlier entries with reservations on GPUs that this entry could use.
        behind: Vec<Ticket>,
        /// Why a lease has no assignment.
        why: Option<NoAssignment>,
    },
    /// The host could not fulfil the request even if all leases had ended.
    Never(NoAssignment),
}

/// Waiting entries, in order of arrival.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Queue {
    entries: BTreeMap<Ticket, Waiting>,
}

impl Queue {
    /// Adds an entry. Replaces an entry with the same ticket, which keeps its position.
    pub fn push(&mut self, ticket: Ticket, waiting: Waiting) {
        self.entries.insert(ticket, waiting);
    }

    /// Removes and returns an entry that was granted or cancelled, or whose client disconnected.
    pub fn remove(&mut self, ticket: Ticket) -> Option<Waiting> {
        self.entries.remove(&ticket)
    }

    /// Returns the entries in order.
    pub fn entries(&self) -> impl Iterator<Item = (Ticket, &Waiting)> {
        self.entries.iter().map(|(ticket, waiting)| (*ticket, waiting))
    }

    /// Returns the position of an entry, counted from 1.
    #[must_use]
    pub fn position(&self, ticket: Ticket) -> Option<usize> {
        self.entries.contains_key(&ticket).then(|| self.entries.range(..=ticket).count())
    }

    /// Returns the host with the reservations of all entries, as a new request sees it.
    #[must_use]
    pub fn host_for_newcomer(&self, host: &Host, policy: Policy) -> Host {
        let mut pass = Pass::new(host, policy);
        for (ticket, waiting) in &self.entries {
            pass.decide(*ticket, waiting);
        }
        pass.host
    }

    /// Decides about every entry, in order.
    #[must_use]
    pub fn schedule(&self, host: &Host, policy: Policy) -> Vec<(Ticket, Outcome)> {
        let mut pass = Pass::new(host, policy);
        self.entries.iter().map(|(ticket, waiting)| (*ticket, pass.decide(*ticket, waiting))).collect()
    }
}

/// One pass through the entries.
struct Pass<'a> {
    policy: Policy,
    /// The host with the grants and reservations of earlier entries.
    host: Host,
    /// The first entry with a reservation on each GPU, by GPU index.
    heads: BTreeMap<u32, Ticket>,
    /// Requests that failed in this pass. The host only becomes fuller, so equal requests fail too.
    failed: HashSet<&'a Wanted>,
}

impl<'a> Pass<'a> {
    fn new(host: &Host, policy: Policy) -> Self {
        Self { policy, host: host.clone(), heads: BTreeMap::new(), failed: HashSet::new() }
    }

    fn decide(&mut self, ticket: Ticket, waiting: &'a Waiting) -> Outcome {
        match waiting {
            Waiting::Operation(takes) => self.operation(ticket, takes),
            Waiting::Lease(wanted) => self.lease(ticket, wanted),
        }
    }

    fn operation(&mut self, ticket: Ticket, takes: &BTreeMap<u32, Takes>) -> Outcome {
        let behind = self.heads_of(takes.keys().copied());
        if !behind.is_empty() {
            return Outcome::Waits { reserves: None, behind, why: None };
        }
        for (gpu, takes) in takes {
            self.heads.insert(*gpu, ticket);
            self.take(*gpu, takes);
        }
        Outcome::Ready
    }

    fn lease(&mut self, ticket: Ticket, wanted: &'a Wanted) -> Outcome {
        let candidates = self.candidates(wanted);
        let why = if self.failed.contains(wanted) {
            None
        } else {
            match place(&self.host, wanted, self.policy) {
                Ok(assignment) => {
                    self.grant(&assignment, wanted.holder);
                    return Outcome::Grant(assignment);
                }
                Err(why @ NoAssignment::Busy { .. }) => Some(why),
                // The offers of a GPU may change when the operation that has claimed it ends.
                Err(why) if self.is_closed(wanted) => Some(why),
                Err(why) => return Outcome::Never(why),
            }
        };
        self.failed.insert(wanted);
        let behind = self.heads_of(candidates.iter().copied());
        let free: BTreeSet<u32> = candidates.into_iter().filter(|gpu| !self.heads.contains_key(gpu)).collect();
        let reserves = if free.is_empty() {
            None
        } else {
            let restricted = Wanted { gpus: Some(free), ..wanted.clone() };
            self.host.reservation(&restricted, self.policy)
        };
        if let Some(assignment) = &reserves {
            self.heads.extend(assignment.gpus().into_iter().map(|gpu| (gpu, ticket)));
            self.host.reserve(assignment, wanted.holder);
        }
        Outcome::Waits { reserves, behind, why }
    }

    /// Occupies an assignment. If it creates instances, its operation claims their GPUs.
    fn grant(&mut self, assignment: &Assignment, holder: u32) {
        self.host.occupy(assignment, holder);
        let creates = |member: &&Member| matches!(member, Member::Create { .. });
        let claimed: BTreeSet<u32> = assignment.members.iter().filter(creates).map(Member::gpu).collect();
        for gpu in self.host.gpus.iter_mut().filter(|gpu| claimed.contains(&gpu.index)) {
            gpu.closed = gpu.closed.or(Some(Closed::Claimed));
        }
    }

    /// Returns the indexes of the GPUs that a request could use.
    fn candidates(&self, wanted: &Wanted) -> BTreeSet<u32> {
        let kind = wanted.share.kind();
        let selected = |index: &u32| wanted.gpus.as_ref().is_none_or(|gpus| gpus.contains(index));
        let offering = self.host.gpus.iter().filter(|gpu| gpu.kinds().any(|offered| offered == kind));
        offering.map(|gpu| gpu.index).filter(selected).collect()
    }

    /// Returns whether a GPU that the request may use is closed.
    fn is_closed(&self, wanted: &Wanted) -> bool {
        let selected = |index: u32| wanted.gpus.as_ref().is_none_or(|gpus| gpus.contains(&index));
        self.host.gpus.iter().any(|gpu| gpu.closed.is_some() && selected(gpu.index))
    }

    /// Returns the entries with reservations on these GPUs, in order.
    fn heads_of(&self, gpus: impl Iterator<Item = u32>) -> Vec<Ticket> {
        let heads: BTreeSet<Ticket> = gpus.filter_map(|gpu| self.heads.get(&gpu).copied()).collect();
        heads.into_iter().collect()
    }

    /// Reserves everything that an operation takes away on a GPU.
    fn take(&mut self, index: u32, takes: &Takes) {
        let Some(gpu) = self.host.gpus.iter_mut().find(|gpu| gpu.index == index) else { return };
        match takes {
            Takes::Gpu => gpu.closed = gpu.closed.or(Some(Closed::Claimed)),
            Takes::Targets(targets) => {
                let instances = gpu.mig.iter_mut().flat_map(|mig| &mut mig.instances);
                for device in instances.flat_map(|instance| &mut instance.devices) {
                    device.free &= !targets.contains(&device.uuid);
                }
                // The target counts as full but stays in the list, so that a request for it waits instead of failing.
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
