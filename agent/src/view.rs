//! GPUs as the API shows them: what the hardware says, what is wanted of it, what the agent
//! is doing with it, less what the asker may not see.

use gpush_api::{ApiError, Gpu, GpuState, Memory, Mode};
use gpush_core::desired;
use gpush_nvml::{DriverError, ErrorKind};
use gpush_store::ConditionKind;

use crate::{
    agent::Agent,
    auth::Asker,
    observe::{Host, Sight},
    overrides, redact,
};

/// All GPUs, as `asker` may see them; profiles included.
pub(crate) async fn gpus(agent: &Agent, asker: &Asker) -> Result<Vec<Gpu>, ApiError> {
    Ok(compose(agent, asker, host(agent).await?))
}

/// The host, or why it can't be seen.
pub(crate) async fn host(agent: &Agent) -> Result<Host, ApiError> {
    agent.observer.recent().await.map_err(|error| no_driver(&error))
}

/// Why nothing can be seen at all.
pub(crate) fn no_driver(error: &DriverError) -> ApiError {
    let said = error.to_api();
    if error.is_driver_unavailable() {
        return said;
    }
    // Whatever it was, there is no driver to speak of for now.
    ApiError { code: gpush_api::Code::DriverUnavailable, ..said }
        .hint("see the log of gpushd: `journalctl -u gpushd`")
        .retryable()
}

/// The GPUs of `host`, as `asker` may see them.
pub(crate) fn compose(agent: &Agent, asker: &Asker, host: Host) -> Vec<Gpu> {
    let unsettled = agent.hardware.status().unsettled;
    let mut gpus: Vec<Gpu> = host.gpus.into_iter().map(|sight| gpu(agent, asker, &unsettled, sight)).collect();
    desired::describe(&agent.settings.config(), &mut gpus);
    for gpu in &mut gpus {
        redact::gpu(gpu, asker);
    }
    gpus
}

fn gpu(agent: &Agent, asker: &Asker, unsettled: &[String], sight: Sight) -> Gpu {
    let settled = !unsettled.contains(&sight.identity.uuid) && agent.operations.holder(&sight.identity.uuid).is_none();
    if let Some(reading) = sight.reading.as_ref().filter(|_| settled && sight.listed && sight.error.is_none()) {
        agent.conditions.consider(reading, sight.at);
    }
    let (state, reasons) = state(agent, unsettled, &sight);
    let overridden = agent.overrides.of(&sight.identity.uuid);
    let overridden = overridden.map(|one| overrides::view(one, Some(sight.identity.index), asker));
    let Sight { identity, reading, at, stale, .. } = sight;
    let reading = reading.map(|reading| (*reading).clone());
    let (memory, mig, processes, processes_known) = match reading {
        Some(reading) => (reading.memory, reading.mig, reading.processes, reading.processes_known),
        // Nothing is planned on it before there is a reading.
        None => (Memory::default(), None, Vec::new(), true),
    };
    Gpu {
        index: identity.index,
        uuid: identity.uuid,
        pci: identity.pci,
        pci_id: Some(format!("0x{:08X}", identity.pci_id)),
        pci_subsystem: identity.pci_subsystem.map(|id| format!("0x{id:08X}")),
        minor: identity.minor,
        name: identity.name,
        architecture: identity.architecture,
        memory,
        mode: Mode::Unmanaged,
        rule: None,
        layout: None,
        overridden,
        drift: Vec::new(),
        state,
        reasons,
        mig,
        processes,
        processes_known,
        observed_at: at,
        stale,
    }
}

/// Whether the agent works with the GPU, the worst first, and why.
fn state(agent: &Agent, unsettled: &[String], sight: &Sight) -> (GpuState, Vec<String>) {
    let uuid = &sight.identity.uuid;
    let mut reasons = Vec::new();
    let mut state = GpuState::Ready;
    if let Some(reading) = &sight.reading {
        reasons.extend(reading.warnings.iter().cloned());
    }
    let degraded = agent.conditions.about(uuid, ConditionKind::Degraded);
    if !degraded.is_empty() {
        state = GpuState::Degraded;
        reasons.extend(degraded.into_iter().map(|one| one.reason));
    }
    if let Some(holder) = agent.operations.holder(uuid) {
        state = GpuState::Changing;
        reasons.push(format!("{holder} is changing it"));
    }
    if unsettled.contains(uuid) {
        state = GpuState::Unknown;
        reasons.push("a driver call has not returned and may still take effect".to_owned());
    } else if !sight.listed {
        state = GpuState::Lost;
        reasons.push("the driver no longer lists it".to_owned());
    }
    if let Some(error) = &sight.error {
        if error.kind == ErrorKind::GpuIsLost {
            state = GpuState::Lost;
        } else if state != GpuState::Lost {
            state = GpuState::Unknown;
        }
        reasons.push(error.to_string());
    } else if sight.reading.is_none() && state == GpuState::Ready {
        state = GpuState::Unknown;
        reasons.push("the driver has not answered yet".to_owned());
    }
    (state, reasons)
}
