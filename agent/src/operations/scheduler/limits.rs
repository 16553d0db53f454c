//! The limits of the holder of a request: its quota.

use gpush_api::{ApiError, LeaseBinding, LeaseWait};
use gpush_core::lease::{
    placement::PlacementRequest,
    quota::{self, Denial, DeniedRequest, Exceeded, HeldLease},
};
use gpush_store::NewLease;

use super::{Scheduler, demand::LeaseDemand, held::HeldLeases};
use crate::state::LeaseTable;

/// Checks the limits of the holder that do not depend on the placement. A refused request costs no search.
pub(crate) fn check_quotas(scheduler: &Scheduler, demand: &LeaseDemand, wait: LeaseWait) -> Result<(), ApiError> {
    let table = scheduler.handles.context.state.leases();
    let held = HeldLeases::of(scheduler.handles.context.users.accounts(), &table);
    within_quota(&held, demand).map_err(|denial| {
        let error = denied(&denial, &demand.new, &demand.wanted, None);
        match quota::check_count(&demand.quota, &held.of_requester(demand)) {
            // A shorter request would be refused, because the user holds too many leases.
            Err(full) if matches!(denial.exceeded, Exceeded::Duration { .. }) => after_release(error, &full),
            Err(_) | Ok(()) => error,
        }
    })?;
    match wait {
        LeaseWait::No => Ok(()),
        LeaseWait::Seconds(_) | LeaseWait::Unlimited => may_wait(scheduler, demand, &table),
    }
}

/// Adds to the hint of an error that the user must first release a lease. `full` is the denial of a further lease.
fn after_release(mut error: ApiError, full: &Denial) -> ApiError {
    let first = full.hint(None);
    error.hint = Some(match error.hint {
        Some(hint) => format!("the quota allows no further lease: {first}; after that, {hint}"),
        None => first,
    });
    error
}

/// Checks that the quota of the holder allows one more waiting request.
pub(crate) fn may_wait(scheduler: &Scheduler, demand: &LeaseDemand, table: &LeaseTable) -> Result<(), ApiError> {
    let held = HeldLeases::of(scheduler.handles.context.users.accounts(), table).of_requester(demand);
    quota::check_queue(&demand.quota, &held).map_err(|denial| denied(&denial, &demand.new, &demand.wanted, None))
}

/// Checks those limits of the holder that do not depend on which GPUs the lease gets.
pub(crate) fn within_quota(held: &HeldLeases, demand: &LeaseDemand) -> Result<(), Denial> {
    check_limits(&held.of_requester(demand), demand)
}

/// Does the same as [`within_quota`], with these leases of the holder.
pub(crate) fn check_limits(held: &[HeldLease], demand: &LeaseDemand) -> Result<(), Denial> {
    let (kind, duration) = (demand.wanted.share.kind(), demand.new.request.duration_s);
    quota::check_request(&demand.quota, held, kind, duration)
}

/// Checks the limits that depend on the size of the assignment, with these leases of the holder.
pub(crate) fn check_size(held: &[HeldLease], demand: &LeaseDemand, size: quota::Size) -> Result<(), Denial> {
    quota::check_size(&demand.quota, held, size)
}

/// Returns a denial by a quota as an error. For a Slurm job, the hint says what the user of the job can do. `instead` is
/// described in [`DeniedRequest`].
pub(crate) fn denied(denial: &Denial, new: &NewLease, wanted: &PlacementRequest, instead: Option<&str>) -> ApiError {
    let named = || new.holder.user.clone().unwrap_or_else(|| format!("uid {}", new.holder.uid));
    let other = (new.holder.uid != new.asked_by.uid).then(named);
    let what = wanted.describe();
    let error = denial.error(DeniedRequest { what: &what, holder: other.as_deref(), instead });
    if matches!(new.binding, LeaseBinding::Job { .. }) { error.hint(denial.hint_for_job()) } else { error }
}
