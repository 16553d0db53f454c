//! Searches equal GPUs only once. Most hosts have several GPUs of one model, and many of them have the same instances.
//!
//! The choices on a GPU depend on its geometry and on the state of its instances, but not on its index, and not on the
//! UUIDs and ids of its devices. So the choices for one GPU are also valid for an equal GPU, with its own names.

use std::sync::Arc;

use gpush_api::GpuIndex;

use super::{
    Device, GpuOffer, Instance, Member, MigOffer, PlacementRequest, RequestedShare, UseOccupied, choice::GpuChoice,
};

/// The choices on one GPU, by number of members.
type Choices = Vec<Option<GpuChoice>>;

/// Returns the choices on each GPU. `search` finds the choices on one GPU. `occupied` says whether it chooses capacity in use:
/// only then the ends of leases matter.
pub(super) fn choices(
    gpus: &[&GpuOffer],
    wanted: &PlacementRequest,
    occupied: UseOccupied,
    search: impl Fn(&GpuOffer) -> Choices,
) -> Vec<Choices> {
    let mut known: Vec<Choices> = Vec::with_capacity(gpus.len());
    for (at, gpu) in gpus.iter().enumerate() {
        let equal = (0..at).find(|other| are_equal(gpus[*other], gpu, wanted, occupied));
        known.push(match equal {
            Some(other) => {
                known[other].iter().map(|choice| Some(renamed(choice.as_ref()?, gpus[other], gpu))).collect()
            }
            None => search(gpu),
        });
    }
    known
}

/// Returns whether two GPUs have the same choices for a request. Compares only MIG devices, because other searches are
/// fast.
fn are_equal(one: &GpuOffer, other: &GpuOffer, wanted: &PlacementRequest, occupied: UseOccupied) -> bool {
    if !matches!(wanted.share, RequestedShare::Mig(_)) || wanted.targets.is_some() || one.closed != other.closed {
        return false;
    }
    match (&one.mig, &other.mig) {
        (Some(one), Some(other)) => have_equal_devices(one, other, occupied),
        (None, None) => true,
        (Some(_), None) | (None, Some(_)) => false,
    }
}

fn have_equal_devices(one: &MigOffer, other: &MigOffer, occupied: UseOccupied) -> bool {
    one.dynamic == other.dynamic
        && one.reserved == other.reserved
        && one.instances.len() == other.instances.len()
        && one.instances.iter().zip(&other.instances).all(|(one, other)| are_equal_instances(one, other, occupied))
        && (Arc::ptr_eq(&one.geometry, &other.geometry) || one.geometry == other.geometry)
}

/// Returns whether two instances differ only in their ids and in the UUIDs of their devices.
fn are_equal_instances(one: &Instance, other: &Instance, occupied: UseOccupied) -> bool {
    let Instance { id: _, profile_id, placement, foreign, busy, clearing, devices } = one;
    let are_equal_devices = |(one, other): (&Device, &Device)| {
        let Device { uuid: _, profile, whole, free, leased, shared, end } = one;
        (*whole, *free, *leased, *shared) == (other.whole, other.free, other.leased, other.shared)
            && (*end == other.end || occupied == UseOccupied::Never)
            && *profile == other.profile
    };
    (*profile_id, *placement) == (other.profile_id, other.placement)
        && (*foreign, *busy, *clearing) == (other.foreign, other.busy, other.clearing)
        && devices.len() == other.devices.len()
        && devices.iter().zip(&other.devices).all(are_equal_devices)
}

/// Returns a choice on the GPU `from` as a choice on an equal GPU `to`.
fn renamed(choice: &GpuChoice, from: &GpuOffer, to: &GpuOffer) -> GpuChoice {
    let instances = |gpu: &GpuOffer| gpu.mig.as_ref().map(|mig| mig.instances.clone()).unwrap_or_default();
    let pairs: Vec<(Instance, Instance)> = instances(from).into_iter().zip(instances(to)).collect();
    let devices = || pairs.iter().flat_map(|(from, to)| from.devices.iter().zip(&to.devices));
    let member = |member: &Member| match member {
        Member::Device { uuid, .. } => {
            let device = devices().find(|(from, _)| from.uuid == *uuid);
            let uuid = device.map_or_else(|| uuid.clone(), |(_, to)| to.uuid.clone());
            Member::Device { gpu: to.index, uuid }
        }
        Member::Create { profile_id, placement, .. } => {
            Member::Create { gpu: to.index, profile_id: *profile_id, placement: *placement }
        }
        Member::Mps { .. } | Member::Timeslice { .. } | Member::Whole { .. } => member.clone(),
    };
    let destroyed = |(_, id): &(GpuIndex, u32)| {
        let instance = pairs.iter().find(|(from, _)| from.id == *id);
        (to.index, instance.map_or(*id, |(_, to)| to.id))
    };
    GpuChoice {
        cost: choice.cost,
        members: choice.members.iter().map(member).collect(),
        destroys: choice.destroys.iter().map(destroyed).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lease::placement::{
        PlacementPolicy, RequestedDevice, mig,
        tests::scene::{random, wanted},
    };

    #[test]
    fn equal_gpu_gets_the_choices_of_its_own_search() {
        let mut rng = fastrand::Rng::with_seed(1);
        for round in 0..300 {
            let model = ["a100-80", "a30-24"][rng.usize(..2)];
            let first = random(&mut rng, 0, model);
            let mut second = GpuOffer { index: GpuIndex(1), uuid: "GPU-second".into(), ..first.clone() };
            for instance in second.mig.iter_mut().flat_map(|mig| &mut mig.instances) {
                instance.id += 20;
                instance.devices.iter_mut().for_each(|device| device.uuid = format!("second-{}", device.uuid).into());
            }
            let gpus = [&first, &second, &random(&mut rng, 2, model)];
            let device = RequestedDevice::AtLeast { memory_mib: 0, slices: rng.u8(0..3) };
            let wanted = wanted(RequestedShare::Mig(device.clone()), rng.usize(1..9));
            let occupied = [UseOccupied::Never, UseOccupied::Last][rng.usize(..2)];
            let search =
                |gpu: &GpuOffer| mig::best_choices(gpu, &device, None, wanted.count, PlacementPolicy::Pack, occupied);
            assert!(are_equal(&first, &second, &wanted, occupied));
            assert_eq!(choices(&gpus, &wanted, occupied, search), gpus.map(search), "round {round}: {gpus:?}");
        }
    }
}
