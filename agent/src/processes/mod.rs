//! Processes on GPUs, and those among them without a lease.
//!
//! ```text
//! driver's lists (compute, graphics, MPS) ─► who: uid, command, cgroup, unit, Slurm job
//!     its lease: by its user and cgroup, else by its user and environment (`judge`)
//!     none, and the rule of the GPU requires one ─► stray
//!         the config allows it? ─► no stray
//! stray ─► policy: report ─► shown
//!                  warn   ─► and logged, once
//!                  end    ─► and ended (`end`)
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `cgroup` | to which unit and Slurm job a process belongs |
//! | `lease` | the lease that it runs with |
//! | `judge` | who is a stray, and who of them may be ended |
//! | `held` | a process held fast, and what the kernel says of it |
//! | `allow` | those that the config allows |
//! | `strays` | what was done about each |
//! | `end` | ending strays, where the config says so |
//! | `told` | reports: log, events, audit trail |

mod allow;
mod end;
mod held;
mod judge;
mod lease;
mod strays;
mod told;

use gpush_api::{ApiError, Code, Gpu, GpuProcess, GpuProcesses, GpuState, Process, USERS_UNKNOWN};
use gpush_core::sharing;
use gpush_host::cgroup;

use self::{
    allow::{Allow, Verdict},
    held::Held,
    judge::{Judge, Judged},
};
pub(crate) use self::{end::run, lease::SeenLeases, strays::Strays};
use crate::caller::Viewer;

/// All processes that the driver lists, as `viewer` may see them.
///
/// # Errors
/// When the GPUs can't be seen at all.
pub(crate) async fn list(strays: &Strays, viewer: Viewer) -> Result<GpuProcesses, ApiError> {
    let (judged, unseen) = judged(strays).await?;
    let mut processes: Vec<GpuProcess> = judged.into_iter().map(|judged| judged.process).collect();
    for one in &mut processes {
        one.stray_action = strays.done(one);
        if !viewer.may_see(one.process.uid) {
            hide(one);
        }
    }
    let policy = strays.state.config().processes.stray;
    Ok(GpuProcesses { policy, processes, unseen })
}

/// What is wrong with how strays are dealt with, as it was seen last.
pub(crate) fn health(strays: &Strays) -> Vec<ApiError> {
    strays.unseen()
}

/// Judges all processes with the rights of gpushd. Also returns an error for each GPU whose processes are not known.
async fn judged(strays: &Strays) -> Result<(Vec<Judged>, Vec<ApiError>), ApiError> {
    let gpus = strays.readings.host().await?.gpus(Viewer::Log);
    // The environments of a process and its ancestors may be large, so a blocking thread reads them.
    let (reader, those) = (strays.clone(), gpus.clone());
    let read = tokio::task::spawn_blocking(move || {
        let judge = Judge::of(&reader);
        those.iter().flat_map(|gpu| of(&judge, gpu)).collect()
    });
    let mut judged: Vec<Judged> = read.await.map_err(|_| ApiError::new(Code::Unavailable, "gpushd is about to end"))?;
    if judged.iter().any(|one| one.process.stray.is_some())
        && let Some(allow) = Allow::of(&strays.state.config()).await
    {
        pardon(&mut judged, allow).await;
    }
    Ok((judged, gpus.iter().filter_map(unknown).collect()))
}

/// Why the processes of a GPU are not known.
fn unknown(gpu: &Gpu) -> Option<ApiError> {
    let readable = match gpu.state {
        GpuState::Ready | GpuState::Cordoned | GpuState::Degraded | GpuState::Changing | GpuState::Held => !gpu.stale,
        GpuState::Unknown | GpuState::Lost | GpuState::Maintenance => false,
    };
    if readable && gpu.processes_known {
        return None;
    }
    let mut error = ApiError::new(Code::DriverError, format!("GPU {} ({}): {USERS_UNKNOWN}", gpu.index, gpu.uuid));
    error.causes.extend(gpu.reasons.iter().cloned());
    Some(error.hint(format!("`gpushctl gpu show {}` says how it is", gpu.index)))
}

/// The processes of a GPU and its MIG devices, each with what is known of it.
fn of(judge: &Judge<'_>, gpu: &Gpu) -> Vec<Judged> {
    let whole = gpu.processes.iter().map(|process| (None, None, process));
    let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
    let devices = instances.clone().flat_map(|instance| {
        instance.compute.iter().flat_map(|compute| {
            let words = sharing::words(instance, compute);
            compute.processes.iter().map(move |process| (Some(words.clone()), compute.uuid.as_deref(), process))
        })
    });
    let between = instances.flat_map(|instance| {
        let words = format!("{}@{}", instance.profile, instance.placement.start);
        instance.processes.iter().map(move |process| (Some(words.clone()), None, process))
    });
    let mut all: Vec<Judged> = whole
        .chain(devices)
        .chain(between)
        .map(|(device, device_uuid, process)| known(judge, gpu, device, device_uuid, process))
        .collect();
    let key = |one: &Judged| (one.process.device.clone(), one.process.process.pid);
    all.sort_by_key(key);
    all
}

fn known(judge: &Judge<'_>, gpu: &Gpu, device: Option<String>, device_uuid: Option<&str>, process: &Process) -> Judged {
    let place = process.pid.and_then(cgroup::of);
    let found = judge.of_process(gpu, device_uuid, process);
    let process = GpuProcess {
        gpu: gpu.index,
        gpu_uuid: gpu.uuid.clone(),
        device,
        process: process.clone(),
        unit: place.as_ref().and_then(|place| place.unit.clone()),
        slurm_job: place.as_ref().and_then(|place| Some(place.slurm_job.as_ref()?.id)),
        cgroup: place.map(|place| place.path),
        serves: found.serves,
        lease: found.lease,
        unattributed: found.unattributed,
        allowed: false,
        stray: found.stray,
        stray_action: None,
    };
    Judged { process, spared: found.spared }
}

/// Clears the strays that the config allows. A separate thread inspects the programs: their file systems may hang.
async fn pardon(judged: &mut [Judged], allow: Allow) {
    let strays = judged.iter().filter(|one| one.process.stray.is_some());
    let pids: Vec<u32> = strays.filter_map(|one| one.process.process.pid).collect();
    let is_allowed = move |pid: &u32| Held::take(*pid).is_some_and(|one| allow.verdict(&one.facts) == Verdict::Yes);
    let looked = tokio::task::spawn_blocking(move || pids.into_iter().filter(is_allowed).collect::<Vec<_>>());
    let allowed = looked.await.unwrap_or_default();
    let those = judged.iter_mut().map(|one| &mut one.process).filter(|one| one.stray.is_some());
    for one in those.filter(|one| one.process.pid.is_some_and(|pid| allowed.contains(&pid))) {
        (one.stray, one.allowed) = (None, true);
    }
}

/// Takes out what only its owner and admins may see.
fn hide(one: &mut GpuProcess) {
    let process = &mut one.process;
    (process.pid, process.uid, process.user, process.command) = (None, None, None, None);
    (one.cgroup, one.unit, one.slurm_job, one.lease) = (None, None, None, None);
    one.unattributed = false;
}
