//! The limits of the holder of a request: its quota.

use gpush_api::{ApiError, LeaseWait};
use gpush_core::lease::quota::{self, HeldLease};

use super::{Leases, held::HeldLeases, quotas::denied, request::Resolved};
use crate::state::LeaseTable;

/// Checks the limits of the holder that do not depend on the placement. A refused request costs no search.
pub(super) fn check_quotas(leases: &Leases, resolved: &Resolved, wait: LeaseWait) -> Result<(), ApiError> {
    let table = leases.handles.state.leases();
    within_quota(&HeldLeases::of(leases.handles.users.accounts(), &table), resolved)?;
    match wait {
        LeaseWait::No => Ok(()),
        LeaseWait::Seconds(_) | LeaseWait::Unlimited => may_wait(leases, resolved, &table),
    }
}

/// Checks that the quota of the holder allows one more waiting request.
pub(super) fn may_wait(leases: &Leases, resolved: &Resolved, table: &LeaseTable) -> Result<(), ApiError> {
    let held = HeldLeases::of(leases.handles.users.accounts(), table).of_requester(resolved);
    quota::check_queue(&resolved.quota, &held).map_err(|denial| ApiError::from(&denial))
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
