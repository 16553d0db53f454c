//! Reserves the capacity of a grant: checks the quotas, finds a placement, and reserves its capacity in the state.
//!
//! ```text
//! leases now ─► quota ─► search ─► [no grant since? reserve] ─► reserved
//!     ▲                    │ no room          │ a grant since, or a GPU was claimed
//!     │                    ▼                  │
//!     │                    refused, or queued │
//!     └───────────────────────────────────────┘
//! ```
//!
//! No lock is held during a search, unless other grants have overtaken several attempts. The state of the host reserves the capacity only if no other grant has got capacity
//! since the leases were read. So of two requests that were placed on the same capacity, only one gets it. The other
//! request is placed again. A request is placed again at most as often as other requests get
//! capacity, or operations claim one of its GPUs.

use std::sync::{Arc, MutexGuard};

use gpush_api::{ApiError, Gpu, GpuIndex, GpuUuid, LeaseId, LeaseKind};
use gpush_core::{
    lease::{
        placement::{Assignment, Host, NoAssignment, smaller},
        quota::{Allowance, Denial, Size},
    },
    schedule::Ticket,
};

use super::{
    Scheduler,
    capacity::{DevicesToCreate, Reserved},
    demand::LeaseDemand,
    ends,
    held::HeldLeases,
    limits::{check_size, denied, within_quota},
    offers::{self, gpus_of},
    placement_snapshot::PlacementSnapshot,
};
use crate::state::{HostState, OutdatedPlacement, Reservation, lanes::LaneChanges};

/// Why gpushd reserved no capacity for a request.
#[derive(Debug)]
pub(crate) enum NotReserved {
    /// A quota, or a limit of the target, refuses the request.
    Refused(ApiError),
    /// No placement is possible for the request now.
    NoRoom { why: NoAssignment, snapshot: Arc<PlacementSnapshot> },
    /// The config, an override, or the instances of a GPU have changed since the readings. The request must be placed
    /// again, with new readings.
    Outdated,
}

/// The readings with which requests are placed. They can be old when the capacity is reserved.
#[derive(Debug, Clone)]
pub(crate) struct ReadHost {
    pub(crate) host: Arc<HostState>,
    /// The GPUs, with everything that placement needs.
    pub(crate) gpus: Vec<Gpu>,
    /// The operations on each GPU before the readings began.
    pub(crate) changes: LaneChanges,
}

/// Why gpushd did not reserve an assignment.
#[derive(Debug)]
pub(super) enum NotTaken {
    /// A limit of the target refuses the assignment.
    Refused(ApiError),
    /// A quota denies an assignment of this size.
    Denied(Denial, Size),
    /// As [`NotReserved::Outdated`].
    Outdated,
    /// An operation has claimed one of the GPUs.
    Claimed,
    /// Another grant has got capacity since the assignment was found.
    Overtaken,
}

/// An assignment, and the data from which it was computed.
#[derive(Debug, Clone, Copy)]
pub(super) struct Placed<'a> {
    pub(super) read: &'a ReadHost,
    /// What the GPUs offer.
    pub(super) host: &'a Host,
    pub(super) now: &'a Arc<HostState>,
    /// The leases of `now`, by account.
    pub(super) held: &'a HeldLeases,
    pub(super) assignment: &'a Assignment,
}

/// Number of attempts to place requests after which gpushd lets no other grant come first.
pub(super) const MOST_OVERTAKEN: u32 = 8;

/// The result of one attempt to place a request.
enum PlacementAttempt {
    Ended(Result<Reserved, NotReserved>),
    /// An operation has claimed a GPU of the assignment. It now counts as closed.
    Claimed,
    /// Another grant came first, or the request must wait for another thread.
    NotNow,
}

/// Places a request, but not on capacity that earlier waiting requests need. Reserves the assignment. Searches, so call
/// this function on a blocking thread.
pub(crate) fn reserve(scheduler: &Scheduler, read: &ReadHost, demand: &LeaseDemand) -> Result<Reserved, NotReserved> {
    let mut overtaken = 0;
    loop {
        let turn = (overtaken >= MOST_OVERTAKEN).then(|| scheduler.turn.lock());
        match attempt(scheduler, read, demand, true, || Some(turn.unwrap_or_else(|| scheduler.turn.lock()))) {
            PlacementAttempt::Ended(result) => return result,
            PlacementAttempt::Claimed => {}
            PlacementAttempt::NotNow => overtaken += 1,
        }
    }
}

/// Does the same as [`reserve`] if this takes only microseconds, so that it needs no blocking thread. Returns `None` for MIG
/// devices, while other requests wait, and if another grant or an operation comes first.
pub(crate) fn reserve_at_once(
    scheduler: &Scheduler,
    read: &ReadHost,
    demand: &LeaseDemand,
) -> Option<Result<Reserved, NotReserved>> {
    if demand.wanted.share.kind() == LeaseKind::Mig {
        return None;
    }
    match attempt(scheduler, read, demand, false, || scheduler.turn.try_lock()) {
        PlacementAttempt::Ended(result) => Some(result),
        PlacementAttempt::Claimed | PlacementAttempt::NotNow => None,
    }
}

/// Places a request once, and reserves the assignment. `may_search` says whether this may take long. `turn` returns the
/// lock for the reservation; `None` if another grant has it.
fn attempt<'s>(
    scheduler: &'s Scheduler,
    read: &ReadHost,
    demand: &LeaseDemand,
    may_search: bool,
    turn: impl FnOnce() -> Option<MutexGuard<'s, ()>>,
) -> PlacementAttempt {
    let refused = |error| PlacementAttempt::Ended(Err(NotReserved::Refused(error)));
    let now = scheduler.handles.context.state.now();
    let held = &HeldLeases::of(scheduler.handles.context.users.accounts(), &now.leases);
    if let Err(denial) = within_quota(held, demand) {
        return refused(denied(&denial, &demand.new, &demand.wanted, None));
    }
    let snapshot = scheduler.snapshot_with(&read.host, &read.gpus, &now, held);
    if !may_search && !snapshot.has_no_queue() {
        return PlacementAttempt::NotNow;
    }
    let placed = snapshot.place(&demand.wanted, ends::longest(demand));
    // While gpushd stops, the waiting requests leave the queue. A new request must not get their capacity.
    if scheduler.handles.context.stopping.is_cancelled() {
        return refused(ApiError::stopping("gpushd is stopping"));
    }
    let assignment = match placed {
        Ok(assignment) => assignment,
        Err(why) => return PlacementAttempt::Ended(Err(NotReserved::NoRoom { why, snapshot: Arc::clone(&snapshot) })),
    };
    let host = snapshot.schedule().host();
    let placed = Placed { read, host, now: &now, held, assignment: &assignment };
    let Some(_turn) = turn() else { return PlacementAttempt::NotNow };
    match reserve_assignment(scheduler, placed, demand, None) {
        Ok(reserved) => PlacementAttempt::Ended(Ok(reserved)),
        Err(NotTaken::Refused(error)) => refused(error),
        Err(NotTaken::Denied(denial, size)) => {
            let of_requester = held.of_requester(demand);
            let allowance = Allowance { effective: &demand.quota, held: &of_requester };
            let smaller = smaller(host, &read.gpus, &demand.wanted, size, allowance);
            refused(denied(&denial, &demand.new, &demand.wanted, smaller.as_deref()))
        }
        Err(NotTaken::Outdated) => PlacementAttempt::Ended(Err(NotReserved::Outdated)),
        Err(NotTaken::Claimed) => PlacementAttempt::Claimed,
        Err(NotTaken::Overtaken) => PlacementAttempt::NotNow,
    }
}

impl Scheduler {
    /// Returns the current snapshot of everything that the placement of a new request depends on.
    pub(crate) fn snapshot(&self, seen: &HostState, gpus: &[Gpu]) -> Arc<PlacementSnapshot> {
        let now = self.handles.context.state.now();
        let held = HeldLeases::of(self.handles.context.users.accounts(), &now.leases);
        self.snapshot_with(seen, gpus, &now, &held)
    }

    fn snapshot_with(
        &self,
        seen: &HostState,
        gpus: &[Gpu],
        now: &HostState,
        held: &HeldLeases,
    ) -> Arc<PlacementSnapshot> {
        let restrictions = self.entries().restrictions(&now.leases, held);
        PlacementSnapshot::current(self, seen, gpus, now, &restrictions)
    }
}

/// Reserves an assignment. `queued` is the request if it is in the queue.
pub(super) fn reserve_assignment(
    scheduler: &Scheduler,
    placed: Placed<'_>,
    demand: &LeaseDemand,
    queued: Option<(Ticket, LeaseId)>,
) -> Result<Reserved, NotTaken> {
    let (ticket, lease) = queued.unzip();
    let Placed { read, host, now, held, assignment } = placed;
    let gpus = read.gpus.as_slice();
    let members = offers::members(now, assignment, gpus, host, &demand.new.request).map_err(NotTaken::Refused)?;
    let size = Size::of(&members);
    check_size(&held.of_requester(demand), demand, size).map_err(|denial| NotTaken::Denied(denial, size))?;
    let created = assignment.creates();
    if !created.is_empty()
        && let Some(why) = scheduler.handles.context.lanes.closed()
    {
        return Err(NotTaken::Refused(why));
    }
    let (lanes, mut others) = (&scheduler.handles.context.lanes, gpus_of(&members));
    let claimed: Vec<(GpuIndex, GpuUuid)> =
        gpus.iter().filter(|gpu| created.contains(&gpu.index)).map(|gpu| (gpu.index, gpu.uuid.clone())).collect();
    others.retain(|uuid| claimed.iter().all(|(_, claimed)| claimed != uuid));
    let grants = lanes.begin_grant(&others).map_err(|_| NotTaken::Claimed)?;
    let missing = match claimed.is_empty() {
        true => None,
        false => {
            let claim = lanes.claim(&claimed).map_err(|_| NotTaken::Claimed)?;
            Some(DevicesToCreate { assignment: assignment.clone(), claim })
        }
    };
    // An operation may have destroyed the devices of the assignment since the readings. None can begin now.
    if lanes.has_changed(gpus_of(&members).iter(), &read.changes) {
        return Err(NotTaken::Outdated);
    }
    let end = ends::end_of_grant(demand);
    let reservation = Reservation { holder: demand.wanted.holder, members: members.clone(), lease, end };
    match scheduler.handles.context.state.reserve(&read.host, &now.leases, reservation) {
        Ok(id) => {
            scheduler.entries().note_grant(ticket, host, &assignment.gpus());
            Ok(Reserved::new(scheduler, id, members, missing, grants))
        }
        Err(OutdatedPlacement::DesiredState) => Err(NotTaken::Outdated),
        Err(OutdatedPlacement::Capacity) => Err(NotTaken::Overtaken),
    }
}
