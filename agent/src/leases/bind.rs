//! The binding of a lease: a scope, a cgroup, a process, an end time, or nothing.
//!
//! ```text
//! request ─► a pidfd of the caller is opened ─► its cgroup is classified ─┬─ present cgroup: recorded, nothing moved
//!                                                                         ├─ process, time or none, with the reason
//!                                                                         └─ new scope
//! new scope: its name is recorded with the grant ─► is the caller still that process? ─► systemd moves it ─► its cgroup
//!            is read back ─► answered
//! ```
//!
//! gpushd does not move processes itself. It asks systemd to move the process that sent the request
//! ([`super::scope`]). gpushd records the name of a scope before systemd creates the scope, so that the next gpushd finds it after a crash. A
//! request may wait long in the queue. So before the grant, gpushd checks that the caller is still in the same cgroup.

use std::sync::Arc;

use gpush_api::{ApiError, BindTo, Code, LeaseBinding, LeaseGrant, LeaseRequest};
use gpush_host::{
    cgroup::{self, BindRequest, BindTarget, CgroupKind, UnitOwner},
    proc, subtask,
};
use gpush_store::{LeaseRecord, StoreError, Tx};

use super::{
    Leases,
    calling_process::CallingProcess,
    scope_unit::{self, no_scope},
    unit_owner::{is_all_of, owner_of},
    user_limits,
};
use crate::requests::caller::Caller;

/// The binding of a lease that is being granted.
#[derive(Debug, Clone)]
pub(super) struct ResolvedBinding {
    /// The binding to record. A new scope gets its name later, when the id of the lease is known.
    pub(super) binding: LeaseBinding,
    /// The calling process; `None` if the lease is bound neither to a new scope nor to the caller's cgroup.
    caller: Option<Arc<CallingProcess>>,
    /// Why the binding differs from the requested one.
    reason: Option<String>,
}

impl ResolvedBinding {
    /// Returns the binding to a Slurm job. The processes of the job stay in the job's cgroup.
    pub(super) fn to_job(binding: LeaseBinding) -> Self {
        Self { binding, caller: None, reason: None }
    }

    /// Returns the process to move into a new scope; `None` if the lease gets no new scope.
    pub(super) fn mover(&self) -> Option<Arc<CallingProcess>> {
        self.caller.clone().filter(|_| matches!(self.binding, LeaseBinding::Scope { .. }))
    }

    /// Checks that the caller is still in the cgroup in which it was when gpushd determined the binding.
    ///
    /// # Errors
    /// If the caller has ended, or has changed its user or its cgroup.
    pub(super) fn check(&self) -> Result<(), ApiError> {
        self.caller.as_ref().map_or(Ok(()), |caller| caller.check_unmoved())
    }

    /// Adds to a grant the reason why its binding differs from the requested binding.
    pub(super) fn explain(&self, granted: &mut LeaseGrant) {
        granted.binding_reason.clone_from(&self.reason);
    }
}

/// Determines the binding of the requested lease. If the lease gets neither a scope nor a cgroup, its binding is
/// `named`: a process, an end time, or nothing.
///
/// # Errors
/// If the caller has ended or changed its user. If a new scope is needed, but systemd cannot be reached, or the request
/// names a process other than the caller. If `named` is needed, but is an error. If the request asks for a cgroup, and
/// the lease would get no binding at all.
pub(super) async fn resolve(
    leases: &Leases,
    caller: &Caller,
    holder: u32,
    request: &LeaseRequest,
    named: Result<LeaseBinding, ApiError>,
) -> Result<ResolvedBinding, ApiError> {
    // If a caller in a container names its session leader, `named` is an error, because gpushd does not know the pids
    // inside a container. If the lease is bound to the caller's cgroup, this error does not matter.
    let (named, wish) = match request.bind_to {
        BindTo::Process => return Ok(ResolvedBinding { binding: named?, caller: None, reason: None }),
        BindTo::Scope => (Ok(named?), BindRequest::NewScope),
        BindTo::Cgroup => (named, BindRequest::Present),
    };
    let as_named = |reason: &str| match (&named, wish) {
        (Err(error), _) => Err(error.clone()),
        (Ok(LeaseBinding::None), BindRequest::Present) => Err(no_end(reason)),
        (Ok(binding), _) => {
            Ok(ResolvedBinding { binding: binding.clone(), caller: None, reason: Some(reason.to_owned()) })
        }
    };
    if let (Ok(LeaseBinding::Process { pid: Some(pid), .. }), BindRequest::NewScope) = (&named, wish)
        && caller.peer.pid != Some(*pid)
    {
        let message =
            format!("process {pid} cannot be moved into a scope: it is not the process that sent the request");
        return Err(ApiError::new(Code::BadRequest, message).hint("send the request from that process"));
    }
    if !caller.runs_as(holder) {
        return as_named("the calling process does not belong to the user of the lease");
    }
    let manager = match &leases.handles.scopes.0 {
        Ok(manager) => manager,
        Err(reason) => return as_named(reason),
    };
    let process = Arc::new(CallingProcess::of(caller)?);
    let (pid, kind) = (process.pid, process.cgroup.clone());
    let unit = kind.clone();
    let read = move || matches!(unit, CgroupKind::Unit { cgroup } if is_all_of(&cgroup, holder));
    let is_own = subtask::blocking(read).await.ok_or_else(|| ApiError::stopping("gpushd is stopping"))?;
    let owner = match (&kind, wish) {
        _ if is_own => UnitOwner::Caller,
        (CgroupKind::Unit { cgroup }, BindRequest::NewScope) => {
            match owner_of(leases, manager, cgroup, holder).await? {
                // Root may have set limits for a cgroup below the service's cgroup. A process in such a cgroup must not
                // leave it.
                UnitOwner::SessionService if !proc::cgroups(pid).is_some_and(|text| cgroup::is_at(cgroup, &text)) => {
                    UnitOwner::Others
                }
                owner => owner,
            }
        }
        // In all other cases the owner does not matter: the request does not ask for a new scope, or the process is not
        // in the cgroup of a unit.
        _ => UnitOwner::Others,
    };
    match kind.choose(wish, holder, caller.peer.is_on_this_host, owner) {
        BindTarget::Cgroup(cgroup) => {
            // If the request asked for a new scope, but the lease is bound to the present cgroup, the lease also ends
            // when the command of `gpushctl run` ends.
            let (pid, start) = match (wish, named) {
                (BindRequest::NewScope, Ok(LeaseBinding::Process { pid, start })) => (pid, start),
                _ => (None, None),
            };
            let binding = LeaseBinding::Cgroup { cgroup: Some(cgroup), pid, start };
            Ok(ResolvedBinding { binding, caller: Some(process), reason: None })
        }
        BindTarget::None(reason) => as_named(reason),
        BindTarget::NewScope => {
            // Check that systemd answers before gpushd reserves or records anything.
            manager.check().await.map_err(|error| no_scope(&error))?;
            user_limits::check(leases, manager, holder).await?;
            let binding = LeaseBinding::Scope { unit: None, cgroup: None };
            Ok(ResolvedBinding { binding, caller: Some(process), reason: None })
        }
    }
}

fn no_end(reason: &str) -> ApiError {
    let error = ApiError::new(Code::BadRequest, "the lease needs an end");
    error
        .cause(format!("gpushd cannot bind the lease to a cgroup, because {reason}"))
        .hint("add an end time to the request, such as `--for 2h`")
}

/// Records the binding of a lease in the transaction that grants the lease. Gives a new scope its name. The client of a
/// queued request may have reconnected from another process, so the binding may differ from the binding that was
/// recorded with the queued request.
pub(super) fn record(
    tx: &mut Tx<'_>,
    epoch: &str,
    record: LeaseRecord,
    resolved: &LeaseBinding,
) -> Result<LeaseRecord, StoreError> {
    let binding = match resolved {
        LeaseBinding::Scope { unit: None, .. } => {
            let (unit, cgroup) = scope_unit::names(epoch, record.id, record.holder.uid);
            LeaseBinding::Scope { unit: Some(unit), cgroup: Some(cgroup) }
        }
        resolved => resolved.clone(),
    };
    if record.binding == binding {
        return Ok(record);
    }
    tx.bind_lease(record.id, binding)
}

#[cfg(test)]
mod tests {
    use gpush_api::{Actor, LeaseHolder, LeaseKind, LeaseState};
    use gpush_host::peer::Peer;
    use gpush_store::{LeaseSource, LeaseTerms, NewLease, Options, Store};

    use super::*;
    use crate::requests::caller::Viewer;

    fn caller(pid: u32, start: Option<u64>) -> Caller {
        let uid = nix::unistd::geteuid().as_raw();
        let peer = Peer { uid, pid: Some(pid), start, groups: Vec::new(), is_on_this_host: true };
        Caller::with_viewer(peer, Viewer::User(uid), Ok(gpush_host::accounts::Account::User(uid)))
    }

    fn new_lease(binding: LeaseBinding) -> NewLease {
        NewLease {
            holder: LeaseHolder { uid: 1000, user: None },
            asked_by: Actor { uid: 1000, user: None, pid: Some(4) },
            kind: LeaseKind::Whole,
            request: LeaseRequest::default(),
            binding,
        }
    }

    /// Cases: another process has the pid now, the caller has ended, the start time of the caller was never read.
    #[test]
    fn process_that_is_not_the_callers_is_not_held() {
        let own = std::process::id();
        let start = proc::start(own);
        assert!(CallingProcess::of(&caller(own, start)).is_ok());
        for (pid, start) in [(own, start.map(|start| start + 1)), (own, None), (u32::MAX / 2, start)] {
            assert_eq!(CallingProcess::of(&caller(pid, start)).unwrap_err().code, Code::Conflict, "{pid}");
        }
        let mut child = std::process::Command::new("sleep").arg("600").spawn().unwrap();
        let held = CallingProcess::of(&caller(child.id(), proc::start(child.id()))).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert_eq!(held.check().unwrap_err().code, Code::Conflict);
    }

    /// Fault: a process was moved into a service with limits while the request of the process waited. gpushd then gave
    /// the process a scope without these limits.
    #[test]
    fn process_that_was_moved_to_another_cgroup_is_refused() {
        let own = std::process::id();
        let mut process = CallingProcess::of(&caller(own, proc::start(own))).unwrap();
        process.check_unmoved().unwrap();
        process.cgroup = CgroupKind::Unit { cgroup: "/system.slice/other.service".to_owned() };
        process.check().unwrap();
        let binding = LeaseBinding::Scope { unit: None, cgroup: None };
        let bound = ResolvedBinding { binding, caller: Some(Arc::new(process)), reason: None };
        let refused = bound.check().unwrap_err();
        assert_eq!(refused.code, Code::Conflict);
        assert!(refused.message.contains("was moved to another cgroup"), "{refused}");
    }

    #[test]
    fn process_that_changed_its_user_is_denied() {
        let own = std::process::id();
        let mut caller = caller(own, proc::start(own));
        caller.peer = Peer { uid: 4_000_000, ..caller.peer };
        assert_eq!(CallingProcess::of(&caller).unwrap_err().code, Code::Denied);
    }

    /// The first process queued the request and ended. The second process repeats the request after a restart of gpushd.
    #[tokio::test]
    async fn grant_records_the_binding_of_the_process_that_reconnected() {
        let directory = tempfile::tempdir().unwrap();
        let store = Store::open(directory.path(), Options::default()).unwrap().store;
        let process = |pid| LeaseBinding::Process { pid: Some(pid), start: Some(1) };
        let written = store.write(move |tx| {
            let queued = tx.queue_lease(new_lease(process(4)))?;
            let terms = LeaseTerms { members: Vec::new(), expires_at: None };
            let granted = tx.grant_lease(LeaseSource::Queued(queued.id), terms)?;
            assert_eq!(granted.binding, process(4));
            record(tx, "e", granted, &process(7))
        });
        let granted = written.await.unwrap();
        assert_eq!(granted.binding, process(7));
        let read = store.read(move |view| view.lease(granted.id)).await.unwrap().unwrap();
        assert_eq!((read.binding, read.state), (process(7), LeaseState::Active));
    }
}
