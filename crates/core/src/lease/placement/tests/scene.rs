//! Hosts for tests of placement.

use std::sync::Arc;

use gpush_api::{ComputeMode, GpuIndex, Placement, TimesliceLevel};

use crate::geometry::Geometry;

use super::*;

pub(crate) fn wanted(share: RequestedShare, count: usize) -> PlacementRequest {
    PlacementRequest { share, count, holder: 1000, gpus: None, targets: None }
}

/// Returns a GPU without offers.
pub(crate) fn gpu(index: u32) -> GpuOffer {
    GpuOffer { index: GpuIndex(index), uuid: format!("GPU-{index}").into(), ..GpuOffer::default() }
}

pub(crate) fn whole(index: u32, free: bool) -> GpuOffer {
    GpuOffer { whole: Some(WholeOffer { free, leased: !free, end: None }), ..gpu(index) }
}

pub(crate) fn timeslice(index: u32, replicas: u32, taken: u32) -> GpuOffer {
    GpuOffer { timeslice: Some(TimesliceOffer { taken, ..timeslice_offer(replicas) }), ..gpu(index) }
}

pub(crate) fn timeslice_offer(replicas: u32) -> TimesliceOffer {
    let (level, compute_mode) = (TimesliceLevel::Default, Some(ComputeMode::Default));
    TimesliceOffer { replicas, level, compute_mode, taken: 0, excluding: 0, first_end: None }
}

pub(crate) fn mps(index: u32, taken_tenths: u32, user: Option<u32>) -> GpuOffer {
    let target = format!("GPU-{index}");
    let (capacity_tenths, default) = (1000, Percentage::ALL);
    let (leases, most_leases) = (0, gpush_api::MPS_CLIENTS);
    let memory_mib = 81_920;
    let offer = MpsOffer {
        ceiling: Percentage::ALL,
        wants_many_users: false,
        target: target.into(),
        memory_mib,
        capacity_tenths,
        taken_tenths,
        leases,
        most_leases,
        default,
        user,
        excluding: 0,
        ends: Vec::new(),
    };
    GpuOffer { mps: vec![offer], ..gpu(index) }
}

fn geometry(model: &str) -> Geometry {
    Geometry::of_model(&gpush_geometry::model(model).unwrap())
}

/// Returns an instance with one device. The device is in use unless `free` is set.
pub(crate) fn instance(model: &str, profile_id: u32, placement: Placement, free: bool) -> Instance {
    let name = geometry(model).profile(profile_id).unwrap().profile.name.clone();
    let uuid = format!("{name}@{}", placement.start);
    let devices =
        vec![Device { uuid: uuid.into(), profile: name, whole: true, free, leased: !free, shared: false, end: None }];
    Instance {
        id: u32::from(placement.start),
        profile_id,
        placement,
        foreign: false,
        busy: false,
        clearing: false,
        devices,
    }
}

/// Returns a GPU with instances such as `1g.10gb@4 used, 2g.20gb@0 foreign`. The id of each
/// instance is its start.
pub(crate) fn mig(index: u32, model: &str, dynamic: bool, instances: &str) -> GpuOffer {
    let geometry = geometry(model);
    let mut standing = Vec::new();
    for text in instances.split(", ").filter(|text| !text.is_empty()) {
        let (name, rest) = text.split_once('@').unwrap();
        let (start, word) = rest.split_once(' ').unwrap_or((rest, ""));
        let profile = geometry.named(name).unwrap();
        let start: u8 = start.parse().unwrap();
        let spot = profile.spots.iter().find(|spot| spot.placement.start == start).unwrap();
        let mut one = instance(model, profile.profile.id, spot.placement, word != "used");
        one.foreign = word == "foreign";
        standing.push(one);
    }
    let mig = MigOffer { geometry: Arc::new(geometry), dynamic, instances: standing, reserved: Vec::new() };
    GpuOffer { mig: Some(mig), ..gpu(index) }
}

/// Returns a GPU with random instances that fit together.
pub(crate) fn random(rng: &mut fastrand::Rng, index: u32, model: &str) -> GpuOffer {
    let dynamic = rng.usize(..4) > 0;
    let mut gpu = mig(index, model, dynamic, "");
    let offer = gpu.mig.as_mut().unwrap();
    for _ in 0..rng.usize(..7) {
        let profile = &offer.geometry.profiles[rng.usize(..offer.geometry.profiles.len())];
        let placement = profile.spots[rng.usize(..profile.spots.len())].placement;
        let mut all: Vec<(u32, Placement)> =
            offer.instances.iter().map(|instance| (instance.profile_id, instance.placement)).collect();
        all.push((profile.profile.id, placement));
        if oracle::legal(&offer.geometry, &all) {
            let mut one = instance(model, profile.profile.id, placement, rng.usize(..2) == 0);
            one.foreign = rng.usize(..4) == 0;
            one.devices[0].uuid = format!("{index}/{}", placement.start).into();
            offer.instances.push(one);
        }
    }
    gpu
}
