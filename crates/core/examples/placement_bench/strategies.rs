//! The strategies that the benchmark compares.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use gpush_api::{GpuIndex, Placement};
use gpush_core::{
    geometry::{Geometry, Slices},
    lease::placement::{
        Assignment, Device, GpuOffer, Host, Instance, KnownEnd, Member, MigOffer, PlacementPolicy, PlacementRequest,
        RequestedDevice, RequestedShare, place,
    },
};
use silicon::machine::{GpuInstanceHandle, Machine};

/// A strategy for choosing placements.
pub(crate) trait Strategy {
    /// Places an instance. Returns `false` if no placement is free.
    fn arrive(&mut self, request: usize, profile: &str) -> bool;
    /// Frees the instance of a request.
    fn leave(&mut self, request: usize);
    /// Returns the number of instances created so far.
    fn created(&self) -> usize;
}

/// gpush's placement. An instance remains after its release, and is destroyed only if a request
/// needs its slices.
pub(crate) struct Gpush {
    host: Host,
    policy: PlacementPolicy,
    held: BTreeMap<usize, (u32, Placement)>,
    created: usize,
    /// How often each placement is timed.
    tries: usize,
    /// Shortest duration of each placement. Other processes may interrupt a try.
    times: Vec<Duration>,
}

impl Gpush {
    pub(crate) fn new(geometry: &Geometry, gpus: u32, policy: PlacementPolicy) -> Self {
        let geometry = Arc::new(geometry.clone());
        let gpu = |index: u32| {
            let (geometry, instances, reserved) = (Arc::clone(&geometry), Vec::new(), Vec::new());
            let mig = Some(MigOffer { geometry, dynamic: true, instances, reserved });
            GpuOffer { index: GpuIndex(index), uuid: index.to_string().into(), mig, ..GpuOffer::default() }
        };
        Self {
            host: Host { gpus: (0..gpus).map(gpu).collect() },
            policy,
            held: BTreeMap::new(),
            created: 0,
            tries: 0,
            times: Vec::new(),
        }
    }

    /// Returns a strategy that times each placement.
    pub(crate) fn timed(geometry: &Geometry, gpus: u32, policy: PlacementPolicy) -> Self {
        Self { tries: 5, ..Self::new(geometry, gpus, policy) }
    }

    /// Returns the 99th percentile of the durations of all placements.
    pub(crate) fn p99(mut self) -> Duration {
        self.times.sort_unstable();
        self.times.get(self.times.len() * 99 / 100).copied().unwrap_or_default()
    }

    fn mig(&mut self, gpu: u32) -> Option<&mut MigOffer> {
        self.host.gpus.get_mut(gpu as usize)?.mig.as_mut()
    }
}

fn uuid(gpu: u32, placement: Placement) -> String {
    format!("{gpu}/{}", placement.start)
}

impl Strategy for Gpush {
    fn arrive(&mut self, request: usize, profile: &str) -> bool {
        let share = RequestedShare::Mig(RequestedDevice::Profile(profile.to_owned()));
        let wanted = PlacementRequest { share, count: 1, holder: 1000, gpus: None, targets: None };
        let timed = |_| {
            let start = Instant::now();
            std::hint::black_box(place(&self.host, &wanted, self.policy)).ok();
            start.elapsed()
        };
        self.times.extend((0..self.tries).map(timed).min());
        let Ok(assignment) = place(&self.host, &wanted, self.policy) else { return false };
        self.execute(request, &assignment, profile, None)
    }

    fn leave(&mut self, request: usize) {
        self.release(request);
    }

    fn created(&self) -> usize {
        self.created
    }
}

impl Gpush {
    /// Returns the host.
    pub(crate) fn host(&self) -> &Host {
        &self.host
    }

    /// Lets gpushd end the processes of leases on all GPUs.
    pub(crate) fn end_leases(&mut self) {
        self.host.gpus.iter_mut().for_each(|gpu| gpu.ends_leases = true);
    }

    /// Executes a grant. `end` is the known end of the lease.
    pub(crate) fn execute(&mut self, request: usize, assignment: &Assignment, profile: &str, end: KnownEnd) -> bool {
        for (gpu, id) in &assignment.destroys {
            let mig = self.mig(gpu.0);
            mig.into_iter().for_each(|mig| mig.instances.retain(|instance| instance.id != *id));
        }
        for member in &assignment.members {
            let gpu = member.gpu();
            let Some(mig) = self.mig(gpu.0) else { return false };
            let at = match member {
                Member::Device { uuid, .. } => {
                    let mut instances = mig.instances.iter_mut();
                    let Some(instance) = instances.find(|one| one.devices[0].uuid == *uuid) else { return false };
                    instance.devices[0].free = false;
                    instance.devices[0].leased = true;
                    instance.devices[0].end = end;
                    instance.placement
                }
                Member::Create { profile_id, placement, .. } => {
                    let device = Device {
                        uuid: uuid(gpu.0, *placement).into(),
                        profile: profile.to_owned(),
                        whole: true,
                        free: false,
                        leased: true,
                        shared: false,
                        end,
                    };
                    mig.instances.push(Instance {
                        id: u32::from(placement.start),
                        profile_id: *profile_id,
                        placement: *placement,
                        foreign: false,
                        busy: false,
                        clearing: false,
                        devices: vec![device],
                    });
                    self.created += 1;
                    *placement
                }
                Member::Mps { .. } | Member::Timeslice { .. } | Member::Whole { .. } => return false,
            };
            self.held.insert(request, (gpu.0, at));
        }
        true
    }

    /// Frees the instance of a request.
    pub(crate) fn release(&mut self, request: usize) {
        let Some((gpu, at)) = self.held.remove(&request) else { return };
        let instances = self.mig(gpu).into_iter().flat_map(|mig| &mut mig.instances);
        instances.filter(|one| one.placement == at).for_each(|one| {
            let device = &mut one.devices[0];
            (device.free, device.leased, device.end) = (true, false, None);
        });
    }
}

/// First fit: the first GPU that has a free placement, at the lowest free placement. A release
/// destroys the instance.
pub(crate) struct FirstFit {
    geometry: Geometry,
    gpus: Vec<BTreeMap<usize, (u32, Placement)>>,
    created: usize,
}

impl FirstFit {
    pub(crate) fn new(geometry: &Geometry, gpus: u32) -> Self {
        Self { geometry: geometry.clone(), gpus: vec![BTreeMap::new(); gpus as usize], created: 0 }
    }

    fn fits(&self, held: &BTreeMap<usize, (u32, Placement)>, profile_id: u32, at: Placement) -> bool {
        let apart = held.values().all(|(_, other)| !Slices::of(*other).overlaps(Slices::of(at)));
        let all = held.values().map(|(id, _)| *id).chain([profile_id]);
        let known = all.filter_map(|id| self.geometry.profile(id));
        let compute: u32 = known.map(|profile| u32::from(profile.profile.slices)).sum();
        apart && compute <= u32::from(self.geometry.compute_slices)
    }
}

impl Strategy for FirstFit {
    fn arrive(&mut self, request: usize, profile: &str) -> bool {
        let Some(profile) = self.geometry.named(profile) else { return false };
        let id = profile.profile.id;
        let place = (0..self.gpus.len()).find_map(|gpu| {
            let mut spots = profile.spots.iter().map(|spot| spot.placement);
            spots.find(|at| self.fits(&self.gpus[gpu], id, *at)).map(|at| (gpu, at))
        });
        let Some((gpu, at)) = place else { return false };
        self.gpus[gpu].insert(request, (id, at));
        self.created += 1;
        true
    }

    fn leave(&mut self, request: usize) {
        for gpu in &mut self.gpus {
            gpu.remove(&request);
        }
    }

    fn created(&self) -> usize {
        self.created
    }
}

/// The driver's choice: the first GPU with room, at the placement that the driver chooses. A
/// release destroys the instance.
pub(crate) struct Driver {
    geometry: Geometry,
    gpus: Vec<Machine>,
    held: BTreeMap<usize, (usize, GpuInstanceHandle)>,
    created: usize,
}

impl Driver {
    pub(crate) fn new(model: &str, geometry: &Geometry, gpus: u32) -> Self {
        let gpus = (0..gpus).filter_map(|_| Machine::of_model(model)).collect();
        Self { geometry: geometry.clone(), gpus, held: BTreeMap::new(), created: 0 }
    }
}

impl Strategy for Driver {
    fn arrive(&mut self, request: usize, profile: &str) -> bool {
        let Some(id) = self.geometry.named(profile).map(|profile| profile.profile.id) else { return false };
        for (number, gpu) in self.gpus.iter_mut().enumerate() {
            if let Ok(handle) = gpu.create_gpu_instance(0, id, None) {
                self.held.insert(request, (number, handle));
                self.created += 1;
                return true;
            }
        }
        false
    }

    fn leave(&mut self, request: usize) {
        if let Some((gpu, handle)) = self.held.remove(&request) {
            _ = self.gpus[gpu].destroy_gpu_instance(handle);
        }
    }

    fn created(&self) -> usize {
        self.created
    }
}
