//! Why a request cannot be placed.

use gpush_api::{GpuIndex, LeaseKind};

use crate::nearest::nearest_few;

use super::{
    Closed, Device, GpuOffer, Host, Instance, MigOffer, MpsOffer, PlacementPolicy, PlacementRequest, RequestedDevice,
    RequestedShare, Unoffered, gang, size::rank,
};

/// Why a request cannot be placed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NoAssignment {
    /// None of the GPUs offers leases of this kind.
    NotOffered {
        /// The requested kind.
        kind: LeaseKind,
        /// Kinds that the GPUs offer, each with a request that one of the GPUs can meet:
        /// `mig=1g.10gb`.
        offered: Vec<(LeaseKind, String)>,
        /// GPUs that offer nothing, by index.
        unoffered: Vec<(GpuIndex, Unoffered)>,
    },
    /// None of the GPUs has the profile.
    UnknownProfile {
        /// The requested profile.
        profile: String,
        /// Profiles with a similar name.
        nearest: Vec<String>,
    },
    /// All MIG devices that match the request are shared through MPS. Contains these devices, each
    /// with the index of its GPU.
    SharedThroughMps(Vec<(GpuIndex, String)>),
    /// The GPUs could not fulfil the request even if all of them were empty.
    TooLarge {
        /// Maximum number of members that the empty GPUs can hold.
        most: usize,
    },
    /// The capacity is currently in use.
    Busy {
        /// What prevents the grant, by GPU index. GPUs that cannot fulfil the request even when empty are
        /// omitted, unless an operation is changing them.
        obstacles: Vec<(GpuIndex, Obstacle)>,
        /// A free share of the requested kind, which the user can request instead; `None` if no share is
        /// free, or if all shares have the same size.
        free: Option<FreeShare>,
    },
}

impl NoAssignment {
    /// Returns whether the request is refused only because GPUs that could meet it are not ready: cordoned, in maintenance
    /// or faulty. Other requests do not use their capacity.
    #[must_use]
    pub fn is_not_ready(&self) -> bool {
        match self {
            Self::Busy { obstacles, .. } => {
                let is_closed = |(_, obstacle): &(GpuIndex, Obstacle)| match obstacle {
                    Obstacle::Closed(
                        Closed::Cordoned
                        | Closed::NotReady
                        | Closed::Prohibited
                        | Closed::StillShared
                        | Closed::NotShared,
                    ) => true,
                    Obstacle::Closed(Closed::Claimed | Closed::Pending)
                    | Obstacle::InUse
                    | Obstacle::SharedThroughMps
                    | Obstacle::OtherUser(_)
                    | Obstacle::Partly(_) => false,
                };
                !obstacles.is_empty() && obstacles.iter().all(is_closed)
            }
            Self::NotOffered { unoffered, .. } => {
                unoffered.iter().any(|(_, why)| matches!(why, Unoffered::NotReady(_)))
            }
            Self::UnknownProfile { .. } | Self::SharedThroughMps(_) | Self::TooLarge { .. } => false,
        }
    }
}

/// A free share that a user can request instead of the requested one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FreeShare {
    /// The largest free part of an MPS target, in tenths of a percent.
    Percentage {
        /// Index of the target's GPU.
        gpu: GpuIndex,
        /// Size of the part.
        tenths: u32,
    },
    /// The smallest free MIG device that is at least as large as the requested one.
    Larger {
        /// Index of the device's GPU.
        gpu: GpuIndex,
        /// Profile of the compute instance.
        profile: String,
    },
    /// The largest free MIG device; no free device is as large as the requested one.
    Smaller {
        /// Index of the device's GPU.
        gpu: GpuIndex,
        /// Profile of the compute instance.
        profile: String,
    },
}

/// Why one GPU cannot fulfil a request now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Obstacle {
    /// The GPU accepts no grants.
    Closed(Closed),
    /// The capacity of the GPU is in use or reserved.
    InUse,
    /// The GPU has such MIG devices only as devices that are shared through MPS.
    SharedThroughMps,
    /// The MPS daemons of the GPU serve other users. Contains the uid of one of these users.
    OtherUser(u32),
    /// The GPU has capacity for only this number of members of the gang.
    Partly(usize),
}

/// Finds the reason why a request cannot be placed.
pub(super) fn explain(host: &Host, wanted: &PlacementRequest, policy: PlacementPolicy) -> NoAssignment {
    let kind = wanted.share.kind();
    let selected = host.selected(wanted);
    let kinds = selected.kinds();
    if !kinds.contains(&kind) {
        let offered = kinds.into_iter().map(|kind| (kind, example(&selected, kind))).collect();
        let unoffered = selected.gpus.iter().filter_map(|gpu| Some((gpu.index, gpu.unoffered?))).collect();
        return NoAssignment::NotOffered { kind, offered, unoffered };
    }
    if let RequestedShare::Mig(RequestedDevice::Profile(profile)) = &wanted.share
        && let Some(error) = unknown_profile(&selected, profile)
    {
        return error;
    }
    let emptied: Vec<GpuOffer> = selected.gpus.iter().map(GpuOffer::emptied).collect();
    let capacities = gang::capacities(&emptied.iter().collect::<Vec<_>>(), wanted, policy);
    let most = capacities.iter().sum();
    if most < wanted.count {
        let shared = shared_devices(&selected.gpus, wanted);
        return if most == 0 && !shared.is_empty() {
            NoAssignment::SharedThroughMps(shared)
        } else {
            NoAssignment::TooLarge { most }
        };
    }
    let now = gang::capacities(&selected.gpus.iter().collect::<Vec<_>>(), wanted, policy);
    let offering = selected.gpus.iter().zip(capacities.into_iter().zip(now));
    let offering = offering.filter(|(gpu, _)| gpu.kinds().any(|offered| offered == kind));
    let obstacles =
        offering.filter_map(|(gpu, (most, now))| Some((gpu.index, obstacle(gpu, most, now, wanted)?))).collect();
    NoAssignment::Busy { obstacles, free: free_share(&selected, wanted) }
}

/// Returns whether the GPUs could fulfil a request if all of them were empty. Stops as soon as it is known.
pub(super) fn is_possible(host: &Host, wanted: &PlacementRequest, policy: PlacementPolicy) -> bool {
    let is_selected = |gpu: &&GpuOffer| wanted.gpus.as_ref().is_none_or(|gpus| gpus.contains(&gpu.index));
    let mut left = wanted.count;
    for gpu in host.gpus.iter().filter(is_selected) {
        left = left.saturating_sub(gang::capacity(&gpu.emptied(), wanted, policy));
        if left == 0 {
            return true;
        }
    }
    false
}

/// Returns a small request of a kind that the GPUs offer.
pub(super) fn example(host: &Host, kind: LeaseKind) -> String {
    let offers = || host.gpus.iter().filter_map(|gpu| gpu.mig.as_ref());
    // A GPU offers its existing devices. Only a dynamic GPU offers all its profiles.
    let devices =
        || offers().flat_map(|mig| &mig.instances).flat_map(|one| one.devices.iter().map(move |of| (one, of)));
    let dynamic = || offers().filter(|mig| mig.dynamic).flat_map(|mig| &mig.geometry.profiles);
    match kind {
        LeaseKind::Mig => {
            let created = devices().map(|(one, device)| (one.placement.size, device.profile.as_str()));
            let possible = dynamic().map(|known| (known.profile.slices, known.profile.name.as_str()));
            format!("mig={}", created.chain(possible).min().map_or("PROFILE", |(_, name)| name))
        }
        LeaseKind::Mps => "mps=25".to_owned(),
        LeaseKind::Timeslice => "timeslice".to_owned(),
        LeaseKind::Whole => "whole".to_owned(),
    }
}

/// Returns the MIG devices that meet a request, but are shared through MPS, each with the index of
/// its GPU.
fn shared_devices(gpus: &[GpuOffer], wanted: &PlacementRequest) -> Vec<(GpuIndex, String)> {
    let RequestedShare::Mig(requested) = &wanted.share else { return Vec::new() };
    let of_gpu = |gpu: &GpuOffer| -> Vec<(GpuIndex, String)> {
        let instances = gpu.mig.iter().flat_map(|mig| mig.instances.iter().map(move |one| (mig, one)));
        let devices = instances.flat_map(|(mig, one)| one.devices.iter().map(move |device| (mig, one, device)));
        let shared = devices.filter(|(mig, one, device)| device.shared && mig.meets(requested, one, device));
        let named = shared.filter(|(_, _, device)| wanted.has_target(&device.uuid));
        named.map(|(_, one, device)| (gpu.index, device.name(gpu.index, one))).collect()
    };
    gpus.iter().flat_map(of_gpu).collect()
}

fn free_share(host: &Host, wanted: &PlacementRequest) -> Option<FreeShare> {
    let open = host.gpus.iter().filter(|gpu| gpu.closed.is_none());
    match &wanted.share {
        RequestedShare::Mps { .. } => {
            let targets = open.flat_map(|gpu| gpu.mps.iter().map(move |mps| (gpu.index, mps)));
            let fits = |(_, mps): &(GpuIndex, &MpsOffer)| {
                wanted.has_target(&mps.target)
                    && mps.excluding == 0
                    && mps.user.is_none_or(|user| user == wanted.holder)
                    && mps.leases < mps.most_leases
            };
            // One lease can have at most 100% of the target, even if all leases together may have more than 100%.
            let free = |mps: &MpsOffer| mps.capacity_tenths.saturating_sub(mps.taken_tenths).min(1000);
            let sizes = targets.filter(fits).map(|(gpu, mps)| (free(mps), gpu)).filter(|(tenths, _)| *tenths > 0);
            // If several GPUs have equally large free shares, choose the first of these GPUs.
            let (tenths, gpu) = sizes.max_by_key(|(tenths, gpu)| (*tenths, std::cmp::Reverse(*gpu)))?;
            Some(FreeShare::Percentage { gpu, tenths })
        }
        RequestedShare::Mig(requested) => {
            let instances = open.flat_map(|gpu| {
                let instances = gpu.mig.iter().flat_map(|mig| mig.instances.iter().map(move |one| (mig, one)));
                instances.filter(|(mig, one)| mig.is_grantable(one)).map(move |(mig, one)| (gpu.index, mig, one))
            });
            let devices = instances.flat_map(|(gpu, mig, one)| {
                let free = one.devices.iter().filter(|device| device.free && wanted.has_target(&device.uuid));
                free.map(move |device| (gpu, mig, one, device))
            });
            let devices: Vec<(GpuIndex, &MigOffer, &Instance, &Device)> = devices.collect();
            let larger = devices.iter().filter_map(|(gpu, mig, one, device)| {
                let profile = mig.geometry.profile(one.profile_id).filter(|_| device.whole)?;
                requested.fits_in(&mig.geometry, profile).then(|| (rank(profile), *gpu, &device.profile))
            });
            if let Some((_, gpu, profile)) = larger.min() {
                return Some(FreeShare::Larger { gpu, profile: profile.clone() });
            }
            // Among devices of equal size, prefer a device that occupies its whole GPU instance.
            let size = |(gpu, _, one, device): &&(GpuIndex, &MigOffer, &Instance, &Device)| {
                (one.placement.size, device.whole, std::cmp::Reverse(*gpu))
            };
            let (gpu, _, _, device) = devices.iter().max_by_key(size)?;
            Some(FreeShare::Smaller { gpu: *gpu, profile: device.profile.clone() })
        }
        RequestedShare::Timeslice | RequestedShare::Whole => None,
    }
}

fn unknown_profile(host: &Host, profile: &str) -> Option<NoAssignment> {
    let mut names: Vec<&str> = Vec::new();
    for mig in host.gpus.iter().filter_map(|gpu| gpu.mig.as_ref()) {
        names.extend(mig.geometry.profiles.iter().map(|known| known.profile.name.as_str()));
        let compute = mig.geometry.profiles.iter().flat_map(|known| &known.compute);
        names.extend(compute.map(|compute| compute.profile.name.as_str()));
    }
    if names.contains(&profile) {
        return None;
    }
    // Name only profiles that a lease can get: a static layout has few of the profiles of its GPU.
    names.retain(|name| host.gpus.iter().filter_map(|gpu| gpu.mig.as_ref()).any(|mig| has_device(mig, name)));
    names.sort_unstable();
    names.dedup();
    let nearest = nearest_few(profile, names, 3).into_iter().map(str::to_owned).collect();
    Some(NoAssignment::UnknownProfile { profile: profile.to_owned(), nearest })
}

/// Returns whether a GPU has a device of a profile for leases, or can create one.
fn has_device(mig: &MigOffer, profile: &str) -> bool {
    let mut devices = mig.instances.iter().flat_map(|instance| &instance.devices);
    mig.dynamic || devices.any(|device| !device.shared && device.profile == profile)
}

/// Returns why a GPU cannot fulfil a request now. `most` is the number of members that the empty GPU can hold, and `now`
/// the number that it can hold now. Returns `None` if the empty GPU can hold none and no operation is changing it.
fn obstacle(gpu: &GpuOffer, most: usize, now: usize, wanted: &PlacementRequest) -> Option<Obstacle> {
    let is_change = |closed: &Closed| matches!(closed, Closed::Claimed | Closed::Pending);
    if let Some(closed) = gpu.closed.filter(|closed| most > 0 || is_change(closed)) {
        return Some(Obstacle::Closed(closed));
    }
    if most == 0 {
        let is_shared = !shared_devices(std::slice::from_ref(gpu), wanted).is_empty();
        return is_shared.then_some(Obstacle::SharedThroughMps);
    }
    let other = gpu.mps.iter().filter_map(|mps| mps.user).find(|user| *user != wanted.holder);
    Some(match (now, other) {
        (0, Some(user)) if matches!(wanted.share, RequestedShare::Mps { .. }) => Obstacle::OtherUser(user),
        (0, _) => Obstacle::InUse,
        (count, _) => Obstacle::Partly(count),
    })
}

impl RequestedShare {
    /// Returns the kind of lease that has this share.
    #[must_use]
    pub fn kind(&self) -> LeaseKind {
        match self {
            Self::Mig(_) => LeaseKind::Mig,
            Self::Mps { .. } => LeaseKind::Mps,
            Self::Timeslice => LeaseKind::Timeslice,
            Self::Whole => LeaseKind::Whole,
        }
    }
}
