//! Capacity that is reserved for a grant.

use gpush_api::LeaseMember;
use gpush_core::lease::placement::Assignment;

use tokio_util::task::task_tracker::TaskTrackerToken;

use super::Scheduler;
use crate::{
    modes::mps,
    state::{
        LeaseTable, ReservationId,
        lanes::{Claim, Grant},
    },
    system::tasks::TaskName,
};

/// The MIG devices that an operation creates for a lease, and the operation's claim on their GPUs.
#[derive(Debug)]
pub(crate) struct DevicesToCreate {
    pub(crate) assignment: Assignment,
    pub(crate) claim: Claim,
}

/// Capacity that is reserved until the grant is recorded. If this value is dropped before that, the capacity is free
/// again.
#[derive(Debug)]
pub(crate) struct Reserved {
    scheduler: Scheduler,
    id: ReservationId,
    pub(crate) members: Vec<LeaseMember>,
    /// The MIG devices that an operation must create first.
    pub(crate) missing: Option<DevicesToCreate>,
    /// For each GPU on which no device is created, a guard: no operation on the GPU begins until the grant is recorded.
    grants: Vec<Grant>,
    /// gpushd does not exit before the grant is recorded.
    unfinished: Option<TaskTrackerToken>,
    /// Whether the reservation is in the table.
    is_reserved: bool,
    /// Whether the grant may be on disk. If so, the capacity stays reserved.
    may_be_recorded: bool,
}

impl Reserved {
    /// Takes over the reservation `id`, which the caller has just added to the table.
    pub(crate) fn new(
        scheduler: &Scheduler,
        id: ReservationId,
        members: Vec<LeaseMember>,
        missing: Option<DevicesToCreate>,
        grants: Vec<Grant>,
    ) -> Self {
        let (scheduler, unfinished) = (scheduler.clone(), Some(scheduler.handles.context.tasks.unfinished()));
        Self { scheduler, id, members, missing, grants, unfinished, is_reserved: true, may_be_recorded: false }
    }

    /// Removes the reservation from the table: the lease holds the capacity now, or does not need it any more.
    pub(crate) fn remove(&mut self, table: &mut LeaseTable) {
        table.reserved.remove(&self.id);
        self.is_reserved = false;
    }

    /// Lets operations on the GPUs begin, and lets gpushd exit. The reservation stays.
    pub(crate) fn drop_guards(&mut self) {
        self.grants.clear();
        self.unfinished = None;
    }

    /// Notes whether the grant may be on disk.
    pub(crate) fn set_may_be_recorded(&mut self, may_be_recorded: bool) {
        self.may_be_recorded = may_be_recorded;
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        if !self.is_reserved || self.may_be_recorded {
            return;
        }
        let (scheduler, members) = (self.scheduler.clone(), std::mem::take(&mut self.members));
        scheduler.handles.context.state.change_leases(|table| self.remove(table));
        scheduler.handles.context.tasks.clone().once_before_exit(TaskName::FreedCapacity, async move {
            mps::admit(&scheduler.handles.mps, &members).await;
            scheduler.capacity_freed();
        });
    }
}
