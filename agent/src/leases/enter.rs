//! Processes that enter an existing lease: `gpushctl run --lease L17`.
//!
//! While the kernel denies the GPUs to login sessions, the environment of the lease is not enough. So systemd moves the
//! process into a further scope without a GPU. If the lease is still active then, the scope opens the devices of the
//! lease, and closes them when the lease ends:
//!
//! ```text
//! gpulease-1000.slice ─┬─ gpulease-EPOCH-17.scope         the command that requested the lease, if it got a scope
//!                      └─ gpulease-EPOCH-17-4711.scope    process 4711 entered later
//! ```
//!
//! The environment of the process names the lease, as without this scope. The lease does not end with such a scope.

use gpush_api::{ApiError, Code, EnteredLease, LeaseBinding};
use gpush_host::{cgroup::CgroupKind, systemd::TransientScope};
use gpush_store::LeaseRecord;

use super::{
    Leases,
    calling_process::CallingProcess,
    scope_devices,
    scope_unit::{self, SLICE, no_scope},
    show,
};
use crate::requests::caller::Caller;

/// Moves the calling process into a scope that opens the devices of a lease. Does nothing if the process can open them
/// where it is.
///
/// # Errors
/// If the caller does not hold the lease, the lease is not active, or the process belongs to another lease. If systemd
/// does not move the process.
pub(crate) async fn enter(leases: &Leases, caller: &Caller, text: &str) -> Result<EnteredLease, ApiError> {
    let id = show::environment(leases, caller, text).await?.lease.id;
    let Some(lease) = leases.handles.context.state.leases().get(id).cloned() else { return Err(show::unknown(id)) };
    if !caller.runs_as(lease.record.holder.uid) {
        return Err(show::denied(&lease, caller, "use"));
    }
    let process = CallingProcess::of(caller)?;
    let epoch = leases.handles.context.store.epoch();
    match &process.cgroup {
        CgroupKind::Session { .. } | CgroupKind::UserManager { .. } => {}
        CgroupKind::Lease { cgroup } if is_of(&lease.record, cgroup) => return Ok(EnteredLease::default()),
        CgroupKind::Lease { cgroup } if scope_unit::entered_lease(epoch, cgroup) == Some(id) => {
            return Ok(EnteredLease::default());
        }
        CgroupKind::Lease { cgroup } => {
            let name = cgroup.rsplit('/').next().unwrap_or_default();
            return Err(ApiError::new(
                Code::Conflict,
                format!("cannot enter lease {id} from the scope of another lease"),
            )
            .cause(format!("this process is in {name}"))
            .hint("run the command in a shell that belongs to no lease"));
        }
        // The kernel denies no GPU to these processes.
        CgroupKind::Unit { .. } | CgroupKind::Container { .. } | CgroupKind::SlurmJob { .. } | CgroupKind::Other => {
            return Ok(EnteredLease::default());
        }
    }
    let Some(devices) = scope_devices::of_entered_scope(leases, id).await else {
        return Ok(EnteredLease::default());
    };
    let manager = leases.handles.scopes.manager().map_err(|reason| {
        ApiError::new(Code::Unsupported, "this gpushd cannot create scopes").cause(reason.to_owned())
    })?;
    let unit = scope_unit::entered(epoch, id, process.pid);
    let scope = TransientScope {
        name: unit.clone(),
        description: format!("command in gpush lease {id}"),
        slice: format!("{SLICE}-{}.slice", lease.record.holder.uid),
        devices: Some(devices),
    };
    process.check_unmoved()?;
    manager.start_scope(&scope, &process.process).await.map_err(|error| no_scope(&error))?;
    // The lease may have ended meanwhile, so the scope opens the devices only now.
    if scope_devices::open_entered(leases, &lease.record, &unit).await? {
        return Ok(EnteredLease { unit: Some(unit) });
    }
    Err(ApiError::new(Code::Conflict, format!("lease {id} has ended"))
        .hint("request another lease with `gpushctl run -- COMMAND`"))
}

/// Returns whether a cgroup is a scope of the lease.
fn is_of(record: &LeaseRecord, cgroup: &str) -> bool {
    let own = match &record.binding {
        LeaseBinding::Scope { cgroup, .. } => cgroup.as_deref(),
        _ => None,
    };
    own == Some(cgroup)
}
