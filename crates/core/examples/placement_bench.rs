//! Measures fragmentation: how many requests for MIG devices succeed, and how much of the memory is
//! leased. Compares gpush's placement, first fit, and the driver's own choice.
//!
//! ```text
//! cargo run --release -p gpush-core --example placement_bench [-- --json]
//! ```
//!
//! Requests of mixed profiles arrive one at a time. An accepted request keeps its instance for a
//! random time; a request that does not fit is dropped. Every strategy gets the same requests, from
//! a fixed seed. The result depends neither on time nor on the machine.

use std::{collections::BTreeMap, sync::Arc};

use gpush_api::{GpuIndex, Placement};
use gpush_core::{
    geometry::{Geometry, Slices},
    lease::placement::{
        Device, GpuOffer, Host, Instance, Member, MigOffer, PlacementPolicy, PlacementRequest, RequestedDevice,
        RequestedShare, place,
    },
};
use silicon::machine::{GpuInstanceHandle, Machine};

const GPUS: u32 = 8;
/// Number of requests in one run.
const REQUESTS: usize = 20_000;
/// Seeds of the random numbers. Each seed gives one run.
const SEEDS: [u64; 3] = [1, 2, 3];
/// Offered load in percent of the host's memory slices.
const LOADS: [usize; 3] = [80, 100, 130];
/// Weights of the profiles, in order of size.
const MIXES: [(&str, [usize; 5]); 2] = [("mixed", [50, 20, 15, 10, 5]), ("large", [25, 20, 25, 20, 10])];
/// Models of GPUs, with the profiles that requests name.
const MODELS: [(&str, [&str; 5]); 2] = [
    ("a100-80", ["1g.10gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"]),
    ("h200-141", ["1g.18gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"]),
];

/// A strategy for choosing placements.
trait Strategy {
    /// Places an instance. Returns `false` if no placement is free.
    fn arrive(&mut self, request: usize, profile: &str) -> bool;
    /// Frees the instance of a request.
    fn leave(&mut self, request: usize);
    /// Returns the number of instances created so far.
    fn created(&self) -> usize;
}

/// gpush's placement. An instance remains after its release, and is destroyed only if a request
/// needs its slices.
struct Ours {
    host: Host,
    policy: PlacementPolicy,
    held: BTreeMap<usize, (u32, Placement)>,
    created: usize,
}

impl Ours {
    fn new(geometry: &Geometry, policy: PlacementPolicy) -> Self {
        let geometry = Arc::new(geometry.clone());
        let gpu = |index: u32| {
            let (geometry, instances, reserved) = (Arc::clone(&geometry), Vec::new(), Vec::new());
            let mig = Some(MigOffer { geometry, dynamic: true, instances, reserved });
            GpuOffer { index: GpuIndex(index), uuid: index.to_string().into(), mig, ..GpuOffer::default() }
        };
        Self { host: Host { gpus: (0..GPUS).map(gpu).collect() }, policy, held: BTreeMap::new(), created: 0 }
    }

    fn mig(&mut self, gpu: u32) -> Option<&mut MigOffer> {
        self.host.gpus.get_mut(gpu as usize)?.mig.as_mut()
    }
}

fn uuid(gpu: u32, placement: Placement) -> String {
    format!("{gpu}/{}", placement.start)
}

impl Strategy for Ours {
    fn arrive(&mut self, request: usize, profile: &str) -> bool {
        let share = RequestedShare::Mig(RequestedDevice::Profile(profile.to_owned()));
        let wanted = PlacementRequest { share, count: 1, holder: 1000, gpus: None, targets: None };
        let Ok(assignment) = place(&self.host, &wanted, self.policy) else { return false };
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

    fn leave(&mut self, request: usize) {
        let Some((gpu, at)) = self.held.remove(&request) else { return };
        let instances = self.mig(gpu).into_iter().flat_map(|mig| &mut mig.instances);
        instances.filter(|one| one.placement == at).for_each(|one| one.devices[0].free = true);
    }

    fn created(&self) -> usize {
        self.created
    }
}

/// First fit: the first GPU that has a free placement, at the lowest free placement. A release
/// destroys the instance.
struct FirstFit {
    geometry: Geometry,
    gpus: Vec<BTreeMap<usize, (u32, Placement)>>,
    created: usize,
}

impl FirstFit {
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
struct Driver {
    geometry: Geometry,
    gpus: Vec<Machine>,
    held: BTreeMap<usize, (usize, GpuInstanceHandle)>,
    created: usize,
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

/// The result of one strategy, summed over the seeds.
#[derive(Default)]
struct Outcome {
    offered: usize,
    accepted: usize,
    /// Leased memory slices, summed over arrivals.
    leased: usize,
    created: usize,
}

fn run(
    strategy: &mut dyn Strategy,
    geometry: &Geometry,
    names: &[&str; 5],
    weights: [usize; 5],
    load: usize,
    seed: u64,
) -> Outcome {
    let mut rng = fastrand::Rng::with_seed(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let slices = |name: &str| geometry.named(name).map_or(0, |profile| profile.memory_slices() as usize);
    let total: usize = weights.iter().sum();
    // One request arrives in each step. So the mean time for which an instance is kept determines
    // the offered load.
    let mean_slices = names.iter().zip(weights).map(|(name, weight)| slices(name) * weight).sum::<usize>();
    let capacity = GPUS as usize * usize::from(geometry.memory_slices);
    let stay = 2 * capacity * load * total / 100 / mean_slices;
    let mut leaves: BTreeMap<usize, Vec<(usize, usize)>> = BTreeMap::new();
    let (mut outcome, mut leased) = (Outcome::default(), 0);
    for request in 0..REQUESTS {
        for (gone, size) in leaves.remove(&request).into_iter().flatten() {
            strategy.leave(gone);
            leased -= size;
        }
        let mut ball = rng.usize(..total);
        let kind = weights.iter().position(|weight| {
            let here = ball < *weight;
            ball = ball.saturating_sub(*weight);
            here
        });
        let name = names[kind.unwrap_or(0)];
        let until = request + 1 + rng.usize(..stay);
        outcome.offered += 1;
        if strategy.arrive(request, name) {
            outcome.accepted += 1;
            leased += slices(name);
            leaves.entry(until).or_default().push((request, slices(name)));
        }
        outcome.leased += leased;
    }
    outcome.created = strategy.created();
    outcome
}

fn main() {
    let mut rows = Vec::new();
    let mut worst: f64 = f64::INFINITY;
    for (key, names) in MODELS {
        let Some(model) = gpush_geometry::model(key) else { continue };
        let geometry = Geometry::of_model(&model);
        for (mix, weights) in MIXES {
            for load in LOADS {
                let mut acceptance: BTreeMap<&str, f64> = BTreeMap::new();
                for what in ["pack", "spread", "driver's choice", "first fit"] {
                    let mut sum = Outcome::default();
                    for seed in SEEDS {
                        let mut strategy: Box<dyn Strategy> = match what {
                            "pack" => Box::new(Ours::new(&geometry, PlacementPolicy::Pack)),
                            "spread" => Box::new(Ours::new(&geometry, PlacementPolicy::Spread)),
                            "first fit" => Box::new(FirstFit {
                                geometry: geometry.clone(),
                                gpus: vec![BTreeMap::new(); GPUS as usize],
                                created: 0,
                            }),
                            _ => Box::new(Driver {
                                geometry: geometry.clone(),
                                gpus: (0..GPUS).filter_map(|_| Machine::of_model(key)).collect(),
                                held: BTreeMap::new(),
                                created: 0,
                            }),
                        };
                        let one = run(strategy.as_mut(), &geometry, &names, weights, load, seed);
                        sum.offered += one.offered;
                        sum.accepted += one.accepted;
                        sum.leased += one.leased;
                        sum.created += one.created;
                    }
                    let percent = |part: usize, of: usize| 100.0 * part as f64 / of as f64;
                    let capacity = GPUS as usize * usize::from(geometry.memory_slices);
                    let accepted = percent(sum.accepted, sum.offered);
                    acceptance.insert(what, accepted);
                    rows.push([
                        format!("{key}, {mix}, {load} %"),
                        what.to_owned(),
                        format!("{accepted:.1} %"),
                        format!("{:.1} %", percent(sum.leased, sum.offered * capacity)),
                        format!("{:.2}", sum.created as f64 / sum.accepted as f64),
                    ]);
                }
                for other in ["driver's choice", "first fit"] {
                    worst = worst.min(acceptance["pack"] - acceptance[other]);
                }
            }
        }
    }
    let columns =
        ["model, mix, offered load", "placement", "requests met", "memory leased", "instances created per lease"];
    if std::env::args().any(|argument| argument == "--json") {
        let report = serde_json::json!({
            "title": "Fragmentation",
            "note": "Each row simulates 60,000 requests for MIG devices of mixed profiles on 8 GPUs, with seeded \
                     arrivals and departures. `pack` and `spread` are gpush's placement strategies. They keep an \
                     instance when its lease ends, and reuse it. `first fit` and `driver's choice` use the first GPU \
                     with room, and destroy an instance when its lease ends.",
            "columns": columns,
            "rows": rows,
            "targets": [{
                "what": "requests met by `pack`", "wanted": "no fewer than the others, in every row",
                "measured": format!("{worst:+.1} points at worst"), "met": worst >= 0.0,
            }],
        });
        println!("{report}");
        return;
    }
    println!("{}", columns.join(" | "));
    for row in rows {
        println!("{}", row.join(" | "));
    }
    println!("pack against the others: {worst:+.1} points at worst");
}
