//! What an agent that died left half done, brought to an end.
//!
//! The journal says how each GPU was and what was to become of it; the hardware says how it is. No
//! mark of single steps is needed:
//!
//! ```text
//! queued ─► queued again
//! begun, and its GPUs were another's since ─► failed
//! begun ─► wait for the driver ─► read each GPU
//!                                          ├─ all as planned ────────────────────────► done
//!                                          ├─ same boot, not being taken back, nobody
//!                                          │  else's work there, and a plan to the
//!                                          │  same end stands ───────────────────────► running, the rest of it
//!                                          ├─ all as before ─────────────────────────► rolled back
//!                                          ├─ another boot: what was made is gone ───► failed
//!                                          └─ between ───────────────────────────────► cancelling, back
//! ```
//!
//! The rest of it is planned to the very placements that the journal has, so what stands is told
//! from what somebody else has made since the agent died: that is never destroyed.
//!
//! It is done while the API is already served: until then the GPUs are the operation's, as they
//! were. An agent that dies in here leaves the next one the same task.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use gpush_api::{ApiError, Code, GpuLayout, GpuPlan, LayoutSource, OperationState, PlanRequest};
use gpush_core::{
    config::Config,
    desired::{needs_reset, plan_host},
    plan,
};
use gpush_nvml::{DriverError, ErrorKind, Reading};
use gpush_store::{GpuIntent, OperationId, UnfinishedOperation};

use super::{
    Part, back,
    begin::More,
    carry_out::{self, carry_out, finish, go_back},
    forward::Forward,
    mode, modes, outcome, queue, renewed,
    step::Trouble,
};
use crate::{
    agent::Shared,
    caller::Viewer,
    operation::{self, Ongoing},
};

/// Between two looks at a GPU that can't be read, at first and at most.
const LOOK: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(15));

/// Looks at a GPU that can't be read although there is a driver.
const LOOKS: u32 = 6;

/// Takes over what was left, as far as it was begun; the rest of the work goes on in the
/// background. To be called before anybody is served: the GPUs are claimed when it returns. Returns the UUIDs of GPUs
/// that an operation on request has changed on this boot.
pub(crate) async fn take_over(
    agent: &Shared,
    unfinished: Vec<UnfinishedOperation>,
    superseded: &BTreeMap<OperationId, OperationId>,
    boot_id: &str,
) -> Vec<String> {
    let mut changed = Vec::new();
    leave_resets_alone(agent, &unfinished).await;
    for left in unfinished {
        if left.record.stage.is_final() {
            // All of it is done but what was to be undone around it.
            let (shared, (id, stage)) = (Arc::clone(agent), (left.record.id, left.record.stage));
            agent.tasks.spawn(async move {
                shared.outside.helpers.adopt(&id.to_string()).await;
                // What was stopped may open the GPUs, which maintenance is there to keep closed.
                while shared.state.maintenance().is_some() {
                    tokio::select! {
                        () = shared.stopping.cancelled() => return,
                        () = tokio::time::sleep(LOOK.1) => {}
                    }
                }
                mode::around::take_back(&shared, id, stage).await;
                mode::around::look_after(&shared, id, stage).await;
                shared.outside.helpers.forget(&id.to_string());
            });
            continue;
        }
        let same_boot = left.record.boot_id == boot_id;
        let ongoing = agent.operations.take_over(&left);
        tracing::warn!(op = ongoing.id(), "{} was {} when gpushd ended", left.record.kind, left.record.stage);
        if left.intent.begun.is_none() {
            queue_again(agent, ongoing, left);
            continue;
        }
        if same_boot && left.record.kind != operation::START {
            // Whatever becomes of it: it was somebody's wish, and a later one than the boot's.
            changed.extend(left.intent.gpus.iter().map(|gpu| gpu.plan.uuid.clone()));
        }
        let lost = match superseded.get(&left.record.id) {
            Some(by) => Some(outlived(&ongoing.id(), *by)),
            None => ongoing.claim_again().err(),
        };
        carry_out::in_background(agent, ongoing, move |agent, ongoing| async move {
            match lost {
                Some(error) => finish(&agent, ongoing, &[], OperationState::Failed, Some(error)).await,
                None => recover(&agent, ongoing, left, same_boot).await,
            }
        });
    }
    changed
}

/// Queues an operation again that was not begun.
fn queue_again(agent: &Shared, ongoing: Arc<Ongoing>, left: UnfinishedOperation) {
    note_the_gap(&ongoing, &left);
    match serde_json::from_value::<More>(left.intent.more) {
        Ok(More { order, .. }) => {
            let needs = queue::needs_before_plan(&ongoing);
            agent.queue.enter(&agent.lanes, &ongoing, order, left.record.created_at, needs);
        }
        Err(error) => {
            let error = ApiError::new(Code::Internal, "what was asked for can't be read any more")
                .cause(error.to_string())
                .hint("ask for it again")
                .outcome("nothing of it was done");
            carry_out::in_background(agent, ongoing, move |agent, ongoing| async move {
                finish(&agent, ongoing, &[], OperationState::RolledBack, Some(error)).await;
            });
        }
    }
}

fn note_the_gap(ongoing: &Ongoing, left: &UnfinishedOperation) {
    ongoing.note(format!("gpushd ended while it was {}, and took it up again when it started", left.record.stage));
}

/// Why an operation is not carried on whose end could not be recorded: `by` got its GPUs since.
fn outlived(id: &str, by: OperationId) -> ApiError {
    ApiError::new(Code::Internal, format!("how operation {id} ended is not on record"))
        .cause(format!("{by} was begun on its GPUs since, so nothing of it is carried on"))
        .hint(format!("`gpushctl operation show {by}` shows what came after it"))
}

/// While a reset runs that the gpushd before began, no GPU is opened: not even to be looked at.
async fn leave_resets_alone(agent: &Shared, unfinished: &[UnfinishedOperation]) {
    let ids: Vec<String> = unfinished.iter().map(|left| left.record.id.to_string()).collect();
    agent.outside.helpers.forget_others(&ids);
    let resets = |id: &&String| agent.outside.helpers.running(id).iter().any(|step| step == mode::RESET);
    let resetting: Vec<String> = ids.iter().filter(resets).cloned().collect();
    if resetting.is_empty() {
        return;
    }
    let alone = Arc::clone(&agent.outside.driverless).write_owned().await;
    if let Err(error) = agent.hardware.pause().await {
        tracing::warn!("the driver can't be left alone: {error}");
    }
    let shared = Arc::clone(agent);
    agent.tasks.spawn(async move {
        for id in &resetting {
            shared.outside.helpers.adopt(id).await;
        }
        shared.hardware.unpause();
        drop(alone);
    });
}

async fn recover(agent: &Shared, ongoing: Arc<Ongoing>, left: UnfinishedOperation, same_boot: bool) {
    note_the_gap(&ongoing, &left);
    if left.record.stage == OperationState::Running
        && let Err(error) = ongoing.advance(OperationState::Interrupted).await
    {
        tracing::warn!(op = ongoing.id(), "that it was interrupted can't be recorded: {error}");
    }
    for told in agent.outside.helpers.adopt(&ongoing.id()).await {
        ongoing.note(told);
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
    let found = std::iter::zip(&left.intent.gpus, &readings);
    let others: Vec<ApiError> =
        found.filter_map(|(gpu, reading)| changed_by_others(gpu, reading.as_deref()?)).collect();
    let mut lasting = serde_json::from_value::<More>(left.intent.more).map(|more| more.lasting).unwrap_or_default();
    let parts: Vec<Part> = left
        .intent
        .gpus
        .iter()
        .enumerate()
        .map(|(position, gpu)| {
            let plan = plans.as_ref().map_or(&gpu.plan, |plans| &plans[position]).clone();
            let now = readings[position].as_ref().and_then(|reading| reading.mig.as_ref());
            let reading = readings[position].as_ref();
            let resets =
                plan.reset.is_some() || reading.is_some_and(|reading| needs_reset(reading.identity.architecture));
            Part {
                resets,
                position,
                lasting: lasting.remove(&gpu.plan.uuid),
                plan,
                before: gpu.before.clone(),
                outcome: outcome(gpu),
                found: now.map(|mig| mig.instances.clone()).unwrap_or_default(),
                mode: modes(now),
            }
        })
        .collect();

    // It was being taken back, or somebody has cancelled it since.
    let back_wanted = left.record.stage == OperationState::Cancelling || ongoing.cancelled().is_cancelled();
    let to_do = plans.as_ref().is_some_and(|plans| plans.iter().all(|plan| plan.error.is_none()));
    // One that failed is taken back though all may stand as planned on the GPUs that did not.
    let failed_before = left.record.error.is_some() && back_wanted;
    let as_planned = to_do && !failed_before && parts.iter().all(Part::is_empty);
    let as_before = std::iter::zip(&parts, &readings).all(|(part, reading)| {
        reading.as_ref().is_some_and(|reading| back::same(part.before.as_ref(), reading.mig.as_ref()))
    });
    // Why it was being taken back when gpushd ended.
    let failed =
        left.record.error.filter(|_| back_wanted).map(|error| error.cause("gpushd ended in the middle of that"));
    let interrupted = |message: &str| ApiError::new(Code::Unavailable, message.to_owned());
    if as_planned {
        finish(agent, ongoing, &parts, OperationState::Done, None).await;
    } else if to_do && same_boot && !back_wanted && others.is_empty() {
        match ongoing.advance(OperationState::Running).await {
            Ok(()) => carry_out(agent, ongoing, &parts).await,
            Err(_) if ongoing.cancelled().is_cancelled() => {
                let why = ongoing.why_cancelled();
                go_back(agent, ongoing, &parts, &ends, why).await;
            }
            // Without a journal nothing is begun.
            Err(error) => stuck(agent, ongoing, &parts, error).await,
        }
    } else if as_before {
        let error = failed.unwrap_or_else(|| {
            interrupted("gpushd ended before anything was changed, or after all was taken back")
                .hint("ask for it again")
        });
        let error = error.outcome("the previous layout stands, read back");
        finish(agent, ongoing, &parts, OperationState::RolledBack, Some(error)).await;
    } else if !same_boot {
        let error = interrupted("the host was restarted in the middle of the operation")
            .cause("MIG instances don't survive a restart: neither the new layout stands nor the previous one")
            .hint(format!("`gpushctl status` shows what stands; what was asked for: {}", again(&parts)));
        finish(agent, ongoing, &parts, OperationState::Failed, Some(error)).await;
    } else {
        let others = others.into_iter().next();
        let refused = parts.iter().find_map(|part| part.plan.error.clone());
        let why = match (failed, others.clone().or(refused)) {
            (Some(failed), _) => {
                let others = others.into_iter().flat_map(|others| [vec![others.message], others.causes].concat());
                ApiError { causes: failed.causes.iter().cloned().chain(others).collect(), ..failed }
            }
            (None, Some(refused)) => {
                ApiError { message: format!("after gpushd ended, {}", refused.message), ..refused }
            }
            (None, None) if back_wanted => interrupted("gpushd ended while the operation was taken back"),
            (None, None) => interrupted("gpushd ended in the middle of the operation, which can't be carried on"),
        };
        go_back(agent, ongoing, &parts, &ends, why).await;
    }
}

/// Ends, in memory at least, an operation that can't be carried on because nothing can be recorded.
async fn stuck(agent: &Shared, ongoing: Arc<Ongoing>, parts: &[Part], why: ApiError) {
    let id = ongoing.id();
    let causes = [vec![why.message], why.causes].concat();
    let error = ApiError {
        message: format!("operation {id} was left half done when gpushd ended, and can't be carried on"),
        causes,
        ..why
    };
    for part in parts {
        agent.state.apply(&[part.degrade(&id, &error)]);
    }
    finish(agent, ongoing, parts, OperationState::Failed, Some(error)).await;
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
            match agent.readings.read_now(&gpu.plan.uuid).await {
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

/// Why an operation goes no further on a GPU where somebody else has made something since.
fn changed_by_others(gpu: &GpuIntent, reading: &Reading) -> Option<ApiError> {
    let now = reading.mig.as_ref()?;
    let before = gpu.before.as_ref().map(|mig| mig.instances.as_slice()).unwrap_or_default();
    let others = plan::others(&now.instances, before, &outcome(gpu));
    if others.is_empty() {
        return None;
    }
    let message = format!("GPU {} ({}) was changed by somebody else", gpu.plan.gpu, gpu.plan.uuid);
    let mut error = ApiError::new(Code::Conflict, message);
    for other in now.instances.iter().filter(|instance| others.contains(&instance.id)) {
        error = error.cause(format!(
            "{}@{} (GPU instance {}) stood neither before the operation nor was it to be made",
            other.profile, other.placement.start, other.id
        ));
    }
    Some(error.hint(format!("see what stands with `gpushctl gpu show {}`, then apply a layout", gpu.plan.gpu)))
}

/// What is left to do on each GPU, made anew; `None` when the agent stops before that is known.
async fn plans(agent: &Shared, gpus: &[GpuIntent], readings: &[Arc<Reading>]) -> Option<Vec<GpuPlan>> {
    let host = loop {
        match renewed(agent, Viewer::Agent, readings).await {
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
        let was_on = gpu.before.as_ref().is_some_and(|before| before.enabled);
        let mig = !gpu.plan.disables_mig && (was_on || gpu.plan.enables_mig);
        if !mig && !gpu.plan.disables_mig {
            // Nothing was to be done on it.
            return gpu.plan.clone();
        }
        let layout = if mig { plan::entries(&outcome(gpu)) } else { Vec::new() };
        let wanted = GpuLayout { gpu: gpu.plan.uuid.clone(), mig, layout };
        let request = PlanRequest { gpus: Vec::new(), layout: LayoutSource::PerGpu(vec![wanted]) };
        match plan_host(&config, &host, &request) {
            Ok(mut plans) if plans.plans.len() == 1 => {
                let plan = plans.plans.remove(0);
                // What goes with a reset is as it was planned, also for the way back.
                let reset = gpu.plan.reset.clone().or_else(|| plan.reset.clone());
                let GpuPlan { layout, stops_mps, starts_mps, takes_turns, .. } = gpu.plan.clone();
                GpuPlan { layout, reset, stops_mps, starts_mps, takes_turns, ..plan }
            }
            Ok(_) => GpuPlan { error: Some(ApiError::new(Code::NotFound, "the GPU is gone")), ..gpu.plan.clone() },
            Err(error) => GpuPlan { error: Some(error), ..gpu.plan.clone() },
        }
    };
    Some(gpus.iter().map(again).collect())
}
