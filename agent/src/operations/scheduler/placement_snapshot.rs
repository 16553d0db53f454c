//! Everything that a placement depends on, at one moment, and the results of the searches with it.
//!
//! Two snapshots with equal contents give equal results. So if a request was refused, gpushd refuses an equal request
//! without a search until something has changed.

use std::{
    collections::{BTreeSet, HashMap},
    hash::Hash,
    sync::{Arc, OnceLock},
};

use gpush_api::{Gpu, GpuIndex, GpuUuid, LeaseId, LeaseMember, Placement, TargetUuid};
use gpush_core::{
    lease::placement::{
        Assignment, Blockers, Host, KnownEnd, NoAssignment, PlacementRequest, blockers, instances_that_block,
        occupied_targets,
    },
    schedule::{Queue, Schedule, ScheduleRules, Ticket},
};
use gpush_locked::Locked;

use super::{Scheduler, ends, offers, restriction::Restrictions};
use crate::state::{HostState, LeaseTable, OpenLease};

/// Maximum number of requests whose results gpushd keeps for one snapshot. Users can send any number of different
/// requests.
const MOST_KEPT: usize = 256;

/// Results by their inputs. Each result is computed once, even if several threads need it at the same time.
#[derive(Debug)]
struct Memo<K, V>(Locked<HashMap<K, Arc<OnceLock<V>>>>);

impl<K, V> Default for Memo<K, V> {
    fn default() -> Self {
        Self(Locked::default())
    }
}

impl<K: Eq + Hash, V: Clone> Memo<K, V> {
    /// Returns the result. Computes it if it is not known.
    fn get(&self, key: K, compute: impl FnOnce() -> V) -> V {
        let slot = {
            let mut slots = self.0.lock();
            if slots.len() >= MOST_KEPT && !slots.contains_key(&key) {
                slots.clear();
            }
            Arc::clone(slots.entry(key).or_default())
        };
        slot.get_or_init(compute).clone()
    }
}

/// Instances, as the indexes of their GPUs and their placements.
type Instances = Vec<(GpuIndex, Placement)>;

/// Everything that a placement depends on, and the results of searches.
#[derive(Debug)]
pub(crate) struct PlacementSnapshot {
    /// What the GPUs offer, without the reservations of the queue.
    pub(crate) host: Host,
    queue: Queue,
    rules: ScheduleRules,
    table: Arc<LeaseTable>,
    schedule: OnceLock<Schedule>,
    /// The results of placements, by request and by the reservations that the request passes over.
    placed: Memo<(PlacementRequest, Vec<Ticket>), Result<Assignment, NoAssignment>>,
    blockers: Memo<(PlacementRequest, Option<BTreeSet<TargetUuid>>), Blockers<LeaseId>>,
    blocking_instances: Memo<(PlacementRequest, Instances), Instances>,
}

impl PlacementSnapshot {
    /// Takes a snapshot. `seen` is the state that the caller has read, and `gpus` are its GPUs. `now` is the current state. `restrictions` say what requests may not reserve. If nothing has changed since an earlier snapshot, returns the earlier
    /// one, with the results of its searches.
    pub(super) fn current(
        scheduler: &Scheduler,
        seen: &HostState,
        gpus: &[Gpu],
        now: &HostState,
        restrictions: &Restrictions,
    ) -> Arc<Self> {
        let table = Arc::clone(&now.leases);
        let host = offers::host(seen, gpus, now, &table);
        let queue = scheduler.entries().for_pass(&table, restrictions);
        // Without a queue, no decision depends on the time.
        let now = if queue.entries().next().is_some() { ends::clock() } else { 0 };
        scheduler.searches.known(Self::new(host, queue, ScheduleRules::new(scheduler.policy(), now), table))
    }

    fn new(host: Host, queue: Queue, rules: ScheduleRules, table: Arc<LeaseTable>) -> Self {
        let (placed, blockers, blocking_instances) = (Memo::default(), Memo::default(), Memo::default());
        Self { host, queue, rules, table, schedule: OnceLock::new(), placed, blockers, blocking_instances }
    }

    /// Returns whether searches with both snapshots have equal results.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        let holding =
            |one: &OpenLease, other: &OpenLease| one.id() == other.id() && one.record.members == other.record.members;
        self.rules == other.rules
            && self.queue == other.queue
            && self.host == other.host
            && (Arc::ptr_eq(&self.table, &other.table)
                || self.table.holding().count() == other.table.holding().count()
                    && self.table.holding().zip(other.table.holding()).all(|(one, other)| holding(one, other)))
    }

    /// Returns whether no other request waits. Otherwise a placement first searches for the places of these requests.
    pub(super) fn has_no_queue(&self) -> bool {
        self.queue.entries().next().is_none()
    }

    /// Returns the decisions about the queue.
    pub(crate) fn schedule(&self) -> &Schedule {
        self.schedule.get_or_init(|| self.queue.schedule(&self.host, self.rules))
    }

    /// Places a new request, but not on capacity that earlier waiting requests need. `lasts` is the longest time in seconds
    /// for which the request occupies its capacity.
    pub(crate) fn place(&self, wanted: &PlacementRequest, lasts: Option<u64>) -> Result<Assignment, NoAssignment> {
        let passed_over = self.schedule().passed_over(lasts);
        self.placed.get((wanted.key(), passed_over.clone()), || self.schedule().place(wanted, &passed_over))
    }

    /// Returns the longest time in seconds for which a new request may occupy capacity, if it fits now only with an end.
    pub(super) fn longest_that_fits(&self, wanted: &PlacementRequest) -> Option<u64> {
        let lengths = self.schedule().lengths();
        lengths.into_iter().find(|lasts| self.place(wanted, Some(*lasts)).is_ok())
    }

    /// Returns why a waiting lease cannot be placed now; `None` for an operation, and for a lease that needs no capacity.
    pub(super) fn why(&self, ticket: Ticket) -> Option<NoAssignment> {
        let entry = self.queue.get(ticket)?;
        Some(self.schedule().why(ticket, entry.wanted.as_ref()?, entry.lasts))
    }

    /// Finds the leases, and the targets in use without a lease, that block a request. For a queued request, considers only
    /// the targets that the request reserves, because the request waits for nothing else.
    pub(crate) fn blockers(&self, wanted: &PlacementRequest, reserves: Option<&Assignment>) -> Blockers<LeaseId> {
        let targets = reserves.map(|reserves| occupied_targets(&self.host, reserves));
        let there = match reserves {
            Some(reserves) => PlacementRequest { gpus: Some(reserves.gpus()), ..wanted.clone() },
            None => wanted.clone(),
        };
        self.blockers.get((there.key(), targets.clone()), || {
            let is_here =
                |member: &LeaseMember| targets.as_ref().is_none_or(|targets| targets.contains(&member.target));
            let holding = self.table.holding().filter(|lease| lease.record.members.iter().any(is_here));
            let members: Vec<(LeaseId, Vec<&LeaseMember>)> =
                holding.map(|lease| (lease.id(), lease.record.members.iter().collect())).collect();
            blockers(&self.host, &there, self.rules.policy, &members)
        })
    }

    /// Returns the leases that use capacity of a reservation now, each with its known end.
    pub(super) fn in_the_way(&self, assignment: &Assignment) -> Vec<(LeaseId, KnownEnd)> {
        let targets = occupied_targets(&self.host, assignment);
        let is_here = |lease: &&OpenLease| lease.record.members.iter().any(|one| targets.contains(&one.target));
        self.table.holding().filter(is_here).map(|lease| (lease.id(), ends::end_of(lease))).collect()
    }

    /// Returns the GPUs without a device of these leases, by index, if a request can reserve capacity there.
    pub(crate) fn reservation_without(
        &self,
        wanted: &PlacementRequest,
        leases: &BTreeSet<LeaseId>,
    ) -> Option<BTreeSet<GpuIndex>> {
        let members = leases.iter().filter_map(|id| self.table.get(*id)).flat_map(|lease| &lease.record.members);
        let avoided: BTreeSet<&GpuUuid> = members.map(|member| &member.gpu_uuid).collect();
        let is_allowed = |index: &GpuIndex| wanted.gpus.as_ref().is_none_or(|gpus| gpus.contains(index));
        let rest = self.host.gpus.iter().filter(|gpu| !avoided.contains(&gpu.uuid)).map(|gpu| gpu.index);
        let rest: BTreeSet<GpuIndex> = rest.filter(is_allowed).collect();
        let there = PlacementRequest { gpus: Some(rest.clone()), ..wanted.clone() };
        self.host.reservation(&there, self.rules.policy).map(|_| rest)
    }

    /// Returns which of these instances block a request: see [`instances_that_block`].
    pub(crate) fn instances_that_block(&self, wanted: &PlacementRequest, instances: &Instances) -> Instances {
        self.blocking_instances.get((wanted.key(), instances.clone()), || {
            instances_that_block(&self.host, wanted, self.rules.policy, instances)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use gpush_api::MemberShare;
    use gpush_core::lease::placement::{GpuOffer, PlacementPolicy, RequestedShare, WholeOffer};

    use super::*;
    use crate::state::leases::tests::record;

    fn snapshot(free: bool, table: LeaseTable) -> PlacementSnapshot {
        let whole = Some(WholeOffer { free, leased: !free, end: None });
        let gpu = GpuOffer { uuid: "GPU-0".into(), whole, ..GpuOffer::default() };
        let rules = ScheduleRules::new(PlacementPolicy::Pack, 0);
        PlacementSnapshot::new(Host { gpus: vec![gpu] }, Queue::default(), rules, Arc::new(table))
    }

    fn whole(holder: u32) -> PlacementRequest {
        PlacementRequest { share: RequestedShare::Whole, count: 1, holder, gpus: None, targets: None }
    }

    /// Fault: a request that did not fit was searched again each time a user repeated it.
    #[test]
    fn equal_request_is_searched_once() {
        let busy = snapshot(false, LeaseTable::default());
        let refused = busy.place(&whole(1000), None);
        assert!(matches!(refused, Err(NoAssignment::Busy { .. })), "{refused:?}");
        assert_eq!(busy.place(&whole(1001), None), refused);
        assert_eq!(busy.placed.0.lock().len(), 1, "the holder does not matter for a whole GPU");
        let (memo, searches) = (Memo::default(), Cell::new(0));
        let search = || searches.replace(searches.get() + 1);
        assert_eq!((memo.get(1, search), memo.get(1, search), memo.get(2, search)), (0, 0, 1));
        (3..).take(MOST_KEPT).for_each(|key| assert!(memo.get(key, search) > 0));
        assert!(memo.0.lock().len() <= MOST_KEPT);
    }

    #[test]
    fn snapshot_with_another_lease_or_offer_is_not_the_same() {
        let with = |id| {
            let (mut table, mut lease) = (LeaseTable::default(), record(id, 1000, "GPU-0"));
            lease.members[0].share = MemberShare::Whole;
            table.insert(lease);
            table
        };
        let busy = snapshot(false, with(1));
        assert!(busy.is_same(&snapshot(false, with(1))));
        assert!(!busy.is_same(&snapshot(false, with(2))), "a refusal names the lease");
        assert!(!busy.is_same(&snapshot(true, with(1))));
        assert_eq!(busy.blockers(&whole(1000), None).leases, [LeaseId(1)]);
    }
}
