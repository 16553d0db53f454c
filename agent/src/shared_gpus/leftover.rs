//! Compute modes that were set for MPS and that nobody needs any more, though they are not back: the driver
//! could not be asked, the daemon never came up, or the gpushd before ended in between.
//!
//! ```text
//! MPS was settled, or one could not be put back ──► look: on record, and needed by nobody?
//!                                                    │ its GPU is at hand
//!                                                    ▼
//!                                      put back ─ failed ─► told in health; again 1 s, 2 s … a minute later
//! ```
//!
//! The records outlive gpushd, so the next one goes on. Nothing is looked at before MPS was settled once:
//! until then it is not known which daemons there are.

use std::{collections::BTreeMap, time::Duration};

use gpush_api::{ApiError, Code, Gpu, GpuState, Mode};
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::CancellationToken;

use super::SharedGpus;
use crate::{caller::Viewer, state::GpuSnapshot};

/// Between two attempts: at first, doubled each time, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// When one is tried again, and the pause after that.
#[derive(Debug, Clone, Copy)]
struct Again {
    at: Instant,
    pause: Duration,
}

/// Puts them back until gpushd stops. `needs` tells whether MPS needs the compute mode of a GPU.
pub(crate) async fn run(shared: SharedGpus, needs: impl Fn(&str) -> bool, stopping: CancellationToken) {
    let mut failed = BTreeMap::new();
    loop {
        let next = failed.values().map(|again: &Again| again.at).min();
        let due = async {
            match next {
                Some(at) => sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = stopping.cancelled() => return,
            () = shared.0.wake.notified() => {}
            () = due => {}
        }
        look(&shared, &needs, &mut failed).await;
    }
}

async fn look(shared: &SharedGpus, needs: &impl Fn(&str) -> bool, failed: &mut BTreeMap<String, Again>) {
    let left = left(shared, needs);
    failed.retain(|uuid, _| left.contains(uuid));
    shared.troubles().retain(|uuid, _| left.contains(uuid));
    if left.is_empty() || shared.0.state.maintenance().is_some() {
        return;
    }
    let gpus = shared.0.readings.host().await.map(|observed| observed.gpus(Viewer::Agent)).unwrap_or_default();
    for uuid in left {
        let now = Instant::now();
        let pause = failed.get(&uuid).map_or(PAUSE.0, |again| again.pause);
        if failed.get(&uuid).is_some_and(|again| again.at > now) {
            continue;
        }
        let gpu = gpus.iter().find(|gpu| gpu.uuid == uuid);
        let done = match gpu {
            Some(gpu) if is_at_hand(gpu) && !shared.0.state.now().gpu(&uuid).is_some_and(GpuSnapshot::is_changing) => {
                shared.put_back_unless_needed(&uuid, Mode::Mps, || needs(&uuid)).await
            }
            // Whoever changes it is waited for, and so is a GPU that can't be seen: that is told elsewhere.
            Some(_) | None => {
                failed.insert(uuid, Again { at: now + pause, pause });
                continue;
            }
        };
        match done {
            Ok(mode) => {
                failed.remove(&uuid);
                shared.troubles().remove(&uuid);
                if let Some(mode) = mode {
                    tracing::info!(
                        gpu = uuid,
                        "it is not shared through MPS any more: its compute mode is {mode} again"
                    );
                }
            }
            Err(why) => {
                let error = error(gpu, &uuid, &why);
                let before = shared.troubles().insert(uuid.clone(), error.clone());
                if before.as_ref() != Some(&error) {
                    tracing::error!(gpu = uuid, "{error}: {why}");
                }
                failed.insert(uuid, Again { at: Instant::now() + pause, pause: (pause * 2).min(PAUSE.1) });
            }
        }
    }
}

/// UUIDs of the GPUs whose compute mode is set for the sake of MPS, and needed by no daemon.
fn left(shared: &SharedGpus, needs: &impl Fn(&str) -> bool) -> Vec<String> {
    let records = shared.records().clone();
    let of_mps = records.into_iter().filter(|(_, record)| record.compute_mode.is_some_and(|set| set.by == Mode::Mps));
    of_mps.map(|(uuid, _)| uuid).filter(|uuid| !needs(uuid)).collect()
}

/// Whether what is read of a GPU is true of it, and it is ours to change.
fn is_at_hand(gpu: &Gpu) -> bool {
    match gpu.state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded => !gpu.stale,
        GpuState::Changing | GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    }
}

fn error(gpu: Option<&Gpu>, uuid: &str, why: &str) -> ApiError {
    let label = gpu.map_or_else(|| format!("GPU {uuid}"), |gpu| format!("GPU {} ({uuid})", gpu.index));
    ApiError::new(Code::DriverError, format!("{label} still has the compute mode that it was given for MPS"))
        .cause(why.to_owned())
        .hint("gpushd tries again by itself until it is put back; by hand: `nvidia-smi -i INDEX -c DEFAULT`")
        .retryable()
}
