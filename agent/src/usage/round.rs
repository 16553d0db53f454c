//! Decides which GPUs to sample next, and which values each sample reads.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use gpush_api::{Gpu, GpuState, GpuUuid};
use gpush_nvml::{
    proto::GpuRef,
    sample::{InstanceRef, Wanted},
};
use tokio::time::Instant;

use super::demand::Needs;
use crate::state::{HostState, lanes::LaneChanges};

/// While no client watches, each fourth sample reads temperatures and clocks: they cost 4 calls, and change slowly.
const BOARD_EVERY: u64 = 4;
/// While no client watches, each eighth sample reads the memory of GPU instances in place of windows.
const MEMORY_EVERY: u64 = 8;
/// A sample before a change of the leases is not taken if the last one is younger. Shorter windows are not exact.
const YOUNG: Duration = Duration::from_secs(1);

/// A sample to take.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct SampleRequest {
    pub(super) gpu: GpuRef,
    /// The GPU instances; `None` if MIG is off.
    pub(super) instances: Option<Vec<InstanceRef>>,
    pub(super) wanted: Wanted,
    /// Longest time until the next sample.
    pub(super) promised: Duration,
}

/// One sample of each GPU that can be sampled.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Round {
    pub(super) requests: Vec<SampleRequest>,
    /// GPUs whose state does not permit a sample.
    pub(super) without_sample: Vec<GpuUuid>,
    /// GPUs whose driver may be loaded again before the next sample, so that their energy counters begin again.
    pub(super) without_driver: Vec<GpuUuid>,
}

/// The last samples, and the samples in flight.
#[derive(Debug, Default)]
pub(super) struct Rounds {
    last: Option<Instant>,
    number: u64,
    in_flight: BTreeSet<GpuUuid>,
    /// When the last sample of each GPU was begun.
    begun: BTreeMap<GpuUuid, Instant>,
}

impl Rounds {
    /// Returns the time of the next round; `None` if nothing needs samples.
    pub(super) fn next(&self, needs: Option<Needs>) -> Option<Instant> {
        let interval = needs?.interval;
        Some(self.last.map_or_else(Instant::now, |last| last + interval))
    }

    /// Returns whether a sample of a GPU is in flight.
    pub(super) fn is_in_flight(&self, gpu: &GpuUuid) -> bool {
        self.in_flight.contains(gpu)
    }

    /// Notes that the sample of a GPU has arrived, or has failed.
    pub(super) fn arrived(&mut self, gpu: &GpuUuid) {
        self.in_flight.remove(gpu);
    }

    /// Begins a round: one sample of each GPU that has no sample in flight.
    pub(super) fn begin(&mut self, host: &HostState, needs: Needs, changes: &LaneChanges) -> Round {
        self.last = Some(Instant::now());
        self.number += 1;
        let wanted = match (needs.is_watched, self.number) {
            (true, _) => Wanted::ALL,
            (false, number) if number % MEMORY_EVERY == 2 => Wanted { memory: true, windows: 0, ..Wanted::default() },
            (false, number) => Wanted { board: number % BOARD_EVERY == 1, ..Wanted::default() },
        };
        let mut round = Round::default();
        for one in &host.gpus {
            if matches!(one.gpu.state, GpuState::Maintenance | GpuState::Lost) {
                round.without_driver.push(one.gpu.uuid.clone());
            } else if !can_be_sampled(&one.gpu) || host.claimed.contains(&one.gpu.uuid) {
                round.without_sample.push(one.gpu.uuid.clone());
            } else {
                round.requests.extend(self.request(&one.gpu, wanted, needs.promised, changes));
            }
        }
        round
    }

    /// Returns the samples to take before the leases on these GPUs change.
    pub(super) fn before_change(
        &mut self,
        host: &HostState,
        needs: Needs,
        gpus: &BTreeSet<GpuUuid>,
        changes: &LaneChanges,
    ) -> Vec<SampleRequest> {
        let is_old = |gpu: &&GpuUuid| self.begun.get(*gpu).is_some_and(|begun| begun.elapsed() >= YOUNG);
        let old: Vec<&Gpu> = gpus
            .iter()
            .filter(is_old)
            .filter(|gpu| !host.claimed.contains(*gpu))
            .filter_map(|gpu| Some(&host.gpu(gpu)?.gpu))
            .filter(|gpu| can_be_sampled(gpu))
            .collect();
        let requests = old.into_iter();
        requests.filter_map(|gpu| self.request(gpu, Wanted::default(), needs.promised, changes)).collect()
    }

    /// Returns the request for a GPU; `None` if a sample of it is in flight.
    fn request(
        &mut self,
        gpu: &Gpu,
        wanted: Wanted,
        promised: Duration,
        changes: &LaneChanges,
    ) -> Option<SampleRequest> {
        if !self.in_flight.insert(gpu.uuid.clone()) {
            return None;
        }
        self.begun.insert(gpu.uuid.clone(), Instant::now());
        // A GPU instance that is created again in the same slot has the same id and UUIDs, so each operation on the GPU
        // begins a generation.
        let generation = changes.of(&gpu.uuid);
        let instances = gpu
            .mig
            .as_ref()
            .filter(|mig| mig.enabled)
            .map(|mig| mig.instances.iter().map(|instance| InstanceRef { gi: instance.id, generation }).collect());
        let gpu = GpuRef { uuid: gpu.uuid.clone(), index: Some(gpu.index), pci: Some(gpu.pci.clone()) };
        Some(SampleRequest { gpu, instances, wanted, promised })
    }
}

/// Returns whether gpushd may call the driver for a GPU.
fn can_be_sampled(gpu: &Gpu) -> bool {
    match gpu.state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded | GpuState::Held => true,
        GpuState::Changing | GpuState::Unknown | GpuState::Maintenance | GpuState::Lost => false,
    }
}
