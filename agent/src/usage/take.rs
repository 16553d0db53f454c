//! Takes one sample, and finds the lease of each process in it.

use std::{collections::BTreeMap, sync::Arc};

use gpush_api::GpuUuid;
use gpush_host::subtask;
use gpush_nvml::{
    SampleError,
    sample::{Doubt, Sample, Wanted},
};
use gpush_usage::{
    input::{GpuSample, WindowScope},
    moment::Moment,
};
use jiff::Timestamp;

use super::{
    Accounts, LastSample, TakenSample, Usage, UsageParts, attempts::DropReason, owners::Owners, round::SampleRequest,
    translate,
};
use crate::state::HostState;

/// Takes a sample.
pub(super) async fn sample(
    usage: &Usage,
    host: &Arc<HostState>,
    request: SampleRequest,
) -> Result<TakenSample, SampleError> {
    let SampleRequest { gpu, instances, wanted, promised } = request;
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
    let kept = earlier.map(|earlier| kept_windows(&sample, &earlier.translated, moment)).unwrap_or_default();
    if let Some(earlier) = earlier {
        keep_unread(&mut sample, &earlier.sample, wanted);
    }
    let interval_ms = u64::try_from(promised.as_millis()).unwrap_or(u64::MAX);
    let limited = earlier.map(|earlier| &earlier.sample.limited);
    let translated: GpuSample =
        translate::translated(&gpu.gpu, &sample, limited, &kept, processes, moment, interval_ms);
    Ok(TakenSample { at, sample, translated })
}

/// Returns the age in ms of each window that this sample has not read.
fn kept_windows(sample: &Sample, earlier: &GpuSample, now: Moment) -> BTreeMap<WindowScope, u64> {
    let skipped = sample.instances.iter().filter(|one| one.activity.doubt == Some(Doubt::Skipped));
    let scopes: Vec<WindowScope> = skipped.map(|one| WindowScope::Instance(one.instance.gi)).collect();
    let kept = earlier.windows.iter().filter(|window| scopes.contains(&window.scope));
    kept.map(|window| (window.scope, window.age_ms.saturating_add(now.ms_since(earlier.at)))).collect()
}

/// Copies the values that this sample has not read from the sample before: temperatures and clocks, memory, and the
/// last complete window of each GPU instance. The instances take turns, and the activity of a window counts until the
/// next one.
fn keep_unread(sample: &mut Sample, earlier: &Sample, wanted: Wanted) {
    if !wanted.board {
        sample.temperature_c = earlier.temperature_c;
        sample.sm_clock_mhz = earlier.sm_clock_mhz;
        sample.memory_clock_mhz = earlier.memory_clock_mhz;
        sample.event_reasons = earlier.event_reasons;
    }
    if !wanted.memory && sample.memory.is_none() {
        sample.memory = earlier.memory;
    }
    for one in &mut sample.instances {
        // A new instance in the same slot has another generation.
        let Some(before) = earlier.instances.iter().find(|before| before.instance == one.instance) else { continue };
        if one.activity.doubt == Some(Doubt::Skipped) {
            one.activity = before.activity;
        }
        if !wanted.memory {
            one.memory = before.memory;
        }
    }
}

impl Accounts {
    /// Notes the result of an attempt to sample a GPU.
    pub(super) fn note(&mut self, gpu: GpuUuid, result: Result<TakenSample, SampleError>, now: Moment) {
        let last = match result {
            Ok(taken) => {
                if self.ledger.sample(&taken.translated) {
                    self.attempts.note_taken();
                } else {
                    self.attempts.note_dropped(DropReason::Outdated);
                    tracing::debug!(gpu = gpu.as_str(), "the sample is older than a change of the leases");
                }
                LastSample::Taken(Box::new(taken))
            }
            Err(error) => {
                self.attempts.note_dropped(DropReason::from(&error));
                tracing::debug!(gpu = gpu.as_str(), "no sample: {error}");
                self.ledger.gap(&gpu, now);
                LastSample::Failed(error)
            }
        };
        self.last.insert(gpu, last);
    }
}
