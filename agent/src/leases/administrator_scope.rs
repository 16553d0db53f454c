//! A scope outside of `user.slice`, in which an administrator can open the GPUs although login sessions cannot.
//!
//! systemd moves the calling process, which then executes a shell or a command. So its terminal and its environment stay
//! the same. Only root can be moved: a session of another administrator stays denied.

use gpush_api::{Actor, AdministratorScope, ApiError, Code};
use gpush_host::systemd::TransientScope;
use gpush_store::AuditEvent;

use super::{Leases, calling_process::CallingProcess, scope_unit::no_scope};
use crate::requests::caller::Caller;

/// The slice that contains the scopes.
const SYSTEM: &str = "system.slice";

/// Moves the calling process into a new scope, and records it.
///
/// # Errors
/// If the caller is not root of this host, or systemd does not move the process.
pub(crate) async fn leave_session(leases: &Leases, caller: &Caller, by: Actor) -> Result<AdministratorScope, ApiError> {
    if !caller.holds(0) {
        return Err(ApiError::new(Code::Denied, "only root can leave its login session")
            .hint("run `gpushctl enforce shell` as root (administrator)"));
    }
    let manager = leases.handles.scopes.manager().map_err(|reason| {
        ApiError::new(Code::Unsupported, "this gpushd cannot create scopes").cause(reason.to_owned())
    })?;
    let process = CallingProcess::of(caller)?;
    let start = caller.peer.start.unwrap_or_default();
    let unit = format!("gpush-shell-{}-{start}.scope", process.pid);
    let scope = TransientScope {
        name: unit.clone(),
        description: "administrator's shell with access to the GPUs".to_owned(),
        slice: SYSTEM.to_owned(),
        devices: None,
    };
    let audit = AuditEvent::EnforceShell { pid: Some(process.pid) }.record(Some(by), &unit, gpush_store::DONE);
    leases.handles.context.store.write(move |tx| tx.audit(audit.clone()).map(|_| ())).await?;
    manager.start_scope(&scope, &process.process).await.map_err(|error| no_scope(&error))?;
    Ok(AdministratorScope { unit })
}
