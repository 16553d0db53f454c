//! `gpushctl gpu reset`: enters maintenance, runs `nvidia-smi --gpu-reset`, and leaves maintenance.
//!
//! nvidia-smi resets only GPUs that no process has open. Outside of maintenance, gpushd itself has
//! driver handles open.

use std::{
    process::{Command, Stdio},
    time::Duration,
};

use gpush_api::{ApiError, Code, Gpu, Process, ReasonRequest};
use gpush_client::Client;
use gpush_core::{lease::usage, refusal};

use super::drain::{TemporaryCordons, Waited};
use crate::{
    args::{SomeGpus, Why},
    exit::Outcome,
    output::Output,
    render::status::gpu_numbers,
};

/// Resets GPUs. With `wait`, the GPUs are cordoned and the reset waits until they are idle.
pub(super) async fn run(
    client: &mut Client,
    which: &SomeGpus,
    why: &Why,
    wait: Option<Duration>,
    out: &Output,
) -> Outcome {
    let all = client.gpus(false).await?;
    let mut gpus = super::select_of(client, all, &which.selectors()).await?;
    let indexes: Vec<u32> = gpus.iter().map(|gpu| gpu.index).collect();
    let reason = why.reason.clone().unwrap_or_else(|| format!("reset of {}", gpu_numbers(&indexes)));
    let Some(limit) = wait else { return idle(client, &gpus, &indexes, reason, out).await };
    let (waited, kept) = TemporaryCordons::idle(client, &mut gpus, &reason, limit, out).await?;
    if waited != Waited::Idle {
        return Ok(waited.exit_status());
    }
    let outcome = idle(client, &gpus, &indexes, reason, out).await;
    kept.clear(client).await;
    outcome
}

/// Resets GPUs that are idle.
async fn idle(client: &mut Client, gpus: &[Gpu], indexes: &[u32], reason: String, out: &Output) -> Outcome {
    let leases = client.leases(0).await?;
    for gpu in gpus {
        refuse_in_use(gpu, super::lease::holders(gpu, &leases))?;
    }
    let numbers = gpu_numbers(indexes);
    client.enter_maintenance(&ReasonRequest { reason: Some(reason) }).await?;
    out.remark(&format!("{numbers}: resetting; gpushd is in maintenance meanwhile\n"));
    let uuids: Vec<&str> = gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
    let result = reset(&uuids.join(","));
    let left = client.leave_maintenance(&ReasonRequest { reason: None }).await;
    if let Err(mut error) = result {
        error.message = format!("{numbers}: {}", error.message);
        if left.is_err() {
            error = error.hint("gpushd is still in maintenance: end it with 'gpushctl maintenance leave'");
        }
        return Err(error.into());
    }
    left?;
    let now = client.gpus(false).await?;
    let now: Vec<Gpu> = now.into_iter().filter(|gpu| uuids.contains(&gpu.uuid.as_str())).collect();
    out.show(&now, |_| format!("{numbers}: reset\n"))?;
    Ok(0)
}

/// Refuses a GPU that processes use or that leases occupy.
fn refuse_in_use(gpu: &Gpu, holders: Vec<String>) -> Result<(), ApiError> {
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    let within = instances.flat_map(|one| one.processes.iter().chain(one.compute.iter().flat_map(|c| &c.processes)));
    let users: Vec<&Process> = gpu.processes.iter().chain(within).collect();
    if users.is_empty() && holders.is_empty() {
        return Ok(());
    }
    let message = format!("cannot reset GPU {}: it is in use", gpu.index);
    let mut error = ApiError::new(Code::Blocked, message).retryable();
    error.causes.extend(users.into_iter().map(refusal::holder));
    error.causes.extend(holders);
    let wait = || format!("wait until it is idle with `gpushctl gpu reset {} --wait`", gpu.index);
    Err(error.hint(usage::hint(gpu.leases.iter().map(|lease| lease.id)).unwrap_or_else(wait)))
}

fn reset(uuids: &str) -> Result<(), ApiError> {
    let output = Command::new("nvidia-smi").args(["--gpu-reset", "-i", uuids]).stdin(Stdio::null()).output();
    let output = output.map_err(|error| {
        crate::exit::io("cannot run nvidia-smi", &error).hint("install it, or add its directory to PATH")
    })?;
    if output.status.success() {
        return Ok(());
    }
    let mut error = ApiError::new(Code::DriverError, format!("`nvidia-smi --gpu-reset` failed: {}", output.status));
    for text in [&output.stdout, &output.stderr] {
        let text = String::from_utf8_lossy(text);
        error.causes.extend(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned));
    }
    Err(error.hint("run 'fuser -v /dev/nvidia*' to see which processes have the GPU open"))
}
