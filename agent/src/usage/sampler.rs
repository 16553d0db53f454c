//! The task that takes samples, and that tells the ledger which leases begin, change and end.
//!
//! ```text
//! snapshot changed ─► holds of the leases, unusable slices ─► ledger
//! interval over ────► one sample of each GPU, side by side ─► ledger, or a gap
//! ```
//!
//! Each GPU has at most one sample in flight, so a GPU that hangs delays no other GPU and no lease.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use gpush_api::{Gpu, GpuState, GpuUuid, LeaseId};
use gpush_host::subtask;
use gpush_nvml::{
    SampleError,
    proto::GpuRef,
    sample::{InstanceRef, Sample, Wanted},
};
use gpush_usage::{
    input::{GpuSample, Hold},
    moment::Moment,
};
use jiff::Timestamp;
use tokio::{task::JoinSet, time::Instant};

use super::{Accounts, LastSample, Need, TakenSample, Usage, UsageParts, holds, owners::Owners, translate::translated};
use crate::state::{HostState, LeaseTable};

/// While only metrics are collected, each fourth sample reads temperatures and clocks: they cost 4 calls, and change
/// slowly.
const BOARD_EVERY: u64 = 4;

/// Takes samples and accounts leases until gpushd stops.
pub(super) async fn run(usage: Usage) {
    let parts = &*usage.0;
    let mut snapshots = parts.context.state.watch();
    let mut sampler = Sampler::default();
    let mut in_flight: JoinSet<(GpuUuid, Result<TakenSample, SampleError>)> = JoinSet::new();
    loop {
        let host = Arc::clone(&snapshots.borrow_and_update());
        sampler.follow(&host, &mut parts.accounts.lock(), parts.clock.now());
        let need = parts.demand.strictest(Instant::now());
        if need.is_none() && std::mem::take(&mut sampler.has_worker) {
            // Without samples, gpushd must not keep the driver open with a second worker.
            if let Err(error) = parts.context.hardware.end_sampling().await {
                tracing::warn!("the worker for samples cannot be ended: {error}");
            }
        }
        let due = sampler.next_sample(need);
        tokio::select! {
            () = parts.context.stopping.cancelled() => return,
            changed = snapshots.changed() => if changed.is_err() { return },
            () = parts.demand.changed() => {}
            Some(finished) = subtask::next(&mut in_flight), if !in_flight.is_empty() => {
                let (gpu, result) = finished;
                sampler.in_flight.remove(&gpu);
                parts.accounts.lock().note(gpu, result, parts.clock.now());
            }
            () = wait_until(due) => if let Some(need) = need {
                for request in sampler.begin_round(&host, need) {
                    let usage = usage.clone();
                    let host = Arc::clone(&host);
                    in_flight.spawn(async move { (request.gpu.uuid.clone(), sample(&usage, &host, request).await) });
                }
            }
        }
    }
}

async fn wait_until(due: Option<Instant>) {
    match due {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

/// A sample to take.
#[derive(Debug, Clone, PartialEq, Eq)]
struct SampleRequest {
    gpu: GpuRef,
    /// The GPU instances; `None` if MIG is off.
    instances: Option<Vec<InstanceRef>>,
    wanted: Wanted,
    interval: Duration,
}

/// What the sampler knows about GPUs and leases.
#[derive(Debug, Default)]
struct Sampler {
    /// Identifies the snapshot that the ledger knows: its table of leases, and its number of GPU changes.
    followed: Option<(Arc<LeaseTable>, u64)>,
    holds: BTreeMap<LeaseId, Vec<Hold>>,
    gpus: BTreeMap<GpuUuid, u32>,
    /// Generation of the GPU instances of each GPU. A GPU instance that is created again in the same slot has the same id
    /// and UUIDs, so each operation on the GPU begins a generation.
    generations: BTreeMap<GpuUuid, u64>,
    last_round: Option<Instant>,
    round: u64,
    /// Whether a worker for samples may run.
    has_worker: bool,
    in_flight: BTreeSet<GpuUuid>,
}

impl Sampler {
    /// Tells the ledger what has changed since the last snapshot.
    fn follow(&mut self, host: &HostState, accounts: &mut Accounts, now: Moment) {
        for uuid in &host.claimed {
            *self.generations.entry(uuid.clone()).or_default() += 1;
        }
        let is_known =
            |(leases, changes): &(Arc<LeaseTable>, u64)| Arc::ptr_eq(leases, &host.leases) && *changes == host.changes;
        if self.followed.as_ref().is_some_and(is_known) {
            return;
        }
        self.followed = Some((Arc::clone(&host.leases), host.changes));
        let ledger = &mut accounts.ledger;
        let gpus: BTreeMap<GpuUuid, u32> =
            host.gpus.iter().map(|one| (one.gpu.uuid.clone(), holds::unusable(&one.gpu))).collect();
        for (uuid, unusable) in &gpus {
            match self.gpus.get(uuid) {
                Some(before) if before == unusable => continue,
                Some(_) => {}
                None => ledger.add_gpu(uuid, now),
            }
            ledger.set_unusable(uuid, *unusable, now);
        }
        let holds = holds::of_leases(host);
        for (id, held) in &holds {
            if self.holds.get(id) != Some(held) {
                ledger.set_lease(*id, held.clone(), now);
            }
        }
        // The ledger may know leases that ended before this task was started again.
        let ended: Vec<LeaseId> = ledger.leases().filter(|id| !holds.contains_key(id)).collect();
        for id in ended {
            ledger.end_lease(id, now);
        }
        for removed in self.gpus.keys().filter(|uuid| !gpus.contains_key(*uuid)) {
            ledger.remove_gpu(removed, now);
            accounts.last.remove(removed);
        }
        (self.holds, self.gpus) = (holds, gpus);
    }

    /// Returns the time of the next sample; `None` if nothing needs samples.
    fn next_sample(&self, need: Option<Need>) -> Option<Instant> {
        let interval = need?.interval();
        Some(self.last_round.map_or_else(Instant::now, |last| last + interval))
    }

    /// Begins a round: one sample of each GPU that has no sample in flight.
    fn begin_round(&mut self, host: &HostState, need: Need) -> Vec<SampleRequest> {
        self.last_round = Some(Instant::now());
        (self.round, self.has_worker) = (self.round + 1, true);
        let wanted = match need {
            Need::Scrape => Wanted { board: self.round % BOARD_EVERY == 1, ..Wanted::default() },
            Need::Watch => Wanted::ALL,
        };
        let gpus = host.gpus.iter().filter(|one| can_be_sampled(&one.gpu));
        let gpus = gpus.filter(|one| !host.claimed.contains(&one.gpu.uuid));
        let requests: Vec<SampleRequest> = gpus
            .filter(|one| !self.in_flight.contains(&one.gpu.uuid))
            .map(|one| self.request(&one.gpu, wanted, need.interval()))
            .collect();
        self.in_flight.extend(requests.iter().map(|request| request.gpu.uuid.clone()));
        requests
    }

    fn request(&self, gpu: &Gpu, wanted: Wanted, interval: Duration) -> SampleRequest {
        let generation = self.generations.get(&gpu.uuid).copied().unwrap_or_default();
        let instances = gpu
            .mig
            .as_ref()
            .filter(|mig| mig.enabled)
            .map(|mig| mig.instances.iter().map(|instance| InstanceRef { gi: instance.id, generation }).collect());
        let gpu = GpuRef { uuid: gpu.uuid.clone(), index: Some(gpu.index), pci: Some(gpu.pci.clone()) };
        SampleRequest { gpu, instances, wanted, interval }
    }
}

/// Returns whether gpushd may call the driver for a GPU.
fn can_be_sampled(gpu: &Gpu) -> bool {
    match gpu.state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded | GpuState::Held => true,
        GpuState::Changing | GpuState::Unknown | GpuState::Maintenance | GpuState::Lost => false,
    }
}

/// Takes a sample, and finds the lease of each process.
async fn sample(usage: &Usage, host: &Arc<HostState>, request: SampleRequest) -> Result<TakenSample, SampleError> {
    let SampleRequest { gpu, instances, wanted, interval } = request;
    let UsageParts { context, clock, lease_names, mps, .. } = &*usage.0;
    let uuid = gpu.uuid.clone();
    let mut sample = context.hardware.sample(gpu, instances, wanted).await?;
    let (at, moment) = (Timestamp::now(), clock.now());
    let listed = sample.processes.clone();
    let (names, leases, mps, snapshot, of) =
        (Arc::clone(lease_names), context.state.leases(), mps.clone(), Arc::clone(host), uuid.clone());
    let owned = subtask::blocking(move || {
        let gpu = &snapshot.gpu(&of)?.gpu;
        let servers = mps.servers();
        Some(Owners { names: &names, leases: &leases, servers: &servers }.of(gpu, &listed?))
    });
    let processes = owned.await.flatten().unwrap_or_default();
    let Some(gpu) = host.gpu(&uuid) else { return Err(SampleError::Suspended) };
    let accounts = usage.0.accounts.lock();
    let earlier = accounts.last.get(&uuid).and_then(|last| last.recent(moment));
    if let Some(earlier) = earlier.filter(|_| !wanted.board) {
        keep_board(&mut sample, &earlier.sample);
    }
    let interval_ms = u64::try_from(interval.as_millis()).unwrap_or(u64::MAX);
    let translated: GpuSample = translated(&gpu.gpu, &sample, earlier, processes, moment, interval_ms);
    Ok(TakenSample { at, sample, translated })
}

/// Keeps the temperatures and clocks of the sample before, because this sample did not read them.
fn keep_board(sample: &mut Sample, earlier: &Sample) {
    sample.temperature_c = earlier.temperature_c;
    sample.sm_clock_mhz = earlier.sm_clock_mhz;
    sample.memory_clock_mhz = earlier.memory_clock_mhz;
    sample.event_reasons = earlier.event_reasons;
}

impl Accounts {
    /// Notes the result of an attempt to sample a GPU.
    fn note(&mut self, gpu: GpuUuid, result: Result<TakenSample, SampleError>, now: Moment) {
        let last = match result {
            Ok(taken) => {
                self.ledger.sample(&taken.translated);
                LastSample::Taken(Box::new(taken))
            }
            Err(error) => {
                tracing::debug!(gpu = gpu.as_str(), "no sample: {error}");
                self.ledger.gap(&gpu, now);
                LastSample::Failed(error)
            }
        };
        self.last.insert(gpu, last);
    }
}
