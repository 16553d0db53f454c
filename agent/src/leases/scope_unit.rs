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

/// Returns the name of the scope of a process that has entered a lease.
pub(super) fn entered(epoch: &str, id: LeaseId, pid: u32) -> String {
    format!("{SLICE}-{epoch}-{}-{pid}.scope", id.0)
}

/// Returns the pattern of the names of all scopes of processes that have entered a lease.
pub(super) fn entered_pattern(epoch: &str, id: LeaseId) -> String {
    format!("{SLICE}-{epoch}-{}-*.scope", id.0)
}

/// Returns the pattern of the names of all scopes of leases of a database.
pub(super) fn pattern(epoch: &str) -> String {
    format!("{SLICE}-{epoch}-*.scope")
}

/// Returns the lease that a process with this scope has entered.
pub(super) fn entered_lease(epoch: &str, cgroup: &str) -> Option<LeaseId> {
    let (id, pid) = numbers(epoch, cgroup)?.split_once('-')?;
    pid.parse::<u32>().ok()?;
    id.parse().ok().map(LeaseId)
}

/// Returns the lease of a scope: the one that requested the scope, or the one that its process has entered.
pub(super) fn lease(epoch: &str, cgroup: &str) -> Option<LeaseId> {
    let own = numbers(epoch, cgroup)?.parse().ok().map(LeaseId);
    own.or_else(|| entered_lease(epoch, cgroup))
}

/// Returns the part of the name of a scope after the epoch.
fn numbers<'a>(epoch: &str, cgroup: &'a str) -> Option<&'a str> {
    let name = cgroup.rsplit('/').next()?.strip_prefix(SLICE)?.strip_prefix('-')?.strip_prefix(epoch)?;
    name.strip_prefix('-')?.strip_suffix(".scope")
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

    #[test]
    fn scope_of_entered_lease_names_lease_and_process() {
        let unit = entered("0a1b2c3d", LeaseId(17), 4711);
        assert_eq!(unit, "gpulease-0a1b2c3d-17-4711.scope");
        let of = |unit: &str| {
            let cgroup = format!("/gpulease.slice/gpulease-1000.slice/{unit}");
            (entered_lease("0a1b2c3d", &cgroup), lease("0a1b2c3d", &cgroup))
        };
        assert_eq!(of(&unit), (Some(LeaseId(17)), Some(LeaseId(17))));
        assert_eq!(of("gpulease-0a1b2c3d-17.scope"), (None, Some(LeaseId(17))));
        for other in ["gpulease-ffffffff-17-4711.scope", "gpulease-ffffffff-17.scope", "gpulease-0a1b2c3d-17-x.scope"] {
            assert_eq!(of(other), (None, None), "{other}");
        }
    }
}
