//! The compute mode of a GPU that is shared through MPS: exclusive process, so that nobody computes there
//! past the daemon; and the one from before, put back when that is over.
//!
//! The one from before is on record before the driver is asked to change it. NVIDIA's driver forgets the
//! mode with a reboot, and so does the record then: what is found is what there was before.

use gpush_api::{ComputeMode, MpsComputeMode};
use gpush_core::sharing::Target;
use gpush_store::MpsTarget;

use crate::agent::Shared;

/// Sees to the compute mode of a GPU that is about to be shared, or is.
pub(super) async fn take(agent: &Shared, target: &Target, wanted: MpsComputeMode) {
    match wanted {
        MpsComputeMode::Keep => return,
        MpsComputeMode::ExclusiveProcess => {}
    }
    let Some(now) = read(agent, &target.gpu_uuid).await else { return };
    if now == ComputeMode::ExclusiveProcess {
        return;
    }
    let record = agent.mps.record(&target.uuid);
    if record.compute_mode.is_none() && !keep(agent, record, Some(now)).await {
        return;
    }
    set(agent, &target.gpu_uuid, ComputeMode::ExclusiveProcess).await;
}

/// Puts the compute mode back that a GPU had before it was shared.
pub(super) async fn put_back(agent: &Shared, uuid: &str) {
    let record = agent.mps.record(uuid);
    let before = record.compute_mode.as_ref().and_then(|before| before.mode.parse::<ComputeMode>().ok());
    let Some(before) = before else { return };
    // Somebody else's doing since then is left alone.
    let ours = read(agent, uuid).await == Some(ComputeMode::ExclusiveProcess);
    if !ours || set(agent, uuid, before).await {
        keep(agent, record, None).await;
    }
}

async fn read(agent: &Shared, uuid: &str) -> Option<ComputeMode> {
    let reading = agent.observer.read_now(uuid).await.ok()?;
    reading.compute_mode
}

async fn set(agent: &Shared, uuid: &str, mode: ComputeMode) -> bool {
    let called = agent.hardware.set_compute_mode(uuid, mode).await;
    agent.observer.outdate(uuid);
    if let Err(error) = called {
        tracing::error!(gpu = uuid, "its compute mode can't be made {mode}: {error}");
        return false;
    }
    let set = read(agent, uuid).await == Some(mode);
    if set {
        tracing::info!(gpu = uuid, "its compute mode is {mode}");
    } else {
        tracing::error!(gpu = uuid, "its compute mode was set to {mode}, and is not that");
    }
    set
}

/// Records which mode was there before; whether it is recorded.
async fn keep(agent: &Shared, record: MpsTarget, before: Option<ComputeMode>) -> bool {
    let uuid = record.target.clone();
    let written = agent.store.write_ending(move |tx| {
        let compute_mode = before.map(|mode| tx.mode_before(mode.name()));
        let record = MpsTarget { compute_mode, ..record.clone() };
        tx.set_mps_target(&record)?;
        Ok(record)
    });
    match written.await {
        Ok(record) => {
            agent.mps.records().insert(uuid, record);
            true
        }
        Err(error) => {
            tracing::error!(gpu = uuid, "its compute mode can't be recorded, so it stays as it is: {error}");
            false
        }
    }
}
