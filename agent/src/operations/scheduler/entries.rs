//! The entries of the queue, with the channels for their answers.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use gpush_api::{GpuIndex, LeaseId};
use gpush_core::{
    config::Config,
    lease::{
        machine::State,
        placement::{Host, PlacementRequest},
    },
    schedule::{Ahead, Needs, Queue, Ticket, Waiter},
};
use tokio::{sync::watch, time::Instant};

use super::{
    answer::LeaseInbox,
    demand::LeaseDemand,
    ends,
    held::HeldLeases,
    limits,
    restriction::{Restriction, Restrictions},
};
use crate::{
    requests::caller::Viewer,
    state::{LeaseTable, OpenLease},
};

/// Time between a failed grant and the next attempt for the same request.
pub(super) const PAUSE: Duration = Duration::from_secs(1);

/// All entries.
#[derive(Debug, Default)]
pub(super) struct Entries {
    queue: Queue,
    leases: BTreeMap<Ticket, WaitingLease>,
    /// For each operation, the channel for the earlier entry that it waits for.
    operations: BTreeMap<Ticket, watch::Sender<Option<Ahead>>>,
}

/// A lease in the queue.
#[derive(Debug)]
pub(super) struct WaitingLease {
    pub(super) id: LeaseId,
    /// What the request asks for, and the viewer of the reasons; `None` for a request of an earlier gpushd that is not
    /// resolved yet.
    pub(super) demand: Option<(Arc<LeaseDemand>, Viewer)>,
    /// After a grant has failed: time until which gpushd does not try again. Meanwhile, the request reserves what it needs.
    not_before: Option<Instant>,
    /// What the last pass has found.
    restriction: Option<Restriction>,
    pub(super) inbox: Arc<dyn LeaseInbox>,
}

impl WaitingLease {
    /// Returns the time until which gpushd does not grant the request, if that time is after `now`.
    pub(super) fn paused_until(&self, now: Instant) -> Option<Instant> {
        self.not_before.filter(|until| *until > now)
    }
}

impl Entries {
    pub(super) fn queue(&self) -> &Queue {
        &self.queue
    }

    pub(super) fn push_lease(
        &mut self,
        id: LeaseId,
        demand: Option<(Arc<LeaseDemand>, Viewer)>,
        inbox: Arc<dyn LeaseInbox>,
    ) -> Ticket {
        let wanted = demand.as_ref().map(|(demand, _)| demand.wanted.clone());
        let ticket = self.queue.push(Waiter::Lease(id.to_string()), wanted, Needs::new());
        self.queue.set_lasts(ticket, demand.as_ref().and_then(|(demand, _)| ends::longest(demand)));
        let (not_before, restriction) = (None, None);
        self.leases.insert(ticket, WaitingLease { id, demand, not_before, restriction, inbox });
        ticket
    }

    pub(super) fn push_operation(&mut self, id: String, needs: Needs) -> (Ticket, watch::Receiver<Option<Ahead>>) {
        let ahead = self.queue.would_wait_for(&needs);
        let ticket = self.queue.push(Waiter::Operation(id), None, needs);
        let (sender, receiver) = watch::channel(ahead);
        self.operations.insert(ticket, sender);
        (ticket, receiver)
    }

    /// Removes an entry. Returns the lease, so that the caller can drop it without the lock of the entries.
    pub(super) fn remove(&mut self, ticket: Ticket) -> Option<WaitingLease> {
        self.queue.remove(ticket);
        self.operations.remove(&ticket);
        self.leases.remove(&ticket)
    }

    pub(super) fn set_demand(&mut self, ticket: Ticket, demand: Arc<LeaseDemand>, viewer: Viewer) {
        let Some(lease) = self.leases.get_mut(&ticket) else { return };
        self.queue.set_wanted(ticket, demand.wanted.clone());
        self.queue.set_lasts(ticket, ends::longest(&demand));
        lease.demand = Some((demand, viewer));
    }

    /// Removes what a request asks for, so that it reserves nothing and is not granted.
    pub(super) fn clear_demand(&mut self, ticket: Ticket) {
        if let Some(lease) = self.leases.get_mut(&ticket) {
            lease.demand = None;
        }
    }

    /// Replaces the needs of an entry. Returns whether they have changed.
    pub(super) fn set_needs(&mut self, ticket: Ticket, needs: Needs) -> bool {
        self.queue.set_needs(ticket, needs)
    }

    /// Notes that a request got capacity on these GPUs. `ticket` is its entry; `None` if it did not wait.
    pub(super) fn note_grant(&mut self, ticket: Option<Ticket>, host: &Host, gpus: &BTreeSet<GpuIndex>) {
        self.queue.note_grant(ticket, host, gpus);
    }

    /// Sets how often a request was overtaken before gpushd started.
    pub(super) fn set_overtaken(&mut self, ticket: Ticket, overtaken: u32) {
        self.queue.set_overtaken(ticket, overtaken);
    }

    pub(super) fn pause(&mut self, ticket: Ticket, until: Instant) {
        if let Some(lease) = self.leases.get_mut(&ticket) {
            lease.not_before = Some(until);
        }
    }

    /// Stores the restrictions that a pass has found. Later passes and new requests use them while they apply.
    pub(super) fn set_restrictions(&mut self, restrictions: &Restrictions) {
        for (ticket, lease) in &mut self.leases {
            lease.restriction = restrictions.get(ticket).cloned();
        }
    }

    /// Tells each operation what it waits for, if this has changed.
    pub(super) fn answer_operations(&self) {
        if self.operations.is_empty() {
            return;
        }
        for (ticket, ahead) in self.queue.operations() {
            if let Some(sender) = self.operations.get(&ticket) {
                sender.send_if_modified(|known| {
                    let is_new = *known != ahead;
                    *known = ahead;
                    is_new
                });
            }
        }
    }

    /// Returns a lease.
    pub(super) fn lease(&self, ticket: Ticket) -> Option<&WaitingLease> {
        self.leases.get(&ticket)
    }

    /// Returns whether a lease waits.
    pub(super) fn has_leases(&self) -> bool {
        !self.leases.is_empty()
    }

    /// Returns the requests that are not resolved with this config: those of an earlier gpushd, and those that waited when
    /// the config changed.
    pub(super) fn unresolved(&self, config: &Arc<Config>) -> Vec<Arc<dyn LeaseInbox>> {
        let is_resolved = |(demand, _): &(Arc<LeaseDemand>, Viewer)| Arc::ptr_eq(&demand.config, config);
        let unresolved = self.leases.values().filter(|lease| !lease.demand.as_ref().is_some_and(is_resolved));
        unresolved.map(|lease| Arc::clone(&lease.inbox)).collect()
    }

    /// Returns the earliest time after `now` at which gpushd may grant a request again.
    pub(super) fn next_due(&self, now: Instant) -> Option<Instant> {
        self.leases.values().filter_map(|lease| lease.paused_until(now)).min()
    }

    /// Returns the leases that need capacity now, in order.
    pub(super) fn needing_capacity<'a>(
        &'a self,
        table: &'a LeaseTable,
    ) -> impl Iterator<Item = (Ticket, &'a LeaseDemand)> {
        let granted: BTreeSet<LeaseId> = table.reserved.values().filter_map(|one| one.lease).collect();
        self.leases.iter().filter_map(move |(ticket, lease)| {
            let (demand, _) = lease.demand.as_ref()?;
            needs_capacity(lease.id, &granted, table).then_some((*ticket, &**demand))
        })
    }

    /// Returns the queue for a pass, or for the placement of a new request.
    pub(super) fn for_pass(&self, table: &LeaseTable, restrictions: &Restrictions) -> Queue {
        let reserves = |ticket: &Ticket| restrictions.get(ticket).is_none_or(|one| one.only_on.is_some());
        let needing = self.needing_capacity(table).map(|(ticket, _)| ticket).filter(reserves);
        let needing: BTreeSet<Ticket> = needing.collect();
        let mut queue = self.queue.for_pass(|ticket| needing.contains(&ticket));
        for (ticket, restriction) in restrictions {
            match (&restriction.only_on, queue.get(*ticket).and_then(|entry| entry.wanted.clone())) {
                (Some(gpus), Some(wanted)) => {
                    queue.set_wanted(*ticket, PlacementRequest { gpus: Some(gpus.clone()), ..wanted });
                }
                (Some(_), None) => {}
                // The request reserves nothing, so it does not delay operations.
                (None, _) => drop(queue.set_needs(*ticket, Needs::new())),
            }
        }
        queue
    }

    /// Returns the restrictions that apply now: requests that exceed a quota, and what the last pass has found.
    pub(super) fn restrictions(&self, table: &LeaseTable, held: &HeldLeases) -> Restrictions {
        let last = self.leases.iter().filter_map(|(ticket, lease)| Some((*ticket, lease.restriction.clone()?)));
        let mut restrictions: Restrictions = last.filter(|(_, one)| one.applies(table)).collect();
        for (ticket, demand) in self.needing_capacity(table) {
            if let Err(denial) = limits::within_quota(held, demand) {
                restrictions.insert(ticket, Restriction::beyond_quota(denial.to_string()));
            }
        }
        restrictions
    }
}

/// Returns whether a request needs capacity. While its grant is being recorded, it needs none: a reservation has it, and
/// `granted` contains the request. When the grant has failed, the request needs capacity again at the moment when the
/// reservation is gone, so that no later request can get this capacity first.
fn needs_capacity(id: LeaseId, granted: &BTreeSet<LeaseId>, table: &LeaseTable) -> bool {
    let waits = |lease: &OpenLease| matches!(lease.state, State::Queued { .. } | State::Committing { .. });
    table.get(id).is_some_and(waits) && !granted.contains(&id)
}

#[cfg(test)]
mod tests {
    use gpush_api::LeaseState;
    use gpush_core::schedule::{ClaimedTargets, Need};

    use super::*;
    use crate::{
        operations::scheduler::answer::LeaseAnswer,
        state::{Reservation, leases::tests::record},
    };

    #[derive(Debug)]
    struct NoInbox;

    impl LeaseInbox for NoInbox {
        fn answer(&self, _: LeaseAnswer) {}
    }

    /// Fault: a request that exceeded a quota kept its last reservation during a pass. So an earlier operation waited, and
    /// later leases got the GPU.
    #[test]
    fn request_beyond_its_quota_delays_no_operation_in_a_pass() {
        let mut entries = Entries::default();
        let lease = entries.push_lease(LeaseId(1), None, Arc::new(NoInbox));
        let parts = Need::Parts(BTreeSet::from(["MIG-a".into()]));
        entries.set_needs(lease, Needs::from([("GPU-0".into(), parts)]));
        let lane = Needs::from([("GPU-0".into(), Need::Lane(ClaimedTargets::Gpu))]);
        let waits =
            |restrictions| entries.for_pass(&LeaseTable::default(), &restrictions).would_wait_for(&lane).is_some();
        let beyond = Restriction::beyond_quota(String::new());
        assert!(waits(Restrictions::new()) && !waits(Restrictions::from([(lease, beyond)])));
    }

    /// Fault: after a commit had failed, later requests got the capacity before the request whose grant had failed.
    #[test]
    fn request_waits_again_as_soon_as_its_capacity_is_free() {
        let mut table = LeaseTable::default();
        let mut queued = record(1, 1000, "GPU-0");
        queued.state = LeaseState::Queued;
        table.insert(queued);
        let needs = |table: &LeaseTable| {
            let granted = table.reserved.values().filter_map(|one| one.lease).collect();
            needs_capacity(LeaseId(1), &granted, table)
        };
        assert!(needs(&table));
        let members = Vec::new();
        let reservation = table.reserve(Reservation { holder: 1000, members, lease: Some(LeaseId(1)), end: None });
        assert!(!needs(&table), "the capacity is reserved");
        table.reserved.remove(&reservation);
        assert!(needs(&table));
        // Fault: a request whose grant had failed got capacity again while its end was being recorded.
        table.get_mut(LeaseId(1)).unwrap().state = State::Leaving { reason: gpush_api::EndReason::Failed, retry: true };
        assert!(!needs(&table), "the request leaves the queue");
        table.insert(record(1, 1000, "GPU-0"));
        assert!(!needs(&table), "the lease is active");
    }

    #[test]
    fn operation_is_notified_when_the_entry_ahead_changes() {
        let parts = |target: &str| Needs::from([("GPU-0".into(), Need::Parts([target.into()].into()))]);
        let claims = |target: &str| {
            let claimed = ClaimedTargets::Targets([target.into()].into());
            Needs::from([("GPU-0".into(), Need::Lane(claimed))])
        };
        let mut entries = Entries::default();
        let (first, _first_answer) = entries.push_operation("op-1".to_owned(), claims("MIG-1"));
        let ahead = entries.queue().would_wait_for(&parts("MIG-1")).unwrap();
        assert_eq!(ahead.waiter, Waiter::Operation("op-1".to_owned()));
        assert_eq!(entries.queue().would_wait_for(&parts("MIG-2")), None, "the operation leaves it alone");
        let lease = entries.push_lease(LeaseId(7), None, Arc::new(NoInbox));
        entries.set_needs(lease, parts("MIG-2"));
        let (_, mut later) = entries.push_operation("op-2".to_owned(), claims("MIG-2"));
        let name = |answer: &mut watch::Receiver<Option<Ahead>>| {
            answer.borrow_and_update().as_ref().map(|ahead| ahead.waiter.name().to_owned())
        };
        assert_eq!(name(&mut later).as_deref(), Some("op-1"));
        entries.answer_operations();
        assert!(!later.has_changed().unwrap(), "nothing has changed");
        drop(entries.remove(first));
        entries.answer_operations();
        assert!(later.has_changed().unwrap());
        assert_eq!(name(&mut later).as_deref(), Some("L7"));
        drop(entries.remove(lease));
        entries.answer_operations();
        assert_eq!(name(&mut later), None);
    }

    /// Without the pause, gpushd would repeat a grant that fails at once again and again.
    #[tokio::test(start_paused = true)]
    async fn paused_request_is_due_when_its_pause_ends() {
        let mut entries = Entries::default();
        let first = entries.push_lease(LeaseId(1), None, Arc::new(NoInbox));
        let second = entries.push_lease(LeaseId(2), None, Arc::new(NoInbox));
        let now = Instant::now();
        assert_eq!(entries.next_due(now), None);
        entries.pause(first, now + PAUSE * 2);
        entries.pause(second, now + PAUSE);
        assert_eq!(entries.next_due(now), Some(now + PAUSE));
        assert_eq!(entries.next_due(now + PAUSE), Some(now + PAUSE * 2));
        assert_eq!(entries.lease(second).unwrap().paused_until(now + PAUSE), None);
        drop(entries.remove(first));
        assert_eq!(entries.next_due(now + PAUSE), None);
    }

    #[test]
    fn request_of_an_earlier_gpushd_reserves_nothing_at_first() {
        let mut entries = Entries::default();
        entries.push_lease(LeaseId(1), None, Arc::new(NoInbox));
        let mut table = LeaseTable::default();
        let mut queued = record(1, 1000, "GPU-0");
        queued.state = LeaseState::Queued;
        table.insert(queued);
        assert_eq!((entries.unresolved(&Arc::default()).len(), entries.needing_capacity(&table).count()), (1, 0));
        assert!(entries.has_leases());
    }
}
