//! The systemd units of the scopes of leases: their names, and the error if they cannot be created.

use gpush_api::{ApiError, Code, LeaseId};
use gpush_host::systemd;

/// The slice that contains the scopes of all users.
pub(super) const SLICE: &str = "gpulease";

/// Returns the name of the scope of a lease, and the path of its cgroup.
pub(super) fn names(epoch: &str, id: LeaseId, uid: u32) -> (String, String) {
    let unit = format!("{SLICE}-{epoch}-{}.scope", id.0);
    let cgroup = format!("/{SLICE}.slice/{SLICE}-{uid}.slice/{unit}");
    (unit, cgroup)
}

/// Returns the error for a lease whose scope cannot be created.
pub(super) fn no_scope(error: &systemd::Error) -> ApiError {
    ApiError::new(Code::Unavailable, "cannot create a systemd scope for the lease").cause(error.in_full()).hint(
        "see `systemctl status dbus.service`, or request a lease with an end time: `gpushctl lease request --for 2h`",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scope_is_named_after_epoch_and_lease() {
        let (unit, cgroup) = names("0a1b2c3d", LeaseId(17), 1000);
        assert_eq!(unit, "gpulease-0a1b2c3d-17.scope");
        assert_eq!(cgroup, "/gpulease.slice/gpulease-1000.slice/gpulease-0a1b2c3d-17.scope");
    }
}
