//! `gpushctl gpu reset`: enters maintenance, runs `nvidia-smi --gpu-reset`, and leaves maintenance.
//!
//! nvidia-smi resets a GPU only if no process has it open. gpushd has all GPUs open, except during maintenance. The
//! request for maintenance names the GPUs to reset, so that leases on other GPUs do not prevent the maintenance.

use std::{process::Stdio, time::Duration};

use gpush_api::{
    ApiError, Code, Gpu, GpuIndex, GpuState, GpuUuid, Holder, LOST_GPU_HINT, Lease, MaintenanceRequest, Mode, Process,
};
use gpush_client::Client;
use gpush_core::{desired, holders, lease::usage, refusal, selector};

use super::{
    drain::{TemporaryCordons, Waited},
    host::{self, Entered},
};
use crate::{
    args::{SomeGpus, Why},
    exit::{Failure, Outcome},
    output::{ChangedGpus, Output},
    program,
    render::{Appearance, names::gpu_numbers},
};

/// The GPUs to reset.
struct ResetTarget {
    gpus: Vec<Gpu>,
    /// Names the GPUs: `GPU 3` or `GPUs 0-3`.
    numbers: String,
    reason: String,
}

/// Resets GPUs. On a terminal, asks the user before it destroys instances, unless `confirmed` is set. With `wait`,
/// first cordons the GPUs and waits until they are idle.
pub(super) async fn run(
    client: &mut Client,
    which: &SomeGpus,
    why: &Why,
    confirmed: bool,
    wait: Option<Duration>,
    out: &Output,
) -> Outcome {
    let all = client.gpus(false).await?;
    let gpus = super::select_of(client, all, &which.selectors()).await?;
    refuse_unmanaged(&gpus)?;
    gpus.iter().try_for_each(refuse_passed_through)?;
    gpus.iter().try_for_each(refuse_lost)?;
    if wait.is_none() {
        refuse_all_in_use(client, &gpus).await?;
    }
    if !confirmed && out.can_ask() && !confirm(&gpus, out)? {
        out.remark("Nothing was changed.\n");
        return Ok(1);
    }
    let indexes: Vec<GpuIndex> = gpus.iter().map(|gpu| gpu.index).collect();
    let numbers = gpu_numbers(&indexes);
    let reason = why.reason.clone().unwrap_or_else(|| format!("reset of {numbers}"));
    let mut target = ResetTarget { gpus, numbers, reason };
    let Some(limit) = wait else { return reset(client, &target, None, out).await };
    let idle = TemporaryCordons::idle(client, &mut target.gpus, &target.reason, limit, out).await;
    let (waited, kept) = idle.map_err(|failure| match failure {
        Failure::Error(error) => denied_reset(*error, &target.numbers).into(),
        Failure::BrokenPipe => Failure::BrokenPipe,
    })?;
    if waited != Waited::Idle {
        return Ok(waited.exit_status());
    }
    let outcome = match refuse_all_in_use(client, &target.gpus).await {
        Ok(()) => reset(client, &target, Some(limit), out).await,
        Err(failure) => Err(failure),
    };
    kept.clear(client).await;
    outcome
}

/// Resets GPUs that are idle. With `limit`, waits until no operation changes any GPU of the host.
async fn reset(client: &mut Client, target: &ResetTarget, limit: Option<Duration>, out: &Output) -> Outcome {
    let ResetTarget { gpus, numbers, reason } = target;
    let uuids: Vec<GpuUuid> = gpus.iter().map(|gpu| gpu.uuid.clone()).collect();
    let request = |reason: String| MaintenanceRequest { reason: Some(reason), gpu_uuids: uuids.clone() };
    let enter = request(reason.clone());
    match limit {
        None => {
            client.enter_maintenance(&enter).await.map_err(|error| denied_reset(*error.error, numbers))?;
        }
        Some(limit) => {
            let failure = format!("{numbers} could not be reset");
            if let Entered::Not(status) = host::poll(client, &enter, &failure, limit, out).await? {
                return Ok(status);
            }
        }
    }
    out.remark(&format!("{numbers}: resetting; gpushd is in maintenance meanwhile\n"));
    let result = run_nvidia_smi(&uuids.join(","));
    let ended = if result.is_ok() { format!("reset of {numbers}") } else { format!("the reset of {numbers} failed") };
    let left = client.leave_maintenance(&request(ended)).await;
    if let Err(mut error) = result {
        error.message = format!("{numbers}: {}", error.message);
        for uuid in &uuids {
            let found = client.holders(uuid.as_str()).await.map(|found| found.holders).unwrap_or_default();
            error.causes.extend(found.iter().map(|holder| format!("held by {}", holders::describe(holder))));
        }
        if left.is_err() {
            error = error.hint("gpushd is still in maintenance: end maintenance with 'gpushctl maintenance leave'");
        }
        return Err(error.into());
    }
    left?;
    let now = client.gpus(false).await?;
    let now: Vec<Gpu> = now.into_iter().filter(|gpu| uuids.contains(&gpu.uuid)).collect();
    out.change(true, &ChangedGpus { gpus: &now }, |look| after_reset(&now, numbers, look))?;
    Ok(0)
}

/// Names the reset if the user may not reset GPUs: a reset needs a cordon and maintenance, which the user did not request.
fn denied_reset(error: ApiError, numbers: &str) -> ApiError {
    let message = format!("cannot reset {numbers}: only administrators may reset GPUs");
    if error.code == Code::Denied { ApiError { message, ..error } } else { error }
}

/// Describes GPUs that were reset, with the next commands.
fn after_reset(now: &[Gpu], numbers: &str, look: &Appearance) -> String {
    let mut text = format!("{numbers}: reset\n");
    let mut next = |test: &dyn Fn(&Gpu) -> bool, what: &str, command: &str, effect: &str| {
        let which: Vec<GpuIndex> = now.iter().filter(|gpu| test(gpu)).map(|gpu| gpu.index).collect();
        if !which.is_empty() {
            let arguments = which.iter().map(GpuIndex::to_string).collect::<Vec<_>>().join(",");
            let line = format!("{}: {what}; `{command} {arguments}` {effect}", gpu_numbers(&which));
            text += &(look.wrap("", &line).join("\n") + "\n");
        }
    };
    let drifts = |gpu: &Gpu| !gpu.drift.is_empty();
    next(&drifts, "drift from the config", "gpushctl apply", "applies the config");
    next(&|gpu| !gpu.cordons.is_empty(), "still cordoned", "gpushctl gpu uncordon", "ends the cordon");
    text
}

/// Refuses a GPU whose rule has mode `unmanaged`, because gpush never changes such a GPU.
fn refuse_unmanaged(gpus: &[Gpu]) -> Result<(), ApiError> {
    let (unmanaged, others): (Vec<&Gpu>, Vec<&Gpu>) = gpus.iter().partition(|gpu| gpu.mode == Mode::Unmanaged);
    let Some(gpu) = unmanaged.first() else { return Ok(()) };
    let rule = gpu.rule.as_deref().map_or_else(|| "a rule".to_owned(), desired::rule_name);
    let message = format!("cannot reset GPU {}: {rule} of the config sets the mode `unmanaged`", gpu.index);
    let leave_out = if others.is_empty() {
        String::new()
    } else {
        let others = selector::ranges(others.iter().map(|gpu| gpu.index)).join(",");
        format!("reset only the other GPUs: `gpushctl gpu reset {others}`; or ")
    };
    let hint = format!(
        "{leave_out}remove GPU {} from {rule} of the config, then run `gpushctl config check` and \
         `gpushctl config reload`",
        gpu.index
    );
    Err(ApiError::new(Code::Conflict, message).hint(hint))
}

/// Refuses a GPU that is passed through to this virtual machine, because nvidia-smi cannot reset it there.
fn refuse_passed_through(gpu: &Gpu) -> Result<(), ApiError> {
    if !gpu.passed_through {
        return Ok(());
    }
    let message = format!("cannot reset GPU {}: it is passed through to this virtual machine", gpu.index);
    Err(ApiError::new(Code::Unsupported, message).hint(if gpu.waits_for_reboot() {
        "reboot this virtual machine: its MIG mode then changes"
    } else {
        "reboot this virtual machine: a reboot resets its GPUs"
    }))
}

/// Refuses a GPU that has fallen off the bus, because nvidia-smi cannot reset it.
fn refuse_lost(gpu: &Gpu) -> Result<(), ApiError> {
    if gpu.state != GpuState::Lost {
        return Ok(());
    }
    let message = format!("cannot reset GPU {}: it is lost", gpu.index);
    let mut error = ApiError::new(Code::GpuLost, message).hint(LOST_GPU_HINT);
    error.causes.clone_from(&gpu.reasons);
    Err(error)
}

async fn refuse_all_in_use(client: &mut Client, gpus: &[Gpu]) -> Result<(), Failure> {
    let leases: Vec<Lease> = client.leases(0).await?;
    for gpu in gpus {
        refuse_in_use(gpu, super::lease::holders(gpu, &leases))?;
        // The driver lists only processes that compute, but nvidia-smi also fails because of monitors and services.
        let found = client.holders(gpu.uuid.as_str()).await?;
        refuse_held(gpu, found.holders)?;
    }
    Ok(())
}

/// Refuses a GPU that a process has open.
fn refuse_held(gpu: &Gpu, found: Vec<Holder>) -> Result<(), ApiError> {
    let left = holders::obstacles(found, &[]);
    if left.is_empty() {
        return Ok(());
    }
    Err(holders::explain_reset(&format!("GPU {}", gpu.index), &left))
}

/// Refuses a GPU that has computing processes or leases.
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
    error.hint = usage::hint(gpu.leases.iter().map(|lease| lease.id));
    Err(error)
}

/// Shows which instances the reset destroys, and asks the user whether to continue.
fn confirm(gpus: &[Gpu], out: &Output) -> Result<bool, Failure> {
    let number: usize = gpus.iter().flat_map(|gpu| &gpu.mig).map(|mig| mig.instances.len()).sum();
    if number == 0 {
        return Ok(true);
    }
    out.text(&destroyed(gpus, &out.look))?;
    let what = if number == 1 { "1 instance".to_owned() } else { format!("{number} instances") };
    out.confirmed(&format!("This destroys {what}. Continue?"))
}

/// Lists the instances that the reset destroys, one line for each GPU.
fn destroyed(gpus: &[Gpu], look: &Appearance) -> String {
    let mut lines = Vec::new();
    for gpu in gpus {
        let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
        let names: Vec<String> =
            instances.map(|one| format!("{}@{}", look.clean(&one.profile), one.placement.start)).collect();
        if !names.is_empty() {
            lines.extend(look.wrap(&format!("GPU {}: - ", gpu.index), &names.join(", ")));
        }
    }
    lines.into_iter().map(|line| line + "\n").collect()
}

fn run_nvidia_smi(uuids: &str) -> Result<(), ApiError> {
    let output = program::command("nvidia-smi")?.args(["--gpu-reset", "-i", uuids]).stdin(Stdio::null()).output();
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
    Err(error.hint(
        "run `gpushctl gpu holders` to see what has the GPUs open; if the GPU has fallen off the bus, reboot the host",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn reset_gpus_name_the_next_commands() {
        let mut gpus = fixtures::mixed();
        gpus.truncate(3);
        gpus[0].cordons = vec![gpush_api::Cordon {
            cause: "admin".into(),
            reason: "test".into(),
            by: None,
            since: jiff::Timestamp::UNIX_EPOCH,
        }];
        let text = after_reset(&gpus, "GPUs 0-2", &fixtures::look(100, Charset::Ascii));
        insta::assert_snapshot!(text, @r"
        GPUs 0-2: reset
        GPU 1: drift from the config; `gpushctl apply 1` applies the config
        GPU 0: still cordoned; `gpushctl gpu uncordon 0` ends the cordon
        ");
    }

    /// Fault: a monitor is not in the driver's list, so the reset was tried and nvidia-smi failed.
    #[test]
    fn held_gpu_is_refused_before_the_reset() {
        let gpu = fixtures::mixed().remove(0);
        let fabric_manager = Holder {
            pid: Some(7),
            uid: Some(0),
            unit: Some("nvidia-fabricmanager.service".to_owned()),
            ..Holder::default()
        };
        let module = Holder { module: Some("nvidia_drm".to_owned()), ..Holder::default() };
        assert!(refuse_held(&gpu, vec![fabric_manager, module]).is_ok());
        let monitor = Holder { pid: Some(812), unit: Some("nvidia-dcgm.service".to_owned()), ..Holder::default() };
        let error = refuse_held(&gpu, vec![monitor]).unwrap_err();
        assert_eq!((error.code, error.code.exit_status()), (Code::Blocked, 4));
        assert_eq!(error.causes, ["held by pid 812 (service nvidia-dcgm)"]);
    }

    #[test]
    fn reset_of_passed_through_gpu_is_refused() {
        let mut gpu = fixtures::mixed().remove(0);
        assert!(refuse_passed_through(&gpu).is_ok());
        gpu.passed_through = true;
        let error = refuse_passed_through(&gpu).unwrap_err();
        assert_eq!((error.code, error.code.exit_status()), (Code::Unsupported, 7));
        assert_eq!(error.message, "cannot reset GPU 0: it is passed through to this virtual machine");
    }

    #[test]
    fn lost_gpu_is_refused_with_the_advice_to_reboot() {
        let mut gpu = fixtures::mixed().remove(0);
        assert!(refuse_lost(&gpu).is_ok());
        gpu.state = GpuState::Lost;
        let error = refuse_lost(&gpu).unwrap_err();
        assert_eq!(error.code, Code::GpuLost);
        assert!(error.hint.unwrap().contains("reboot the host"));
    }

    /// Earlier fault: `gpu reset` reset a GPU that gpushd must never change.
    #[test]
    fn unmanaged_gpu_is_not_reset() {
        let mut gpus = fixtures::mixed();
        gpus.truncate(3);
        assert!(refuse_unmanaged(&gpus).is_ok());
        (gpus[1].mode, gpus[1].rule) = (Mode::Unmanaged, Some("handsoff".to_owned()));
        let error = refuse_unmanaged(&gpus).unwrap_err();
        assert_eq!(error.message, "cannot reset GPU 1: rule `handsoff` of the config sets the mode `unmanaged`");
        assert!(
            error.hint.unwrap().starts_with(
                "reset only the other GPUs: `gpushctl gpu reset 0,2`; or remove GPU 1 from rule `handsoff` "
            )
        );
        let alone = refuse_unmanaged(&gpus[1..2]).unwrap_err().hint.unwrap();
        assert!(alone.starts_with("remove GPU 1 from rule `handsoff` of the config, then run "), "{alone}");
    }

    #[test]
    fn destroyed_instances_are_listed_for_each_gpu() {
        let gpus = fixtures::mixed();
        let with_mig: Vec<Gpu> =
            gpus.into_iter().filter(|gpu| gpu.mig.as_ref().is_some_and(|mig| !mig.instances.is_empty())).collect();
        let text = destroyed(&with_mig[..1], &fixtures::look(80, Charset::Ascii));
        let first = &with_mig[0].mig.as_ref().unwrap().instances[0];
        assert!(text.starts_with(&format!("GPU {}: - ", with_mig[0].index)), "{text}");
        assert!(text.contains(&format!("{}@{}", first.profile, first.placement.start)), "{text}");
    }
}
