//! `gpushctl operation list|show|wait|cancel`, and the code that watches operations.

use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};

use gpush_api::{ApiError, Code, Gpu, Operation, OperationState, OperationSummary, PlanRequest};
use gpush_client::{Client, Kind};
use gpush_core::duration;
use tokio::signal::unix::{SignalKind, signal};

use crate::{
    args,
    exit::{Failure, INTERRUPTED, Outcome},
    output::Output,
    render::{
        operation, operation_list, plan,
        progress::{Progress, Style},
    },
};

/// Maximum time that one request waits for a change of an operation.
const POLL: Duration = Duration::from_secs(20);

/// Id of the first operation.
const FIRST: &str = "op-1";

/// Pause before gpushctl tries again to reach gpushd after the connection was lost.
const RETRY: Duration = Duration::from_millis(100);

/// How long gpushctl waits for gpushd after the connection was lost.
const AWAY: Duration = Duration::from_secs(5);

/// Number of operations that gpushctl requests at once to find the operations on some GPUs.
const PAGE: usize = 100;

/// Returns the last `number` operations on one of these GPUs. Also returns whether there may be earlier operations on
/// these GPUs.
async fn of_gpus(
    client: &mut Client,
    number: usize,
    mut before: Option<String>,
    gpus: &[Gpu],
) -> Result<(Vec<OperationSummary>, bool), Failure> {
    // Compare UUIDs: the index of a GPU may have changed since the operation.
    let concerns = |one: &OperationSummary| one.gpu_uuids.iter().any(|uuid| gpus.iter().any(|gpu| gpu.uuid == *uuid));
    let mut found = Vec::new();
    loop {
        let page = client.last_operations(PAGE, before.as_deref()).await?;
        let has_earlier = page.len() == PAGE;
        before = page.first().map(|first| first.id.clone());
        let mut earlier: Vec<OperationSummary> = page.into_iter().filter(concerns).collect();
        earlier.append(&mut found);
        found = earlier;
        if found.len() >= number || !has_earlier {
            let surplus = found.len().saturating_sub(number);
            return Ok((found.split_off(surplus), has_earlier || surplus > 0));
        }
    }
}

pub(super) async fn run(client: &mut Client, command: &args::Operation, out: &Output) -> Outcome {
    match command {
        args::Operation::List { number, before, which } => {
            let selectors = which.selectors();
            let gpus = match selectors.as_slice() {
                [] => None,
                named => {
                    let gpus = client.gpus(false).await?;
                    Some(super::select_of(client, gpus, named).await?)
                }
            };
            let (page, has_earlier) = match &gpus {
                None => {
                    let page = client.last_operations(*number, before.as_deref()).await?;
                    let is_full = page.len() == *number;
                    (page, is_full)
                }
                Some(gpus) => of_gpus(client, *number, before.clone(), gpus).await?,
            };
            let empty = match (before, &gpus) {
                (Some(_), _) => "No earlier operation.",
                (None, None) => "No operation on record.",
                (None, Some(_)) => "No operation of these GPUs on record.",
            };
            out.list(&page, |look| operation_list::operations(&page, look).or_empty(empty))?;
            if has_earlier
                && let Some(first) = page.first().filter(|first| first.id != FIRST)
                && out.is_drawn()
            {
                let id = &first.id;
                out.remark(&match selectors.join(",") {
                    of if of.is_empty() => format!("earlier operations: `gpushctl operation list --before {id}`\n"),
                    of => format!("earlier operations: `gpushctl operation list {of} --before {id}`\n"),
                });
            }
            Ok(0)
        }
        args::Operation::Show { id } => {
            let one = match id {
                Some(id) => client.operation(id).await?,
                None => {
                    let id = last(client.last_operations(1, None).await?)?;
                    client.operation(&id).await?
                }
            };
            let gpus = client.gpus(false).await.unwrap_or_default();
            out.show(&one, |look| operation::operation(&one, &[], &gpus, false, look))?;
            Ok(0)
        }
        args::Operation::Wait { id, quiet, timeout } => {
            let one = client.operation(id).await?;
            let just = !one.state.is_final();
            let waiting = args::Waiting { quiet: *quiet, timeout: *timeout, detach: false };
            watch_until(client, one, WatchOptions { before: &[], just, waits: None }, &waiting, out, exit_status).await
        }
        args::Operation::Cancel { id, waiting } => {
            let one = client.cancel(id).await?;
            watch_until(
                client,
                one,
                WatchOptions { before: &[], just: true, waits: None },
                waiting,
                out,
                cancel_exit_status,
            )
            .await
        }
    }
}

/// Returns the exit status of `operation cancel`.
fn cancel_exit_status(one: &Operation) -> u8 {
    match one.state {
        OperationState::NotStarted | OperationState::RolledBack => 0,
        OperationState::Done => Code::Conflict.exit_status(),
        OperationState::Queued
        | OperationState::Waiting
        | OperationState::Running
        | OperationState::Cancelling
        | OperationState::Interrupted
        | OperationState::Failed => exit_status(one),
    }
}

/// Returns the exit status for an operation that the user wants to succeed.
fn exit_status(one: &Operation) -> u8 {
    operation::error(one).filter(|_| !succeeded(one)).map_or(0, |error| error.code.exit_status())
}

fn last(all: Vec<OperationSummary>) -> Result<String, Failure> {
    all.into_iter().next_back().map(|op| op.id).ok_or_else(|| {
        ApiError::new(Code::NotFound, "no operation is recorded").hint("`gpushctl status` shows the GPUs").into()
    })
}

/// How waiting for the end of an operation ended.
enum Watched {
    Ended,
    /// `--timeout` was reached, or `--detach` was given.
    TooLong,
    /// Ctrl-C.
    Interrupted,
}

/// How to show an operation.
struct WatchOptions<'a> {
    /// The GPUs before the operation; empty if they were not read.
    before: &'a [Gpu],
    /// Whether the operation has just run, so that the GPUs are still as the operation left them.
    just: bool,
    /// The request of the operation. While the operation waits, a plan for this request names what blocks it.
    waits: Option<PlanRequest>,
}

/// Shows an operation that has just been requested, until it ends. Then shows its result. Returns the exit status.
pub(super) async fn watch(
    client: &mut Client,
    one: Operation,
    before: &[Gpu],
    waits: Option<PlanRequest>,
    waiting: &args::Waiting,
    out: &Output,
) -> Outcome {
    watch_until(client, one, WatchOptions { before, just: true, waits }, waiting, out, exit_status).await
}

/// Does the same as [`watch`], but computes the exit status with `status`.
async fn watch_until(
    client: &mut Client,
    mut one: Operation,
    WatchOptions { before, just, waits }: WatchOptions<'_>,
    &args::Waiting { quiet, timeout, detach }: &args::Waiting,
    out: &Output,
    status: fn(&Operation) -> u8,
) -> Outcome {
    let style = if quiet || out.json {
        Style::Quiet
    } else if std::io::stderr().is_terminal() {
        Style::Bars
    } else {
        Style::Lines
    };
    let mut progress = Progress::new(style, &one, &out.look);
    let limit = if detach { Some(Duration::ZERO) } else { timeout };
    let watched = follow(client, &mut one, &mut progress, waits.as_ref(), limit, out).await;
    progress.end();
    match watched? {
        Watched::Ended => {
            // An operation that had ended before has changed nothing since the command began.
            let changed = just && operation_changed_gpu(&one);
            let after = client.gpus(false).await.unwrap_or_default();
            out.change(changed, &one, |look| operation::operation(&one, before, &after, just, look))?;
            Ok(status(&one))
        }
        Watched::TooLong => {
            if out.json {
                out.change(operation_changed_gpu(&one), &one, |_| String::new())?;
            } else if detach {
                out.text(&format!("{}\n", one.id))?;
            } else {
                out.remark(&goes_on(&one, timeout));
            }
            Ok(if detach { 0 } else { Code::TimedOut.exit_status() })
        }
        Watched::Interrupted => {
            out.remark(&goes_on(&one, None));
            Ok(INTERRUPTED)
        }
    }
}

/// Returns whether an operation has changed a GPU, or is changing it.
fn operation_changed_gpu(one: &Operation) -> bool {
    let has_steps = one.plans.iter().any(|plan| !plan.is_empty());
    match one.state {
        OperationState::Queued | OperationState::Waiting | OperationState::NotStarted | OperationState::RolledBack => {
            false
        }
        OperationState::Running
        | OperationState::Cancelling
        | OperationState::Interrupted
        | OperationState::Done
        | OperationState::Failed => one.begun && has_steps,
    }
}

fn succeeded(one: &Operation) -> bool {
    match one.state {
        OperationState::Done => true,
        OperationState::Queued
        | OperationState::Waiting
        | OperationState::Running
        | OperationState::Cancelling
        | OperationState::Interrupted
        | OperationState::NotStarted
        | OperationState::RolledBack
        | OperationState::Failed => false,
    }
}

fn goes_on(one: &Operation, waited: Option<Duration>) -> String {
    let id = &one.id;
    let waited =
        waited.map_or_else(String::new, |limit| format!("{id} did not end within {}.\n", duration::format(limit)));
    format!(
        "{waited}{id} continues in gpushd.\n  gpushctl operation show {id}   show its progress\n  gpushctl operation wait {id}   wait for its end\n"
    )
}

async fn follow(
    client: &mut Client,
    one: &mut Operation,
    progress: &mut Progress,
    waits: Option<&PlanRequest>,
    limit: Option<Duration>,
    out: &Output,
) -> Result<Watched, Failure> {
    // Without a limit, wait longer than any operation takes.
    let unwatched = limit == Some(Duration::ZERO);
    let limit = tokio::time::sleep(limit.unwrap_or(Duration::from_secs(60 * 86_400)));
    // Handle Ctrl-C before the first output, because a user may press it as soon as a line appears.
    let mut interrupt = signal(SignalKind::interrupt())
        .map_err(|error| ApiError::new(Code::Internal, format!("cannot handle Ctrl-C: {error}")))?;
    tokio::pin!(limit);
    let (mut away, mut away_reported): (Option<Instant>, bool) = (None, false);
    let mut reasons = Vec::new();
    loop {
        progress.update(one, &out.look);
        if one.waits_for != reasons && !progress.is_quiet() && !unwatched {
            reasons.clone_from(&one.waits_for);
            progress.waits(&wait_reasons(client, &reasons, waits).await, &out.look);
        }
        if one.state.is_final() {
            return Ok(Watched::Ended);
        }
        if unwatched {
            return Ok(Watched::TooLong);
        }
        let asked = {
            let asking = client.operation_after(&one.id, one.revision, POLL);
            let silence = tokio::time::sleep(super::SILENCE);
            tokio::pin!(asking, silence);
            let mut silent = true;
            loop {
                tokio::select! {
                    _ = interrupt.recv() => return Ok(Watched::Interrupted),
                    () = &mut limit => return Ok(Watched::TooLong),
                    () = &mut silence, if silent => {
                        progress.waiting(one, &out.look);
                        silent = false;
                    }
                    asked = &mut asking => break asked,
                }
            }
        };
        match asked {
            // gpushd now uses another state directory, in which this id belongs to another operation.
            Ok(other) if !same(one, &other) => {
                let cause = format!(
                    "gpushd now uses another state directory, where {} is another operation ({})",
                    other.id, other.kind
                );
                return Err(unknown_result_error(one, cause).into());
            }
            Ok(newer) => {
                (away, away_reported) = (None, false);
                *one = newer;
            }
            Err(error) if matches!(error.kind, Kind::Connect | Kind::Lost) => {
                // gpushd may be restarting. Wait only for a short time, because gpushd might not be started again.
                let since = *away.get_or_insert_with(Instant::now);
                if since.elapsed() > AWAY {
                    return Err(unknown_result_error(one, error.error.message).into());
                }
                if since.elapsed() > super::SILENCE && !away_reported {
                    away_reported = true;
                    progress.say(&format!("gpushd does not answer; trying again for up to {}s", AWAY.as_secs()));
                }
                tokio::time::sleep(RETRY).await;
            }
            Err(error) if error.code() == Code::NotFound && away.is_some() | (error.kind == Kind::Answer) => {
                return Err(unknown_result_error(one, error.error.message).into());
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns what an operation waits for, one sentence each. Requests a plan, because a plan names the processes that
/// this user may see. If the plan shows no blockers, returns `reasons`, which come from the operation.
async fn wait_reasons(client: &mut Client, reasons: &[String], request: Option<&PlanRequest>) -> Vec<String> {
    let (Some(request), false) = (request, reasons.is_empty()) else { return reasons.to_vec() };
    let named = client.plan(request).await.map(|plans| plan::blockers(&plans)).unwrap_or_default();
    if named.is_empty() { reasons.to_vec() } else { named }
}

/// Returns whether two responses are about the same operation. In another state directory, the same id belongs to
/// another operation.
fn same(one: &Operation, other: &Operation) -> bool {
    let created = |one: &Operation| one.created_at.as_millisecond();
    // Compare whole milliseconds, because recorded times have no finer resolution.
    one.id == other.id && one.kind == other.kind && created(one) == created(other)
}

/// Returns the error that the result of an operation is unknown, because gpushd could not be reached again, or no
/// longer knows the operation.
fn unknown_result_error(one: &Operation, cause: String) -> ApiError {
    let changed = one.plans.iter().filter(|p| !plan::needs_no_change(p)).map(|p| p.gpu).collect::<Vec<_>>();
    let which = crate::render::names::gpu_numbers(&changed);
    ApiError::new(
        Code::Unreachable,
        format!("the result of {} on {which} is not known: gpushd stopped while the operation ran", one.id),
    )
    .cause(cause)
    .hint(format!(
        "start gpushd with the same state directory, then run `gpushctl operation wait {}`: gpushd finishes the \
            operation or rolls it back",
        one.id
    ))
}
