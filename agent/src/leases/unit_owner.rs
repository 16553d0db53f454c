//! Determines whose processes a service of the system manager runs. The answer decides whether a process may leave the
//! cgroup of the service for the scope of a lease.

use gpush_api::ApiError;
use gpush_host::{
    cgroup::{self, Members, UnitOwner},
    proc,
    systemd::Manager,
};

use super::{Leases, scope_unit::no_scope};

/// Services of root that start sessions of users. The limits of these services do not apply to sessions: with
/// pam_systemd, each session has its own scope.
const SESSION_SERVICES: [&str; 12] = [
    "anacron",
    "atd",
    "console-getty",
    "container-getty",
    "cron",
    "crond",
    "cronie",
    "dropbear",
    "getty",
    "serial-getty",
    "ssh",
    "sshd",
];

/// Returns whether a cgroup has processes, and all of these processes certainly belong to the user `uid`.
pub(super) fn is_all_of(cgroup: &str, uid: u32) -> bool {
    let Some(Members { pids, error: None }) = cgroup::processes(cgroup) else { return false };
    let is_own = |pid| proc::try_uids(pid).is_ok_and(|uids| uids.is_none_or(|uids| uids == [uid; 4]));
    !pids.is_empty() && pids.into_iter().all(is_own)
}

/// Asks systemd whose processes a service runs. Returns `Others` for a scope, because a scope has no `User=`.
///
/// # Errors
/// If systemd cannot be reached.
pub(super) async fn owner_of(
    leases: &Leases,
    manager: &Manager,
    cgroup: &str,
    holder: u32,
) -> Result<UnitOwner, ApiError> {
    let name = cgroup.rsplit('/').next().unwrap_or_default();
    // systemd adds `_` to names that the kernel reserves in cgroup directories.
    let unit = name.strip_prefix('_').unwrap_or(name);
    if !unit.ends_with(".service") {
        return Ok(UnitOwner::Others);
    }
    let service = manager.state(unit).await.map_err(|error| no_scope(&error))?;
    let is_in_unit = |pid: &u32| proc::cgroups(*pid).is_some_and(|text| cgroup::contains(cgroup, &text));
    let main_uids = service.main_pid.filter(is_in_unit).and_then(proc::uids);
    let name = leases.handles.context.users.user(holder).await;
    Ok(owner(unit, &service.user, main_uids, holder, name.as_deref()))
}

/// Returns whether a service, such as `cron.service` or `getty@tty1.service`, starts sessions of users.
fn starts_sessions(unit: &str) -> bool {
    let name = unit.strip_suffix(".service").unwrap_or(unit);
    SESSION_SERVICES.contains(&name.split_once('@').map_or(name, |(template, _)| template))
}

/// Returns whose service this is, by its name, its `User=` and the uids of its main process.
fn owner(unit: &str, user: &str, main_uids: Option<[u32; 4]>, holder: u32, holder_name: Option<&str>) -> UnitOwner {
    let is_holders = holder_name == Some(user) || user.parse() == Ok(holder);
    match (user, main_uids) {
        ("" | "root" | "0", _) if holder == 0 && starts_sessions(unit) => UnitOwner::SessionService,
        // Without `User=`, the main process may have changed its user to the holder.
        ("" | "root" | "0", Some(uids)) if uids == [holder; 4] && holder != 0 => UnitOwner::Caller,
        ("" | "root" | "0", Some([0, 0, 0, 0])) if starts_sessions(unit) => UnitOwner::SessionService,
        // For example, the service runs as root, or the main process of a user has executed a setuid program.
        ("" | "root" | "0", _) => UnitOwner::Others,
        _ if is_holders => UnitOwner::Caller,
        _ => UnitOwner::Others,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Cases: `run` in a service whose user started a setuid program, in a service of root such as cron, and in a
    /// service whose main process changed its user.
    #[test]
    fn owner_of_a_service_does_not_depend_on_its_other_processes() {
        let owner = |user: &str, main| owner("cron.service", user, main, 1000, Some("alice"));
        let (root, alice) = (Some([0; 4]), Some([1000; 4]));
        for user in ["alice", "1000"] {
            assert_eq!(owner(user, root), UnitOwner::Caller, "{user}");
        }
        assert_eq!(owner("bob", alice), UnitOwner::Others);
        assert_eq!(owner("", root), UnitOwner::SessionService);
        assert_eq!(owner("", alice), UnitOwner::Caller);
        assert_eq!(owner("", None), UnitOwner::Others);
        assert_eq!(owner("", Some([1000, 0, 0, 0])), UnitOwner::Others, "the main process is a setuid program");
        assert_eq!(super::owner("cron.service", "", root, 0, Some("root")), UnitOwner::SessionService);
    }

    /// Fault: root started a program of a user with `runuser` in a service with limits, and the program got a scope
    /// without these limits.
    #[test]
    fn service_of_root_gives_no_scope_unless_it_starts_sessions() {
        let owner = |unit: &str, holder| owner(unit, "", Some([0; 4]), holder, None);
        for unit in ["cron.service", "crond.service", "ssh.service", "ssh@3-10.0.0.1:22.service", "getty@tty1.service"]
        {
            assert_eq!((owner(unit, 1000), owner(unit, 0)), (UnitOwner::SessionService, UnitOwner::SessionService));
        }
        for unit in ["batch.service", "cron-like.service", "batch@cron.service"] {
            assert_eq!((owner(unit, 1000), owner(unit, 0)), (UnitOwner::Others, UnitOwner::Others), "{unit}");
        }
    }
}
