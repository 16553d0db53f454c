//! The facts of this host for the plan of `gpushctl enforce on`.

use std::path::Path;

use gpush_api::{ApiError, Code, EnforcementPlan, LeaseBinding, LeaseId};
use gpush_core::lease::access::{CONTAINERS, HostFacts, SLURMD, SessionProcess, host_plan};
use gpush_host::systemd::{self, Manager};

use super::{gpus_by_rule, host_part, sessions, slurm_jobs};
use crate::state::{HostState, context::HostContext};

/// Directory of the nodes of the kernel's graphics drivers.
const GRAPHICS: &str = "/dev/dri";

/// Maximum number of processes in an error.
const MOST: usize = 16;

/// Returns the plan for this host.
///
/// # Errors
/// If systemd does not answer.
pub(super) async fn of_host(manager: &Manager, context: &HostContext) -> Result<EnforcementPlan, ApiError> {
    let read = async {
        let version = manager.version().await?;
        let units = host_part::read(manager).await?;
        Ok((version, units, manager.services_of_users().await?, running(manager).await?))
    };
    let (version, units, services, runtimes) = read.await.map_err(|error| host_part::failed(&error))?;
    let host = context.state.now();
    let (_, other_gpus) = gpus_by_rule(&host);
    let facts = HostFacts {
        unsupported: host_part::unsupported(version, manager.is_unified()),
        units,
        services,
        services_with_sessions: sessions::services_with_sessions().await,
        runtimes,
        processes: sessions::processes(context).await,
        session_leases: session_leases(&host),
        has_graphics_nodes: Path::new(GRAPHICS).exists(),
        other_gpus,
        denied_to_jobs: slurm_jobs::denied_indexes(&host),
    };
    Ok(host_plan(&facts))
}

/// Returns the services of [`CONTAINERS`], and [`SLURMD`], that run.
async fn running(manager: &Manager) -> Result<Vec<String>, systemd::Error> {
    let mut found = Vec::new();
    for unit in CONTAINERS.into_iter().chain([SLURMD]) {
        found.extend(manager.running(unit).await?);
    }
    Ok(found)
}

/// Returns the error if graphical sessions use a GPU.
pub(super) async fn graphical_sessions(context: &HostContext) -> Option<ApiError> {
    let processes = sessions::processes(context).await;
    let graphical = processes.iter().filter(|one| one.is_graphical).take(MOST).map(SessionProcess::describe);
    let graphical: Vec<String> = graphical.collect();
    let error = ApiError::new(Code::Conflict, "graphical sessions use a GPU, and would not start again without it")
        .hint("end these sessions, or run `gpushctl enforce on --force` (administrator)");
    (!graphical.is_empty()).then(|| graphical.into_iter().fold(error, ApiError::cause))
}

/// Returns the leases whose programs run in login sessions.
fn session_leases(host: &HostState) -> Vec<LeaseId> {
    let is_in_session = |binding: &LeaseBinding| match binding {
        LeaseBinding::Cgroup { cgroup, .. } => cgroup.as_ref().is_some_and(|path| path.starts_with("/user.slice/")),
        LeaseBinding::Process { .. } | LeaseBinding::Time | LeaseBinding::None => true,
        LeaseBinding::Scope { .. } | LeaseBinding::Job { .. } => false,
    };
    let leases = host.leases.open.values().filter(|lease| is_in_session(&lease.record.binding));
    leases.map(|lease| lease.id()).collect()
}
