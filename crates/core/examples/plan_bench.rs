//! Measures the duration of planning. Plans a change from every state of an A100 and an H100 to
//! every layout, even to impossible layouts. Also plans whole hosts of 64 GPUs.
//!
//! ```text
//! cargo run --release -p gpush-core --example plan_bench [-- --json]
//! ```
//!
//! A measured time is the wall-clock time of a single call. So each percentile is computed from
//! single calls, not from averages. `--json` prints one object for `cargo xtask bench`.

use std::hint::black_box;
use std::time::Instant;

use gpush_api::{ComputeInstance, GpuInstance, GpuProfile, Placement, Process, ProcessKind};
use gpush_core::geometry::{Geometry, profiles_of_model};
use gpush_core::layout::{Entry, Layout};
use gpush_core::plan::{Target, plan};

/// Number of attempts for each host. Only the best time is reported: a plan for a host takes so
/// long that other processes may interrupt it. A plan for a single GPU is timed once.
const HOST_TRIES: usize = 3;

/// Layouts with compute instances: several kinds of GPU instances, and GPU instances with many
/// compute instances.
const SPLITS: [&str; 4] = [
    "1c.2g.20gb*2, 2g.20gb, 1c.2g.20gb@4, 1g.10gb",
    "1c.3g.40gb*3, 2c.3g.40gb, 1c.3g.40gb",
    "2c.4g.40gb, 1c.4g.40gb*2, 1c.3g.40gb*2",
    "1c.7g.80gb*3, 2c.7g.80gb*2",
];

/// Percentiles of a set of times, in nanoseconds.
struct Times {
    what: String,
    sorted: Vec<u64>,
}

impl Times {
    fn new(what: String, mut times: Vec<u64>) -> Self {
        times.sort_unstable();
        Self { what, sorted: times }
    }

    fn at(&self, per_mille: usize) -> u64 {
        self.sorted[(self.sorted.len() - 1) * per_mille / 1000]
    }

    fn text(&self) -> String {
        let us = |ns: u64| format!("{:9.2}", ns as f64 / 1000.0);
        let [p50, p99, p999, max] = [500, 990, 999, 1000].map(|p| us(self.at(p)));
        format!("{:44} {:9} {p50} {p99} {p999} {max}", self.what, self.sorted.len())
    }

    fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "what": self.what, "count": self.sorted.len(),
            "p50_ns": self.at(500), "p99_ns": self.at(990), "p999_ns": self.at(999), "max_ns": self.at(1000),
        })
    }
}

/// Returns every state that is reachable by adding instances to an empty GPU.
fn states(geometry: &Geometry) -> Vec<Vec<GpuInstance>> {
    fn walk(geometry: &Geometry, from: usize, held: &mut Vec<GpuInstance>, found: &mut Vec<Vec<GpuInstance>>) {
        found.push(held.clone());
        let pairs = geometry.profiles.iter().flat_map(|p| p.spots.iter().map(move |s| (p, s.placement)));
        for (n, (profile, placement)) in pairs.enumerate().skip(from) {
            held.push(instance(n as u32, &profile.profile, placement));
            let exact = Target::of_instances(geometry, held);
            if plan(geometry, &[], &exact).is_ok() {
                walk(geometry, n + 1, held, found);
            }
            held.pop();
        }
    }
    let mut found = Vec::new();
    walk(geometry, 0, &mut Vec::new(), &mut found);
    found
}

fn instance(id: u32, profile: &GpuProfile, placement: Placement) -> GpuInstance {
    let whole = profile.compute.iter().find(|c| c.name == profile.name);
    let compute = whole.map(|c| ComputeInstance {
        id: 0,
        profile_id: c.id,
        profile: c.name.clone(),
        placement: c.placements.first().copied(),
        uuid: None,
        processes: Vec::new(),
    });
    GpuInstance {
        id,
        profile_id: profile.id,
        profile: profile.name.clone(),
        placement,
        memory: None,
        compute: compute.into_iter().collect(),
        processes: Vec::new(),
    }
}

/// Returns every layout of up to eight instances, possible or not.
fn layouts(profiles: &[GpuProfile]) -> Vec<Layout> {
    fn walk(profiles: &[GpuProfile], left: usize, entries: &mut Vec<Entry>, found: &mut Vec<Layout>) {
        found.push(Layout { entries: entries.clone() });
        if left == 0 {
            return;
        }
        for (n, profile) in profiles.iter().enumerate() {
            entries.push(Entry {
                compute_slices: None,
                profile: profile.name.clone(),
                start: None,
                count: 1,
                share: None,
            });
            walk(&profiles[n..], left - 1, entries, found);
            entries.pop();
        }
    }
    let mut found = Vec::new();
    walk(profiles, 8, &mut Vec::new(), &mut found);
    found
}

/// Adds a process to every second instance.
fn busy(instances: &[GpuInstance]) -> Vec<GpuInstance> {
    let process = Process {
        pid: Some(1),
        uid: None,
        user: None,
        command: None,
        kind: ProcessKind::Compute,
        memory_mib: None,
        unidentified: false,
    };
    let mut busy = instances.to_vec();
    for compute in busy.iter_mut().step_by(2).flat_map(|i| &mut i.compute) {
        compute.processes.push(process.clone());
    }
    busy
}

fn timed<T>(times: &mut Vec<u64>, call: impl FnOnce() -> T) -> T {
    let start = Instant::now();
    let answer = black_box(call());
    times.push(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
    answer
}

fn main() {
    let mut report = Vec::new();
    for key in ["a100-80", "h100-80-sxm"] {
        let Some(model) = gpush_geometry::model(key) else { continue };
        let profiles = profiles_of_model(&model);
        let geometry = Geometry::of_model(&model);
        let states = states(&geometry);

        let mut resolving = Vec::new();
        let mut refusing = Vec::new();
        let mut targets = Vec::new();
        for layout in layouts(&profiles) {
            let mut times = Vec::new();
            match timed(&mut times, || Target::resolve(&geometry, &layout)) {
                Ok(target) => {
                    targets.push((layout, target));
                    resolving.extend(times);
                }
                Err(_) => refusing.extend(times),
            }
        }
        report.push(Times::new(format!("{key}: resolve a possible layout"), resolving));
        report.push(Times::new(format!("{key}: refuse an impossible layout"), refusing));

        let mut splitting = Vec::new();
        for text in SPLITS {
            let target = Layout::parse(text).ok().and_then(|layout| Target::resolve(&geometry, &layout).ok());
            for (idle, target) in states.iter().flat_map(|s| target.as_ref().map(|t| (s, t))) {
                let _ = timed(&mut splitting, || plan(&geometry, idle, target));
            }
        }
        report.push(Times::new(format!("{key}: plan compute instance splits"), splitting));

        let mut planning = Vec::new();
        let mut planning_busy = Vec::new();
        let mut restoring = Vec::new();
        for idle in &states {
            let busy = busy(idle);
            for (_, target) in &targets {
                let _ = timed(&mut planning, || plan(&geometry, idle, target));
                let _ = timed(&mut planning_busy, || plan(&geometry, &busy, target));
            }
            let exact = Target::of_instances(&geometry, idle);
            let other = &states[restoring.len() * 7 % states.len()];
            let _ = timed(&mut restoring, || plan(&geometry, other, &exact));
        }
        report.push(Times::new(format!("{key}: plan, idle"), planning));
        report.push(Times::new(format!("{key}: plan, every other instance in use"), planning_busy));
        report.push(Times::new(format!("{key}: plan an exact restore"), restoring));

        let mut hosts = Vec::new();
        for round in 0..1000 {
            let mut tries = Vec::new();
            for _ in 0..HOST_TRIES {
                timed(&mut tries, || {
                    for gpu in 0..64 {
                        let nth = round * 64 + gpu;
                        let geometry = Geometry::new(&profiles, model.memory_slices, model.compute_slices);
                        let layout = &targets[nth * 31 % targets.len()].0;
                        if let Ok(target) = Target::resolve(&geometry, layout) {
                            let _ = black_box(plan(&geometry, &states[nth * 17 % states.len()], &target));
                        }
                    }
                });
            }
            hosts.extend(tries.into_iter().min());
        }
        report.push(Times::new(format!("{key}: 64 GPUs from profiles to plans"), hosts));
    }

    if std::env::args().any(|a| a == "--json") {
        let rows: Vec<_> = report.iter().map(Times::json).collect();
        println!("{}", serde_json::json!({ "plan": rows }));
    } else {
        println!("{:44} {:>9} {:>9} {:>9} {:>9} {:>9}", "µs", "calls", "p50", "p99", "p99.9", "max");
        for times in &report {
            println!("{}", times.text());
        }
    }
}
