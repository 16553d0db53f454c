//! One step: the driver call, what it came to, and whether it landed.
//!
//! ```text
//! call ──► ok ───────────────────────────────────────────────► taken
//!   ├────► the GPU is lost ──────────────────────────────────► Lost
//!   ├────► refused ──────────────────────────────────────────► Failed
//!   └────► no answer in time, or the worker died ─► settle ─► read
//!                                        │                    ├─ it is there: taken
//!                                        │                    └─ it is not:   Failed
//!                                        └─ not settled in time: Unknown
//! ```
//!
//! A call without an answer may still land, so nothing is concluded from its silence: the outcome
//! is read from the hardware once the driver can no longer change it.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use gpush_api::{ApiError, Code, GpuInstance, Placement, Step};
use gpush_nvml::{DriverError, ErrorKind, Reading};

use super::Part;
use crate::agent::Shared;

/// How long an operation waits for a call without an answer to be settled. The driver layer kills
/// the worker well before that; what then remains sits in the kernel.
const SETTLE: Duration = Duration::from_secs(45);

/// Why a step was not taken.
#[derive(Debug, Clone)]
pub(super) enum Trouble {
    /// It did not happen.
    Failed(ApiError),
    /// The GPU is gone, and its instances with it.
    Lost(ApiError),
    /// It may still happen.
    Unknown(ApiError),
}

impl Trouble {
    pub(super) fn error(&self) -> &ApiError {
        match self {
            Self::Failed(error) | Self::Lost(error) | Self::Unknown(error) => error,
        }
    }
}

/// What the steps so far have made of the GPU, by the driver's own ids.
#[derive(Debug)]
pub(super) struct Ground {
    /// GPU instances by placement.
    instances: Vec<(Placement, u32)>,
    /// Compute instances as (GPU instance, compute instance).
    compute: BTreeSet<(u32, u32)>,
}

impl Ground {
    /// As a reading shows it.
    pub(super) fn of(instances: &[GpuInstance]) -> Self {
        Self {
            instances: instances.iter().map(|instance| (instance.placement, instance.id)).collect(),
            compute: instances.iter().flat_map(|i| i.compute.iter().map(|c| (i.id, c.id))).collect(),
        }
    }

    fn at(&self, placement: Placement) -> Option<u32> {
        self.instances.iter().find(|(at, _)| *at == placement).map(|(_, id)| *id)
    }
}

/// What a step does, in words that follow "while" or "can't go on:".
pub(super) fn words(step: &Step) -> String {
    match step {
        Step::DestroyCompute { gi, ci, profile } => {
            format!("destroying compute instance {ci} ({profile}) of GPU instance {gi}")
        }
        Step::DestroyGpuInstance { gi, profile, placement } => {
            format!("destroying GPU instance {gi} ({profile}@{})", placement.start)
        }
        Step::CreateGpuInstance { profile, placement, .. } => {
            format!("creating GPU instance {profile}@{}", placement.start)
        }
        Step::CreateCompute { gi_placement, profile, placement: None, .. } => {
            format!("creating compute instance {profile} in the GPU instance at {}", gi_placement.start)
        }
        Step::CreateCompute { gi_placement, profile, placement: Some(at), .. } => format!(
            "creating compute instance {profile} at slot {} in the GPU instance at {}",
            at.start, gi_placement.start
        ),
    }
}

/// Carries out one step.
pub(super) async fn take(agent: &Shared, part: &Part, step: &Step, ground: &mut Ground) -> Result<(), Trouble> {
    let called = call(agent, part, step, ground).await;
    // Whatever it came to: what was read before is of another time.
    agent.readings.outdate(&part.plan.uuid);
    match called {
        Ok(()) => Ok(()),
        Err(error) => {
            let trouble = format!("{}: {} failed", part.label(), words(step));
            let reading = judge(agent, part, &trouble, &error).await?;
            if landed(step, &reading, ground) { Ok(()) } else { Err(Trouble::Failed(without_effect(&trouble, &error))) }
        }
    }
}

/// What a switch of MIG mode came to.
#[derive(Debug)]
pub(super) enum Switched {
    /// It is in force.
    InForce,
    /// It comes into force only with a reset; as an error, where none is to be made.
    Pending(ApiError),
}

/// Switches MIG mode.
pub(super) async fn set_mode(agent: &Shared, part: &Part, enabled: bool) -> Result<Switched, Trouble> {
    let doing = if enabled { "switching MIG mode on" } else { "switching MIG mode off" };
    let trouble = format!("{}: {doing} failed", part.label());
    let called = agent.hardware.set_mig_mode(&part.plan.uuid, enabled).await;
    agent.readings.outdate(&part.plan.uuid);
    match called {
        Ok(change) if change.is(enabled) => Ok(Switched::InForce),
        Ok(change) => {
            let mut error = match &change.activation {
                Some(error) => explain(&trouble, error),
                None => ApiError::new(Code::DriverError, trouble),
            };
            if change.pending != change.enabled {
                error = error.cause("the driver accepted it, but it comes into force only with a GPU reset");
            }
            if change.pending == enabled { Ok(Switched::Pending(error)) } else { Err(Trouble::Failed(error)) }
        }
        Err(error) => {
            let reading = judge(agent, part, &trouble, &error).await?;
            let without_effect = without_effect(&trouble, &error);
            match reading.mig.as_ref().map(|mig| (mig.enabled == enabled, mig.pending == enabled)) {
                Some((true, true)) => Ok(Switched::InForce),
                Some((false, true)) => Ok(Switched::Pending(without_effect)),
                Some((_, false)) | None => Err(Trouble::Failed(without_effect)),
            }
        }
    }
}

/// The GPU as it is now, once nothing can change it any more.
pub(super) async fn read(agent: &Shared, part: &Part) -> Result<Arc<Reading>, Trouble> {
    let trouble = format!("{}: reading it back failed", part.label());
    match agent.readings.read_now(&part.plan.uuid).await {
        Ok(reading) => Ok(reading),
        Err(error) if error.kind == ErrorKind::GpuIsLost => Err(Trouble::Lost(explain(&trouble, &error))),
        Err(error) => {
            settle(agent, part, &trouble, &error).await?;
            // Whatever was wrong with the worker, a new one may do.
            read_again(agent, part, &trouble).await
        }
    }
}

/// After a failed call: the GPU as it is now, if the call can have changed it after all; otherwise
/// the trouble.
async fn judge(agent: &Shared, part: &Part, trouble: &str, error: &DriverError) -> Result<Arc<Reading>, Trouble> {
    if error.kind == ErrorKind::GpuIsLost {
        return Err(Trouble::Lost(explain(trouble, error)));
    }
    if error.may_land() || error.kind == ErrorKind::Unsettled {
        settle(agent, part, trouble, error).await?;
    } else if !matches!(error.kind, ErrorKind::WorkerDied { may_have_landed: true }) {
        // The driver has spoken, or was never asked.
        return Err(Trouble::Failed(explain(trouble, error)));
    }
    read_again(agent, part, trouble).await
}

async fn read_again(agent: &Shared, part: &Part, trouble: &str) -> Result<Arc<Reading>, Trouble> {
    agent.readings.read_now(&part.plan.uuid).await.map_err(|error| {
        let explained = explain(trouble, &error);
        if error.kind == ErrorKind::GpuIsLost { Trouble::Lost(explained) } else { Trouble::Unknown(explained) }
    })
}

/// Waits until no call of ours to the GPU can land any more.
async fn settle(agent: &Shared, part: &Part, trouble: &str, error: &DriverError) -> Result<(), Trouble> {
    let settled = tokio::time::timeout(SETTLE, agent.hardware.settle(&part.plan.uuid)).await;
    settled.map(|_| ()).map_err(|_| {
        let error = explain(trouble, error).cause("the call may still take effect, so nothing was taken back");
        Trouble::Unknown(error)
    })
}

/// The driver's error as the operation's.
fn explain(trouble: &str, error: &DriverError) -> ApiError {
    let said = error.to_api();
    // Whether to ask again is the caller's to judge once the operation has ended.
    ApiError { message: trouble.to_owned(), causes: [vec![said.message], said.causes].concat(), ..said }
}

/// The same for a call that was settled, and the hardware shows nothing of it: it can't land any more.
fn without_effect(trouble: &str, error: &DriverError) -> ApiError {
    // It might have landed when it was given up; by now it is known that it has not.
    let kind = if matches!(error.kind, ErrorKind::Deadline { .. }) {
        ErrorKind::Deadline { may_land: false }
    } else {
        error.kind.clone()
    };
    let explained = explain(trouble, &DriverError { kind, ..error.clone() })
        .cause("the call has ended and the hardware shows no effect of it");
    if !error.may_land() && error.kind != ErrorKind::Unsettled {
        return explained;
    }
    explained
        .hint("what held the driver up may be in the kernel's log: `dmesg | grep -i -e nvrm -e xid`; then apply again")
}

async fn call(agent: &Shared, part: &Part, step: &Step, ground: &mut Ground) -> Result<(), DriverError> {
    let (hardware, uuid) = (&agent.hardware, part.plan.uuid.as_str());
    match step {
        Step::DestroyCompute { gi, ci, .. } => {
            hardware.destroy_compute_instance(uuid, *gi, *ci).await?;
            ground.compute.remove(&(*gi, *ci));
        }
        Step::DestroyGpuInstance { gi, .. } => {
            hardware.destroy_gpu_instance(uuid, *gi).await?;
            ground.instances.retain(|(_, id)| id != gi);
        }
        Step::CreateGpuInstance { profile_id, placement, .. } => {
            let made = hardware.create_gpu_instance(uuid, *profile_id, *placement).await?;
            if made.placement != *placement || made.profile_id != *profile_id {
                // Nobody else would take it for ours.
                if let Err(error) = hardware.destroy_gpu_instance(uuid, made.id).await {
                    tracing::warn!(gpu = uuid, %error, "what the driver made instead can't be destroyed");
                }
                let what = format!("asked for profile {profile_id} at {placement:?}, got {made:?}");
                return Err(DriverError::new(ErrorKind::Garbled, "creating a GPU instance").on(uuid).detail(what));
            }
            ground.instances.push((*placement, made.id));
        }
        Step::CreateCompute { gi_placement, profile_id, placement, .. } => {
            let Some(gi) = ground.at(*gi_placement) else {
                let what = format!("no GPU instance stands at {gi_placement:?}");
                return Err(DriverError::new(ErrorKind::NotFound, "creating a compute instance").on(uuid).detail(what));
            };
            let made = hardware.create_compute_instance(uuid, gi, *profile_id, *placement).await?;
            ground.compute.insert((gi, made.id));
        }
    }
    Ok(())
}

/// Whether a reading shows the step as taken; if so the ground is as the reading has it.
fn landed(step: &Step, reading: &Reading, ground: &mut Ground) -> bool {
    let Some(mig) = &reading.mig else { return false };
    let instance = |id: u32| mig.instances.iter().find(|instance| instance.id == id);
    let landed = match step {
        Step::DestroyCompute { gi, ci, .. } => {
            instance(*gi).is_none_or(|instance| instance.compute.iter().all(|compute| compute.id != *ci))
        }
        Step::DestroyGpuInstance { gi, .. } => instance(*gi).is_none(),
        Step::CreateGpuInstance { profile_id, placement, .. } => {
            mig.instances.iter().any(|i| i.profile_id == *profile_id && i.placement == *placement)
        }
        Step::CreateCompute { gi_placement, profile_id, placement, .. } => {
            mig.instances.iter().filter(|i| i.placement == *gi_placement).any(|i| {
                i.compute.iter().any(|c| {
                    c.profile_id == *profile_id
                        && (placement.is_none() || c.placement.is_none() || c.placement == *placement)
                        && !ground.compute.contains(&(i.id, c.id))
                })
            })
        }
    };
    if landed {
        *ground = Ground::of(&mig.instances);
    }
    landed
}
