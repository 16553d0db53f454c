//! The limits of the holder of a request: its quota.

use gpush_api::{ApiError, LeaseBinding, LeaseWait};
use gpush_core::lease::quota::{self, Denial, HeldLease};

use super::{Scheduler, demand::LeaseDemand, held::HeldLeases};
use crate::state::LeaseTable;

/// Checks the limits of the holder that do not depend on the placement. A refused request costs no search.
pub(crate) fn check_quotas(scheduler: &Scheduler, demand: &LeaseDemand, wait: LeaseWait) -> Result<(), ApiError> {
    let table = scheduler.handles.context.state.leases();
    within_quota(&HeldLeases::of(scheduler.handles.context.users.accounts(), &table), demand)?;
    match wait {
        LeaseWait::No => Ok(()),
        LeaseWait::Seconds(_) | LeaseWait::Unlimited => may_wait(scheduler, demand, &table),
    }
}

/// Checks that the quota of the holder allows one more waiting request.
pub(crate) fn may_wait(scheduler: &Scheduler, demand: &LeaseDemand, table: &LeaseTable) -> Result<(), ApiError> {
    let held = HeldLeases::of(scheduler.handles.context.users.accounts(), table).of_requester(demand);
    quota::check_queue(&demand.quota, &held).map_err(|denial| ApiError::from(&denial))
}

/// Checks those limits of the holder that do not depend on which GPUs the lease gets.
pub(crate) fn within_quota(held: &HeldLeases, demand: &LeaseDemand) -> Result<(), ApiError> {
    check_limits(&held.of_requester(demand), demand)
}

/// Does the same as [`within_quota`], with these leases of the holder.
pub(crate) fn check_limits(held: &[HeldLease], demand: &LeaseDemand) -> Result<(), ApiError> {
    let (kind, duration) = (demand.wanted.share.kind(), demand.new.request.duration_s);
    quota::check_request(&demand.quota, held, kind, duration).map_err(|denial| denied(&denial, &demand.new.binding))
}

/// Checks the limits that depend on the size of the assignment, with these leases of the holder.
pub(crate) fn check_size(held: &[HeldLease], demand: &LeaseDemand, size: quota::Size) -> Result<(), ApiError> {
    quota::check_size(&demand.quota, held, size).map_err(|denial| denied(&denial, &demand.new.binding))
}

/// Returns a denial by a quota as an error. For a Slurm job, the hint says what the user of the job can do.
pub(crate) fn denied(denial: &Denial, binding: &LeaseBinding) -> ApiError {
    let error = ApiError::from(denial);
    if matches!(binding, LeaseBinding::Job { .. }) { error.hint(denial.hint_for_job()) } else { error }
}
