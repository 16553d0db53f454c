//! Explains why a request for a lease cannot be granted: the obstacles, the leases that hold the capacity, and whether
//! the obstacles will disappear without an action of a user.

use std::collections::BTreeSet;

use gpush_api::{ApiError, Gpu, LeaseBinding, LeaseKind, LeaseMember};
use gpush_core::{
    desired::desired_states,
    lease::placement::{Closed, NoAssignment, Obstacle},
};

use super::{Leases, request::Resolved};
use crate::{
    lanes::Ticket,
    mps,
    state::{LeaseTable, OpenLease},
};

/// Maximum number of leases that an error names.
const MOST_NAMED: usize = 16;

/// Explains why a request cannot be granted: the obstacles, and the leases that hold the capacity. `before` is the
/// position of the request in the queue, if it is queued.
pub(super) fn explain(
    leases: &Leases,
    why: &NoAssignment,
    resolved: &Resolved,
    gpus: &[Gpu],
    before: Option<Ticket>,
) -> ApiError {
    let mut error = why.error(&resolved.wanted);
    if matches!(resolved.new.binding, LeaseBinding::Job { .. }) {
        error.hint = why.hint_for_job().or(error.hint);
    }
    let NoAssignment::Busy { obstacles, .. } = why else { return error };
    let targets = resolved.wanted.targets.as_ref();
    if let Some(target) = targets.filter(|targets| targets.len() == 1).and_then(|targets| targets.first())
        && resolved.wanted.share.kind() == LeaseKind::Mps
        && let Err(closed) = mps::serves(&leases.handles.mps, target)
    {
        return closed;
    }
    let indexes: BTreeSet<u32> = obstacles.iter().map(|(index, _)| *index).collect();
    // Add the reasons why the GPUs are closed, such as the reason of a cordon.
    let is_closed = |gpu: &&Gpu| {
        obstacles.iter().any(|(index, obstacle)| *index == gpu.index && matches!(obstacle, Obstacle::Closed(_)))
    };
    error.causes.extend(gpus.iter().filter(is_closed).flat_map(|gpu| gpu.reasons.iter().cloned()));
    let uuids: Vec<&str> =
        gpus.iter().filter(|gpu| indexes.contains(&gpu.index)).map(|gpu| gpu.uuid.as_str()).collect();
    if resolved.wanted.share.kind() == LeaseKind::Mps {
        let mut closed = mps::not_serving(&leases.handles.mps, &uuids);
        let is_final = closed.len() == uuids.len() && closed.iter().all(|closed| !closed.retryable);
        if is_final && let Some(first) = closed.pop() {
            // No MPS daemon of these GPUs serves clients, and waiting does not change that. So the error names the
            // daemons instead of the leases.
            return closed.into_iter().fold(first, |error, other| error.cause(other.message));
        }
        if closed.len() == uuids.len() {
            // If an administrator must start a daemon, the hint must not suggest to wait.
            error.hint = closed[0].hint.clone().or(error.hint);
        }
        error.causes.extend(closed.into_iter().map(|closed| closed.message));
    }
    let table = leases.handles.state.leases();
    error.causes.extend(foreign_instances(leases, &table, gpus, &indexes));
    let is_here = |member: &LeaseMember| {
        uuids.contains(&member.gpu.as_str()) && targets.is_none_or(|targets| targets.contains(&member.target))
    };
    let holding: Vec<String> =
        table.holding().filter(|lease| lease.record.members.iter().any(is_here)).map(OpenLease::describe).collect();
    error.causes.extend(holding.iter().take(MOST_NAMED).map(|lease| format!("{lease} blocks the request")));
    let ahead = leases.handles.lanes.entries().into_iter().filter(|(ticket, entry)| {
        before.is_none_or(|before| *ticket < before)
            && entry.needs.iter().any(|(gpu, need)| {
                uuids.contains(&gpu.as_str())
                    && targets.is_none_or(|targets| targets.iter().any(|target| need.concerns(target)))
            })
    });
    error.causes.extend(ahead.map(|(_, entry)| format!("{} is ahead of this request in the queue", entry.waiter)));
    if let Some(more) = holding.len().checked_sub(MOST_NAMED).filter(|more| *more > 0) {
        error.causes.push(format!("{more} more leases block the request"));
    }
    error
}

/// Names the instances that other programs created on GPUs with the layout `dynamic`. gpushd does not destroy these
/// instances to grant a lease.
fn foreign_instances(leases: &Leases, table: &LeaseTable, gpus: &[Gpu], indexes: &BTreeSet<u32>) -> Vec<String> {
    let wishes = desired_states(&leases.handles.state.config(), gpus);
    let dynamic = gpus.iter().zip(wishes).filter(|(gpu, wish)| wish.dynamic && indexes.contains(&gpu.index));
    let named = dynamic.flat_map(|(gpu, _)| {
        let created = table.created.get(&gpu.uuid);
        let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
        let others = instances.filter(move |one| !created.is_some_and(|created| created.contains(&one.placement)));
        others.map(move |one| {
            let (index, profile, start) = (gpu.index, &one.profile, one.placement.start);
            format!("gpushd does not destroy {profile}@{start} on GPU {index}: another program created it")
        })
    });
    named.take(MOST_NAMED).collect()
}

/// Whether the obstacles of a request will disappear soon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RetryHint {
    No,
    /// An operation, or a lease without processes, ends soon, usually within seconds.
    Soon,
    /// An MPS daemon is starting, or gpushd has just started and has not checked yet whether a running daemon serves
    /// clients.
    Starting,
}

/// Returns whether the obstacles of a request will disappear soon.
pub(super) async fn retry_hint(leases: &Leases, why: &NoAssignment, resolved: &Resolved) -> RetryHint {
    let NoAssignment::Busy { obstacles, .. } = why else { return RetryHint::No };
    // Check the daemons before the slower checks below. A daemon that becomes ready meanwhile no longer counts as
    // starting, and gpushd would refuse the request although it can now grant it.
    let is_mps = resolved.wanted.share.kind() == LeaseKind::Mps;
    let is_starting = is_mps && mps::is_starting(&leases.handles.mps);
    let is_claimed = |(_, obstacle): &(u32, Obstacle)| *obstacle == Obstacle::Closed(Closed::Claimed);
    let table = leases.handles.state.leases();
    let one_ends = tokio::task::spawn_blocking(move || table.holding().any(OpenLease::ends_now));
    if obstacles.iter().any(is_claimed) || one_ends.await.unwrap_or_default() {
        return RetryHint::Soon;
    }
    if is_starting { RetryHint::Starting } else { RetryHint::No }
}
