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

use super::{is_needed, put_back_unless_needed};
use crate::{
    agent::{Agent, Shared},
    caller::Viewer,
};

/// Between two attempts: at first, doubled each time, and at most.
const PAUSE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// When one is tried again, and the pause after that.
#[derive(Debug, Clone, Copy)]
struct Again {
    at: Instant,
    pause: Duration,
}

/// Looks after them until the agent stops.
pub(crate) async fn run(agent: Shared) {
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
            () = agent.stopping.cancelled() => return,
            () = agent.shared_gpus.wake.notified() => {}
            () = due => {}
        }
        look(&agent, &mut failed).await;
    }
}

async fn look(agent: &Shared, failed: &mut BTreeMap<String, Again>) {
    let left = left(agent);
    failed.retain(|uuid, _| left.contains(uuid));
    agent.shared_gpus.troubles().retain(|uuid, _| left.contains(uuid));
    if left.is_empty() || agent.state.maintenance().is_some() {
        return;
    }
    let gpus = agent.readings.host().await.map(|observed| observed.gpus(Viewer::Agent)).unwrap_or_default();
    for uuid in left {
        let now = Instant::now();
        let pause = failed.get(&uuid).map_or(PAUSE.0, |again| again.pause);
        if failed.get(&uuid).is_some_and(|again| again.at > now) {
            continue;
        }
        let gpu = gpus.iter().find(|gpu| gpu.uuid == uuid);
        let done = match gpu {
            Some(gpu) if is_at_hand(gpu) && agent.operations.changing(&uuid).is_none() => {
                put_back_unless_needed(agent, &uuid, Mode::Mps).await
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
                agent.shared_gpus.troubles().remove(&uuid);
                if let Some(mode) = mode {
                    tracing::info!(
                        gpu = uuid,
                        "it is not shared through MPS any more: its compute mode is {mode} again"
                    );
                }
            }
            Err(why) => {
                let error = error(gpu, &uuid, &why);
                let before = agent.shared_gpus.troubles().insert(uuid.clone(), error.clone());
                if before.as_ref() != Some(&error) {
                    tracing::error!(gpu = uuid, "{error}: {why}");
                }
                failed.insert(uuid, Again { at: Instant::now() + pause, pause: (pause * 2).min(PAUSE.1) });
            }
        }
    }
}

/// UUIDs of the GPUs whose compute mode is set for the sake of MPS, and needed by no daemon.
fn left(agent: &Agent) -> Vec<String> {
    let records = agent.shared_gpus.records().clone();
    let of_mps = records.into_iter().filter(|(_, record)| record.compute_mode.is_some_and(|set| set.by == Mode::Mps));
    of_mps.map(|(uuid, _)| uuid).filter(|uuid| !is_needed(agent, uuid, Mode::Mps)).collect()
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
