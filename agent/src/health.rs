//! What is wrong, each with its cause and way out.
//!
//! The agent is up whenever it can answer; what it can't do is said here. Drift is no ill health:
//! it is in the GPUs.

use std::time::Duration;

use gpush_api::{ApiError, Code, Driver, GpuState, Health, HealthStatus, Mode};
use gpush_host::other_managers;
use gpush_nvml::DriverError;

use crate::{
    agent::Agent,
    apply,
    caller::Viewer,
    durable, mps, processes, recover,
    state::{no_driver, redact, unidentified, words},
};

/// How long an caller waits for the driver to say who it is.
const WAIT: Duration = Duration::from_millis(500);

/// The driver behind the agent.
pub(crate) async fn driver(agent: &Agent) -> Result<Driver, DriverError> {
    if agent.state.maintenance().is_some() {
        return Err(DriverError::new(gpush_nvml::ErrorKind::Stopped, "asking for the driver"));
    }
    let starting = || {
        let status = agent.hardware.status();
        let missing = || {
            DriverError::new(gpush_nvml::ErrorKind::WorkerUnavailable, "asking for the driver")
                .detail("it has not answered yet")
        };
        status.driver.ok_or_else(|| status.failure.unwrap_or_else(missing))
    };
    tokio::time::timeout(WAIT, agent.hardware.driver()).await.unwrap_or_else(|_| starting())
}

/// Everything that is wrong.
pub(crate) async fn health(agent: &Agent, viewer: Viewer) -> Health {
    let driver = driver(agent).await;
    let simulated = driver.as_ref().is_ok_and(|driver| driver.simulated);
    let mut causes: Vec<ApiError> = agent.settings.trouble().into_iter().collect();
    causes.extend(agent.operations.not_stopping(&agent.stopping).err());
    causes.extend(apply::services_health(&agent.outside));
    causes.extend(agent.timeslice.health());
    causes.extend(agent.shared_gpus.health());
    causes.extend(mps::health(&agent.mps));
    causes.extend(processes::health(&agent.strays));
    causes.extend(durable::health(&agent.notes));
    causes.extend(agent.store.trouble().map(ApiError::from));
    let mut count = 0;
    let mut maintenance = agent.state.maintenance();
    if let Some(maintenance) = &mut maintenance {
        causes.push(words::refusal(maintenance));
        if let Some(by) = &mut maintenance.by {
            redact::actor(by, viewer);
        }
    }
    match (&driver, agent.readings.host().await) {
        (_, observed) if maintenance.is_some() => {
            let gpus = observed.map(|observed| observed.gpus(viewer)).unwrap_or_default();
            count = gpus.iter().filter(|gpu| gpu.state != GpuState::Lost).count();
            causes.extend(agent.state.now().lost.as_ref().map(|lost| recover::health(lost, &gpus)));
        }
        (Err(error), _) => causes.push(no_driver(error)),
        (Ok(_), Err(error)) => causes.push(error),
        (Ok(_), Ok(observed)) => {
            for (index, error) in &observed.host.nameless {
                causes.push(unidentified(*index, error));
                count += 1;
            }
            let gpus = observed.gpus(viewer);
            count += gpus.iter().filter(|gpu| gpu.state != GpuState::Lost).count();
            causes.extend(agent.state.now().lost.as_ref().map(|lost| recover::health(lost, &gpus)));
            causes.extend(gpus.iter().filter_map(ill));
            if gpus.iter().any(|gpu| gpu.mode == Mode::Mig)
                && let Some(rival) = other_managers::mig_manager(&agent.host_root)
            {
                causes.push(rival.error("GPUs that the config claims for MIG are not reshaped"));
            }
            causes.extend(agent.startup.troubles(&gpus));
        }
    }
    for worker in agent.hardware.status().abandoned.iter().filter(|worker| worker.stuck) {
        let pid = worker.pid.map_or_else(|| "?".to_owned(), |pid| pid.to_string());
        causes.push(
            ApiError::new(Code::DriverTimeout, format!("driver worker {pid} was killed and hangs in the kernel"))
                .cause(worker.calls.join(", "))
                .hint("only a reboot ends it; the other GPUs are served by a new worker"),
        );
    }
    let status = if causes.is_empty() { HealthStatus::Ok } else { HealthStatus::Degraded };
    let gpus = u32::try_from(count).unwrap_or(u32::MAX);
    let layouts_at_start = agent.startup.layouts();
    Health { status, causes, simulated, maintenance, gpus, layouts_at_start, pid: std::process::id() }
}

fn ill(gpu: &gpush_api::Gpu) -> Option<ApiError> {
    let index = gpu.index;
    let (code, what, hint) = match gpu.state {
        // What an administrator set is no ill health; what the driver reported is.
        GpuState::Cordoned | GpuState::Ready | GpuState::Changing => {
            let own = gpu.cordons.iter().any(|cordon| cordon.by.is_none());
            if !own {
                return None;
            }
            (
                Code::DriverError,
                "is cordoned for a fault that the driver reported",
                format!(
                    "drain it (`gpushctl gpu drain {index}`) and reset it or have it looked at; then `gpushctl gpu uncordon {index}`"
                ),
            )
        }
        // Told once, for the host.
        GpuState::Held | GpuState::Maintenance => return None,
        GpuState::Degraded => (
            Code::DriverError,
            "is degraded",
            format!(
                "see what stands with `gpushctl gpu show {index}`, then apply a layout: `gpushctl mig apply --gpu {index}{}`",
                // Without a rule nobody but who asks knows which.
                if gpu.layout.is_some() { "" } else { " --layout ENTRIES" }
            ),
        ),
        GpuState::Unknown => (
            Code::DriverTimeout,
            "is in a state that is not known",
            format!(
                "wait, and look again: `gpushctl gpu show {index}`; if it stays, see `dmesg | grep -i -e nvrm -e xid`"
            ),
        ),
        GpuState::Lost => (Code::GpuLost, "is lost", gpush_core::refusal::of_a_lost_one(&gpu.uuid)),
    };
    let mut error = ApiError::new(code, format!("GPU {index} ({}) {what}", gpu.uuid)).hint(hint);
    error.causes.clone_from(&gpu.reasons);
    Some(error)
}
