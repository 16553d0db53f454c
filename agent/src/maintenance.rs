//! Maintenance: the host's GPUs out of the agent's hands, for a reset, another driver, or a look at
//! the board.
//!
//! ```text
//!           no operation has a GPU          on record        the worker is gone
//! serving ──────────────────────────► closed ────────► entered ─────────────────► nothing of ours is open
//!    ▲          │ one has: refused, it is named            │ it hangs in the kernel: said, with its pid
//!    │                                                     ▼
//!    └──────────── leave: on record, a new worker, GPUs matched again by UUID
//! ```
//!
//! It outlives the agent: the next one starts without loading the driver. Until somebody leaves it,
//! reads answer with what was seen last, marked stale; what would change a GPU is refused with the
//! name of whoever entered; operations in line wait on.

use std::time::Duration;

use gpush_api::{ApiError, Change as Told, Code, Maintenance};
use gpush_store::{ConditionKind, NewCondition, Scope};

use crate::{
    agent::{Agent, Shared},
    request::Request,
    state::{Change, words},
};

/// How long the worker may take to be gone: calls in it have their deadlines, and a worker that
/// outlasts those is killed.
const GONE: Duration = Duration::from_secs(45);

/// Enters maintenance; all handles of ours are closed when it returns.
///
/// # Errors
/// When an operation has a GPU, the host is in maintenance already, it can't be recorded, or the
/// worker can't be ended. In the last case the host is in maintenance all the same.
pub(crate) async fn enter(agent: &Shared, request: Request) -> Result<Maintenance, ApiError> {
    let _turn = agent.turn.lock().await;
    if let Some(standing) = agent.state.maintenance() {
        return Err(ApiError { causes: Vec::new(), ..words::refusal(&standing) });
    }
    let maintenance = Maintenance {
        reason: request.reason.clone().filter(|reason| !reason.is_empty()),
        by: Some(request.by.clone()),
        since: jiff::Timestamp::now(),
    };
    agent.operations.close(words::refusal(&maintenance)).map_err(|(uuid, holder)| under_way(agent, &uuid, &holder))?;
    let new = NewCondition {
        scope: Scope::Host,
        kind: ConditionKind::Maintenance,
        cause: "admin".to_owned(),
        reason: request.reason.clone().unwrap_or_default(),
        by: Some(request.by.clone()),
    };
    let uid = request.by.uid;
    if let Err(error) = agent
        .commits
        .change(Change::Set(new), told("maintenance.enter", &request), request.recorded("maintenance.enter", host()))
        .await
    {
        agent.operations.open();
        return Err(error);
    }
    tracing::info!(uid, "{}", words::in_maintenance(&maintenance));
    // A program that is run beside has it open, too, and ends in a moment; none is begun any more.
    let _ = tokio::time::timeout(GONE, agent.outside.driverless.write()).await;
    end_worker(agent).await?;
    tracing::info!("the driver worker is gone: no handle of gpushd's is open");
    Ok(agent.state.maintenance().unwrap_or(maintenance))
}

/// Sees to it that no handle is open while the host is in maintenance.
///
/// # Errors
/// When the worker can't be ended.
pub(crate) async fn let_go(agent: &Shared) -> Result<(), ApiError> {
    let _turn = agent.turn.lock().await;
    match agent.state.maintenance() {
        Some(_) => end_worker(agent).await,
        None => Ok(()),
    }
}

/// Leaves maintenance. Nothing happens when the host is in none.
///
/// # Errors
/// When it can't be recorded.
pub(crate) async fn leave(agent: &Shared, request: Request) -> Result<(), ApiError> {
    let _turn = agent.turn.lock().await;
    if agent.state.maintenance().is_none() {
        return Ok(());
    }
    let uid = request.by.uid;
    let change = Change::Clear(Scope::Host, ConditionKind::Maintenance, None);
    let told = told("maintenance.leave", &request);
    let recorded = request.recorded("maintenance.leave", host());
    // Before maintenance ends: callers must not get the errors of a stopped worker.
    agent.hardware.resume();
    agent.readings.begin_anew();
    if let Err(error) = agent.commits.change(change, told, recorded).await {
        agent.hardware.suspend();
        return Err(error);
    }
    agent.operations.open();
    tracing::info!(uid, "maintenance was left");
    Ok(())
}

/// Keeps an agent that starts in maintenance from touching the driver. To be called before anything
/// else could.
pub(crate) fn resume(agent: &Agent) {
    let Some(maintenance) = agent.state.maintenance() else { return };
    tracing::warn!("{}; the driver is not loaded", words::in_maintenance(&maintenance));
    if let Err((uuid, holder)) = agent.operations.close(words::refusal(&maintenance)) {
        tracing::error!(gpu = uuid, "{holder} has it in maintenance: it goes on when maintenance is left");
    }
    agent.hardware.suspend();
}

async fn end_worker(agent: &Agent) -> Result<(), ApiError> {
    let hangs = |cause: String| {
        let pids: Vec<String> =
            agent.hardware.status().abandoned.iter().filter_map(|one| one.pid).map(|pid| pid.to_string()).collect();
        let which = if pids.is_empty() { String::new() } else { format!(" (pid {})", pids.join(", ")) };
        ApiError::new(
            Code::DriverTimeout,
            format!("the host is in maintenance, but a driver worker{which} is not gone and may have GPUs open"),
        )
        .cause(cause)
        .hint("see what it hangs in with `gpushctl status` and `dmesg | grep -i -e nvrm -e xid`; a reboot ends it")
    };
    match tokio::time::timeout(GONE, agent.hardware.stop()).await {
        Ok(Ok(())) => Ok(()),
        Ok(Err(error)) => Err(hangs(error.to_string())),
        Err(_) => Err(hangs(format!("it did not end within {} s", GONE.as_secs()))),
    }
}

fn under_way(agent: &Agent, uuid: &str, holder: &str) -> ApiError {
    let index = agent.state.index_of(uuid);
    let gpu = index.map_or_else(|| format!("GPU {uuid}"), |index| format!("GPU {index} ({uuid})"));
    let error = ApiError::new(Code::Conflict, format!("maintenance can't be entered while {holder} has {gpu}"));
    let error = match holder.strip_prefix("operation ").filter(|id| id.starts_with("op-")) {
        Some(id) => error.hint(format!("wait for it with `gpushctl operation wait {id}`, then enter again")),
        None => error.hint("ask again in a moment"),
    };
    error.retryable()
}

fn told(action: &str, request: &Request) -> Told {
    Told {
        action: action.to_owned(),
        object: host(),
        by: Some(request.by.clone()),
        reason: request.reason.clone(),
        uuids: Vec::new(),
    }
}

fn host() -> String {
    "host".to_owned()
}
