//! What the GPUs offer, and the members of an assignment, as pure functions of snapshots of the host.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{
    ApiError, Gpu, GpuIndex, GpuUuid, LeaseMember, LeaseOwner, LeaseRequest, LeaseShare, LeaseState, MemberShare,
    MpsSettings, TargetUuid,
};
use gpush_core::{
    lease::placement::{Assignment, Host, Member, nominal_mib},
    mps::{DesiredTargets, OfferInputs, client_settings, offers},
};

use super::ends;
use crate::{
    modes::mps,
    requests::caller::Viewer,
    state::{GpuSnapshot, HostState, LeaseTable},
};

/// Returns what the GPUs offer, and which capacity leases and operations already occupy. `gpus` are the GPUs of the
/// snapshot `read`, whose rules apply. The later snapshot `now` has the MPS targets and the claims of operations. `table`
/// has the leases.
pub(crate) fn host(read: &HostState, gpus: &[Gpu], now: &HostState, table: &LeaseTable) -> Host {
    let members: Vec<(u32, &LeaseMember)> = table.members().collect();
    let mut claimed = now.claimed.clone();
    // The operation that creates the MIG device of a lease may release its claim before gpushd records the device. So
    // count the GPU as claimed as long as the lease is in the state `granting`.
    let granting = table.open.values().filter(|lease| lease.state.name() == LeaseState::Granting);
    claimed.extend(granting.flat_map(|lease| gpus_of(&lease.record.members)));
    let outlook = DesiredTargets::new(&read.config, gpus, &now.mps);
    let (config, members, claimed) = (&read.config, members.as_slice(), &claimed);
    let mut host = offers(&outlook, OfferInputs { config, members, claimed, created: &table.created });
    ends::note_ends(&mut host, read, table);
    host
}

/// Returns the indexes of the GPUs that only Slurm's hooks may lease.
pub(crate) fn slurm_gpus(host: &HostState) -> BTreeSet<GpuIndex> {
    let is_slurms = |gpu: &&Arc<GpuSnapshot>| {
        let terms = gpu.rule.and_then(|rule| host.config.rules.get(rule)?.lease);
        terms.is_some_and(|terms| terms.owner == LeaseOwner::Slurm)
    };
    host.gpus.iter().filter(is_slurms).map(|gpu| gpu.gpu.index).collect()
}

/// Returns the members of an assignment. Leaves out members whose GPU no longer exists. `now` is the current snapshot.
///
/// # Errors
/// If an MPS target cannot give what the request asks for.
pub(crate) fn members(
    now: &Arc<HostState>,
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
                (TargetUuid::default(), MemberShare::Mig { profile }, memory)
            }
            Member::Mps { target, percentage, .. } => {
                let asked = match &request.share {
                    LeaseShare::Mps { memory_limit_mib, priority, .. } => (*memory_limit_mib, *priority),
                    _ => (None, None),
                };
                let outlook = mps::outlook(now, Viewer::Agent);
                let settings = client_settings(outlook.serves(target)?, *percentage, asked.0, asked.1)?;
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
                (gpu.uuid.clone().into(), share, total.div_ceil(replicas.into()))
            }
            Member::Whole { .. } => (gpu.uuid.clone().into(), MemberShare::Whole, total),
        };
        members.push(LeaseMember { target, gpu_uuid: gpu.uuid.clone(), share, memory_mib, gpu_memory_mib: total });
    }
    Ok(members)
}

/// Returns the profile and the nominal memory of a MIG device that does not exist yet.
fn to_create(offered: &Host, index: GpuIndex, profile_id: u32) -> (String, u64) {
    let mig = offered.gpus.iter().find(|gpu| gpu.index == index).and_then(|gpu| gpu.mig.as_ref());
    let Some(profile) = mig.and_then(|mig| mig.geometry.profile(profile_id)) else { return (String::new(), 0) };
    let device = profile.whole().map_or(&profile.profile.name, |compute| &compute.profile.name);
    (device.clone(), nominal_mib(&profile.profile.name).unwrap_or_default())
}

/// Returns the profile and the memory of a MIG device.
fn device(gpu: &Gpu, uuid: &TargetUuid) -> (String, u64) {
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    let mut devices = instances.flat_map(|one| one.compute.iter().map(move |compute| (one, compute)));
    let found = devices.find(|(_, compute)| compute.uuid.as_ref() == Some(uuid));
    let Some((instance, compute)) = found else { return (String::new(), 0) };
    let memory = instance.memory.map(|memory| memory.total_mib).filter(|mib| *mib > 0);
    (compute.profile.clone(), memory.or(nominal_mib(&instance.profile)).unwrap_or_default())
}

/// Returns the UUIDs of the GPUs of these members.
pub(super) fn gpus_of(members: &[LeaseMember]) -> BTreeSet<GpuUuid> {
    members.iter().map(|member| member.gpu_uuid.clone()).collect()
}

#[cfg(test)]
mod tests {
    use gpush_api::{ComputeMode, Memory, TimesliceLevel};
    use gpush_core::{
        config::Config,
        lease::placement::{Closed, GpuOffer, TimesliceOffer},
    };

    use super::*;
    use crate::{
        modes::scene::{mig_gpu, whole_gpu},
        state::{
            Holder, State,
            leases::tests::record,
            tests::{list, read},
        },
    };

    /// Returns the only member of an assignment on GPU 0.
    fn member(gpu: Gpu, member: Member, timeslice: Option<TimesliceOffer>) -> LeaseMember {
        let offered = Host { gpus: vec![GpuOffer { index: GpuIndex(0), timeslice, ..GpuOffer::default() }] };
        let assignment = Assignment { members: vec![member], destroys: Vec::new() };
        let now = State::empty().now();
        members(&now, &assignment, &[gpu], &offered, &LeaseRequest::default()).unwrap().remove(0)
    }

    #[test]
    fn whole_gpu_counts_with_all_its_memory() {
        let memory = Memory { total_mib: 1001, used_mib: 0 };
        let whole = member(Gpu { memory, ..whole_gpu() }, Member::Whole { gpu: GpuIndex(0) }, None);
        assert_eq!((whole.target.as_str(), whole.share, whole.memory_mib), ("GPU-0", MemberShare::Whole, 1001));
    }

    /// The share is rounded up, so that all replicas together never count as less than the memory of the GPU.
    #[test]
    fn replica_counts_its_part_of_memory_and_has_rule_settings() {
        let gpu = || Gpu { memory: Memory { total_mib: 1001, used_mib: 0 }, ..whole_gpu() };
        let (level, compute_mode) = (TimesliceLevel::Long, Some(ComputeMode::Default));
        let offer =
            |replicas| TimesliceOffer { replicas, level, compute_mode, taken: 0, excluding: 0, first_end: None };
        let replica = member(gpu(), Member::Timeslice { gpu: GpuIndex(0) }, Some(offer(4)));
        assert_eq!(replica.memory_mib, 251);
        assert_eq!(replica.share, MemberShare::Timeslice { replicas: 4, level: Some(level), compute_mode });
        let only = member(gpu(), Member::Timeslice { gpu: GpuIndex(0) }, None);
        assert_eq!((only.memory_mib, only.gpu_memory_mib), (1001, 1001), "the GPU offers none any more");
    }

    #[test]
    fn mig_device_counts_with_its_read_or_nominal_memory() {
        let mut gpu = mig_gpu(&["3g.40gb@4"]);
        let device = |gpu: &Gpu| member(gpu.clone(), Member::Device { gpu: GpuIndex(0), uuid: "MIG-0".into() }, None);
        assert_eq!(device(&gpu).memory_mib, 40 * 1024);
        gpu.mig.as_mut().unwrap().instances[0].memory = Some(Memory { total_mib: 39_936, used_mib: 0 });
        let read = device(&gpu);
        assert_eq!((read.target.as_str(), read.memory_mib), ("MIG-0", 39_936));
        assert_eq!(read.share, MemberShare::Mig { profile: "3g.40gb".to_owned() });
    }

    #[test]
    fn gpus_of_slurm_are_those_whose_rule_says_so() {
        let state = state();
        assert_eq!(slurm_gpus(&state.now()), BTreeSet::new());
        let rule = "[[gpu]]\nmatch = [\"1\"]\nmode = \"exclusive\"\nowner = \"slurm\"\n";
        state.replace_config(Arc::new(Config::parse(rule, "c").unwrap()), 2);
        assert_eq!(slurm_gpus(&state.now()), BTreeSet::from([GpuIndex(1)]));
    }

    /// Returns a state with GPUs 0 and 1, which are offered as whole GPUs.
    fn state() -> State {
        let state = State::empty();
        let config = Config::parse("[[gpu]]\nmatch = [\"0\", \"1\"]\nmode = \"exclusive\"\n", "c").unwrap();
        state.replace_config(Arc::new(config), 1);
        list(&state, &[0, 1]);
        read(&state, 0);
        read(&state, 1);
        state
    }

    fn closed(now: &Arc<HostState>, table: &LeaseTable) -> Vec<Option<Closed>> {
        host(now, &now.gpus(Viewer::Log), now, table).gpus.iter().map(|gpu| gpu.closed).collect()
    }

    #[test]
    fn claimed_gpu_is_closed_in_snapshots_after_the_claim() {
        let state = state();
        let before = state.now();
        state.set_lane(&["GPU-0".into()], Some(&Holder::Planning));
        let table = LeaseTable::default();
        assert_eq!(closed(&before, &table), [None, None]);
        assert_eq!(closed(&state.now(), &table), [Some(Closed::Claimed), None]);
    }

    /// The operation that creates a MIG device may release its claim before gpushd has recorded the device.
    #[test]
    fn gpu_of_a_lease_that_is_being_granted_counts_as_claimed() {
        let (state, mut table, mut granting) = (state(), LeaseTable::default(), record(1, 1000, "MIG-1"));
        granting.state = LeaseState::Granting;
        granting.members[0].gpu_uuid = "GPU-1".into();
        table.insert(granting);
        assert_eq!(closed(&state.now(), &table), [None, Some(Closed::Claimed)]);
    }
}
