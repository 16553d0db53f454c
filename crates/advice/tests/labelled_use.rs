//! Advice for simulated leases of which the test knows how much memory they need.
//!
//! The test simulates leases of six kinds, with a memory use that changes over time. gpushd samples the memory each 15
//! seconds, so it misses short peaks, and it sees open leases only until now. The advice is made from these samples, as
//! gpushd records them. Then each advised downsizing is compared with the memory that the lease really needs, also after
//! now.
//!
//! | label | memory |
//! |---|---|
//! | training | constant after the start, with a peak of a few seconds at each evaluation |
//! | server | grows with the load to a maximum |
//! | notebook | no process for most of the time, several datasets of different sizes |
//! | batch | one value for each run |
//! | leak | grows until the end |
//! | preallocating | most of the share from the start, as JAX and vLLM do |
//!
//! The rule for comparison is the only public one, of Job Defense Shield: a mean utilization of at most 20 % and at most
//! 10 GB of memory on a whole GPU, of a job of at least 61 minutes that was used at all: an eighth of the GPU is enough.

#![allow(clippy::unwrap_used, reason = "a test that meets nothing fails")]

use gpush_advice::{SizeVerdict, right_sizes};
use gpush_api::{Gpu, GpuProfile, LeaseId, UsedLease, UsedTarget};
use gpush_core::preset;
use gpush_usage::ledger::MemoryHistogram;

/// Time between two steps of the simulation, in seconds.
const STEP_S: u64 = 3;
/// Time between two samples, in seconds.
const SAMPLE_S: u64 = 15;

const LABELS: [Label; 6] =
    [Label::Training, Label::Server, Label::Notebook, Label::Batch, Label::Leak, Label::Preallocating];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Label {
    Training,
    Server,
    Notebook,
    Batch,
    Leak,
    Preallocating,
}

/// The hidden facts about a simulated lease.
struct Simulated {
    label: Label,
    /// Memory in MiB of each step, also after now.
    memory: Vec<u64>,
    /// Number of steps until now.
    observed: usize,
    /// Mean activity of the share while it works.
    activity: f64,
    /// Part of the time in which it works.
    busy: f64,
}

impl Simulated {
    fn random(random: &mut fastrand::Rng, share_mib: u64) -> Self {
        let label = LABELS[random.usize(..LABELS.len())];
        let steps = usize::try_from(random.u64(2..=40) * 3600 / STEP_S).unwrap();
        // Most programs need much less than a whole GPU has.
        let fraction = random.f64() * random.f64();
        let base = scaled(share_mib, 0.02 + 0.9 * fraction);
        let most = share_mib - 300;
        let memory: Vec<u64> = match label {
            Label::Training => {
                let (every, length) = (random.usize(200..2000), random.usize(1..12));
                let peak = scaled(base, 1.0 + random.f64() * 0.25);
                (0..steps).map(|step| if step % every < length && step > 60 { peak } else { base }).collect()
            }
            Label::Server => {
                let (grown, until) = (scaled(base, 1.1 + random.f64() * 0.4), steps / random.usize(2..8));
                (0..steps)
                    .map(|step| base + (grown - base) * (step.min(until) as u64) / (until.max(1) as u64))
                    .collect()
            }
            Label::Notebook | Label::Batch => {
                let pause = if label == Label::Notebook { 0.7 } else { 0.1 };
                let mut memory = Vec::with_capacity(steps);
                while memory.len() < steps {
                    let length = random.usize(100..2400);
                    let size = if random.f64() < pause { 0 } else { scaled(base, 0.6 + random.f64() * 0.4) };
                    memory.extend(std::iter::repeat_n(size, length));
                }
                memory.truncate(steps);
                memory
            }
            Label::Leak => {
                let end = scaled(base, 1.2 + random.f64() * 2.0);
                (0..steps).map(|step| base + (end - base) * (step as u64) / (steps as u64)).collect()
            }
            Label::Preallocating => vec![scaled(share_mib, 0.75 + random.f64() * 0.2); steps],
        };
        let memory: Vec<u64> = memory.into_iter().map(|mib| mib.min(most)).collect();
        // Three of four leases have ended.
        let observed = if random.u8(..4) == 0 { random.usize(steps / 2..steps) } else { steps };
        let (activity, busy) = (random.f64() * random.f64(), 0.05 + 0.95 * random.f64());
        Self { label, memory, observed, activity, busy }
    }

    /// Returns the largest memory that the lease needs.
    fn need_mib(&self) -> u64 {
        self.memory.iter().copied().max().unwrap()
    }

    /// Returns what gpushd records.
    fn recorded(&self, gpu: &Gpu, profile: Option<&GpuProfile>, random: &mut fastrand::Rng) -> UsedTarget {
        let share_memory_mib = profile.map_or(gpu.memory.total_mib, |profile| profile.memory_mib);
        let mut histogram = MemoryHistogram::new(share_memory_mib);
        let every = usize::try_from(SAMPLE_S / STEP_S).unwrap();
        let (first, mut known_s) = (random.usize(..every), 0);
        for memory in self.memory[..self.observed].iter().skip(first).step_by(every) {
            // Some samples are missing.
            if random.u8(..50) != 0 {
                histogram.add(*memory, SAMPLE_S * 1000);
                known_s += SAMPLE_S;
            }
        }
        let held_s = self.observed as u64 * STEP_S;
        let busy_s = scaled(held_s, self.busy);
        // GPUs before Hopper report no activity of multiprocessors, and their MIG devices no utilization either.
        let has_activity = !gpu.name.contains("A100");
        let is_busy_known = has_activity || profile.is_none();
        UsedTarget {
            gpu_uuid: gpu.uuid.clone(),
            share_kind: if profile.is_some() { "mig" } else { "whole" }.to_owned(),
            profile: profile.map(|profile| profile.name.clone()),
            compute_part: 1.0,
            share_memory_mib,
            held_s,
            busy_s: if is_busy_known { busy_s } else { 0 },
            memory_known_s: known_s,
            memory_peak_mib: Some(histogram.peak_mib()),
            memory_p98_mib: histogram.percentile_mib(98),
            activity_known_s: if has_activity { known_s } else { 0 },
            sm_mean: has_activity.then_some(self.activity * self.busy),
        }
    }
}

#[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "small values")]
fn scaled(value: u64, factor: f64) -> u64 {
    (value as f64 * factor) as u64
}

fn memory_slices(profile: &GpuProfile) -> u32 {
    profile.placements.iter().map(|placement| u32::from(placement.size)).min().unwrap()
}

/// Memory slices that the public rule frees, without a check whether the program still fits. The rule sees the utilization
/// of whole GPUs, also before Hopper.
fn freed_by_public_rule(simulated: &Simulated, target: &UsedTarget, gpu: &Gpu) -> u32 {
    let mean = simulated.activity * simulated.busy;
    let is_advised = target.profile.is_none()
        && (0.0..=0.2).contains(&mean)
        && mean > 0.0
        && target.memory_peak_mib.is_some_and(|peak| peak <= 10_000)
        && target.held_s >= 61 * 60;
    if is_advised { u32::from(gpu.mig.as_ref().unwrap().memory_slices) - 1 } else { 0 }
}

#[test]
fn advised_downsizings_fit_and_free_twice_as_much_as_the_public_rule() {
    let mut random = fastrand::Rng::with_seed(41);
    let gpus: Vec<Gpu> =
        ["dgx-a100", "dgx-h100", "dgx-h200"].iter().map(|name| preset::gpus(name).unwrap().remove(0)).collect();
    let (mut advised, mut too_small, mut freed, mut freed_by_rule) = (0, Vec::new(), 0, 0);
    for number in 0..1500 {
        let gpu = &gpus[random.usize(..gpus.len())];
        let profiles: Vec<&GpuProfile> = gpu.mig.as_ref().unwrap().profiles.iter().collect();
        let larger: Vec<&&GpuProfile> = profiles
            .iter()
            .filter(|one| !one.gfx && !one.name.contains(['+', '-']) && memory_slices(one) >= 2)
            .collect();
        let profile = (random.u8(..10) < 4).then(|| *larger[random.usize(..larger.len())]);
        let share_mib = profile.map_or(gpu.memory.total_mib, |profile| profile.memory_mib);
        let simulated = Simulated::random(&mut random, share_mib);
        let target = simulated.recorded(gpu, profile, &mut random);
        freed_by_rule += freed_by_public_rule(&simulated, &target, gpu);
        let lease = UsedLease {
            lease_id: LeaseId(number + 1),
            user: "u".to_owned(),
            begun_at: "2026-11-20T08:00:00Z".parse().unwrap(),
            ended_at: None,
            waited_s: 0,
            used_targets: vec![target],
        };
        let advice = right_sizes(&[lease], std::slice::from_ref(gpu)).remove(0);
        let SizeVerdict::SmallerDevice { enough_mib, .. } = advice.verdict else { continue };
        advised += 1;
        if simulated.need_mib() > enough_mib {
            too_small.push(simulated.label);
        } else {
            freed += advice.freed_slices();
        }
    }
    println!(
        "{advised} advised, {} too small: {too_small:?}; freed {freed}, by the rule {freed_by_rule}",
        too_small.len()
    );
    assert!(advised > 300 && freed_by_rule > 100, "the set shows nothing: {advised} {freed_by_rule}");
    assert!(too_small.len() * 100 <= advised * 5, "{} of {advised} ran out of memory", too_small.len());
    assert!(freed >= 2 * freed_by_rule, "{freed} slices, {freed_by_rule} by the public rule");
}
