//! GPUs as the API shows them: what the hardware says, what is wanted of it, what the agent
//! is doing with it, less what the asker may not see.

use gpush_api::{ApiError, Gpu, Memory, Mode};
use gpush_core::desired;
use gpush_nvml::DriverError;

use crate::{
    agent::Agent,
    auth::Asker,
    cordon, maintenance,
    observe::{Host, Sight},
    overrides, redact, state,
};

/// All GPUs, as `asker` may see them; profiles included.
pub(crate) async fn gpus(agent: &Agent, asker: &Asker) -> Result<Vec<Gpu>, ApiError> {
    let mut gpus = compose(agent, asker, host(agent).await?);
    gpus.iter_mut().for_each(|gpu| state::progress(agent, gpu));
    Ok(gpus)
}

/// The host, or why it can't be seen.
pub(crate) async fn host(agent: &Agent) -> Result<Host, ApiError> {
    if let Some(maintenance) = agent.conditions.maintenance() {
        return agent.observer.last_seen().ok_or_else(|| maintenance::nothing_seen(&maintenance));
    }
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
        state::hold(agent, gpu);
        redact::gpu(gpu, asker);
    }
    gpus
}

fn gpu(agent: &Agent, asker: &Asker, unsettled: &[String], sight: Sight) -> Gpu {
    let settled = !unsettled.contains(&sight.identity.uuid) && agent.operations.holder(&sight.identity.uuid).is_none();
    if let Some(reading) = sight.reading.as_ref().filter(|_| settled && sight.listed && sight.error.is_none()) {
        agent.conditions.consider(reading, sight.at.own);
    }
    if let Some(rows) = sight.reading.as_ref().and_then(|reading| reading.rows) {
        cordon::read(agent, &sight.identity.uuid, rows);
    }
    let (state, reasons) = state::of(agent, unsettled, &sight);
    let cordons = agent.conditions.cordons(&sight.identity.uuid);
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
        cordons,
        mig,
        processes,
        processes_known,
        observed_at: at.wall,
        stale,
    }
}
