//! What an agent that died left half done, brought to an end.
//!
//! The journal says how each GPU was and what was to become of it; the hardware says how it is. No
//! mark of single steps is needed:
//!
//! ```text
//! queued, waiting ─► in line again
//! interrupted ─► wait for the driver ─► read each GPU
//!                                          ├─ all as planned ────────────────────────► done
//!                                          ├─ same boot, not being taken back,
//!                                          │  and a plan to the end stands ──────────► running, the rest of it
//!                                          ├─ all as before ─────────────────────────► rolled back
//!                                          ├─ another boot: what was made is gone ───► failed
//!                                          └─ between ───────────────────────────────► cancelling, back
//! ```
//!
//! It is done while the API is already served: until then the GPUs are the operation's, as they
//! were. An agent that dies in here leaves the next one the same task.

use std::{sync::Arc, time::Duration};

use gpush_api::{ApiError, Code, GpuPlan, LayoutSource, OperationState, PlanRequest};
use gpush_core::{config::Config, desired::plan_host};
use gpush_nvml::{DriverError, ErrorKind, Reading};
use gpush_store::{GpuIntent, UnfinishedOperation};

use super::{
    Part, back,
    begin::More,
    carry_out::{self, carry_out, finish, go_back},
    forward::Forward,
    line, renewed,
    step::Trouble,
};
use crate::{agent::Shared, auth::Asker, operation::Ongoing, startup};

/// Between two looks at a GPU that can't be read, at first and at most.
const LOOK: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(15));

/// Looks at a GPU that can't be read although there is a driver.
const LOOKS: u32 = 6;

/// Takes over what was left, as far as it was begun; the rest of the work goes on in the
/// background. To be called before anybody is served: the GPUs are claimed when it returns.
pub(crate) fn take_over(agent: &Shared, unfinished: Vec<UnfinishedOperation>, boot_id: &str) {
    for left in unfinished {
        if left.record.stage.is_final() {
            continue;
        }
        let same_boot = left.record.boot_id == boot_id;
        let ongoing = agent.operations.take_over(&left);
        if same_boot && left.record.kind != startup::KIND {
            // Whatever becomes of it: it was somebody's wish, and a later one than the boot's.
            agent.startup.leave(left.intent.gpus.iter().map(|gpu| gpu.plan.uuid.clone()));
        }
        tracing::warn!(op = ongoing.id(), "{} was {} when gpushd ended", left.record.kind, left.record.stage);
        carry_out::in_background(agent, ongoing, move |agent, ongoing| async move {
            recover(&agent, ongoing, left, same_boot).await;
        });
    }
}

async fn recover(agent: &Shared, ongoing: Arc<Ongoing>, left: UnfinishedOperation, same_boot: bool) {
    ongoing.note(format!("gpushd ended while it was {}, and took it up again when it started", left.record.stage));
    let back_wanted = match left.record.stage {
        OperationState::Queued | OperationState::Waiting => {
            return match serde_json::from_value::<More>(left.intent.more) {
                Ok(More { order, .. }) => line::stand(agent, ongoing, order, left.record.created_at).await,
                Err(error) => {
                    let error = ApiError::new(Code::Internal, "what was asked for can't be read any more")
                        .cause(error.to_string())
                        .hint("ask for it again; nothing of it was done");
                    finish(agent, ongoing, &[], OperationState::RolledBack, Some(error)).await;
                }
            };
        }
        OperationState::Cancelling => true,
        OperationState::Running
        | OperationState::Interrupted
        | OperationState::Done
        | OperationState::RolledBack
        | OperationState::Failed => false,
    };
    if left.record.stage == OperationState::Running
        && let Err(error) = ongoing.advance(OperationState::Interrupted).await
    {
        tracing::warn!(op = ongoing.id(), "that it was interrupted can't be recorded: {error}");
    }
    let Some(looks) = look(agent, &left.intent.gpus).await else { return };
    let mut readings = Vec::new();
    let mut ends = Vec::new();
    for look in looks {
        match look {
            Ok(reading) => {
                readings.push(Some(reading));
                ends.push(Forward::Stopped);
            }
            Err(trouble) => {
                readings.push(None);
                ends.push(Forward::Troubled(trouble));
            }
        }
    }
    let whole: Option<Vec<Arc<Reading>>> = readings.iter().cloned().collect();
    let plans = match &whole {
        Some(readings) => match plans(agent, &left.intent.gpus, readings).await {
            Some(plans) => Some(plans),
            None => return,
        },
        None => None,
    };
    let mut lasting = serde_json::from_value::<More>(left.intent.more).map(|more| more.lasting).unwrap_or_default();
    let parts: Vec<Part> = left
        .intent
        .gpus
        .iter()
        .enumerate()
        .map(|(position, gpu)| {
            let plan = plans.as_ref().map_or(&gpu.plan, |plans| &plans[position]).clone();
            let now = readings[position].as_ref().and_then(|reading| reading.mig.as_ref());
            Part {
                position,
                lasting: lasting.remove(&gpu.plan.uuid),
                plan,
                before: gpu.before.clone(),
                found: now.map(|mig| mig.instances.clone()).unwrap_or_default(),
            }
        })
        .collect();

    let to_do = plans.as_ref().is_some_and(|plans| plans.iter().all(|plan| plan.error.is_none()));
    let as_planned = to_do && parts.iter().all(Part::is_empty);
    let as_before = std::iter::zip(&parts, &readings).all(|(part, reading)| {
        reading.as_ref().is_some_and(|reading| back::same(part.before.as_ref(), reading.mig.as_ref()))
    });
    let interrupted = |message: &str| ApiError::new(Code::Unavailable, message.to_owned());
    if as_planned {
        finish(agent, ongoing, &parts, OperationState::Done, None).await;
    } else if to_do && same_boot && !back_wanted {
        match ongoing.advance(OperationState::Running).await {
            Ok(()) => carry_out(agent, ongoing, &parts).await,
            // It stays as it is recorded: without a journal nothing is begun.
            Err(error) => tracing::error!(op = ongoing.id(), "it can't be carried on: {error}"),
        }
    } else if as_before {
        let error = interrupted("gpushd ended before anything was changed, or after all was taken back")
            .outcome("the previous layout stands, read back")
            .hint("ask for it again");
        finish(agent, ongoing, &parts, OperationState::RolledBack, Some(error)).await;
    } else if !same_boot {
        let error = interrupted("the host was restarted in the middle of the operation")
            .cause("MIG instances don't survive a restart: neither the new layout stands nor the previous one")
            .hint(format!("`gpushctl status` shows what stands; what was asked for: {}", again(&parts)));
        finish(agent, ongoing, &parts, OperationState::Failed, Some(error)).await;
    } else {
        let why = match parts.iter().find_map(|part| part.plan.error.clone()) {
            Some(refused) => ApiError { message: format!("after gpushd ended, {}", refused.message), ..refused },
            None if back_wanted => interrupted("gpushd ended while the operation was taken back"),
            None => interrupted("gpushd ended in the middle of the operation, which can't be carried on"),
        };
        go_back(agent, ongoing, &parts, &ends, why).await;
    }
}

/// Commands that ask for the same again.
fn again(parts: &[Part]) -> String {
    let command = |part: &Part| {
        let layout = if part.plan.layout.is_empty() { "none".to_owned() } else { part.plan.layout.join(",") };
        format!("`gpushctl mig apply --gpu {} --layout '{layout}'`", part.plan.gpu)
    };
    parts.iter().map(command).collect::<Vec<_>>().join(", ")
}

/// Each GPU as it is now, once there is a driver; `None` when the agent stops before.
async fn look(agent: &Shared, gpus: &[GpuIntent]) -> Option<Vec<Result<Arc<Reading>, Trouble>>> {
    let mut looks = Vec::new();
    for gpu in gpus {
        let label = format!("GPU {} ({})", gpu.plan.gpu, gpu.plan.uuid);
        let (mut pause, mut looked) = (LOOK.0, 0);
        looks.push(loop {
            match agent.observer.read_now(&gpu.plan.uuid).await {
                Ok(reading) => break Ok(reading),
                Err(error) if is_gone(&error) => {
                    break Err(Trouble::Lost(explained(&label, "is not there any more", &error)));
                }
                Err(error) if !error.is_driver_unavailable() && looked >= LOOKS => {
                    break Err(Trouble::Unknown(explained(&label, "can't be read", &error)));
                }
                Err(error) => {
                    looked += u32::from(!error.is_driver_unavailable());
                    tracing::info!("{label} can't be read yet: {error}");
                }
            }
            tokio::select! {
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(LOOK.1),
                () = agent.stopping.cancelled() => return None,
            }
        });
    }
    Some(looks)
}

fn is_gone(error: &DriverError) -> bool {
    matches!(error.kind, ErrorKind::GpuIsLost | ErrorKind::NotFound)
}

fn explained(label: &str, what: &str, error: &DriverError) -> ApiError {
    let said = error.to_api();
    ApiError { message: format!("{label} {what}"), causes: [vec![said.message], said.causes].concat(), ..said }
}

/// What is left to do on each GPU, made anew; `None` when the agent stops before that is known.
async fn plans(agent: &Shared, gpus: &[GpuIntent], readings: &[Arc<Reading>]) -> Option<Vec<GpuPlan>> {
    let asker = Asker::agent();
    let host = loop {
        match renewed(agent, &asker, readings).await {
            Ok(host) => break host,
            // The GPUs were read a moment ago: whatever hides the host passes.
            Err(error) => tracing::info!("the host can't be seen yet: {error}"),
        }
        tokio::select! {
            () = tokio::time::sleep(LOOK.0) => {}
            () = agent.stopping.cancelled() => return None,
        }
    };
    // It keeps what it was begun with, whatever the config says by now.
    let config = Config::default();
    let again = |gpu: &GpuIntent| {
        let layout = LayoutSource::Entries(gpu.plan.layout.clone());
        let request = PlanRequest { gpus: vec![gpu.plan.uuid.clone()], layout };
        match plan_host(&config, &host, &request) {
            Ok(mut plans) if plans.plans.len() == 1 => plans.plans.remove(0),
            Ok(_) => GpuPlan { error: Some(ApiError::new(Code::NotFound, "the GPU is gone")), ..gpu.plan.clone() },
            Err(error) => GpuPlan { error: Some(error), ..gpu.plan.clone() },
        }
    };
    Some(gpus.iter().map(again).collect())
}
