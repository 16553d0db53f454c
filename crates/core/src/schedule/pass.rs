//! One pass through the queue: the decision about each entry.

use gpush_api::{GpuIndex, GpuUuid, TargetUuid};
use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashSet},
};

use crate::lease::placement::{
    Assignment, Closed, Host, Member, NoAssignment, PlacementRequest, explain, find, is_possible, place,
};

use super::{
    limits::{ScheduleRules, can_use, can_use_one},
    need::{ClaimedTargets, FirstEntries, Need, Needs, reserved_parts},
    queue::{Queue, QueuedEntry},
    reservations::{Capacity, LeaseReservation, PassedOver},
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
        /// Assignment that is reserved for the lease; `None` if it does not reserve yet.
        reserves: Option<Assignment>,
        /// For a lease, the earlier entries that have reservations on GPUs that it could use. For an operation, the
        /// earlier entries that it conflicts with.
        behind: Vec<Ticket>,
        /// Whether the reason is different from that of every earlier request: see [`Schedule::why`]. False for an operation.
        has_reason: bool,
    },
    /// The host could not fulfil the request even if all leases ended.
    Never(NoAssignment),
}

impl Queue {
    /// Decides about every entry, in order.
    #[must_use]
    pub fn schedule(&self, host: &Host, rules: ScheduleRules) -> Schedule {
        let mut pass = Pass::new(host, rules);
        let free = |pass: &Pass<'_>| -> BTreeSet<TargetUuid> { pass.capacity.host.free_devices().cloned().collect() };
        let (mut outcomes, mut takers, mut before) = (Vec::new(), BTreeMap::new(), free(&pass));
        for (ticket, entry) in self.entries() {
            let Some(outcome) = pass.decide(ticket, entry) else { continue };
            if pass.has_changed {
                let left = free(&pass);
                takers.extend(before.difference(&left).map(|uuid| (uuid.clone(), ticket)));
                (before, pass.has_changed) = (left, false);
            }
            outcomes.push((ticket, outcome));
        }
        Schedule { outcomes, takers, capacity: pass.capacity, rules }
    }
}

/// The decisions of one pass.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    /// The decision about each operation, and about each lease that needs capacity, in order.
    pub outcomes: Vec<(Ticket, Outcome)>,
    /// The free MIG devices that entries take or reserve, each with the first such entry.
    pub takers: BTreeMap<TargetUuid, Ticket>,
    capacity: Capacity,
    rules: ScheduleRules,
}

impl Schedule {
    /// Returns the host as a new request without an end sees it: with the grants and reservations of all entries.
    #[must_use]
    pub fn host(&self) -> &Host {
        &self.capacity.host
    }

    /// Returns the reservation of a lease.
    #[must_use]
    pub fn reservation(&self, ticket: Ticket) -> Option<&LeaseReservation> {
        self.reservations().iter().find(|one| one.ticket == ticket)
    }

    /// Returns the reservations of all leases, in order.
    #[must_use]
    pub fn reservations(&self) -> &[LeaseReservation] {
        self.capacity.reservations()
    }

    /// Returns the reservations that a new request passes over, because it ends before their capacity is free. `lasts` is
    /// the longest time in seconds for which the request occupies its capacity.
    #[must_use]
    pub fn passed_over(&self, lasts: Option<u64>) -> Vec<Ticket> {
        self.capacity.passed_over(lasts, self.rules)
    }

    /// Returns the times in seconds until reservations that a short request can pass over are free, the longest first.
    #[must_use]
    pub fn lengths(&self) -> Vec<u64> {
        self.capacity.lengths(self.rules)
    }

    /// Places a new request that passes over these reservations.
    ///
    /// # Errors
    /// No placement is possible.
    pub fn place(&self, wanted: &PlacementRequest, passed_over: &[Ticket]) -> Result<Assignment, NoAssignment> {
        match passed_over {
            [] => place(self.host(), wanted, self.rules.policy),
            [..] => place(&self.capacity.without(passed_over), wanted, self.rules.policy),
        }
    }

    /// Returns why a waiting lease cannot be placed now. `wanted` and `lasts` are those of its entry.
    #[must_use]
    pub fn why(&self, ticket: Ticket, wanted: &PlacementRequest, lasts: Option<u64>) -> NoAssignment {
        let host = self.capacity.ahead_of(ticket, &self.passed_over(lasts));
        explain(&host, wanted, self.rules.policy)
    }
}

/// One pass through the entries.
struct Pass<'a> {
    rules: ScheduleRules,
    /// What earlier entries have left.
    capacity: Capacity,
    /// Whether an entry has taken or reserved capacity since the last comparison.
    has_changed: bool,
    /// The earlier entries that are first.
    first: FirstEntries<'a>,
    /// For each GPU index, the earlier entries that have reservations on the GPU.
    heads: BTreeMap<GpuIndex, BTreeSet<Ticket>>,
    /// Requests that could not be placed in this pass, with the reservations that they passed over. Capacity only decreases
    /// during a pass, so equal requests cannot be placed either.
    failed: HashSet<(PlacementRequest, PassedOver)>,
}

impl<'a> Pass<'a> {
    fn new(host: &Host, rules: ScheduleRules) -> Self {
        let (first, heads, failed) = Default::default();
        Self { rules, capacity: Capacity::new(host), has_changed: false, first, heads, failed }
    }

    /// Decides about an entry. Returns `None` for a lease that needs no capacity now.
    fn decide(&mut self, ticket: Ticket, entry: &'a QueuedEntry) -> Option<Outcome> {
        match (&entry.waiter, &entry.wanted) {
            (Waiter::Operation(_), _) => Some(self.operation(ticket, &entry.needs)),
            (Waiter::Lease(_), Some(wanted)) => {
                let outcome = self.lease(ticket, entry, wanted);
                if let Outcome::Grant(assignment) | Outcome::Waits { reserves: Some(assignment), .. } = &outcome {
                    self.first.add(ticket, Cow::Owned(reserved_parts(&self.capacity.host, assignment)));
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
            return Outcome::Waits { reserves: None, behind, has_reason: false };
        }
        self.first.add(ticket, Cow::Borrowed(needs));
        for (uuid, need) in needs {
            if let Need::Lane(claimed) = need {
                self.reserve_targets(ticket, uuid, claimed);
            }
        }
        Outcome::Ready
    }

    fn lease(&mut self, ticket: Ticket, entry: &QueuedEntry, wanted: &PlacementRequest) -> Outcome {
        let attempt = (wanted.key(), self.capacity.passed_over(entry.lasts, self.rules));
        let has_reason = !self.failed.contains(&attempt);
        if has_reason {
            let host = self.capacity.seen(&attempt.1);
            if let Some(assignment) = find(host, wanted, self.rules.policy) {
                self.grant(&assignment, wanted.holder);
                return Outcome::Grant(assignment);
            }
            // Let the request wait while one of its GPUs is closed, for example claimed by an operation. When the GPU opens
            // again, its offers may be different.
            if !is_possible(host, wanted, self.rules.policy) && !is_closed(host, wanted) {
                match explain(host, wanted, self.rules.policy) {
                    NoAssignment::Busy { .. } => {}
                    why @ (NoAssignment::NotOffered { .. }
                    | NoAssignment::UnknownProfile { .. }
                    | NoAssignment::SharedThroughMps(_)
                    | NoAssignment::TooLarge { .. }) => return Outcome::Never(why),
                }
            }
            self.failed.insert(attempt);
        }
        let behind = self.ahead_of(wanted);
        let reserves = self.reserve(ticket, entry.overtaken, wanted);
        Outcome::Waits { reserves, behind, has_reason }
    }

    /// Reserves capacity for a waiting lease, on GPUs where no earlier entry has a reservation. Returns `None` if the lease
    /// does not reserve yet.
    fn reserve(&mut self, ticket: Ticket, overtaken: u32, wanted: &PlacementRequest) -> Option<Assignment> {
        let (host, limits) = (&self.capacity.host, self.rules.limits);
        let is_here = |one: &&LeaseReservation| can_use_one(host, &one.gpus, wanted);
        let ahead = self.capacity.reservations().iter().filter(is_here).count();
        let candidates = || host.gpus.iter().filter(|gpu| can_use(gpu, wanted)).map(|gpu| gpu.index);
        if !limits.permit(ahead, overtaken, candidates().count()) {
            return None;
        }
        let free: BTreeSet<GpuIndex> = candidates().filter(|gpu| !self.heads.contains_key(gpu)).collect();
        if free.is_empty() {
            return None;
        }
        let restricted = PlacementRequest { gpus: Some(free), ..wanted.clone() };
        let (assignment, free_at) = host.reservation(&restricted, self.rules.policy)?;
        for gpu in assignment.gpus() {
            self.heads.entry(gpu).or_default().insert(ticket);
        }
        self.capacity.reserve(ticket, assignment.clone(), wanted.holder, free_at);
        self.has_changed = true;
        Some(assignment)
    }

    /// Occupies an assignment. If the assignment creates instances, its operation claims the GPUs
    /// of these instances.
    fn grant(&mut self, assignment: &Assignment, holder: u32) {
        let creates = |member: &&Member| matches!(member, Member::Create { .. });
        let claimed: BTreeSet<GpuIndex> = assignment.members.iter().filter(creates).map(Member::gpu).collect();
        self.capacity.occupy(|host| {
            host.occupy(assignment, holder);
            for gpu in host.gpus.iter_mut().filter(|gpu| claimed.contains(&gpu.index)) {
                gpu.closed = gpu.closed.or(Some(Closed::Claimed));
            }
        });
        self.has_changed = true;
    }

    /// Returns the entries that have reservations on GPUs that a request can use, in order.
    fn ahead_of(&self, wanted: &PlacementRequest) -> Vec<Ticket> {
        let gpus = &self.capacity.host.gpus;
        let is_here = |index: &GpuIndex| gpus.iter().any(|gpu| gpu.index == *index && can_use(gpu, wanted));
        let here = self.heads.iter().filter(|(index, _)| is_here(index));
        let tickets: BTreeSet<Ticket> = here.flat_map(|(_, tickets)| tickets.iter().copied()).collect();
        tickets.into_iter().collect()
    }

    /// Reserves the targets on a GPU that an operation removes or changes.
    fn reserve_targets(&mut self, ticket: Ticket, uuid: &GpuUuid, claimed: &ClaimedTargets) {
        let Some(index) = self.capacity.host.gpus.iter().find(|gpu| gpu.uuid == *uuid).map(|gpu| gpu.index) else {
            return;
        };
        self.heads.entry(index).or_default().insert(ticket);
        self.capacity.occupy(|host| reserve_targets(host, uuid, claimed));
        self.has_changed = true;
    }
}

/// Returns whether any GPU that the request may use is closed.
fn is_closed(host: &Host, wanted: &PlacementRequest) -> bool {
    let selected = |index: GpuIndex| wanted.gpus.as_ref().is_none_or(|gpus| gpus.contains(&index));
    host.gpus.iter().any(|gpu| gpu.closed.is_some() && selected(gpu.index))
}

fn reserve_targets(host: &mut Host, uuid: &GpuUuid, claimed: &ClaimedTargets) {
    let Some(gpu) = host.gpus.iter_mut().find(|gpu| gpu.uuid == *uuid) else { return };
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
