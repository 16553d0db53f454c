//! In which state a GPU is, and why: what the hardware says of it, what stands against working with
//! it, and what is being done with it.
//!
//! Several may hold at once. The state is the first of them from above.
//!
//! ```text
//! maintenance   an administrator entered it: no handle of ours is open    ─ until somebody leaves it
//! lost          the driver no longer lists it, or says so                 ─ until it is listed again
//! unknown       a call may still land, or it can't be read                ─ until it is read
//! held          claimed by the config, and the database was lost          ─ recover, or another boot
//! changing      an operation has it                                       ─ until that ends
//! degraded      a change failed and its rollback too                      ─ an operation that ends well,
//!                                                                           or a reading as wanted
//! cordoned      an administrator, an Xid error, a pending row remap       ─ uncordon
//! ready         none of these
//! ```
//!
//! | state | new work | asked to reshape it by name | by a request for all, or gpushd by itself |
//! |---|---|---|---|
//! | `ready` | yes | yes | yes |
//! | `cordoned` | no | yes | no |
//! | `degraded` | no | yes | no |
//! | `changing` | no | in turn | in turn |
//! | `held`, `unknown`, `lost`, `maintenance` | no | no | no |
//!
//! A cordon stands beside the state: a GPU that is changing or degraded may have one, which is in
//! `cordons`. Each has its cause; `uncordon` clears all, and one that gpushd set comes back only
//! when the fault is reported anew.

use gpush_api::{Gpu, GpuState};
use gpush_nvml::ErrorKind;
use gpush_store::{ConditionKind, Lost};

use crate::{agent::Agent, held, maintenance, observe::Sight};

/// How the reason ends why a GPU is `changing`, after who has it.
const CHANGING: &str = " is changing it";

/// Whether somebody is changing the GPU, whatever else is to be said of it.
pub(crate) fn is_changing(reasons: &[String]) -> bool {
    reasons.iter().any(|reason| reason.ends_with(CHANGING))
}

/// Adds how far the operation is that is changing the GPU, and which ones wait for it: for who looks, and for
/// no event.
pub(crate) fn progress(agent: &Agent, gpu: &mut Gpu) {
    gpu.reasons.extend(agent.line.for_gpu(&gpu.uuid));
    let Some(reason) = gpu.reasons.iter_mut().find(|reason| reason.ends_with(CHANGING)) else { return };
    let Some(progress) = agent.operations.progress(&gpu.uuid) else { return };
    *reason += &match progress.rolling_back {
        false => format!(": {} of {} steps are done", progress.done, progress.total),
        true => ": its steps are being taken back".to_owned(),
    };
}

/// The state, but for what depends on the config's claim, and why it is so.
pub(crate) fn of(agent: &Agent, unsettled: &[String], sight: &Sight) -> (GpuState, Vec<String>) {
    let uuid = &sight.identity.uuid;
    let mut reasons = Vec::new();
    let mut state = GpuState::Ready;
    if let Some(reading) = &sight.reading {
        reasons.extend(reading.warnings.iter().cloned());
    }
    let cordons = agent.conditions.cordons(uuid);
    if !cordons.is_empty() {
        state = GpuState::Cordoned;
    }
    let degraded = agent.conditions.about(uuid, ConditionKind::Degraded);
    if !degraded.is_empty() {
        state = GpuState::Degraded;
        reasons.extend(degraded.into_iter().map(|one| one.reason));
    }
    // One that is only planned hides nothing of what speaks against it.
    if let Some(holder) = agent.operations.changing(uuid) {
        state = GpuState::Changing;
        reasons.push(format!("{holder}{CHANGING}"));
    }
    if unsettled.contains(uuid) {
        state = GpuState::Unknown;
        reasons.push("a driver call has not returned and may still take effect".to_owned());
    } else if !sight.listed {
        state = GpuState::Lost;
        reasons.push("the driver no longer lists it".to_owned());
    }
    let maintenance = agent.conditions.maintenance();
    if let Some(error) = sight.error.as_ref().filter(|_| maintenance.is_none()) {
        if error.kind == ErrorKind::GpuIsLost {
            state = GpuState::Lost;
        } else if state != GpuState::Lost {
            state = GpuState::Unknown;
        }
        reasons.push(error.to_string());
    } else if sight.reading.is_none() && maintenance.is_none() && is_workable(state) {
        state = GpuState::Unknown;
        reasons.push("the driver has not answered yet".to_owned());
    }
    if let Some(maintenance) = maintenance {
        state = GpuState::Maintenance;
        reasons.push(maintenance::words(&maintenance));
    }
    if state == GpuState::Cordoned {
        // Beside another state they stand in `cordons` alone.
        reasons.extend(cordons.iter().map(crate::cordon::sentence));
    }
    (state, reasons)
}

/// Adds that a GPU is held, once it is known whether the config claims it.
pub(crate) fn hold(lost: &Lost, gpu: &mut Gpu) {
    let Some(why) = held::reason(lost, gpu) else { return };
    if matches!(gpu.state, GpuState::Changing) || is_workable(gpu.state) {
        gpu.state = GpuState::Held;
    }
    gpu.reasons.push(why);
}

/// Whether nothing is known against the hardware as it was read.
fn is_workable(state: GpuState) -> bool {
    match state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded => true,
        GpuState::Changing | GpuState::Held | GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    }
}
