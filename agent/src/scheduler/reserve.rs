//! Reserves the capacity of a grant: checks the quotas, finds a placement, and reserves its capacity in the state.
//!
//! ```text
//! quota ─► search ─► [placement lock: quota, unchanged? reserve] ─► reserved
//!             ▲ │ no room          │ changed, or a GPU was claimed
//!             │ ▼                  │
//!             │ refused, or queued │
//!             └────────────────────┘
//! ```

use std::sync::Arc;

use gpush_api::{ApiError, Gpu, LeaseId};
use gpush_core::lease::{
    placement::{Assignment, Host, NoAssignment},
    quota,
};

use super::{
    Scheduler,
    capacity::{DevicesToCreate, Reserved},
    demand::LeaseDemand,
    held::HeldLeases,
    limits::{check_size, within_quota},
    offers::{self, gpus_of},
    placement_snapshot::PlacementSnapshot,
    searches::searched,
};
use crate::{
    lanes::LaneChanges,
    state::{HostState, Reservation},
};

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

/// Places a request, but not on capacity that earlier waiting requests need. Reserves the assignment. Searches without
/// the placement lock, so call this function on a blocking thread.
pub(crate) fn reserve(scheduler: &Scheduler, read: &ReadHost, demand: &LeaseDemand) -> Result<Reserved, NotReserved> {
    let current = || {
        let table = scheduler.handles.state.leases();
        let held = HeldLeases::of(scheduler.handles.users.accounts(), &table);
        within_quota(&held, demand).map_err(NotReserved::Refused)?;
        let left_out = scheduler.entries().beyond_quota(&table, &held);
        Ok((PlacementSnapshot::current(scheduler, &read.host, &read.gpus, table, &left_out), held))
    };
    loop {
        let (_placing, (snapshot, held), placed) = searched(
            || scheduler.lock_placement(),
            current,
            |(snapshot, _)| snapshot.known_placement(&demand.wanted),
            |(snapshot, _)| snapshot.place(&demand.wanted),
        )?;
        // While gpushd stops, the waiting requests leave the queue. A new request must not get their capacity.
        if scheduler.handles.stopping.is_cancelled() {
            return Err(NotReserved::Refused(ApiError::stopping("gpushd is stopping")));
        }
        let assignment = placed.map_err(|why| NotReserved::NoRoom { why, snapshot: Arc::clone(&snapshot) })?;
        let host = &snapshot.schedule().host;
        if let Some(reserved) = reserve_assignment(scheduler, read, host, &held, demand, &assignment, None)? {
            return Ok(reserved);
        }
        // An operation has claimed one of the GPUs since the snapshot. Place the request again: this GPU now counts as
        // closed.
    }
}

impl Scheduler {
    /// Returns the current snapshot of everything that the placement of a new request depends on.
    pub(crate) fn snapshot(&self, seen: &HostState, gpus: &[Gpu]) -> Arc<PlacementSnapshot> {
        let _placing = self.lock_placement();
        let table = self.handles.state.leases();
        let held = HeldLeases::of(self.handles.users.accounts(), &table);
        let left_out = self.entries().beyond_quota(&table, &held);
        PlacementSnapshot::current(self, seen, gpus, table, &left_out)
    }
}

/// Reserves an assignment. `lease` is the request if it is in the queue. Returns `None` if an operation has claimed one of
/// the GPUs. The caller must hold the placement lock.
pub(crate) fn reserve_assignment(
    scheduler: &Scheduler,
    read: &ReadHost,
    host: &Host,
    held: &HeldLeases,
    demand: &LeaseDemand,
    assignment: &Assignment,
    lease: Option<LeaseId>,
) -> Result<Option<Reserved>, NotReserved> {
    let (refused, gpus) = (NotReserved::Refused, read.gpus.as_slice());
    let members = offers::members(scheduler, assignment, gpus, host, &demand.new.request).map_err(refused)?;
    check_size(&held.of_requester(demand), demand, quota::Size::of(&members)).map_err(refused)?;
    let created = assignment.creates();
    if !created.is_empty()
        && let Some(why) = scheduler.handles.lanes.closed()
    {
        return Err(refused(why));
    }
    let (lanes, mut others) = (&scheduler.handles.lanes, gpus_of(&members));
    let claimed: Vec<(u32, String)> =
        gpus.iter().filter(|gpu| created.contains(&gpu.index)).map(|gpu| (gpu.index, gpu.uuid.clone())).collect();
    others.retain(|uuid| claimed.iter().all(|(_, claimed)| claimed != uuid));
    let Ok(grants) = lanes.begin_grant(&others) else { return Ok(None) };
    let missing = match claimed.is_empty() {
        true => None,
        false => match lanes.claim(&claimed) {
            Ok(claim) => Some(DevicesToCreate { assignment: assignment.clone(), claim }),
            Err(_) => return Ok(None),
        },
    };
    // An operation may have destroyed the devices of the assignment since the readings. None can begin now.
    if lanes.has_changed(gpus_of(&members).iter(), &read.changes) {
        return Err(NotReserved::Outdated);
    }
    let reservation = Reservation { holder: demand.wanted.holder, members: members.clone(), lease };
    let Some(id) = scheduler.handles.state.reserve(&read.host, reservation) else { return Err(NotReserved::Outdated) };
    Ok(Some(Reserved::new(scheduler, id, members, missing, grants)))
}
