//! One pass through the queue: the decision about each entry.

use gpush_api::{GpuIndex, GpuUuid, TargetUuid};
use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashSet},
};

use crate::lease::placement::{
    Assignment, Closed, Host, Member, NoAssignment, PlacementPolicy, PlacementRequest, place,
};

use super::{
    need::{ClaimedTargets, FirstEntries, Need, Needs, reserved_parts},
    queue::{Queue, QueuedEntry},
    waiter::{Ticket, Waiter},
};

/// The result of one pass for an entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    /// The lease can be granted now.
    Grant(Assignment),
    /// The operation is first. It can begin if nothing in use blocks it.
    Ready,
    /// The entry waits.
    Waits {
        /// Assignment that is reserved for the lease; `None` until earlier entries leave enough GPUs.
        reserves: Option<Assignment>,
        /// For a lease, the earlier entries that have reservations on GPUs that it could use. For an operation, the
        /// earlier entries that it conflicts with.
        behind: Vec<Ticket>,
        /// Why a lease cannot be placed now.
        why: Option<NoAssignment>,
    },
    /// The host could not fulfil the request even if all leases ended.
    Never(NoAssignment),
}

impl Queue {
    /// Decides about every entry, in order.
    #[must_use]
    pub fn schedule(&self, host: &Host, policy: PlacementPolicy) -> Schedule {
        let mut pass = Pass::new(host, policy);
        let free = |pass: &Pass<'_>| -> BTreeSet<TargetUuid> { pass.host.free_devices().cloned().collect() };
        let (mut outcomes, mut takers, mut before) = (Vec::new(), BTreeMap::new(), free(&pass));
        for (ticket, entry) in self.entries() {
            let Some(outcome) = pass.decide(ticket, entry) else { continue };
            let left = free(&pass);
            takers.extend(before.difference(&left).map(|uuid| (uuid.clone(), ticket)));
            before = left;
            outcomes.push((ticket, outcome));
        }
        Schedule { outcomes, host: pass.host, takers }
    }
}

/// The decisions of one pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// The decision about each operation, and about each lease that needs capacity, in order.
    pub outcomes: Vec<(Ticket, Outcome)>,
    /// The host as a new request sees it: with the grants and reservations of all entries.
    pub host: Host,
    /// The free MIG devices that entries take or reserve, each with the first such entry.
    pub takers: BTreeMap<TargetUuid, Ticket>,
}

/// One pass through the entries.
struct Pass<'a> {
    policy: PlacementPolicy,
    /// The host with the grants and reservations of earlier entries.
    host: Host,
    /// The earlier entries that are first.
    first: FirstEntries<'a>,
    /// For each GPU index, the earlier entries that have reservations on the GPU.
    heads: BTreeMap<GpuIndex, BTreeSet<Ticket>>,
    /// Requests that could not be placed in this pass. Capacity only decreases during a pass, so
    /// equal requests cannot be placed either.
    failed: HashSet<PlacementRequest>,
}

impl<'a> Pass<'a> {
    fn new(host: &Host, policy: PlacementPolicy) -> Self {
        let (first, heads, failed) = Default::default();
        Self { policy, host: host.clone(), first, heads, failed }
    }

    /// Decides about an entry. Returns `None` for a lease that needs no capacity now.
    fn decide(&mut self, ticket: Ticket, entry: &'a QueuedEntry) -> Option<Outcome> {
        match (&entry.waiter, &entry.wanted) {
            (Waiter::Operation(_), _) => Some(self.operation(ticket, &entry.needs)),
            (Waiter::Lease(_), Some(wanted)) => {
                let outcome = self.lease(ticket, wanted);
                if let Outcome::Grant(assignment) | Outcome::Waits { reserves: Some(assignment), .. } = &outcome {
                    self.first.add(ticket, Cow::Owned(reserved_parts(&self.host, assignment)));
                }
                Some(outcome)
            }
            (Waiter::Lease(_), None) => {
                self.first.add(ticket, Cow::Borrowed(&entry.needs));
                None
            }
        }
    }

    fn operation(&mut self, ticket: Ticket, needs: &'a Needs) -> Outcome {
        let behind = self.first.all_ahead_of(needs);
        if !behind.is_empty() {
            return Outcome::Waits { reserves: None, behind, why: None };
        }
        self.first.add(ticket, Cow::Borrowed(needs));
        for (uuid, need) in needs {
            if let Need::Lane(claimed) = need {
                self.reserve_targets(ticket, uuid, claimed);
            }
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
                // Let the request wait while one of its GPUs is closed, for example claimed by an operation. When the GPU
                // opens again, its offers may be different.
                Err(why) if self.is_closed(wanted) => Some(why),
                Err(why) => return Outcome::Never(why),
            }
        };
        self.failed.insert(key);
        let behind = self.entries_on(candidates.iter().copied());
        let free: BTreeSet<GpuIndex> = candidates.into_iter().filter(|gpu| !self.heads.contains_key(gpu)).collect();
        let reserves = if free.is_empty() {
            None
        } else {
            let restricted = PlacementRequest { gpus: Some(free), ..wanted.clone() };
            self.host.reservation(&restricted, self.policy)
        };
        if let Some(assignment) = &reserves {
            for gpu in assignment.gpus() {
                self.heads.entry(gpu).or_default().insert(ticket);
            }
            self.host.reserve(assignment, wanted.holder);
        }
        Outcome::Waits { reserves, behind, why }
    }

    /// Occupies an assignment. If the assignment creates instances, its operation claims the GPUs
    /// of these instances.
    fn grant(&mut self, assignment: &Assignment, holder: u32) {
        self.host.occupy(assignment, holder);
        let creates = |member: &&Member| matches!(member, Member::Create { .. });
        let claimed: BTreeSet<GpuIndex> = assignment.members.iter().filter(creates).map(Member::gpu).collect();
        for gpu in self.host.gpus.iter_mut().filter(|gpu| claimed.contains(&gpu.index)) {
            gpu.closed = gpu.closed.or(Some(Closed::Claimed));
        }
    }

    /// Returns the indexes of the GPUs that a request could use.
    fn candidates(&self, wanted: &PlacementRequest) -> BTreeSet<GpuIndex> {
        let kind = wanted.share.kind();
        let selected = |index: &GpuIndex| wanted.gpus.as_ref().is_none_or(|gpus| gpus.contains(index));
        let offering = self.host.gpus.iter().filter(|gpu| gpu.kinds().any(|offered| offered == kind));
        offering.map(|gpu| gpu.index).filter(selected).collect()
    }

    /// Returns whether any GPU that the request may use is closed.
    fn is_closed(&self, wanted: &PlacementRequest) -> bool {
        let selected = |index: GpuIndex| wanted.gpus.as_ref().is_none_or(|gpus| gpus.contains(&index));
        self.host.gpus.iter().any(|gpu| gpu.closed.is_some() && selected(gpu.index))
    }

    /// Returns the entries that have reservations on these GPUs, in order.
    fn entries_on(&self, gpus: impl Iterator<Item = GpuIndex>) -> Vec<Ticket> {
        let heads: BTreeSet<Ticket> = gpus.filter_map(|gpu| self.heads.get(&gpu)).flatten().copied().collect();
        heads.into_iter().collect()
    }

    /// Reserves the targets on a GPU that an operation removes or changes.
    fn reserve_targets(&mut self, ticket: Ticket, uuid: &GpuUuid, claimed: &ClaimedTargets) {
        let Some(gpu) = self.host.gpus.iter_mut().find(|gpu| gpu.uuid == *uuid) else { return };
        self.heads.entry(gpu.index).or_default().insert(ticket);
        match claimed {
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
                if targets.contains(gpu.uuid.as_target()) {
                    gpu.closed = gpu.closed.or(Some(Closed::Claimed));
                }
            }
        }
    }
}
