//! Restores compute modes that gpushd has set for MPS and that no daemon needs any more. Such a mode remains if the
//! driver did not answer, the daemon never started, or the previous gpushd ended too early.
//!
//! ```text
//! a GPU was reconciled, or a restore failed ──► check: on record, and needed by no daemon?
//!                                                          │ one task per GPU, under its lane
//!                                                          ▼
//!                          restore ── failed ─► reported in health; again after 1 s, 2 s … at most a minute
//! ```
//!
//! The records survive gpushd, so the next gpushd continues to restore the modes. gpushd does not check a GPU before it
//! has reconciled the GPU's daemons for the first time, because until then gpushd does not know which daemons exist.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use backon::ExponentialBackoff;
use gpush_api::{ApiError, Code, Gpu, GpuState, GpuUuid, Mode};
use gpush_host::subtask;
use gpush_store::SharedGpu;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};
use tokio_util::sync::CancellationToken;

use super::SharedGpus;
use crate::{requests::caller::Viewer, system::backoff::backoff};

/// First and longest pause between two attempts. The pause doubles after each failure.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// Returns whether MPS needs the compute mode of the GPU with this UUID.
type NeedsComputeMode = Arc<dyn Fn(&GpuUuid) -> bool + Send + Sync>;

/// The attempts to restore the compute mode of one GPU.
#[derive(Debug)]
struct Attempts {
    pauses: ExponentialBackoff,
    next: NextAttempt,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NextAttempt {
    /// An attempt is in progress.
    Running,
    /// The next attempt starts at this time.
    At(Instant),
}

/// The result of an attempt.
enum AttemptResult {
    Done,
    Failed,
    /// An operation changes the GPU, or the GPU cannot be read. gpushd already reports this elsewhere.
    NotYet,
}

impl Attempts {
    fn new() -> Self {
        Self { pauses: backoff(PAUSE), next: NextAttempt::At(Instant::now()) }
    }
}

/// Restores leftover compute modes until gpushd stops.
pub(crate) async fn run(
    shared: SharedGpus,
    needs: impl Fn(&GpuUuid) -> bool + Send + Sync + 'static,
    stopping: CancellationToken,
) {
    let needs: NeedsComputeMode = Arc::new(needs);
    let mut wake = shared.0.wake.subscribe();
    let mut left: BTreeMap<GpuUuid, Attempts> = BTreeMap::new();
    let mut running = JoinSet::new();
    // Wait for the first reconciliation of a GPU before the first check.
    let mut is_woken = false;
    loop {
        if is_woken {
            let now = leftovers(&shared, &needs);
            left.retain(|uuid, attempts| attempts.next == NextAttempt::Running || now.contains(uuid));
            shared.troubles().retain(|uuid, _| now.contains(uuid));
            for uuid in now {
                left.entry(uuid).or_insert_with(Attempts::new);
            }
        }
        for (uuid, attempts) in &mut left {
            if matches!(attempts.next, NextAttempt::At(at) if at <= Instant::now()) {
                attempts.next = NextAttempt::Running;
                let (shared, needs, uuid) = (shared.clone(), Arc::clone(&needs), uuid.clone());
                running.spawn(async move { (attempt(&shared, &needs, &uuid).await, uuid) });
            }
        }
        let due = left.values().filter_map(|attempts| match attempts.next {
            NextAttempt::At(at) => Some(at),
            NextAttempt::Running => None,
        });
        let due = due.min();
        let due = async {
            match due {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = stopping.cancelled() => return,
            _ = wake.changed() => is_woken = true,
            () = due => {}
            Some((outcome, uuid)) = subtask::next(&mut running) => {
                let Some(attempts) = left.get_mut(&uuid) else { continue };
                let pause = match outcome {
                    AttemptResult::Done => {
                        left.remove(&uuid);
                        continue;
                    }
                    AttemptResult::NotYet => PAUSE.0,
                    AttemptResult::Failed => attempts.pauses.next().unwrap_or(PAUSE.1),
                };
                attempts.next = NextAttempt::At(Instant::now() + pause);
            }
        }
    }
}

/// Tries to restore the compute mode of one GPU.
async fn attempt(shared: &SharedGpus, needs: &NeedsComputeMode, uuid: &GpuUuid) -> AttemptResult {
    if shared.0.context.state.maintenance().is_some() {
        return AttemptResult::NotYet;
    }
    let Some(_turn) = shared.0.context.lanes.lock(uuid).await else { return AttemptResult::NotYet };
    if needs(uuid) {
        return AttemptResult::Done;
    }
    let observed = shared.0.context.readings.gpu(uuid).await;
    let gpus = observed.map(|observed| observed.gpus(Viewer::Agent)).unwrap_or_default();
    let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == *uuid && can_be_changed(gpu)) else {
        return AttemptResult::NotYet;
    };
    match shared.restore_unless_needed(uuid, Mode::Mps, || needs(uuid)).await {
        Ok(mode) => {
            shared.troubles().remove(uuid);
            if let Some(mode) = mode {
                tracing::info!(
                    gpu = uuid.as_str(),
                    "GPU {uuid} is no longer shared through MPS: its compute mode is {mode} again"
                );
            }
            AttemptResult::Done
        }
        Err(why) => {
            let error = error(gpu, &why);
            let before = shared.troubles().insert(uuid.clone(), error.clone());
            if before.as_ref() != Some(&error) {
                tracing::error!(gpu = uuid.as_str(), "{error}: {why}");
            }
            AttemptResult::Failed
        }
    }
}

/// Returns the UUIDs of the GPUs whose compute mode gpushd has set for MPS although no daemon needs it any more.
fn leftovers(shared: &SharedGpus, needs: &NeedsComputeMode) -> Vec<GpuUuid> {
    leftovers_of(shared.records().clone(), &**needs)
}

fn leftovers_of(records: BTreeMap<GpuUuid, SharedGpu>, needs: &dyn Fn(&GpuUuid) -> bool) -> Vec<GpuUuid> {
    let of_mps = records.into_iter().filter(|(_, record)| record.compute_mode.is_some_and(|set| set.by == Mode::Mps));
    of_mps.map(|(uuid, _)| uuid).filter(|uuid| !needs(uuid)).collect()
}

/// Returns whether gpushd knows the current state of a GPU and may change the GPU.
fn can_be_changed(gpu: &Gpu) -> bool {
    match gpu.state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded => !gpu.stale,
        GpuState::Changing | GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    }
}

fn error(gpu: &Gpu, why: &str) -> ApiError {
    let label = format!("GPU {} ({})", gpu.index, gpu.uuid);
    ApiError::new(Code::DriverError, format!("{label} still has the compute mode that gpushd set for MPS"))
        .cause(why.to_owned())
        .hint(format!(
            "gpushd retries until the mode is restored; to allow several processes at once now, run `nvidia-smi -i {} -c DEFAULT`",
            gpu.index
        ))
        .retryable()
}

#[cfg(test)]
mod tests {
    use gpush_api::ComputeMode;
    use gpush_store::{ComputeModeSet, LevelSet};

    use super::*;
    use crate::modes::scene::whole_gpu;

    #[test]
    fn only_modes_that_were_set_for_mps_are_left_over() {
        let mode =
            |by| ComputeModeSet { before: ComputeMode::Default, set: ComputeMode::ExclusiveProcess, last: None, by };
        let level = LevelSet { set: gpush_api::TimesliceLevel::Long, last: None };
        let record = |uuid: &str, compute_mode| {
            let record = SharedGpu { gpu_uuid: uuid.into(), compute_mode, level: Some(level), ..SharedGpu::default() };
            (GpuUuid::from(uuid), record)
        };
        let records = BTreeMap::from([
            record("needed", Some(mode(Mode::Mps))),
            record("left over", Some(mode(Mode::Mps))),
            record("time-sliced", Some(mode(Mode::Timeslice))),
            record("level", None),
        ]);
        assert_eq!(leftovers_of(records, &|uuid| *uuid == "needed"), ["left over"]);
    }

    #[test]
    fn compute_mode_is_restored_only_on_a_gpu_in_a_known_state() {
        let gpu = |state, stale| Gpu { state, stale, ..whole_gpu() };
        for (state, expected) in [
            (GpuState::Ready, true),
            (GpuState::Cordoned, true),
            (GpuState::Degraded, true),
            (GpuState::Changing, false),
            (GpuState::Held, false),
            (GpuState::Unknown, false),
            (GpuState::Lost, false),
            (GpuState::Maintenance, false),
        ] {
            assert_eq!(can_be_changed(&gpu(state, false)), expected, "{state:?}");
            assert!(!can_be_changed(&gpu(state, true)), "the reading of the {state:?} GPU is old");
        }
    }
}
