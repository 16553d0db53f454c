//! Describes daemons for the API: gathers what no snapshot contains, such as the names of users.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::future::join_all;
use gpush_api::{ApiError, Code, GpuUuid, MemberShare, Mode, MpsDaemon, MpsLogs, TargetUuid};
use gpush_core::{
    mps::{DesiredTargets, MpsTarget, ShownFacts, in_order},
    sharing,
};
use gpush_host::proc;
use gpush_mps::daemon::log;

use super::{
    Mps, clients, control_connection, leases_on, missing,
    outlook::{find, outlook},
};
use crate::{
    modes::eligibility,
    requests::caller::{Caller, Viewer},
    state::{HostState, OpenLease, redact},
};

/// Maximum age of the data about a daemon that a response shows.
const FRESH: Duration = Duration::from_secs(1);

/// The hint for a GPU that is too old for MPS.
pub(super) const OTHER_MODE: &str = "set another mode in the GPU's rule, such as \"exclusive\" or \"timeslice\"";

/// Returns an error for each daemon that should serve clients but does not. A daemon that is starting, draining, or
/// stopped by an administrator counts as healthy.
pub(crate) fn health(mps: &Mps) -> Vec<ApiError> {
    let host = mps.handles.context.state.now();
    let ill = host.mps.all().filter_map(|target| target.unhealthy_error());
    let whole = host.mps.all().filter(|target| target.is_whole_gpu());
    let bypassed = whole.filter_map(|target| host.mps.bypass_error(&target.gpu_uuid, &target.label()));
    // Report each GPU that is too old for MPS, because an administrator must change the config.
    let outlook = outlook(&host, Viewer::Agent);
    let too_old = outlook.gpus.iter().filter(|gpu| gpu.mode == Mode::Mps).filter_map(|gpu| {
        let error = ApiError::new(Code::Unsupported, format!("GPU {} can't be shared through MPS", gpu.index));
        sharing::mps_unsupported_reason(gpu).map(|why| error.cause(why).hint(OTHER_MODE))
    });
    ill.chain(bypassed).chain(too_old).collect()
}

/// Returns all daemons, sorted by GPU and MIG device.
///
/// # Errors
/// If gpushd does not know the GPUs yet.
pub(crate) async fn all(mps: &Mps, caller: &Caller) -> Result<Vec<MpsDaemon>, ApiError> {
    let host = mps.handles.context.state.now();
    if host.mps.by_uuid.is_empty() {
        missing::gpus_known(&host)?;
    }
    missing::gpus_can_be_named(&host, unplaced(host.mps.all()))?;
    let daemons = mps.daemons().clone();
    join_all(daemons.values().map(|handle| handle.daemon.refresh(FRESH))).await;
    let host = mps.handles.context.state.now();
    let outlook = outlook(&host, caller.viewer);
    let mut all = Vec::new();
    for target in host.mps.all() {
        all.push(shown(mps, caller, &host, &outlook, target).await);
    }
    all.sort_by(in_order);
    Ok(all)
}

/// Polls the daemon that a text names, and describes this daemon.
///
/// # Errors
/// If the text matches no daemon, or several, or if gpushd does not know the GPU of the daemon yet.
pub(crate) async fn one(mps: &Mps, caller: &Caller, text: &str) -> Result<MpsDaemon, ApiError> {
    let host = mps.handles.context.state.now();
    let target = find(&host, text)?;
    missing::gpus_can_be_named(&host, unplaced([target]))?;
    Ok(describe(mps, caller, target).await)
}

/// Returns the UUIDs of the GPUs of those targets that gpushd has not found yet.
fn unplaced<'a>(targets: impl IntoIterator<Item = &'a Arc<MpsTarget>>) -> impl Iterator<Item = &'a GpuUuid> {
    targets.into_iter().filter(|target| target.desired.is_none()).map(|target| &target.gpu_uuid)
}

/// Polls the daemon of a target, and describes it. If the target has been removed, describes it as it was in `last`.
pub(super) async fn describe(mps: &Mps, caller: &Caller, last: &Arc<MpsTarget>) -> MpsDaemon {
    if let Some(handle) = mps.daemon(&last.uuid) {
        // Only requests of administrators always cause a poll, because a daemon accepts only one connection at a time.
        // For other users, answers may be up to [`FRESH`] old.
        handle.daemon.refresh(if caller.viewer.is_admin() { Duration::ZERO } else { FRESH }).await;
    }
    let host = mps.handles.context.state.now();
    let target = host.mps.get(&last.uuid).unwrap_or(last);
    shown(mps, caller, &host, &outlook(&host, caller.viewer), target).await
}

/// Returns the last lines of the logs of the daemon that a text names.
///
/// # Errors
/// If the text matches no daemon.
pub(crate) async fn logs_of(mps: &Mps, text: &str, lines: usize, all: bool) -> Result<MpsLogs, ApiError> {
    let host = mps.handles.context.state.now();
    match &find(&host, text)?.report.logs {
        Some(dir) => Ok(log::last(dir, lines, all)),
        None => Ok(MpsLogs { files: Vec::new() }),
    }
}

/// Describes a target of a snapshot, with its users and processes.
async fn shown(
    mps: &Mps,
    caller: &Caller,
    host: &HostState,
    outlook: &DesiredTargets<'_>,
    target: &MpsTarget,
) -> MpsDaemon {
    let seen = &target.report;
    let held = leases_on(host, &target.uuid);
    let clients = clients::of(mps, seen, &target.uuid).await;
    let client_findings = clients::findings(seen, &clients, &held);
    let mut server_users = BTreeMap::new();
    for pid in seen.servers.iter().filter_map(|(pid, _)| u32::try_from(*pid).ok()) {
        if let Some(uid) = proc::owner(pid) {
            server_users.insert(pid, (uid, mps.handles.context.users.user(uid).await));
        }
    }
    let user = match seen.user {
        Some(uid) => mps.handles.context.users.user(uid).await,
        None => None,
    };
    let gpu = outlook.gpus.iter().find(|gpu| gpu.uuid == target.gpu_uuid);
    let facts = ShownFacts {
        clients,
        server_users,
        leases: held.iter().map(|lease| lease.to_api(caller.viewer)).collect(),
        granted_tenths: held.iter().map(|lease| tenths_on(lease, &target.uuid)).sum(),
        user,
        connection_holders: control_connection::holders(mps, caller, seen).await,
        client_findings,
        waiting: clients::waiting(mps, caller, seen).await,
        unavailable: gpu.and_then(|gpu| eligibility::refusal(gpu, "a lease")).map(|error| error.message),
    };
    let mut daemon = gpush_core::mps::describe(outlook, target, facts);
    redact::mps(&mut daemon, caller.viewer);
    daemon
}

/// Returns which part of a target a lease may use, in tenths of a percent.
fn tenths_on(lease: &OpenLease, target: &TargetUuid) -> u32 {
    let here = lease.record.members.iter().filter(|member| member.target == *target);
    here.map(|member| match &member.share {
        MemberShare::Mps { percentage, .. } => u32::from(percentage.tenths()),
        MemberShare::Mig { .. } | MemberShare::Timeslice { .. } | MemberShare::Whole => 0,
    })
    .sum()
}

#[cfg(test)]
mod tests {
    use gpush_api::LeaseMember;

    use super::*;
    use crate::{modes::scene::mig_member, state::leases::tests::record};

    /// A gang may have several shares of a target.
    #[test]
    fn granted_part_is_the_sum_of_the_shares_on_the_target() {
        let mut gang = record(1, 1000, "GPU-0");
        gang.members.extend(record(1, 1000, "GPU-0").members);
        gang.members.extend(record(1, 1000, "GPU-1").members);
        gang.members.push(LeaseMember { target: "GPU-0".into(), ..mig_member("GPU-0", "", "1g.10gb") });
        let lease = OpenLease::new(gang);
        assert_eq!(["GPU-0", "GPU-1", "GPU-2"].map(|target| tenths_on(&lease, &target.into())), [500, 250, 0]);
    }
}
