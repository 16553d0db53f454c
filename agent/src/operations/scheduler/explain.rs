//! Explains why a request for a lease cannot be granted: the obstacles, the leases and processes that would have to
//! end, and whether the obstacles will disappear without an action of a user.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use gpush_api::{
    ApiError, Gpu, GpuIndex, GpuInstance, GpuUuid, LeaseBinding, LeaseId, LeaseKind, Placement, Process, TargetUuid,
};
use gpush_core::{
    desired::desired_states,
    lease::{
        placement::{Assignment, Blockers, Closed, ErrorContext, NoAssignment, Obstacle, PlacementRequest},
        quota::{self, Allowance, HeldLease},
    },
    mps::{MpsTargets, NotServing},
    refusal,
    schedule::{QueuedEntry, Ticket},
    sharing,
};
use gpush_host::subtask;

use super::{Scheduler, demand::LeaseDemand, held::HeldLeases, placement_snapshot::PlacementSnapshot, short_lease};
use crate::{
    modes::mps,
    requests::caller::Viewer,
    state::{HostState, OpenLease},
};

/// Maximum number of leases that an error names.
const MOST_NAMED: usize = 16;

/// A request that cannot be granted now.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Unplaced<'a> {
    pub(crate) demand: &'a LeaseDemand,
    /// The caller. The explanation leaves out what this caller, or the holder, may not see.
    pub(crate) viewer: Viewer,
    /// The snapshot with which the request was placed.
    pub(crate) snapshot: &'a PlacementSnapshot,
    /// The leases of each account.
    pub(crate) held: &'a HeldLeases,
    pub(crate) gpus: &'a [Gpu],
    /// The position of the request in the queue, and what the request reserves; `None` if it is not queued.
    pub(crate) queued: Option<(Ticket, Option<&'a Assignment>)>,
}

/// Returns the viewer that reads the explanation of a refusal. If an administrator or a hook of Slurm requests a lease
/// for a user, the viewer is this user, who also reads the refusal in the queue or in the output of the job.
fn reader(caller: Viewer, holder: u32) -> Viewer {
    match caller {
        Viewer::Hook => Viewer::User(holder),
        Viewer::Admin if holder != 0 => Viewer::User(holder),
        Viewer::Admin | Viewer::Agent | Viewer::Log | Viewer::User(_) => caller,
    }
}

/// Explains why a request cannot be granted. Searches for what blocks the request, so call this function on a blocking
/// thread.
pub(crate) fn explain(scheduler: &Scheduler, why: &NoAssignment, unplaced: Unplaced<'_>) -> ApiError {
    // The searches of the explanation run without the lock of the queue.
    let entries: Vec<(Ticket, QueuedEntry)> =
        scheduler.with_queue(|queue| queue.entries().map(|(ticket, entry)| (ticket, entry.clone())).collect());
    explanation(&scheduler.handles.context.state.now(), &entries, why, unplaced)
}

/// Returns the explanation that follows from a snapshot of the host and from the entries of the queue.
fn explanation(
    host: &Arc<HostState>,
    entries: &[(Ticket, QueuedEntry)],
    why: &NoAssignment,
    unplaced: Unplaced<'_>,
) -> ApiError {
    let Unplaced { demand, viewer, snapshot, held, gpus, queued } = unplaced;
    let viewer = reader(viewer, demand.wanted.holder);
    let duration = demand.new.request.duration_s.map(Duration::from_secs);
    let held = held.of_requester(demand);
    let allowance = Some(Allowance { effective: &demand.quota, held: &held });
    let context = ErrorContext { host: &snapshot.host, gpus, allowed: Some(&demand.allowed), duration, allowance };
    let mut error = why.error(&demand.wanted, context);
    if matches!(demand.new.binding, LeaseBinding::Job { .. }) {
        error.hint = why.hint_for_job(&demand.wanted, context).or(error.hint);
    }
    let NoAssignment::Busy { obstacles, .. } = why else { return error };
    let targets = demand.wanted.targets.as_ref();
    let outlook = mps::outlook(host, Viewer::Agent);
    if let Some(target) = targets.filter(|targets| targets.len() == 1).and_then(|targets| targets.first())
        && demand.wanted.share.kind() == LeaseKind::Mps
        && sharing::pending_target(target.as_str(), gpus).is_none()
        && let Err(closed) = outlook.serves(target)
    {
        return closed.into();
    }
    let indexes: BTreeSet<GpuIndex> = obstacles.iter().map(|(index, _)| *index).collect();
    let uuids: Vec<&GpuUuid> = gpus.iter().filter(|gpu| indexes.contains(&gpu.index)).map(|gpu| &gpu.uuid).collect();
    if demand.wanted.share.kind() == LeaseKind::Mps {
        let closed = outlook.not_serving(&uuids);
        let none_serves = none_serves(&host.mps, &uuids, closed.len());
        let is_final = none_serves && closed.iter().all(|closed| matches!(closed, NotServing::Lasting(_)));
        let mut closed: Vec<ApiError> = closed.into_iter().map(ApiError::from).collect();
        if is_final && let Some(first) = closed.pop() {
            // No MPS daemon of these GPUs serves clients, and waiting does not change that. So the error names the
            // daemons instead of the leases.
            return closed.into_iter().fold(first, |error, other| error.cause(other.message));
        }
        if let Some(first) = closed.first().filter(|_| none_serves) {
            // If an administrator must start a daemon, the hint must not suggest waiting.
            error.hint = first.hint.clone().or(error.hint);
        }
        error.causes.extend(closed.into_iter().map(|closed| closed.message));
    }
    let table = &host.leases;
    error.causes.extend(foreign_instances(host, gpus, &indexes, (snapshot, &demand.wanted)));
    let blocking = match queued {
        None => snapshot.blockers(&demand.wanted, None),
        Some((_, Some(reserves))) => snapshot.blockers(&demand.wanted, Some(reserves)),
        // The request reserves nothing, because it waits for earlier requests.
        Some((_, None)) => Blockers { leases: Vec::new(), in_use: Vec::new(), together: false },
    };
    if let Some(own) = own_lease(&blocking, &held)
        && !matches!(demand.new.binding, LeaseBinding::Job { .. })
    {
        // Otherwise the user would wait for the end of the user's own lease.
        let hint = quota::use_or_release(own);
        error.hint = Some(error.hint.map_or_else(|| hint.clone(), |other| format!("{hint}; or {other}")));
    }
    if queued.is_none()
        && !matches!(demand.new.binding, LeaseBinding::Job { .. })
        && let Some(hint) = short_lease::hint(snapshot, demand)
    {
        error.hint = Some(error.hint.map_or_else(|| hint.clone(), |other| format!("{hint}; or {other}")));
    }
    let is_own = |id: LeaseId| held.iter().any(|lease| lease.id == id && !lease.queued);
    let holding = blocking.leases.iter().filter_map(|id| {
        let lease = describe(table.get(*id)?, gpus);
        Some(if is_own(*id) { format!("{lease}, whose user is also the user of this request,") } else { lease })
    });
    let mut named: Vec<String> = holding.chain(users_without_lease(gpus, &blocking.in_use, viewer)).collect();
    let more = named.len().saturating_sub(MOST_NAMED);
    named.truncate(MOST_NAMED);
    match named.as_slice() {
        [_, _, ..] if blocking.together => {
            error.causes.push(format!("the request can be granted when all of these have ended: {}", named.join("; ")));
        }
        _ => error.causes.extend(named.into_iter().map(|one| format!("{one} blocks the request"))),
    }
    if more > 0 {
        error.causes.push(format!("leases and processes that also block the request: {more}"));
    }
    let ahead = entries.iter().filter(|(ticket, entry)| {
        queued.is_none_or(|(own, _)| *ticket < own)
            && entry.needs.iter().any(|(gpu, need)| {
                uuids.contains(&gpu) && targets.is_none_or(|targets| targets.iter().any(|target| need.concerns(target)))
            })
    });
    error.causes.extend(ahead.map(|(_, entry)| format!("{} is ahead of this request in the queue", entry.waiter)));
    error
}

/// Returns the lease of the requester whose end alone makes the grant possible.
fn own_lease(blocking: &Blockers<LeaseId>, held: &[HeldLease]) -> Option<LeaseId> {
    let is_enough = !blocking.together || (blocking.leases.len() == 1 && blocking.in_use.is_empty());
    let own = |id: &&LeaseId| held.iter().any(|lease| lease.id == **id && lease.releasable && !lease.queued);
    blocking.leases.iter().find(own).copied().filter(|_| is_enough)
}

/// Returns whether each of these GPUs has MPS targets, and none of the targets serves clients. `closed` is the number of
/// targets on these GPUs that do not serve.
fn none_serves(targets: &MpsTargets, gpus: &[&GpuUuid], closed: usize) -> bool {
    let on_each = gpus.iter().map(|gpu| targets.on_gpu(gpu).count());
    on_each.clone().all(|targets| targets > 0) && on_each.sum::<usize>() == closed
}

/// Describes the processes that use these GPUs and MIG devices without a lease, one clause for each process.
fn users_without_lease(gpus: &[Gpu], targets: &[TargetUuid], viewer: Viewer) -> Vec<String> {
    let mut users: Vec<String> = Vec::new();
    for gpu in gpus {
        let mut add = |what: &str, process: &Process| {
            let who = match viewer.may_see(process.uid) {
                true => refusal::holder(process),
                false if process.unidentified => "a process whose user is not known yet".to_owned(),
                false => "a process of another user".to_owned(),
            };
            let user = format!("{who}, which uses {what} without a lease,");
            if !users.contains(&user) {
                users.push(user);
            }
        };
        if targets.contains(gpu.uuid.as_target()) {
            gpu.processes.iter().for_each(|process| add(&format!("GPU {}", gpu.index), process));
        }
        for instance in gpu.mig.iter().flat_map(|mig| &mig.instances) {
            let is_used = |uuid: &TargetUuid| targets.contains(uuid);
            for compute in instance.compute.iter().filter(|compute| compute.uuid.as_ref().is_some_and(is_used)) {
                let what = format!("MIG device {}:{}", gpu.index, sharing::device_name(instance, compute));
                instance.processes.iter().chain(&compute.processes).for_each(|process| add(&what, process));
            }
        }
    }
    users
}

/// Describes a lease with its MIG devices: `lease L12 of alice on MIG device 0:1g.10gb@5`.
fn describe(lease: &OpenLease, gpus: &[Gpu]) -> String {
    let is_member = |uuid: &Option<TargetUuid>| {
        uuid.as_ref().is_some_and(|uuid| lease.record.members.iter().any(|member| member.target == *uuid))
    };
    let mut devices = Vec::new();
    for gpu in gpus {
        for instance in gpu.mig.iter().flat_map(|mig| &mig.instances) {
            for compute in instance.compute.iter().filter(|compute| is_member(&compute.uuid)) {
                devices.push(format!("{}:{}", gpu.index, sharing::device_name(instance, compute)));
            }
        }
    }
    match devices.as_slice() {
        [] => lease.describe(),
        [one] => format!("{} on MIG device {one}", lease.describe()),
        several => format!("{} on MIG devices {}", lease.describe(), several.join(", ")),
    }
}

/// Names the instances of other programs that block a request on GPUs with the layout `dynamic`. gpushd does not destroy
/// these instances to grant a lease.
fn foreign_instances(
    host: &HostState,
    gpus: &[Gpu],
    indexes: &BTreeSet<GpuIndex>,
    (snapshot, wanted): (&PlacementSnapshot, &PlacementRequest),
) -> Vec<String> {
    let wishes = desired_states(&host.config, gpus);
    let dynamic = gpus.iter().zip(wishes).filter(|(gpu, wish)| wish.dynamic && indexes.contains(&gpu.index));
    let foreign = dynamic.flat_map(|(gpu, _)| {
        let created = host.leases.created.get(&gpu.uuid);
        let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
        let others = instances.filter(move |one| !created.is_some_and(|created| created.contains(&one.placement)));
        others.map(move |one| (gpu.index, one))
    });
    let foreign: Vec<(GpuIndex, &GpuInstance)> = foreign.collect();
    let places: Vec<(GpuIndex, Placement)> = foreign.iter().map(|(index, one)| (*index, one.placement)).collect();
    let blocking = snapshot.instances_that_block(wanted, &places);
    let named = foreign.into_iter().filter(|(index, one)| blocking.contains(&(*index, one.placement)));
    let named = named.map(|(index, one)| {
        let (profile, start) = (&one.profile, one.placement.start);
        format!("gpushd does not destroy {profile}@{start} on GPU {index}: another program created it")
    });
    named.take(MOST_NAMED).collect()
}

/// Whether the obstacles of a request will disappear soon.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RetryHint {
    No,
    /// An operation, or a lease without processes, ends soon, usually within seconds.
    Soon,
    /// An MPS daemon is starting, or gpushd has just started and has not checked yet whether a running daemon serves
    /// clients.
    Starting,
}

/// Returns whether the obstacles of a request will disappear soon.
///
/// Ignores leases on other GPUs, because their end does not help the request.
pub(crate) async fn retry_hint(
    scheduler: &Scheduler,
    why: &NoAssignment,
    demand: &LeaseDemand,
    gpus: &[Gpu],
) -> RetryHint {
    let NoAssignment::Busy { obstacles, .. } = why else { return RetryHint::No };
    // Check first whether a daemon is starting. The checks below are slower, and a daemon that becomes ready during
    // them no longer counts as starting. gpushd would then refuse the request although it can now grant it.
    let is_mps = demand.wanted.share.kind() == LeaseKind::Mps;
    let host = scheduler.handles.context.state.now();
    let is_starting = is_mps && mps::outlook(&host, Viewer::Agent).is_starting();
    let is_claimed = |(_, obstacle): &(GpuIndex, Obstacle)| *obstacle == Obstacle::Closed(Closed::Claimed);
    let in_the_way = uuids_of(obstacles.iter().map(|(index, _)| *index), gpus);
    let table = Arc::clone(&host.leases);
    let one_ends =
        subtask::blocking(move || table.holding().filter(|lease| is_on(lease, &in_the_way)).any(OpenLease::ends_now));
    if obstacles.iter().any(is_claimed) || one_ends.await.unwrap_or_default() {
        return RetryHint::Soon;
    }
    if is_starting { RetryHint::Starting } else { RetryHint::No }
}

/// Returns the UUIDs of the GPUs with these indexes.
fn uuids_of(indexes: impl IntoIterator<Item = GpuIndex>, gpus: &[Gpu]) -> BTreeSet<GpuUuid> {
    let indexes: BTreeSet<GpuIndex> = indexes.into_iter().collect();
    gpus.iter().filter(|gpu| indexes.contains(&gpu.index)).map(|gpu| gpu.uuid.clone()).collect()
}

/// Returns whether a lease occupies one of these GPUs, or one of their MIG devices.
fn is_on(lease: &OpenLease, uuids: &BTreeSet<GpuUuid>) -> bool {
    lease.record.members.iter().any(|member| uuids.contains(&member.gpu_uuid))
}

#[cfg(test)]
mod tests {
    use gpush_api::ProcessKind;
    use gpush_core::{mps::MpsTarget, preset};

    use super::*;
    use crate::modes::scene::{READY, daemon_report, mps_target};

    /// Fault: two stopped daemons of one GPU counted as the daemons of two GPUs. So the refusal named only the stopped
    /// daemons, although the daemon of the other GPU serves and a lease on it will end.
    #[test]
    fn stopped_daemons_of_one_gpu_do_not_count_for_another() {
        let mut targets = MpsTargets::default();
        for (uuid, gpu) in [("MIG-0", "GPU-0"), ("MIG-1", "GPU-0"), ("GPU-1", "GPU-1")] {
            let target = MpsTarget { gpu_uuid: gpu.into(), ..mps_target(uuid, daemon_report(READY)) };
            targets.by_uuid.insert(uuid.into(), Arc::new(target));
        }
        assert!(!none_serves(&targets, &[&"GPU-0".into(), &"GPU-1".into()], 2), "the daemon of GPU 1 serves");
        assert!(none_serves(&targets, &[&"GPU-0".into(), &"GPU-1".into()], 3));
        assert!(none_serves(&targets, &[&"GPU-0".into()], 2) && !none_serves(&targets, &[&"GPU-0".into()], 1));
        assert!(!none_serves(&targets, &[&"GPU-0".into(), &"GPU-2".into()], 2), "GPU 2 has no daemon, but may get one");
    }

    /// Fault: if a process without a lease blocked a request, the refusal said only that the GPU has no room.
    /// Fault: the tasks of a refused job printed the process of another user.
    #[test]
    fn refusal_is_written_for_the_holder_of_the_lease() {
        assert_eq!(reader(Viewer::Hook, 1000), Viewer::User(1000));
        assert_eq!(reader(Viewer::Admin, 1000), Viewer::User(1000));
        assert_eq!(reader(Viewer::Admin, 0), Viewer::Admin);
        assert_eq!(reader(Viewer::User(1000), 1000), Viewer::User(1000));
    }

    /// Fault: the hint for a user whose own lease held the GPU was to wait for the end of this lease.
    #[test]
    fn own_lease_that_blocks_alone_is_found() {
        let held = |id: u64, releasable: bool, queued: bool| HeldLease {
            id: LeaseId(id),
            queued,
            size: quota::Size::default(),
            releasable,
        };
        let blocking = |ids: &[u64], together: bool| Blockers {
            leases: ids.iter().copied().map(LeaseId).collect(),
            in_use: Vec::new(),
            together,
        };
        let own = [held(2, true, false), held(3, false, false), held(4, true, true)];
        assert_eq!(own_lease(&blocking(&[2], true), &own), Some(LeaseId(2)));
        assert_eq!(own_lease(&blocking(&[1, 2], false), &own), Some(LeaseId(2)));
        assert_eq!(own_lease(&blocking(&[1, 2], true), &own), None, "the other lease must end too");
        for other in [1, 3, 4] {
            assert_eq!(own_lease(&blocking(&[other], false), &own), None, "L{other}");
        }
    }

    #[test]
    fn retry_hint_ignores_leases_on_other_gpus() {
        let gpus = preset::gpus("dgx-a100").expect("a preset");
        let uuids = uuids_of([1, 3].map(GpuIndex), &gpus);
        assert_eq!(uuids.len(), 2);
        let on = |at: usize| {
            let mut record = crate::state::leases::tests::record(1, 1000, "target");
            record.members[0].gpu_uuid.clone_from(&gpus[at].uuid);
            is_on(&OpenLease::new(record), &uuids)
        };
        assert!(on(1) && on(3) && !on(0) && !on(2));
    }

    #[test]
    fn process_without_a_lease_is_named_as_far_as_the_caller_may_see_it() {
        let mut gpus = preset::gpus("dgx-a100").expect("a preset");
        gpus.truncate(6);
        let (uid, user) = (Some(1000), Some("alice".to_owned()));
        let command = Some("python train.py".to_owned());
        let process = Process {
            pid: Some(4123),
            uid,
            user,
            command,
            kind: ProcessKind::Compute,
            memory_mib: None,
            unidentified: false,
        };
        gpus[5].processes.push(process);
        let target = [gpus[5].uuid.clone().into()];
        let named = |viewer: Viewer| users_without_lease(&gpus, &target, viewer).join("; ");
        let own = "pid 4123 (alice, python train.py), which uses GPU 5 without a lease,";
        assert_eq!((named(Viewer::User(1000)).as_str(), named(Viewer::Admin).as_str()), (own, own));
        let other = "a process of another user, which uses GPU 5 without a lease,";
        assert_eq!(named(Viewer::User(1001)), other);
        let mut unknown = gpus.clone();
        (unknown[5].processes[0].uid, unknown[5].processes[0].unidentified) = (None, true);
        let unknown = users_without_lease(&unknown, &target, Viewer::User(1001)).join("; ");
        assert_eq!(unknown, "a process whose user is not known yet, which uses GPU 5 without a lease,");
        assert!(users_without_lease(&gpus, &[gpus[0].uuid.clone().into()], Viewer::Admin).is_empty());
    }
}
