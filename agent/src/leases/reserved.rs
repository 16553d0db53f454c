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

use gpush_api::{ApiError, Gpu, LeaseMember, LeaseWait};
use gpush_core::lease::{
    placement::{Assignment, Host, NoAssignment},
    quota::{self, HeldLease},
};

use super::{
    Leases,
    held::HeldLeases,
    offers::{self, gpus_of},
    placement_snapshot::PlacementSnapshot,
    queue,
    request::{Resolved, denied},
    searches::searched,
};
use crate::{
    lanes::{Claim, Grant, LaneChanges},
    mps,
    state::{HostState, LeaseTable, Reservation, ReservationId},
    tasks::TaskName,
};

/// Checks the limits of the holder that do not depend on the placement. A refused request costs no search.
pub(super) fn check_quotas(leases: &Leases, resolved: &Resolved, wait: LeaseWait) -> Result<(), ApiError> {
    let table = leases.handles.state.leases();
    within_quota(&HeldLeases::of(leases.handles.users.accounts(), &table), resolved)?;
    match wait {
        LeaseWait::No => Ok(()),
        LeaseWait::Seconds(_) | LeaseWait::Unlimited => queue::may_wait(leases, resolved, &table),
    }
}

/// Why gpushd reserved no capacity for a request.
#[derive(Debug)]
pub(super) enum NotReserved {
    /// A quota, or a limit of the target, refuses the request.
    Refused(ApiError),
    /// No placement is possible for the request now.
    NoRoom { why: NoAssignment, snapshot: Arc<PlacementSnapshot> },
    /// The config, an override, or the instances of a GPU have changed since the readings. The request must be placed
    /// again, with new readings.
    Outdated,
}

/// The MIG devices that an operation creates for a lease, and the operation's claim on their GPUs.
#[derive(Debug)]
pub(super) struct DevicesToCreate {
    pub(super) assignment: Assignment,
    pub(super) claim: Claim,
}

/// Capacity that is reserved until the grant is recorded. If this value is dropped before that, the capacity is free
/// again.
#[derive(Debug)]
pub(super) struct Reserved {
    leases: Leases,
    id: ReservationId,
    pub(super) members: Vec<LeaseMember>,
    /// The MIG devices that an operation must create first.
    pub(super) missing: Option<DevicesToCreate>,
    /// For each GPU on which no device is created, a guard: no operation on the GPU begins until the grant is recorded.
    _grants: Vec<Grant>,
    /// Whether the reservation is in the table.
    is_reserved: bool,
    /// Whether the grant may be on disk. If so, the capacity stays reserved.
    may_be_recorded: bool,
}

impl Reserved {
    /// Returns the number of the reservation.
    pub(super) fn id(&self) -> ReservationId {
        self.id
    }

    /// Removes the reservation from the table: the lease holds the capacity now, or does not need it any more.
    pub(super) fn remove(&mut self, table: &mut LeaseTable) {
        table.reserved.remove(&self.id);
        self.is_reserved = false;
    }

    /// Notes whether the grant may be on disk.
    pub(super) fn set_may_be_recorded(&mut self, may_be_recorded: bool) {
        self.may_be_recorded = may_be_recorded;
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if !self.is_reserved || self.may_be_recorded {
            return;
        }
        let (leases, members) = (self.leases.clone(), std::mem::take(&mut self.members));
        leases.handles.state.change_leases(|table| self.remove(table));
        leases.handles.tasks.clone().once_before_exit(TaskName::FreedCapacity, async move {
            mps::admit(&leases.handles.mps, &members).await;
            leases.capacity_freed();
        });
    }
}

/// The readings with which requests are placed. They can be old when the capacity is reserved.
#[derive(Debug, Clone)]
pub(super) struct ReadHost {
    pub(super) host: Arc<HostState>,
    /// The GPUs, with everything that placement needs.
    pub(super) gpus: Vec<Gpu>,
    /// The operations on each GPU before the readings began.
    pub(super) changes: LaneChanges,
}

/// Places a request, but not on capacity that earlier waiting requests need. Reserves the assignment. Searches without
/// the placement lock, so call this function on a blocking thread.
pub(super) fn reserve(leases: &Leases, read: &ReadHost, resolved: &Resolved) -> Result<Reserved, NotReserved> {
    let current = || {
        let table = leases.handles.state.leases();
        let held = HeldLeases::of(leases.handles.users.accounts(), &table);
        within_quota(&held, resolved).map_err(NotReserved::Refused)?;
        let left_out = &queue::beyond_quota(leases);
        Ok((PlacementSnapshot::current(leases, &read.host, &read.gpus, table, left_out), held))
    };
    loop {
        let (_placing, (snapshot, held), placed) = searched(
            || leases.lock_placement(),
            current,
            |(snapshot, _)| snapshot.known_placement(&resolved.wanted),
            |(snapshot, _)| snapshot.place(&resolved.wanted),
        )?;
        let assignment = placed.map_err(|why| NotReserved::NoRoom { why, snapshot: Arc::clone(&snapshot) })?;
        let host = &snapshot.schedule().host;
        if let Some(reserved) = reserve_assignment(leases, read, host, &held, resolved, &assignment)? {
            return Ok(reserved);
        }
        // An operation has claimed one of the GPUs since the snapshot. Place the request again: this GPU now counts as
        // closed.
    }
}

/// Reserves an assignment. Returns `None` if an operation has claimed one of the GPUs. The caller must hold the
/// placement lock.
pub(super) fn reserve_assignment(
    leases: &Leases,
    read: &ReadHost,
    host: &Host,
    held: &HeldLeases,
    resolved: &Resolved,
    assignment: &Assignment,
) -> Result<Option<Reserved>, NotReserved> {
    let (refused, gpus) = (NotReserved::Refused, read.gpus.as_slice());
    let members = offers::members(leases, assignment, gpus, host, &resolved.new.request).map_err(refused)?;
    check_size(&held.of_requester(resolved), resolved, quota::Size::of(&members)).map_err(refused)?;
    let created = assignment.creates();
    if !created.is_empty()
        && let Some(why) = leases.handles.engine.operations.closed()
    {
        return Err(refused(why));
    }
    let (lanes, mut others) = (&leases.handles.lanes, gpus_of(&members));
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
    let reservation = Reservation { holder: resolved.wanted.holder, members: members.clone() };
    let Some(id) = leases.handles.state.reserve(&read.host, reservation) else { return Err(NotReserved::Outdated) };
    let leases = leases.clone();
    let (is_reserved, may_be_recorded) = (true, false);
    Ok(Some(Reserved { leases, id, members, missing, _grants: grants, is_reserved, may_be_recorded }))
}

/// Checks those limits of the holder that do not depend on which GPUs the lease gets.
pub(super) fn within_quota(held: &HeldLeases, resolved: &Resolved) -> Result<(), ApiError> {
    check_limits(&held.of_requester(resolved), resolved)
}

/// Does the same as [`within_quota`], with these leases of the holder.
pub(super) fn check_limits(held: &[HeldLease], resolved: &Resolved) -> Result<(), ApiError> {
    let (kind, duration) = (resolved.wanted.share.kind(), resolved.new.request.duration_s);
    quota::check_request(&resolved.quota, held, kind, duration).map_err(|denial| denied(&denial, &resolved.new.binding))
}

/// Checks the limits that depend on the size of the assignment, with these leases of the holder.
pub(super) fn check_size(held: &[HeldLease], resolved: &Resolved, size: quota::Size) -> Result<(), ApiError> {
    quota::check_size(&resolved.quota, held, size).map_err(|denial| denied(&denial, &resolved.new.binding))
}
