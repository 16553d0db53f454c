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

use gpush_api::{ApiError, Gpu};
use gpush_core::lease::{
    placement::{Assignment, Host, NoAssignment},
    quota::{self},
};

use super::{
    Leases,
    capacity::{DevicesToCreate, Reserved},
    held::HeldLeases,
    limits::{check_size, within_quota},
    offers::{self, gpus_of},
    placement_snapshot::PlacementSnapshot,
    request::Resolved,
    searches::searched,
    waiting,
};
use crate::{
    lanes::LaneChanges,
    state::{HostState, Reservation},
};

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
        let now = leases.handles.state.now();
        let held = HeldLeases::of(leases.handles.users.accounts(), &now.leases);
        within_quota(&held, resolved).map_err(NotReserved::Refused)?;
        let left_out = &waiting::beyond_quota(leases);
        Ok((PlacementSnapshot::current(leases, &read.host, &read.gpus, &now, left_out), held))
    };
    loop {
        let (_placing, (snapshot, held), placed) = searched(
            || leases.lock_placement(),
            current,
            |(snapshot, _)| snapshot.known_placement(&resolved.wanted),
            |(snapshot, _)| snapshot.place(&resolved.wanted),
        )?;
        // While gpushd stops, the waiting requests leave the queue. A new request must not get their capacity.
        if leases.handles.stopping.is_cancelled() {
            return Err(NotReserved::Refused(ApiError::stopping("gpushd is stopping")));
        }
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
    let members =
        offers::members(&leases.handles.state.now(), assignment, gpus, host, &resolved.new.request).map_err(refused)?;
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
    Ok(Some(Reserved::new(leases, id, members, missing, grants)))
}
