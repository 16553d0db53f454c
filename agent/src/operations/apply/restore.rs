//! Restores the previous layout of one GPU at the same placements, and reads the layout back.
//!
//! gpushd plans the rollback from a fresh reading, so the number of completed steps does not
//! matter. After a failed step gpushd reads the GPU and plans again, because the cause of the
//! failure may be gone.
//!
//! ```text
//! read ─► plan to the previous layout ─┬─ feasible ──► steps ─► read back ─► restored
//!  ▲                                   └─ in use ────► plan around what stays ─► steps ─► partly restored
//!  └── pause ◄── a step failed, or the processes on the GPU are not known
//! ```
//!
//! If an instance must stay, gpushd restores all previous instances except those that overlap it.
//! An instance must stay in these cases:
//!
//! - A process has started in it.
//! - It belongs to neither the previous layout nor the plan.
//! - On the last attempts: the driver refused to destroy it in an earlier attempt.
//! - On the last attempts: the driver does not list the processes on the GPU, and the instance has compute instances. A
//!   GPU instance without compute instances has no processes.

use std::{collections::BTreeSet, time::Duration};

use gpush_api::{ApiError, Code, GpuInstance, InstanceStep, Mig, Refusal, USERS_UNKNOWN};
use gpush_core::{
    geometry::Geometry,
    plan::{self, PartialRestore, ProtectedInstances, Target},
    refusal,
    step::{Instances, same_layout},
};
use gpush_nvml::{Reading, ReadingPart};

use super::part::{Part, instances};
use crate::{
    modes::{
        Trouble,
        mig::{self, MigMode, reset::Purpose},
    },
    state::{redact, words},
};

/// Number of attempts to restore the previous layout.
const ATTEMPTS: u32 = 3;

/// Pause after the first attempt; twice as long after the second.
const PAUSE: Duration = Duration::from_millis(200);

/// The error of an attempt that did not restore the layout.
struct RestoreFailure {
    trouble: Trouble,
    /// Id of the GPU instance that the driver refused to destroy.
    refused: Option<u32>,
}

impl From<Trouble> for RestoreFailure {
    fn from(trouble: Trouble) -> Self {
        Self { trouble, refused: None }
    }
}

/// How much an attempt restores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RestoreScope {
    /// The instances. MIG mode stays on, even if it was off before.
    Instances,
    /// The instances and the MIG mode.
    Mode,
}

/// Restores the MIG mode of GPUs that can only be reset together. gpushd cannot restore these GPUs one by one, because
/// each GPU would block the reset of the other GPUs. Returns no errors: [`restore_previous_layout`] runs for each GPU
/// afterwards and reports the errors.
pub(super) async fn restore_modes_together(mig: &MigMode, purpose: &Purpose<'_>, parts: &[&Part]) {
    let mut changed: Vec<&Part> = Vec::new();
    for &part in parts.iter().filter(|part| part.peers().next().is_some()) {
        let Ok(reading) = mig.driver.read(&part.gpu()).await else { continue };
        if let (Some(before), Some(now)) = (&part.before, &reading.mig)
            && before.enabled != now.enabled
        {
            changed.push(part);
        }
    }
    let was_on = |part: &&Part| part.before.as_ref().is_some_and(|before| before.enabled);
    let (on, off): (Vec<&Part>, Vec<&Part>) = changed.into_iter().partition(was_on);
    for attempt in 1..=ATTEMPTS {
        let is_on = on.len() < 2 || switch_together(mig, purpose, &on, true).await;
        let is_off = off.len() < 2 || off_together(mig, purpose, &off).await;
        if is_on && is_off {
            return;
        }
        tokio::time::sleep(PAUSE * attempt).await;
    }
}

/// Destroys the instances that the operation created on these GPUs, and disables MIG mode on all of them together.
/// Returns whether both succeeded.
async fn off_together(mig: &MigMode, purpose: &Purpose<'_>, off: &[&Part]) -> bool {
    for part in off {
        if !matches!(once(mig, purpose, part, None, RestoreScope::Instances).await, Ok(None)) {
            return false;
        }
    }
    switch_together(mig, purpose, off, false).await
}

/// Sets the MIG mode of these GPUs together. Returns whether this change succeeded.
async fn switch_together(mig: &MigMode, purpose: &Purpose<'_>, parts: &[&Part], enable: bool) -> bool {
    let changes: Vec<_> = parts.iter().map(|part| part.mode_change()).collect();
    mig::mode::execute(mig, purpose, &changes, enable).await.is_empty()
}

/// Restores the GPU as it was before the operation.
///
/// # Errors
/// If the GPU cannot be restored, or only in part. After an error, the GPU has neither the planned nor the previous
/// state.
pub(super) async fn restore_previous_layout(mig: &MigMode, purpose: &Purpose<'_>, part: &Part) -> Result<(), Trouble> {
    let mut refused = BTreeSet::new();
    let mut attempt = 1;
    loop {
        let stays = (attempt >= ATTEMPTS).then_some(&refused);
        let setback = match once(mig, purpose, part, stays, RestoreScope::Mode).await {
            Ok(None) => return Ok(()),
            Ok(Some(partial)) => return Err(Trouble::Failed(partly(part, partial))),
            Err(setback) => setback,
        };
        let error = match &setback.trouble {
            Trouble::Lost(_) | Trouble::Unknown(_) => return Err(setback.trouble),
            Trouble::Failed(error) | Trouble::InUse(error) => error,
        };
        tracing::warn!(
            gpu = part.plan.gpu_uuid.as_str(),
            "{}: attempt {attempt} to restore the previous layout failed: {}",
            part.label(),
            error.causes.first().unwrap_or(&error.message)
        );
        let another = setback.refused.is_some_and(|gi| refused.insert(gi));
        if attempt >= ATTEMPTS && !another {
            return Err(setback.trouble);
        }
        tokio::time::sleep(PAUSE * attempt.min(ATTEMPTS)).await;
        attempt += 1;
    }
}

/// Makes one attempt to restore the layout. Returns what could not be restored; `None` if everything was restored.
///
/// `stays` contains the ids of the instances that the driver refused to destroy. The attempt destroys neither these
/// instances nor instances whose processes the driver does not list. If `stays` is `None`, the attempt tries to destroy
/// every instance, but fails if the driver does not list the processes of an instance to destroy.
async fn once(
    mig: &MigMode,
    purpose: &Purpose<'_>,
    part: &Part,
    stays: Option<&BTreeSet<u32>>,
    up_to: RestoreScope,
) -> Result<Option<PartialRestore>, RestoreFailure> {
    let gpu = part.gpu();
    let mut reading = mig.driver.read(&gpu).await?;
    if same_layout(part.before.as_ref(), reading.mig.as_ref()) {
        return Ok(None);
    }
    let failed = |error: ApiError| RestoreFailure::from(Trouble::Failed(error));
    let is_on = |reading: &Reading| reading.mig.as_ref().is_some_and(|mig| mig.enabled);
    if part.before.as_ref().is_some_and(|before| before.enabled) && !is_on(&reading) {
        restore_mode(mig, purpose, part, true).await?;
        reading = mig.driver.read(&gpu).await?;
    }
    let (Some(before), Some(now)) = (&part.before, &reading.mig) else {
        let message = format!("{}: the GPU does not support MIG any more", part.label());
        return Err(failed(ApiError::new(Code::DriverError, message)));
    };
    let mut short = None;
    let geometry = Geometry::new(&now.profiles, now.memory_slices, now.compute_slices);
    if now.enabled {
        let daemons = mig.context.state.mps().daemons_on(&part.plan.gpu_uuid);
        let holds = ProtectedInstances::default().with_mps_daemons(&now.instances, &daemons);
        let (steps, partial) = plan_back(part, before, now, &reading, &holds, stays).map_err(failed)?;
        short = partial;
        let mut known = Instances::of(&now.instances);
        for step in &steps {
            mig::instances::execute(&mig.driver, &gpu, step, &mut known).await.map_err(|trouble| RestoreFailure {
                refused: step.destroys().filter(|_| matches!(trouble, Trouble::InUse(_))),
                trouble,
            })?;
        }
    }
    if up_to == RestoreScope::Instances {
        return Ok(short);
    }
    if short.is_none() && (now.enabled, now.pending_mode()) != (before.enabled, before.pending_mode()) {
        restore_mode(mig, purpose, part, before.enabled).await?;
        if before.reset_pending {
            // Before the operation, a new MIG mode was already set, but pending until the next reset. Set that mode
            // again.
            mig::mode::set_pending(&mig.driver, &gpu, before.pending_mode()).await?;
        }
    }
    let reading = mig.driver.read(&gpu).await?;
    let stands = match &short {
        None => same_layout(part.before.as_ref(), reading.mig.as_ref()),
        Some(partial) => {
            let rest = plan::plan(&geometry, instances(reading.mig.as_ref()), &partial.target);
            reading.mig.is_some() && rest.is_ok_and(|rest| rest.steps.is_empty())
        }
    };
    if stands {
        return Ok(short);
    }
    let message = format!("{}: the driver reported success, but the previous layout was not restored", part.label());
    Err(failed(ApiError::new(Code::DriverError, message)))
}

/// Plans the steps that restore the instances from before the operation, starting from the current state (`now`). If an
/// instance must stay, the steps restore only a part, and the second result describes this partial restore.
fn plan_back(
    part: &Part,
    before: &Mig,
    now: &Mig,
    reading: &Reading,
    holds: &ProtectedInstances,
    stays: Option<&BTreeSet<u32>>,
) -> Result<(Vec<InstanceStep>, Option<PartialRestore>), ApiError> {
    let geometry = &Geometry::new(&now.profiles, now.memory_slices, now.compute_slices);
    let previous: &[GpuInstance] = if before.enabled { &before.instances } else { &[] };
    let target = Target::of_instances(geometry, previous);
    let unknown = |instance: &GpuInstance| !reading.processes_known && !instance.compute.is_empty();
    let others = plan::foreign_instances(&now.instances, previous, &part.outcome);
    let untouchable = |instance: &GpuInstance| {
        others.contains(&instance.id) || unknown(instance) || stays.is_some_and(|stays| stays.contains(&instance.id))
    };
    let mut planned = plan::plan_protecting(geometry, &now.instances, &target, holds);
    let instead = match &planned {
        Ok(plan) if !destroys(&plan.steps, &now.instances, untouchable) => false,
        Ok(plan) if stays.is_none() && destroys(&plan.steps, &now.instances, unknown) => {
            return Err(users_unknown(part, reading));
        }
        Ok(_) | Err(Refusal::Blocked { .. }) => true,
        Err(_) => false,
    };
    let mut short = None;
    if instead {
        let mut partial = plan::partial_restore(geometry, &now.instances, previous, untouchable);
        partial.others = others;
        planned = plan::plan_protecting(geometry, &now.instances, &partial.target, holds);
        short = Some(partial);
    }
    match planned {
        Ok(plan) => Ok((plan.steps, short)),
        Err(refused) => Err(not_feasible(part, refused)),
    }
}

/// Creates the error that the previous layout cannot be restored. The log gets all details; the error does not name
/// processes.
fn not_feasible(part: &Part, mut refused: Refusal) -> ApiError {
    let in_full = refusal::explain(&refused, part.plan.gpu, &part.label());
    tracing::error!(gpu = part.plan.gpu_uuid.as_str(), "{}", words::one_line(&in_full));
    if let Refusal::Blocked { blockers } = &mut refused {
        redact::holders(blockers);
    }
    let error = refusal::explain(&refused, part.plan.gpu, &part.label());
    error.context(format!("{}: the previous layout can't be restored", part.label()))
}

async fn restore_mode(mig: &MigMode, purpose: &Purpose<'_>, part: &Part, enable: bool) -> Result<(), Trouble> {
    let mut troubled = mig::mode::execute(mig, purpose, &[part.mode_change()], enable).await;
    troubled.remove(&part.position).map_or(Ok(()), Err)
}

/// Returns whether the steps destroy an instance for which `untouchable` is true, or one of its compute instances.
fn destroys(steps: &[InstanceStep], instances: &[GpuInstance], untouchable: impl Fn(&GpuInstance) -> bool) -> bool {
    let destroyed: BTreeSet<u32> = steps.iter().filter_map(InstanceStep::destroys).collect();
    instances.iter().any(|instance| destroyed.contains(&instance.id) && untouchable(instance))
}

fn users_unknown(part: &Part, reading: &Reading) -> ApiError {
    let message = format!("{}: {USERS_UNKNOWN}, so none of its instances is destroyed", part.label());
    let mut error = ApiError::new(Code::DriverError, message);
    error.causes.extend(reading.unread(ReadingPart::Processes).map(str::to_owned));
    error
}

/// Creates the error that a layout is only partly restored. The error does not name processes, because every user may
/// read it. The log, which only root reads, gets all details.
fn partly(part: &Part, mut partial: PartialRestore) -> ApiError {
    let explain = |partial: &PartialRestore| {
        let error = refusal::partly_restored(partial, part.plan.gpu, &part.label());
        let stays_on = part.before.as_ref().is_some_and(|before| !before.enabled);
        if stays_on { error.cause("MIG mode stays on, although it was off before the operation") } else { error }
    };
    tracing::error!(gpu = part.plan.gpu_uuid.as_str(), "{}", words::one_line(&explain(&partial)));
    redact::holders(&mut partial.stays);
    explain(&partial)
}

#[cfg(test)]
mod tests;
