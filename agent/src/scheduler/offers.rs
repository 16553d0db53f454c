//! Determines from one snapshot what the GPUs offer now, and the members of an assignment.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{
    ApiError, Gpu, LeaseMember, LeaseOwner, LeaseRequest, LeaseShare, LeaseState, MemberShare, MpsSettings,
};
use gpush_core::lease::placement::{Assignment, Host, Member, Snapshot, nominal_mib};

use super::Scheduler;
use crate::{
    mps,
    state::{GpuSnapshot, HostState, LeaseTable},
};

/// Returns what the GPUs offer, and which capacity leases and operations already occupy.
pub(crate) fn host(scheduler: &Scheduler, host: &HostState, gpus: &[Gpu], table: &LeaseTable) -> Host {
    let members: Vec<(u32, &LeaseMember)> = table.members().collect();
    let daemons = mps::daemons(&scheduler.handles.mps);
    let mut claimed = scheduler.handles.lanes.claimed();
    // The operation that creates the MIG device of a lease may release its claim before gpushd records the device. So
    // count the GPU as claimed as long as the lease is in the state `granting`.
    let granting = table.open.values().filter(|lease| lease.state.name() == LeaseState::Granting);
    claimed.extend(granting.flat_map(|lease| gpus_of(&lease.record.members)));
    let mut offered = Host::of(&Snapshot {
        config: &host.config,
        gpus,
        members: &members,
        claimed: &claimed,
        daemons: &daemons.targets,
        ended: &daemons.ended,
        users: &daemons.users,
        created: &table.created,
    });
    // If the daemon of a target serves one user at a time, use this limit, even if the rule allows
    // several users.
    for (target, user) in mps::single_users(&scheduler.handles.mps, table) {
        for mps in offered.gpus.iter_mut().flat_map(|gpu| &mut gpu.mps).filter(|mps| mps.target == target) {
            mps.user = mps.user.or(Some(user));
        }
    }
    // A target without a running daemon has no room now, but still offers its kind of share.
    let serving = mps::serving(&scheduler.handles.mps);
    for mps in offered.gpus.iter_mut().flat_map(|gpu| &mut gpu.mps).filter(|mps| !serving.contains(&mps.target)) {
        mps.leases = u32::MAX;
    }
    offered
}

/// Returns the indexes of the GPUs that only Slurm's hooks may lease.
pub(crate) fn slurm_gpus(host: &HostState) -> BTreeSet<u32> {
    let is_slurms = |gpu: &&Arc<GpuSnapshot>| {
        let terms = gpu.rule.and_then(|rule| host.config.rules.get(rule)?.lease);
        terms.is_some_and(|terms| terms.owner == LeaseOwner::Slurm)
    };
    host.gpus.iter().filter(is_slurms).map(|gpu| gpu.gpu.index).collect()
}

/// Returns the members of an assignment. Leaves out members whose GPU no longer exists.
///
/// # Errors
/// If an MPS target cannot give what the request asks for.
pub(crate) fn members(
    scheduler: &Scheduler,
    assignment: &Assignment,
    gpus: &[Gpu],
    offered: &Host,
    request: &LeaseRequest,
) -> Result<Vec<LeaseMember>, ApiError> {
    let mut members = Vec::new();
    for member in &assignment.members {
        let Some(gpu) = gpus.iter().find(|gpu| gpu.index == member.gpu()) else { continue };
        let total = gpu.memory.total_mib;
        let (target, share, memory_mib) = match member {
            Member::Device { uuid, .. } => {
                let (profile, memory) = device(gpu, uuid);
                (uuid.clone(), MemberShare::Mig { profile }, memory)
            }
            // The UUID and the memory become known when the operation has created the instance.
            Member::Create { profile_id, .. } => {
                let (profile, memory) = to_create(offered, gpu.index, *profile_id);
                (String::new(), MemberShare::Mig { profile }, memory)
            }
            Member::Mps { target, percentage, .. } => {
                let asked = match &request.share {
                    LeaseShare::Mps { memory_limit_mib, priority, .. } => (*memory_limit_mib, *priority),
                    _ => (None, None),
                };
                let settings = mps::client_settings(&scheduler.handles.mps, target, *percentage, asked.0, asked.1)?;
                let MpsSettings { percentage, memory_limit_mib, priority } = settings;
                let of_target = offered.gpus.iter().flat_map(|gpu| &gpu.mps).find(|mps| mps.target == *target);
                let all = of_target.map_or(total, |mps| mps.memory_mib);
                let part = all.saturating_mul(percentage.tenths().into()).div_ceil(1000);
                let memory = memory_limit_mib.map_or(part, gpush_api::MemoryLimit::mib);
                (target.clone(), MemberShare::Mps { percentage, memory_limit_mib, priority }, memory)
            }
            Member::Timeslice { .. } => {
                let offer = offered.gpus.iter().find(|one| one.index == gpu.index).and_then(|one| one.timeslice);
                let replicas = offer.map_or(1, |offer| offer.replicas.max(1));
                let (level, compute_mode) =
                    (offer.map(|offer| offer.level), offer.and_then(|offer| offer.compute_mode));
                let share = MemberShare::Timeslice { replicas, level, compute_mode };
                (gpu.uuid.clone(), share, total.div_ceil(replicas.into()))
            }
            Member::Whole { .. } => (gpu.uuid.clone(), MemberShare::Whole, total),
        };
        members.push(LeaseMember { target, gpu: gpu.uuid.clone(), share, memory_mib, gpu_memory_mib: total });
    }
    Ok(members)
}

/// Returns the profile and the nominal memory of a MIG device that does not exist yet.
fn to_create(offered: &Host, index: u32, profile_id: u32) -> (String, u64) {
    let mig = offered.gpus.iter().find(|gpu| gpu.index == index).and_then(|gpu| gpu.mig.as_ref());
    let Some(profile) = mig.and_then(|mig| mig.geometry.profile(profile_id)) else { return (String::new(), 0) };
    let device = profile.whole().map_or(&profile.profile.name, |compute| &compute.profile.name);
    (device.clone(), nominal_mib(&profile.profile.name).unwrap_or_default())
}

/// Returns the profile and the memory of a MIG device.
fn device(gpu: &Gpu, uuid: &str) -> (String, u64) {
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    let mut devices = instances.flat_map(|one| one.compute.iter().map(move |compute| (one, compute)));
    let found = devices.find(|(_, compute)| compute.uuid.as_deref() == Some(uuid));
    let Some((instance, compute)) = found else { return (String::new(), 0) };
    let memory = instance.memory.map(|memory| memory.total_mib).filter(|mib| *mib > 0);
    (compute.profile.clone(), memory.or(nominal_mib(&instance.profile)).unwrap_or_default())
}

/// Returns the UUIDs of the GPUs of these members.
pub(crate) fn gpus_of(members: &[LeaseMember]) -> BTreeSet<String> {
    members.iter().map(|member| member.gpu.clone()).collect()
}
