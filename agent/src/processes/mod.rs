//! Processes on GPUs, and those among them that belong to nobody who was given a share.
//!
//! ```text
//! driver's lists (compute, graphics, MPS) ─► who: uid, command, cgroup, unit, Slurm job
//!     GPU or MIG device shared through MPS ──► its user has a share, and it comes through MPS? ─► stray
//!     any other ─────────────────────────────► not asked: nobody is given shares of it
//! stray ─► policy: report ─► shown
//!                  warn   ─► and logged, once
//!                  end    ─► and ended (`end`)
//! ```
//!
//! | file | subject |
//! |---|---|
//! | `cgroup` | to which unit and Slurm job a process belongs |
//! | `end` | ending strays, where the config says so |

mod cgroup;
mod end;

use std::collections::BTreeSet;

use gpush_api::{
    ApiError, Code, Gpu, GpuProcess, GpuProcesses, GpuState, Process, ProcessKind, StrayPolicy, USERS_UNKNOWN,
};
use gpush_core::sharing;

pub(crate) use self::end::{Strays, run};
use crate::{agent::Shared, auth::Asker, mps, view};

/// All processes that the driver lists, as `asker` may see them.
///
/// # Errors
/// When the GPUs can't be seen at all.
pub(crate) async fn list(agent: &Shared, asker: &Asker) -> Result<GpuProcesses, ApiError> {
    let gpus = view::gpus(agent, &Asker::log()).await?;
    let mut processes = Vec::new();
    let mut unseen = Vec::new();
    for gpu in &gpus {
        unseen.extend(unknown(gpu));
        processes.extend(of(agent, gpu));
    }
    for one in &mut processes {
        one.done = agent.strays.done(one);
        if !asker.may_see(one.process.uid) {
            hide(one);
        }
    }
    let policy = agent.settings.config().processes.stray;
    Ok(GpuProcesses { policy, processes, unseen })
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
fn of(agent: &Shared, gpu: &Gpu) -> Vec<GpuProcess> {
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
    let mut all: Vec<GpuProcess> = whole
        .chain(devices)
        .chain(between)
        .map(|(device, device_uuid, process)| known(agent, gpu, device, device_uuid, process))
        .collect();
    all.sort_by(|one, other| (&one.device, one.process.pid).cmp(&(&other.device, other.process.pid)));
    all
}

fn known(
    agent: &Shared,
    gpu: &Gpu,
    device: Option<String>,
    device_uuid: Option<&str>,
    process: &Process,
) -> GpuProcess {
    let target = device_uuid.unwrap_or(&gpu.uuid);
    let shared = mps::sharing(agent, target);
    let place = process.pid.and_then(cgroup::of);
    let share = shared.as_ref().and_then(|shared| shared.share_of(process));
    let stray = shared.as_ref().and_then(|shared| why_stray(shared, process, share.as_deref()));
    GpuProcess {
        gpu: gpu.index,
        gpu_uuid: gpu.uuid.clone(),
        device,
        process: process.clone(),
        unit: place.as_ref().and_then(|place| place.unit.clone()),
        slurm_job: place.as_ref().and_then(|place| place.slurm_job),
        cgroup: place.map(|place| place.path),
        share,
        stray,
        done: None,
    }
}

/// Why a process on a target that is shared through MPS has no place there.
fn why_stray(shared: &mps::SharedTarget, process: &Process, share: Option<&str>) -> Option<String> {
    let uid = process.uid?;
    if process.pid.is_some_and(|pid| shared.servers.contains(&pid)) || share.is_some() {
        return None;
    }
    let holds = shared.holders.contains(&uid);
    match process.kind {
        ProcessKind::MpsClient if holds => Some("it took none of its user's shares".to_owned()),
        ProcessKind::MpsClient => Some("its user has no share".to_owned()),
        ProcessKind::Compute => Some("it computes past MPS".to_owned()),
        ProcessKind::Graphics => Some("it draws, and has no share".to_owned()),
    }
}

/// Takes out what only its owner and admins may see.
fn hide(one: &mut GpuProcess) {
    let process = &mut one.process;
    (process.pid, process.uid, process.user, process.command) = (None, None, None, None);
    (one.cgroup, one.unit, one.slurm_job, one.share) = (None, None, None, None);
}

/// Whether the config allows a process by the file that it runs and by its user, never by its name.
fn is_allowed(agent: &Shared, pid: u32, uid: u32) -> bool {
    use std::os::unix::fs::MetadataExt;
    let config = agent.settings.config();
    let runs = std::fs::metadata(format!("/proc/{pid}/exe")).ok().map(|meta| (meta.dev(), meta.ino()));
    config.processes.allow.iter().any(|allowed| {
        let by_uid = allowed.uid.is_none_or(|allowed| allowed == uid);
        let by_exe = allowed.exe.as_deref().is_none_or(|exe| {
            let file = std::fs::metadata(exe).ok().map(|meta| (meta.dev(), meta.ino()));
            file.is_some() && file == runs
        });
        by_uid && by_exe
    })
}

/// The strays of this host, as gpushd itself sees them.
async fn strays(agent: &Shared) -> Vec<GpuProcess> {
    // Where nobody is given shares there are none, and no GPU need be read.
    if !agent.mps.is_used() || agent.settings.config().processes.stray == StrayPolicy::Report {
        return Vec::new();
    }
    let Ok(all) = list(agent, &Asker::log()).await else { return Vec::new() };
    let mut seen = BTreeSet::new();
    all.processes
        .into_iter()
        .filter(|one| one.stray.is_some() && one.process.pid.is_some_and(|pid| seen.insert(pid)))
        .collect()
}
