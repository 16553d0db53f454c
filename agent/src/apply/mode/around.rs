//! What is done around a reset: services stopped and started again, hooks run.
//!
//! ```text
//!  service active? ─► noted for undoing ─► stopped ─► … ─► hook after noted ─► hook before ─► (change)
//!                                                                                               │
//!  services started ◄──────────────── hook after ◄──────── last noted, first undone ◄───────────┘
//! ```
//!
//! Several operations may need one service stopped at a time: each notes it, and the last of them that
//! ends starts it. Whoever stops or starts one does so alone on this host.
//!
//! Each is noted durably before it is done, so whatever happens in between, somebody undoes it:
//! the operation at its end, good or bad, or the next gpushd. Undoing twice does no harm: a service
//! that runs is started to no effect. What can't be undone stays noted, and is told.

use std::{
    collections::BTreeMap,
    sync::{Arc, PoisonError},
    time::Duration,
};

use gpush_api::{ApiError, Code, OperationState};
use gpush_host::helper::{End, Ended, Job};
use gpush_store::{OperationId, UnfinishedOperation, View};
use serde::{Deserialize, Serialize};

use super::Part;
use crate::{
    agent::{Agent, Shared},
    operation::Ongoing,
};

/// Attempts to start a service.
const ATTEMPTS: u32 = 3;

/// After the first attempt; after the second twice as long.
const PAUSE: Duration = Duration::from_millis(200);

/// Between two attempts afterwards, at first and at most.
const AGAIN: (Duration, Duration) = (Duration::from_secs(30), Duration::from_secs(600));

/// The step under which the first hook runs.
const HOOK_BEFORE: &str = "hook-before";

/// What was done, by what undoes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "undo", rename_all = "snake_case")]
enum Undo {
    /// Start the service that was stopped.
    Start {
        /// Its name.
        service: String,
    },
    /// Run the hook that follows the first one.
    Hook {
        /// The program.
        program: String,
        /// What it is told.
        env: BTreeMap<String, String>,
    },
}

/// Stops services and runs the first hook, if any part of an operation needs a reset.
///
/// # Errors
/// When one of them fails; what was done is noted for undoing.
pub(in crate::apply) async fn prepare(agent: &Shared, ongoing: &Ongoing, parts: &[Part]) -> Result<(), ApiError> {
    if parts.iter().all(|part| part.plan.reset.is_none()) {
        return Ok(());
    }
    let config = agent.settings.config();
    let change = &config.mode_change;
    let noted: Vec<Undo> = pending(agent, ongoing.number()).await?.into_iter().map(|(_, undo)| undo).collect();
    for service in &change.services {
        let _alone = agent.outside.services.lock().await;
        let undo = Undo::Start { service: service.clone() };
        // Noted by the gpushd before, which may have died before it stopped it.
        if !noted.contains(&undo) {
            let runs = is_active(agent, &ongoing.id(), service).await?;
            if !runs && owed_by_others(agent, ongoing.number(), &undo).await?.is_empty() {
                continue;
            }
            note(agent, ongoing.number(), &undo).await?;
        }
        let ended = systemctl(agent, &ongoing.id(), "stop", service).await?;
        if ended.end != End::Exited(0) {
            return Err(failed(&format!("stopping {service}"), &ended)
                .hint(format!("see why: `systemctl status {service}`, `journalctl -u {service}`")));
        }
    }
    let switched = |enable: bool| {
        let uuids = parts.iter().filter(|part| if enable { part.plan.enables_mig } else { part.plan.disables_mig });
        uuids.map(|part| part.plan.uuid.clone()).collect::<Vec<_>>().join(",")
    };
    let env = |phase: &str| {
        let facts = [
            ("GPUSH_OPERATION", ongoing.id()),
            ("GPUSH_PHASE", phase.to_owned()),
            ("GPUSH_MIG_ON", switched(true)),
            ("GPUSH_MIG_OFF", switched(false)),
        ];
        facts.into_iter().map(|(name, value)| (name.to_owned(), value)).collect::<BTreeMap<_, _>>()
    };
    if let Some(program) = &change.after
        && !noted.iter().any(|undo| matches!(undo, Undo::Hook { .. }))
    {
        note(agent, ongoing.number(), &Undo::Hook { program: program.clone(), env: env("after") }).await?;
    }
    let Some(program) = &change.before else { return Ok(()) };
    if agent.outside.helpers.ended_well(&ongoing.id(), HOOK_BEFORE) {
        return Ok(());
    }
    let ended = hook(agent, &ongoing.id(), HOOK_BEFORE, program, env("before")).await?;
    if ended.end == End::Exited(0) {
        return Ok(());
    }
    Err(failed(&format!("the hook {program}"), &ended).hint("mend the hook under [mode_change], then ask again"))
}

/// Undoes what is noted of an operation, last first, before it ends in `state`; what could not be
/// undone, one sentence each.
pub(in crate::apply) async fn take_back(agent: &Shared, operation: OperationId, state: OperationState) -> Vec<String> {
    let mut told = Vec::new();
    let noted = match pending(agent, operation).await {
        Ok(noted) => noted,
        Err(error) => {
            tracing::error!(op = %operation, "what is to be undone can't be read: {error}");
            return told;
        }
    };
    for (position, undo) in noted.into_iter().rev() {
        let _alone = match &undo {
            Undo::Start { .. } => Some(agent.outside.services.lock().await),
            Undo::Hook { .. } => None,
        };
        let undone = match &undo {
            Undo::Start { .. } if still_needed_stopped(agent, operation, &undo).await => true,
            Undo::Start { service } => {
                match start(agent, &operation.to_string(), service).await {
                    Ok(()) => true,
                    Err(why) => {
                        told.push(format!("{service} was stopped and can't be started again: {why}; see why: `systemctl status {service}`"));
                        false
                    }
                }
            }
            Undo::Hook { program, env } => {
                let mut env = env.clone();
                env.insert("GPUSH_RESULT".to_owned(), state.name().to_owned());
                match hook(agent, &operation.to_string(), "hook-after", program, env).await {
                    Ok(Ended { end: End::Exited(0), .. }) => {}
                    Ok(ended) => told.push(format!("the hook {program} {}; {LOGGED}", ended.end)),
                    Err(error) => told.push(format!("the hook {program}: {error}")),
                }
                // It had its turn; run again it might do harm.
                true
            }
        };
        if undone {
            let recorded = agent.store.write_ending(move |tx| tx.undone(operation, position)).await;
            if let Err(error) = recorded {
                tracing::error!(op = %operation, "that something was undone can't be recorded: {error}");
            }
        }
    }
    for one in &told {
        tracing::error!(op = %operation, "{one}");
    }
    told
}

/// Whether an operation that goes on needs the same, and will undo it.
async fn still_needed_stopped(agent: &Shared, operation: OperationId, undo: &Undo) -> bool {
    // In doubt it is started: one that runs when it should not is in the way, and is told.
    owed_by_others(agent, operation, undo).await.is_ok_and(|others| others.iter().any(|stage| !stage.is_final()))
}

/// Stages of the other operations that have the same to undo.
async fn owed_by_others(agent: &Shared, operation: OperationId, undo: &Undo) -> Result<Vec<OperationState>, ApiError> {
    let undo = undo.clone();
    let stages = move |view: &View<'_>| {
        let owes = |other: &UnfinishedOperation| {
            other.undo.iter().any(|one| serde_json::from_value::<Undo>(one.what.clone()).is_ok_and(|one| one == undo))
        };
        let others = view.unfinished()?.into_iter().filter(|other| other.record.id != operation && owes(other));
        Ok(others.map(|other| other.record.stage).collect())
    };
    Ok(agent.store.read(stages).await?)
}

/// Looks after the services that an operation which has ended could not start again: health names them, and
/// each is tried again, until it runs or the agent ends. The next agent tries too.
pub(in crate::apply) async fn look_after(agent: &Shared, operation: OperationId, state: OperationState) {
    let left = services(agent, operation).await;
    if left.is_empty() {
        return;
    }
    agent.outside.not_started.lock().unwrap_or_else(PoisonError::into_inner).insert(operation, left);
    let agent = Arc::clone(agent);
    // Beside the agent's tasks: it does not wait for this when it ends.
    tokio::spawn(async move {
        let mut pause = AGAIN.0;
        loop {
            tokio::select! {
                () = agent.stopping.cancelled() => return,
                () = tokio::time::sleep(pause) => pause = (pause * 2).min(AGAIN.1),
            }
            if agent.conditions.maintenance().is_some() {
                continue;
            }
            take_back(&agent, operation, state).await;
            let left = services(&agent, operation).await;
            let mut known = agent.outside.not_started.lock().unwrap_or_else(PoisonError::into_inner);
            if left.is_empty() {
                known.remove(&operation);
                return;
            }
            known.insert(operation, left);
        }
    });
}

/// Services that are still to be started on behalf of an operation.
async fn services(agent: &Shared, operation: OperationId) -> Vec<String> {
    let noted = pending(agent, operation).await.unwrap_or_default();
    let service = |(_, undo)| match undo {
        Undo::Start { service } => Some(service),
        Undo::Hook { .. } => None,
    };
    noted.into_iter().filter_map(service).collect()
}

/// What health says of services that an operation stopped and nobody has started since.
pub(crate) fn health(agent: &Agent) -> Vec<ApiError> {
    let known = agent.outside.not_started.lock().unwrap_or_else(PoisonError::into_inner);
    let each = known.iter().flat_map(|(operation, services)| services.iter().map(move |one| (operation, one)));
    each.map(|(operation, service)| {
        ApiError::new(Code::Internal, format!("{service} was stopped for operation {operation}, and can't be started"))
            .cause("gpushd goes on trying")
            .hint(format!("see why: `systemctl status {service}`, `journalctl -u {service}`"))
    })
    .collect()
}

async fn start(agent: &Shared, operation: &str, service: &str) -> Result<(), String> {
    let mut attempt = 1;
    loop {
        let why = match systemctl(agent, operation, "start", service).await {
            Ok(Ended { end: End::Exited(0), .. }) => return Ok(()),
            Ok(ended) => format!("`systemctl start` {}", ended.end),
            Err(error) => [vec![error.message], error.causes].concat().join(": "),
        };
        if attempt == ATTEMPTS {
            return Err(why);
        }
        tokio::time::sleep(PAUSE * attempt).await;
        attempt += 1;
    }
}

/// What is noted and not undone, in order.
async fn pending(agent: &Shared, operation: OperationId) -> Result<Vec<(u64, Undo)>, ApiError> {
    let noted = agent.store.read(move |view| view.undo(operation)).await?;
    let known = noted.into_iter().filter(|undo| !undo.undone).filter_map(|undo| {
        let what = serde_json::from_value(undo.what);
        let what = what.map_err(|error| tracing::error!(op = %operation, "what is to be undone is not known: {error}"));
        Some((undo.position, what.ok()?))
    });
    Ok(known.collect())
}

async fn note(agent: &Shared, operation: OperationId, undo: &Undo) -> Result<(), ApiError> {
    let what = serde_json::to_value(undo)
        .map_err(|error| ApiError::new(Code::Internal, "an undo can't be written").cause(error.to_string()))?;
    agent.store.write(move |tx| tx.note_undo(operation, what.clone()).map(|_| ())).await?;
    Ok(())
}

async fn is_active(agent: &Shared, operation: &str, service: &str) -> Result<bool, ApiError> {
    let ended = systemctl(agent, operation, "is-active", service).await?;
    match ended.end {
        End::Exited(0) => Ok(true),
        // Not running, and not known.
        End::Exited(3 | 4) => Ok(false),
        End::Exited(_)
        | End::Signalled(_)
        | End::TimedOut
        | End::NotStarted(_)
        | End::Lost
        | End::Void
        | End::Hangs => Err(failed(&format!("asking whether {service} runs"), &ended)
            .hint(format!("ask yourself: `systemctl is-active {service}`"))),
    }
}

async fn systemctl(agent: &Shared, operation: &str, verb: &str, service: &str) -> Result<Ended, ApiError> {
    let config = agent.settings.config();
    let plain = |c: char| if c.is_ascii_alphanumeric() { c } else { '-' };
    let job = Job {
        operation: operation.to_owned(),
        step: format!("{verb}-{}", service.chars().map(plain).collect::<String>()),
        program: config.mode_change.systemctl.clone(),
        args: vec![verb.to_owned(), format!("{service}.service")],
        env: BTreeMap::new(),
        deadline: Duration::from_secs(config.mode_change.service_s.into()),
        routine: false,
    };
    agent.outside.helpers.run(job).await
}

async fn hook(
    agent: &Shared,
    operation: &str,
    step: &str,
    program: &str,
    env: BTreeMap<String, String>,
) -> Result<Ended, ApiError> {
    let job = Job {
        operation: operation.to_owned(),
        step: step.to_owned(),
        program: program.to_owned(),
        args: Vec::new(),
        env,
        deadline: Duration::from_secs(agent.settings.config().mode_change.hook_s.into()),
        routine: false,
    };
    agent.outside.helpers.run(job).await
}

/// Where what a program printed is to be found. It may name anybody's processes, so it goes to the log,
/// which is root's, and not into the operation, which everybody reads.
pub(super) const LOGGED: &str = "what it printed is in gpushd's log: `journalctl -u gpushd`";

fn failed(what: &str, ended: &Ended) -> ApiError {
    ApiError::new(Code::Internal, format!("{what} failed: it {}", ended.end)).cause(LOGGED)
}
