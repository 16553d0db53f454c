//! Processes on GPUs, and which of them have no lease.
//!
//! ```text
//! the driver's lists (compute, graphics, MPS) ─► user, command, cgroup, unit and Slurm job of each process
//!     its lease ([`gpush_core::attribution`])
//!     no lease, though the rule of its GPU requires one, and not allowed by the config ─► unleased
//! unleased ─► on a device that another user has leased, or that Slurm owns: also shown with the GPU and in health, with
//!             one event
//! unleased ─► policy "report": shown
//!             policy "warn": shown, and logged once
//!             policy "end": shown, logged and ended (`end`)
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `allow` | processes that the config allows |
//! | `classify` | which processes are unleased |
//! | `end` | warns about unleased processes, or ends them |
//! | `identity` | a process opened with a pidfd, and its identity |
//! | `report` | log, events and audit trail |
//! | `unleased` | what gpushd did about each unleased process |

mod allow;
mod classify;
mod end;
mod identity;
mod report;
mod unleased;

use std::sync::Arc;

use gpush_api::{
    ApiError, Code, Gpu, GpuProcess, GpuProcesses, GpuState, Process, TargetUuid, USERS_UNKNOWN, UnknownProcesses,
};
use gpush_core::sharing;
use gpush_host::{process_facts::ProcessFacts, subtask};

#[cfg(test)]
pub(crate) use self::end::check_once;
use self::{
    allow::{AllowList, Match},
    classify::{Classification, ClassifiedProcess, Classifier},
    identity::OpenedProcess,
};
pub(crate) use self::{end::run, unleased::Unleased};
use crate::requests::caller::Viewer;

/// Returns all processes that the driver lists, as `viewer` may see them.
///
/// # Errors
/// If the GPUs cannot be read.
pub(crate) async fn list(unleased: &Unleased, viewer: Viewer) -> Result<GpuProcesses, ApiError> {
    let (classified, unknown) = classified(unleased).await?;
    let mut processes: Vec<GpuProcess> = classified.into_iter().map(|one| one.process).collect();
    for one in &mut processes {
        unleased.describe(one);
        if !viewer.may_see(one.process.uid) {
            redact_process(one);
        }
    }
    let policy = unleased.context.state.config().processes.unleased;
    Ok(GpuProcesses { policy, processes, unknown })
}

/// Returns an error for each file in `processes.allow` that gpushd could not see at the last check, and for each GPU with
/// processes on a device of others.
pub(crate) fn health(unleased: &Unleased) -> Vec<ApiError> {
    let mut errors = unleased.invisible();
    errors.extend(unleased.context.state.now().gpus.iter().filter_map(|gpu| trespass_error(&gpu.gpu)));
    errors
}

/// Returns the error about processes on a device of others. Every user may read it, so it names no process.
fn trespass_error(gpu: &Gpu) -> Option<ApiError> {
    let what = match gpu.unleased.len() {
        0 => return None,
        1 => "1 process uses a device that belongs to others".to_owned(),
        number => format!("{number} processes use devices that belong to others"),
    };
    let mut error = ApiError::new(Code::Conflict, format!("GPU {} ({}): {what}", gpu.index, gpu.uuid));
    for one in &gpu.unleased {
        if !error.causes.contains(&one.why) {
            error.causes.push(one.why.clone());
        }
    }
    Some(error.hint(format!("`gpushctl ps --unleased -g {}` lists the processes", gpu.index)))
}

/// Finds the leases of all processes, including details that only gpushd may see. Also returns the GPUs whose processes
/// are not known.
async fn classified(unleased: &Unleased) -> Result<(Vec<ClassifiedProcess>, Vec<UnknownProcesses>), ApiError> {
    let gpus = unleased.context.readings.host().await?.gpus(Viewer::Log);
    let (handle, listed) = (unleased.clone(), gpus.clone());
    let classify = move || {
        let classifier = Classifier::new(&handle);
        listed.iter().flat_map(|gpu| classify_gpu(&classifier, gpu)).collect()
    };
    // Use a blocking thread: environments may be large, and a file system may not answer.
    let processes: Option<Vec<ClassifiedProcess>> = subtask::blocking(classify).await;
    let mut processes = processes.ok_or_else(|| ApiError::stopping("gpushd is stopping"))?;
    if processes.iter().any(|one| one.process.unleased.is_some())
        && let Some(allow) = unleased.allow_list().await
    {
        mark_allowed(&mut processes, allow).await;
    }
    Ok((processes, gpus.iter().filter_map(unknown).collect()))
}

/// Returns why the processes of a GPU are not known; `None` if they are known.
fn unknown(gpu: &Gpu) -> Option<UnknownProcesses> {
    let is_readable = match gpu.state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded | GpuState::Changing | GpuState::Held => !gpu.stale,
        GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    };
    if is_readable && gpu.processes_known {
        return None;
    }
    let mut error = ApiError::new(Code::DriverError, format!("GPU {} ({}): {USERS_UNKNOWN}", gpu.index, gpu.uuid));
    error.causes.extend(gpu.reasons.iter().cloned());
    let error = error.hint(format!("see its state with `gpushctl gpu show {}`", gpu.index));
    Some(UnknownProcesses { gpu: gpu.index, gpu_uuid: gpu.uuid.clone(), error })
}

/// Returns the processes of a GPU and its MIG devices, sorted by device and pid.
fn classify_gpu(classifier: &Classifier<'_>, gpu: &Gpu) -> Vec<ClassifiedProcess> {
    let add = |device: Option<&str>, uuid: Option<&TargetUuid>, listed: &[Process]| -> Vec<ClassifiedProcess> {
        listed.iter().map(|process| classify_process(classifier, gpu, device, uuid, process)).collect()
    };
    let mut all = add(None, None, &gpu.processes);
    for instance in gpu.mig.iter().flat_map(|mig| &mig.instances) {
        for compute in &instance.compute {
            let device = sharing::device_name(instance, compute);
            all.extend(add(Some(&device), compute.uuid.as_ref(), &compute.processes));
        }
        let device = format!("{}@{}", instance.profile, instance.placement.start);
        all.extend(add(Some(&device), None, &instance.processes));
    }
    all.sort_by_key(|one| (one.process.device.clone(), one.process.process.pid));
    all
}

fn classify_process(
    classifier: &Classifier<'_>,
    gpu: &Gpu,
    device: Option<&str>,
    device_uuid: Option<&TargetUuid>,
    process: &Process,
) -> ClassifiedProcess {
    let names = &classifier.unleased.lease_names;
    let examine = |facts: &ProcessFacts<'_>| {
        let found = match process.uid.is_some_and(|uid| classifier.unleased.is_same_user(uid, facts.owner())) {
            true => classifier.classify(gpu, device_uuid, process.kind, facts),
            // The process has changed its user since the driver listed it. Wait for the next reading.
            false => Classification::default(),
        };
        (found, facts.membership().cloned())
    };
    let examined = process.pid.and_then(|pid| ProcessFacts::examine(names, pid, examine).ok().flatten());
    let (found, cgroup) = examined.unwrap_or_default();
    let process = GpuProcess {
        gpu: gpu.index,
        gpu_uuid: gpu.uuid.clone(),
        device: device.map(str::to_owned),
        process: process.clone(),
        account: None,
        unit: cgroup.as_ref().and_then(|cgroup| cgroup.unit.clone()),
        slurm_job: cgroup.as_ref().and_then(|cgroup| Some(cgroup.slurm_job.as_ref()?.id)),
        cgroup: cgroup.map(|cgroup| cgroup.path),
        serves: found.serves,
        lease: found.lease,
        unattributed: found.unattributed,
        allowed: false,
        unleased: found.unleased,
        unleased_step: None,
        unleased_action: None,
    };
    let target = device_uuid.unwrap_or(gpu.uuid.as_target()).clone();
    ClassifiedProcess { process, exempt: found.exempt, trespass: found.trespass, target }
}

/// Marks the unleased processes that the config allows.
async fn mark_allowed(processes: &mut [ClassifiedProcess], allow: Arc<AllowList>) {
    let unleased = processes.iter_mut().map(|one| &mut one.process).filter(|one| one.unleased.is_some());
    let unleased: Vec<&mut GpuProcess> = unleased.collect();
    let pids: Vec<u32> = unleased.iter().filter_map(|one| one.process.pid).collect();
    let is_allowed =
        move |pid: &u32| OpenedProcess::open(*pid).is_some_and(|one| allow.matches(&one.identity) == Match::Yes);
    let allowed: Option<Vec<u32>> = subtask::blocking(move || pids.into_iter().filter(is_allowed).collect()).await;
    let allowed = allowed.unwrap_or_default();
    for one in unleased.into_iter().filter(|one| one.process.pid.is_some_and(|pid| allowed.contains(&pid))) {
        (one.unleased, one.allowed) = (None, true);
    }
    processes.iter_mut().filter(|one| one.process.allowed).for_each(|one| one.trespass = None);
}

/// Removes the details that only the owner of a process and administrators may see.
fn redact_process(one: &mut GpuProcess) {
    let process = &mut one.process;
    (process.pid, process.uid, process.user, process.command) = (None, None, None, None);
    (one.cgroup, one.unit, one.slurm_job, one.lease) = (None, None, None, None);
    one.unattributed = false;
}
