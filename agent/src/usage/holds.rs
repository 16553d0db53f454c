//! The holds of the leases and the unusable units of the GPUs, from a snapshot.

use std::collections::BTreeMap;

use gpush_api::{Gpu, GpuInstance, GpuState, LeaseId, LeaseMember, MemberShare, Mig, Mode, TargetUuid};
use gpush_usage::{
    input::Hold,
    share::{GPU_UNITS, Part, TargetSize},
};

use crate::state::{HostState, OpenLease};

/// Returns the holds of each granted lease. While gpushd does not know a GPU or its instances, for example after a
/// start, a member keeps its earlier hold, which `before` returns.
pub(super) fn of_leases(
    host: &HostState,
    before: impl Fn(LeaseId, &TargetUuid) -> Option<Hold>,
) -> BTreeMap<LeaseId, Vec<Hold>> {
    let leases = host.leases.holding().filter(|lease| lease.record.granted_at.is_some());
    let holds = |lease: &OpenLease| {
        let of = |member| of_member(host, member).or_else(|| before(lease.id(), &member.target));
        (lease.id(), lease.record.members.iter().filter_map(of).collect())
    };
    leases.map(holds).collect()
}

/// Returns the holds of the members of a lease. A member on a GPU that gpushd does not know is left out.
pub(super) fn of_members(host: &HostState, members: &[LeaseMember]) -> Vec<Hold> {
    members.iter().filter_map(|member| of_member(host, member)).collect()
}

fn of_member(host: &HostState, member: &LeaseMember) -> Option<Hold> {
    let gpu = &host.gpu(&member.gpu_uuid)?.gpu;
    let (size, instance) = target(gpu, member).or_else(|| Some((by_profile(gpu, member)?, None)))?;
    Some(Hold::of_member(member, size, instance))
}

/// Returns the size of a MIG device that does not exist yet or any more, by the name of its profile.
fn by_profile(gpu: &Gpu, member: &LeaseMember) -> Option<TargetSize> {
    let (MemberShare::Mig { profile: name }, Some(mig)) = (&member.share, &gpu.mig) else { return None };
    let profile = mig.profiles.iter().find(|profile| profile.name == *name)?;
    let size = profile.placements.first()?.size;
    Some(TargetSize {
        compute: Part { of: profile.slices.into(), all: mig.compute_slices.into() },
        memory: Part { of: size.into(), all: mig.memory_slices.into() },
    })
}

/// Returns the size of a member's target, and the GPU instance that contains it.
fn target(gpu: &Gpu, member: &LeaseMember) -> Option<(TargetSize, Option<u32>)> {
    if member.target == member.gpu_uuid {
        return Some((TargetSize::GPU, None));
    }
    let mig = gpu.mig.as_ref()?;
    mig.instances.iter().find_map(|instance| {
        let device = instance.compute.iter().find(|device| device.uuid.as_ref() == Some(&member.target))?;
        let profile = mig.profiles.iter().find(|profile| profile.id == instance.profile_id)?;
        let part = profile.compute.iter().find(|part| part.id == device.profile_id);
        let (slices, all) = (part.map_or(profile.slices, |part| part.slices), profile.slices.max(1));
        // The memory of a GPU instance is shared by its compute instances.
        let memory = u32::from(instance.placement.size) * u32::from(slices);
        let size = TargetSize {
            compute: Part { of: slices.into(), all: mig.compute_slices.into() },
            memory: Part { of: memory, all: u32::from(mig.memory_slices) * u32::from(all) },
        };
        Some((size, Some(instance.id)))
    })
}

/// Returns the compute part of a GPU instance, in units of [`GPU_UNITS`].
pub(super) fn units_of_instance(mig: &Mig, instance: &GpuInstance) -> u32 {
    let profile = mig.profiles.iter().find(|profile| profile.id == instance.profile_id);
    let slices = profile.map_or(0, |profile| u32::from(profile.slices));
    GPU_UNITS / u32::from(mig.compute_slices).max(1) * slices
}

/// Returns the unusable units of a GPU: all units if gpushd does not grant leases on it, or else the slices that a
/// static layout leaves over.
pub(super) fn unusable(gpu: &Gpu) -> u32 {
    match gpu.state {
        GpuState::Ready | GpuState::Changing => {}
        GpuState::Cordoned
        | GpuState::Degraded
        | GpuState::Unknown
        | GpuState::Held
        | GpuState::Maintenance
        | GpuState::Lost => return GPU_UNITS,
    }
    if !gpu.mode.is_managed() {
        return GPU_UNITS;
    }
    match (gpu.mode, &gpu.mig, &gpu.layout) {
        (Mode::Mig, Some(mig), Some(_)) => {
            let used: u32 = mig.instances.iter().map(|instance| units_of_instance(mig, instance)).sum();
            GPU_UNITS.saturating_sub(used)
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::TargetUuid;
    use gpush_core::preset;

    use super::*;

    fn a100() -> Gpu {
        let mut gpu = preset::gpus("dgx-a100").expect("a preset").remove(0);
        let mig = gpu.mig.as_mut().unwrap();
        let profile = mig.profiles.iter().find(|profile| profile.name == "3g.40gb").unwrap().clone();
        let device = gpush_api::ComputeInstance {
            id: 0,
            profile_id: profile.compute.last().unwrap().id,
            profile: profile.compute.last().unwrap().name.clone(),
            placement: None,
            uuid: Some("MIG-1".into()),
            processes: Vec::new(),
        };
        mig.instances = vec![GpuInstance {
            id: 2,
            profile_id: profile.id,
            profile: profile.name.clone(),
            placement: profile.placements[0],
            memory: None,
            compute: vec![device],
            processes: Vec::new(),
        }];
        gpu
    }

    fn member(gpu: &Gpu, target: TargetUuid) -> LeaseMember {
        let share = MemberShare::Mig { profile: "3g.40gb".to_owned() };
        LeaseMember { target, gpu_uuid: gpu.uuid.clone(), share, memory_mib: 40_000, gpu_memory_mib: 80_000 }
    }

    #[test]
    fn mig_device_has_the_slices_of_its_profile() {
        let gpu = a100();
        let (size, instance) = target(&gpu, &member(&gpu, "MIG-1".into())).unwrap();
        assert_eq!(instance, Some(2));
        let hold = Hold::of_member(&member(&gpu, "MIG-1".into()), size, instance);
        assert_eq!((hold.share.units, hold.share.charged), (GPU_UNITS / 7 * 3, GPU_UNITS / 2));
        assert_eq!(target(&gpu, &member(&gpu, gpu.uuid.as_target().clone())), Some((TargetSize::GPU, None)));
        assert_eq!(target(&gpu, &member(&gpu, "MIG-2".into())), None, "it does not exist yet");
    }

    #[test]
    fn slices_that_a_static_layout_leaves_over_are_unusable() {
        let mut gpu = a100();
        (gpu.state, gpu.mode) = (GpuState::Ready, Mode::Mig);
        gpu.layout = None;
        assert_eq!(unusable(&gpu), 0, "a dynamic GPU can have more instances");
        gpu.layout = Some(vec!["3g.40gb".to_owned()]);
        assert_eq!(unusable(&gpu), GPU_UNITS / 7 * 4);
        for mode in [Mode::Unmanaged, Mode::NoRule] {
            gpu.mode = mode;
            assert_eq!(unusable(&gpu), GPU_UNITS, "{mode:?}");
        }
        (gpu.mode, gpu.state) = (Mode::Exclusive, GpuState::Cordoned);
        assert_eq!(unusable(&gpu), GPU_UNITS);
        gpu.state = GpuState::Ready;
        assert_eq!(unusable(&gpu), 0);
    }
}
