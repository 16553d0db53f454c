//! Scopes of leases: systemd creates and kills these scopes on request of gpushd.
//!
//! Only systemd moves and kills the processes of a scope: gpushd's unit may not write to cgroups. The name of a scope
//! contains the epoch of the database and the number of the lease, so no two leases have the same scope.

use std::{collections::BTreeSet, io, sync::Arc};

use gpush_api::{ApiError, Code, LeaseBinding};
use gpush_host::{
    cgroup, proc,
    systemd::{self, Manager, TransientScope},
};
use gpush_store::LeaseRecord;

use super::{
    Leases,
    calling_process::CallingProcess,
    scope_devices,
    scope_unit::{SLICE, entered_lease, no_scope},
    user_limits,
};
use crate::state::LeaseTable;

/// Creates scopes, or has the reason why this gpushd cannot create them.
#[derive(Debug, Clone)]
pub(crate) struct Scopes(pub(super) Result<Arc<Manager>, &'static str>);

impl Scopes {
    /// Returns systemd's manager; an error if this gpushd cannot change units.
    pub(crate) fn manager(&self) -> Result<Arc<Manager>, &'static str> {
        self.0.clone()
    }

    /// Returns scopes that this systemd creates.
    pub(crate) fn of(manager: Arc<Manager>) -> Self {
        Self(Ok(manager))
    }

    /// Determines whether this gpushd can create scopes. Only the gpushd that runs as the system service can create
    /// scopes.
    pub(crate) fn new(is_systems_own: bool) -> Self {
        Self(if !systemd::is_the_service_manager() {
            Err("systemd is not the service manager here")
        } else if !nix::unistd::geteuid().is_root() {
            Err("gpushd does not run as root")
        } else if !is_systems_own {
            Err("this gpushd does not run as the system's service")
        } else {
            Ok(Arc::default())
        })
    }
}

/// Why the caller was not moved into the scope of its lease.
#[derive(Debug)]
pub(super) struct NotMoved {
    pub(super) error: ApiError,
    /// Whether systemd may have moved another process into the scope.
    pub(super) may_have_moved_another: bool,
}

impl From<ApiError> for NotMoved {
    fn from(error: ApiError) -> Self {
        Self { error, may_have_moved_another: false }
    }
}

/// Creates the scope of an active lease and moves the caller into it.
///
/// # Errors
/// If the caller has ended or changed its user or cgroup, or systemd did not move the caller. If systemd may have moved
/// another process, the lease must no longer have a scope.
pub(super) async fn move_into_scope(
    leases: &Leases,
    record: &LeaseRecord,
    process: &CallingProcess,
) -> Result<(), NotMoved> {
    let Ok(manager) = &leases.handles.scopes.0 else { return Ok(()) };
    let LeaseBinding::Scope { unit: Some(unit), cgroup: Some(cgroup) } = &record.binding else { return Ok(()) };
    let who = record.holder.user.clone().unwrap_or_else(|| format!("uid {}", record.holder.uid));
    let scope = TransientScope {
        name: unit.clone(),
        description: format!("gpush lease {} of {who}", record.id),
        slice: format!("{SLICE}-{}.slice", record.holder.uid),
        devices: scope_devices::of_new_scope(leases, record).await?,
    };
    user_limits::carry_over(leases, manager, record.holder.uid).await?;
    process.check_unmoved()?;
    let started = manager.start_scope(&scope, &process.process).await;
    scope_devices::check_new_scope(leases, record).await;
    let is_there = proc::cgroups(process.pid).is_some_and(|text| cgroup::contains(cgroup, &text));
    let may_have_moved_another = started.as_ref().is_err_and(systemd::Error::may_move_another_process);
    // If the process has ended, return the error that says so, instead of systemd's error.
    let error = match (process.check(), started) {
        (Err(error), _) => error,
        (Ok(()), Err(error)) => no_scope(&error),
        (Ok(()), Ok(())) if is_there => return Ok(()),
        (Ok(()), Ok(())) => {
            ApiError::new(Code::Internal, format!("systemd did not move the calling process into {unit}"))
                .hint(format!("see `journalctl -u {unit}`"))
        }
    };
    Err(NotMoved { error, may_have_moved_another })
}

/// Kills all processes in the scope of a lease, including processes of other users and processes that start meanwhile.
/// Does nothing if the lease has no scope, because gpushd must not kill processes in other cgroups.
pub(super) async fn kill(leases: &Leases, record: &LeaseRecord) {
    let (Ok(manager), Some(unit)) = (&leases.handles.scopes.0, unit_of(record)) else { return };
    let id = record.id;
    match manager.kill(unit).await {
        Ok(()) => tracing::info!(lease = %id, "lease {id}: sent SIGKILL to all processes of {unit}"),
        // systemd has unloaded the scope, because its last process has ended.
        Err(error) if error.is_not_loaded() => {}
        Err(error) => tracing::warn!(lease = %id, "lease {id}: cannot kill {unit}: {}", error.in_full()),
    }
}

/// Returns the scope that gpushd created for a lease.
fn unit_of(record: &LeaseRecord) -> Option<&str> {
    match &record.binding {
        LeaseBinding::Scope { unit, .. } => unit.as_deref(),
        LeaseBinding::Cgroup { .. }
        | LeaseBinding::Process { .. }
        | LeaseBinding::Job { .. }
        | LeaseBinding::Time
        | LeaseBinding::None => None,
    }
}

/// Returns the scopes of leases that gpushd does not know, for example because the database was
/// lost. gpushd never kills these scopes.
///
/// # Errors
/// The cgroups of the scopes cannot be listed.
fn unknown_scopes(leases: &Leases) -> io::Result<Vec<String>> {
    if leases.handles.scopes.0.is_err() {
        return Ok(Vec::new());
    }
    let epoch = leases.handles.context.store.epoch();
    unknown_among(epoch, all_scopes, || leases.handles.context.state.leases())
}

/// Returns the scopes that `list` returns and that no lease in the table has. Calls `list` before `table`. A lease is
/// in the table before systemd creates its scope, so the result never contains the scope of a new lease.
fn unknown_among(
    epoch: &str,
    list: impl FnOnce() -> io::Result<Vec<String>>,
    table: impl FnOnce() -> Arc<LeaseTable>,
) -> io::Result<Vec<String>> {
    let mut scopes = list()?;
    let table = table();
    let known: BTreeSet<&str> = table
        .open
        .values()
        .filter_map(|lease| match &lease.record.binding {
            LeaseBinding::Scope { cgroup, .. } => cgroup.as_deref(),
            _ => None,
        })
        .collect();
    let has_entered = |scope: &str| entered_lease(epoch, scope).is_some_and(|id| table.open.contains_key(&id));
    scopes.retain(|scope| !known.contains(scope.as_str()) && !has_entered(scope));
    Ok(scopes)
}

/// Lists the scopes of all leases.
fn all_scopes() -> io::Result<Vec<String>> {
    let mut scopes = Vec::new();
    for slice in cgroup::children(&format!("/{SLICE}.slice"))? {
        scopes.extend(cgroup::children(&slice)?);
    }
    scopes.retain(|scope| scope.ends_with(".scope"));
    Ok(scopes)
}

/// Returns the problems of lease scopes.
pub(crate) fn health(leases: &Leases) -> Vec<ApiError> {
    // The scope of a lease that has just ended may still exist briefly, without processes. So ignore scopes without
    // processes.
    let may_have_processes = |scope: &String| cgroup::processes(scope).is_some_and(|found| !found.is_empty());
    let unknown: Vec<String> = match unknown_scopes(leases) {
        Ok(scopes) => scopes.into_iter().filter(may_have_processes).collect(),
        Err(error) => {
            return vec![
                ApiError::new(Code::Internal, "cannot list the scopes of leases")
                    .cause(error.to_string())
                    .hint("see `systemctl list-units 'gpulease-*.scope'`"),
            ];
        }
    };
    let Some(first) = unknown.first() else { return Vec::new() };
    let name = first.rsplit('/').next().unwrap_or_default();
    let count = unknown.len();
    let what = if count == 1 { format!("scope {name} has") } else { format!("{count} scopes, such as {name}, have") };
    let message = format!("{what} processes of a lease that gpushd does not know");
    vec![
        ApiError::new(Code::Conflict, message)
            .cause("gpushd does not end these processes")
            .hint(format!("see `systemctl status {name}`")),
    ]
}

#[cfg(test)]
mod tests {
    use gpush_api::LeaseId;

    use super::*;
    use crate::leases::scope_unit::names;
    use crate::state::leases::tests::record;

    /// Fault: gpushd read the table of leases before it listed the scopes. If a lease was granted in between, its scope
    /// appeared in `gpushctl status` as that of an unknown lease.
    #[test]
    fn scope_of_a_lease_granted_during_the_listing_is_known() {
        let table = std::cell::RefCell::new(LeaseTable::default());
        let list = || {
            let (unit, cgroup) = names("e", LeaseId(1), 1000);
            let binding = LeaseBinding::Scope { unit: Some(unit), cgroup: Some(cgroup.clone()) };
            table.borrow_mut().insert(LeaseRecord { binding, ..record(1, 1000, "GPU-0") });
            let of = |name: &str| format!("/gpulease.slice/gpulease-1000.slice/gpulease-e-{name}.scope");
            Ok(vec![cgroup, of("1-4711"), of("2"), of("2-4711")])
        };
        let unknown = unknown_among("e", list, || Arc::new(table.borrow().clone())).unwrap();
        let of = |name: &str| format!("/gpulease.slice/gpulease-1000.slice/gpulease-e-{name}.scope");
        assert_eq!(unknown, [of("2"), of("2-4711")]);
    }

    /// gpushd must not kill a session, service, container or job.
    #[test]
    fn only_a_scope_of_gpushd_is_killed() {
        let cgroup = Some("/system.slice/jupyter.service".to_owned());
        let bound = |binding| LeaseRecord { binding, ..record(1, 1000, "GPU-0") };
        let scope = bound(LeaseBinding::Scope { unit: Some("gpulease-e-1.scope".to_owned()), cgroup: cgroup.clone() });
        assert_eq!(unit_of(&scope), Some("gpulease-e-1.scope"));
        let (pid, start) = (Some(4), Some(1));
        for binding in [
            LeaseBinding::Cgroup { cgroup, pid: None, start: None },
            LeaseBinding::Process { pid, start },
            LeaseBinding::Time,
            LeaseBinding::None,
        ] {
            assert_eq!(unit_of(&bound(binding)), None);
        }
    }
}
