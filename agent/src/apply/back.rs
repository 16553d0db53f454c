//! The previous layout on one GPU: restored to the placement, read back.
//!
//! It is planned like any other change, from a fresh reading to what stood before, so it does not
//! matter how far the change came. A failed step is tried again from another fresh reading: what
//! broke the change may be over.
//!
//! ```text
//! read ─► plan to what stood before ─┬─ stands ──► steps ─► read back ─► restored
//!  ▲                                 └─ in use ──► plan beside it ─► steps ─► partly restored
//!  └── pause ◄── a step failed, or who uses the GPU is not known
//! ```
//!
//! An instance that must stay costs only what overlaps it. It must when a process has come into it
//! meanwhile, or when it is somebody else's: neither from before nor of the plan; on the last attempts also when the driver has refused to destroy it, or does not tell
//! who uses the GPU. A GPU instance without compute instances has no users.

use std::{collections::BTreeSet, time::Duration};

use gpush_api::{ApiError, Code, GpuInstance, Mig, Refusal, Step, USERS_UNKNOWN};
use gpush_core::{
    geometry::Geometry,
    plan::{self, Beside, Target},
    refusal,
};
use gpush_nvml::Reading;

use super::{
    Part, mode,
    step::{self, Ground, Trouble},
};
use crate::{
    agent::Shared,
    state::{redact, words},
};

/// Attempts to restore the previous layout.
const ATTEMPTS: u32 = 3;

/// After the first attempt; after the second twice as long.
const PAUSE: Duration = Duration::from_millis(200);

/// Why an attempt did not restore it.
struct Setback {
    trouble: Trouble,
    /// The GPU instance that the driver would not let go, by id.
    refused: Option<u32>,
}

impl From<Trouble> for Setback {
    fn from(trouble: Trouble) -> Self {
        Self { trouble, refused: None }
    }
}

/// How much of what stood before an attempt restores.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum UpTo {
    /// The instances; a MIG mode that is to go off stays on, for now.
    Instances,
    /// All.
    Mode,
}

/// Gives GPUs that are reset only together their modes from before at once: one by one, each would be in the
/// way of the other's reset. What fails here is left to [`back`], which every one of them has still to go.
pub(super) async fn modes_together(agent: &Shared, operation: &str, parts: &[&Part]) {
    let mut other: Vec<&Part> = Vec::new();
    for &part in parts.iter().filter(|part| part.plan.reset.as_ref().is_some_and(|reset| !reset.together.is_empty())) {
        let Ok(reading) = step::read(agent, part).await else { continue };
        if let (Some(before), Some(now)) = (&part.before, &reading.mig)
            && before.enabled != now.enabled
        {
            other.push(part);
        }
    }
    let was_on = |part: &&Part| part.before.as_ref().is_some_and(|before| before.enabled);
    let (on, off): (Vec<&Part>, Vec<&Part>) = other.into_iter().partition(was_on);
    for attempt in 1..=ATTEMPTS {
        let is_on = on.len() < 2 || mode::switch(agent, operation, &on, true, None).await.is_empty();
        let is_off = off.len() < 2 || off_together(agent, operation, &off).await;
        if is_on && is_off {
            return;
        }
        tokio::time::sleep(PAUSE * attempt).await;
    }
}

/// Clears GPUs of what was made on them, and switches their modes off at once; whether that was done.
async fn off_together(agent: &Shared, operation: &str, off: &[&Part]) -> bool {
    for part in off {
        if !matches!(once(agent, operation, part, None, UpTo::Instances).await, Ok(None)) {
            return false;
        }
    }
    mode::switch(agent, operation, off, false, None).await.is_empty()
}

/// Restores what stood before.
///
/// # Errors
/// When it can't, or not all of it; the GPU is then neither as planned nor as before.
pub(super) async fn back(agent: &Shared, operation: &str, part: &Part) -> Result<(), Trouble> {
    let mut refused = BTreeSet::new();
    let mut attempt = 1;
    loop {
        let stays = (attempt >= ATTEMPTS).then_some(&refused);
        let setback = match once(agent, operation, part, stays, UpTo::Mode).await {
            Ok(None) => return Ok(()),
            Ok(Some(beside)) => return Err(Trouble::Failed(partly(part, beside))),
            Err(setback) => setback,
        };
        let error = match &setback.trouble {
            Trouble::Lost(_) | Trouble::Unknown(_) => return Err(setback.trouble),
            Trouble::Failed(error) => error,
        };
        tracing::warn!(
            gpu = part.plan.uuid,
            "restoring the previous layout, attempt {attempt}: {}",
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

/// One attempt; what could not be restored, where that is not all. `stays` are the instances that
/// are not touched although no process shows in them; without it everything is to come back.
async fn once(
    agent: &Shared,
    operation: &str,
    part: &Part,
    stays: Option<&BTreeSet<u32>>,
    up_to: UpTo,
) -> Result<Option<Beside>, Setback> {
    let mut reading = step::read(agent, part).await?;
    if same(part.before.as_ref(), reading.mig.as_ref()) {
        return Ok(None);
    }
    let failed = |error: ApiError| Setback::from(Trouble::Failed(error));
    let is_on = |reading: &Reading| reading.mig.as_ref().is_some_and(|mig| mig.enabled);
    if part.before.as_ref().is_some_and(|before| before.enabled) && !is_on(&reading) {
        restore_mode(agent, operation, part, true).await?;
        reading = step::read(agent, part).await?;
    }
    let (Some(before), Some(now)) = (&part.before, &reading.mig) else {
        let message = format!("{}: it has no MIG any more", part.label());
        return Err(failed(ApiError::new(Code::DriverError, message)));
    };
    let mut short = None;
    let mut target = Target::default();
    let geometry = Geometry::new(&now.profiles, now.memory_slices, now.compute_slices);
    if now.enabled {
        let previous: &[GpuInstance] = if before.enabled { &before.instances } else { &[] };
        target = Target::of_instances(&geometry, previous);
        let unknown = |instance: &GpuInstance| !reading.processes_known && !instance.compute.is_empty();
        let others = plan::others(&now.instances, previous, &part.outcome);
        let untouchable = |instance: &GpuInstance| {
            others.contains(&instance.id)
                || unknown(instance)
                || stays.is_some_and(|stays| stays.contains(&instance.id))
        };
        let mut planned = plan::plan(&geometry, &now.instances, &target);
        let instead = match &planned {
            Ok(plan) if !destroys(&plan.steps, &now.instances, untouchable) => false,
            Ok(plan) if stays.is_none() && destroys(&plan.steps, &now.instances, unknown) => {
                return Err(failed(users_unknown(part, &reading)));
            }
            Ok(_) | Err(Refusal::Blocked { .. }) => true,
            Err(_) => false,
        };
        if instead {
            let mut beside = plan::beside(&geometry, &now.instances, previous, untouchable);
            beside.others = others;
            target = beside.target.clone();
            planned = plan::plan(&geometry, &now.instances, &target);
            short = Some(beside);
        }
        let plan = planned.map_err(|mut refused| {
            tracing::error!(
                gpu = part.plan.uuid,
                "{}",
                words::in_full(&refusal::explain(&refused, part.plan.gpu, &part.label()))
            );
            if let Refusal::Blocked { blockers } = &mut refused {
                redact::holders(blockers);
            }
            let mut error = refusal::explain(&refused, part.plan.gpu, &part.label());
            error.causes.insert(0, error.message);
            error.message = format!("{}: the previous layout can't be restored", part.label());
            failed(error)
        })?;
        let mut ground = Ground::of(&now.instances);
        for step in &plan.steps {
            step::take(agent, part, step, &mut ground).await.map_err(|trouble| Setback {
                refused: destroyed(step).filter(|_| trouble.error().code == Code::Blocked),
                trouble,
            })?;
        }
    }
    if up_to == UpTo::Instances {
        return Ok(short);
    }
    if short.is_none() && (now.enabled, now.pending) != (before.enabled, before.pending) {
        restore_mode(agent, operation, part, before.enabled).await?;
        if before.pending != before.enabled {
            // Somebody had asked for it and not reset the GPU yet.
            step::set_mode(agent, part, before.pending).await?;
        }
    }
    let reading = step::read(agent, part).await?;
    let stands = match &short {
        None => same(part.before.as_ref(), reading.mig.as_ref()),
        Some(_) => reading
            .mig
            .as_ref()
            .is_some_and(|mig| plan::plan(&geometry, &mig.instances, &target).is_ok_and(|plan| plan.steps.is_empty())),
    };
    if stands {
        return Ok(short);
    }
    let message = format!("{}: the driver reported success, but the previous layout is not back", part.label());
    Err(failed(ApiError::new(Code::DriverError, message)))
}

async fn restore_mode(agent: &Shared, operation: &str, part: &Part, enable: bool) -> Result<(), Trouble> {
    let mut troubled = mode::switch(agent, operation, &[part], enable, None).await;
    troubled.remove(&part.position).map_or(Ok(()), Err)
}

/// The GPU instance that a step destroys, or destroys something in.
fn destroyed(step: &Step) -> Option<u32> {
    match step {
        Step::DestroyCompute { gi, .. } | Step::DestroyGpuInstance { gi, .. } => Some(*gi),
        Step::CreateGpuInstance { .. } | Step::CreateCompute { .. } => None,
    }
}

fn destroys(steps: &[Step], instances: &[GpuInstance], untouchable: impl Fn(&GpuInstance) -> bool) -> bool {
    let destroyed: BTreeSet<u32> = steps.iter().filter_map(destroyed).collect();
    instances.iter().any(|instance| destroyed.contains(&instance.id) && untouchable(instance))
}

fn users_unknown(part: &Part, reading: &Reading) -> ApiError {
    let message = format!("{}: {USERS_UNKNOWN}, so none of its instances is destroyed", part.label());
    let mut error = ApiError::new(Code::DriverError, message);
    error.causes.extend(reading.warnings.iter().filter(|warning| warning.starts_with(USERS_UNKNOWN)).cloned());
    error
}

/// What is left to be said of a layout that is only partly back: in full to the log, which is
/// root's, and without the holders in the operation and the GPU's condition, which everybody reads.
fn partly(part: &Part, mut beside: Beside) -> ApiError {
    let explain = |beside: &Beside| {
        let error = refusal::partly_restored(beside, part.plan.gpu, &part.label());
        let stays_on = part.before.as_ref().is_some_and(|before| !before.enabled);
        if stays_on { error.cause("MIG mode stays on") } else { error }
    };
    tracing::error!(gpu = part.plan.uuid, "{}", words::in_full(&explain(&beside)));
    redact::holders(&mut beside.stays);
    explain(&beside)
}

/// Whether the same layout stands in both. Ids of instances are the driver's and may differ.
pub(super) fn same(one: Option<&Mig>, other: Option<&Mig>) -> bool {
    match (one, other) {
        (None, None) => true,
        (Some(one), Some(other)) => {
            (one.enabled, one.pending) == (other.enabled, other.pending)
                && shape(&one.instances) == shape(&other.instances)
        }
        (None, Some(_)) | (Some(_), None) => false,
    }
}

/// Instances by where they are and what they are.
pub(super) type Shape = Vec<(gpush_api::Placement, u32, Vec<(Option<gpush_api::Placement>, u32)>)>;

/// What stands, without the ids.
pub(super) fn shape(instances: &[GpuInstance]) -> Shape {
    let mut shape: Shape = instances
        .iter()
        .map(|instance| {
            let mut compute: Vec<_> = instance.compute.iter().map(|c| (c.placement, c.profile_id)).collect();
            compute.sort_unstable();
            (instance.placement, instance.profile_id, compute)
        })
        .collect();
    shape.sort_unstable();
    shape
}
