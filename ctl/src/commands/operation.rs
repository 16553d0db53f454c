//! `gpushctl operation list|show|wait`, and how an operation is watched.

use std::{
    io::IsTerminal,
    time::{Duration, Instant},
};

use gpush_api::{ApiError, Code, Gpu, Operation, OperationSummary};
use gpush_client::{Client, Kind};

use crate::{
    args,
    exit::{Failure, INTERRUPTED, Outcome},
    output::Output,
    render::{
        operation, plan,
        progress::{Progress, Style},
        table,
    },
};

/// How long one long poll waits at the agent.
const POLL: Duration = Duration::from_secs(20);

/// Between two tries to reach an agent that went away.
const RETRY: Duration = Duration::from_millis(100);

/// How long an agent that went away is waited for.
const AWAY: Duration = Duration::from_secs(5);

pub(super) async fn run(client: &mut Client, command: &args::Operation, out: &Output) -> Outcome {
    match command {
        args::Operation::List => {
            let all = client.operations().await?;
            if all.is_empty() && !out.json {
                out.text("No operation since the agent started.\n")?;
                return Ok(0);
            }
            out.show(&all, |look| table::operations(&all, look))?;
            Ok(0)
        }
        args::Operation::Show { id } => {
            let one = match id {
                Some(id) => client.operation(id).await?,
                None => {
                    let id = last(client.operations().await?)?;
                    client.operation(&id).await?
                }
            };
            let gpus = client.gpus(false).await.unwrap_or_default();
            out.show(&one, |look| operation::operation(&one, &[], &gpus, false, look))?;
            Ok(0)
        }
        args::Operation::Wait { id, quiet, wait } => {
            let one = client.operation(id).await?;
            let just = !one.state.is_final();
            watch(client, one, &[], just, *quiet, *wait, out).await
        }
    }
}

fn last(all: Vec<OperationSummary>) -> Result<String, Failure> {
    all.into_iter().max_by_key(|op| op.created_at).map(|op| op.id).ok_or_else(|| {
        ApiError::new(Code::NotFound, "no operation since the agent started")
            .hint("`gpushctl status` shows the GPUs")
            .into()
    })
}

/// How watching ended.
enum Watched {
    Ended,
    /// `--wait` is over.
    TooLong,
    /// Ctrl-C.
    Interrupted,
}

/// Shows an operation until it ends, then its result; the exit status is the operation's. `just` says
/// that it is being carried out, or was just now: the GPUs are then as it left them.
pub(super) async fn watch(
    client: &mut Client,
    mut one: Operation,
    before: &[Gpu],
    just: bool,
    quiet: bool,
    wait: Option<f64>,
    out: &Output,
) -> Outcome {
    let style = if quiet || out.json {
        Style::Quiet
    } else if std::io::stderr().is_terminal() {
        Style::Bars
    } else {
        Style::Lines
    };
    let mut progress = Progress::new(style, &one, &out.look);
    let watched = follow(client, &mut one, &mut progress, wait, out).await;
    progress.end();
    match watched? {
        Watched::Ended => {
            let after = client.gpus(false).await.unwrap_or_default();
            out.show(&one, |look| operation::operation(&one, before, &after, just, look))?;
            Ok(operation::error(&one).filter(|_| !succeeded(&one)).map_or(0, |error| error.code.exit_status()))
        }
        Watched::TooLong => {
            if out.json {
                out.document(&one)?;
            } else {
                out.remark(&goes_on(&one, wait.filter(|seconds| *seconds > 0.0)));
            }
            // Not to have waited at all was asked for; to have waited in vain was not.
            Ok(if wait == Some(0.0) { 0 } else { Code::TimedOut.exit_status() })
        }
        Watched::Interrupted => {
            out.remark(&goes_on(&one, None));
            Ok(INTERRUPTED)
        }
    }
}

fn succeeded(one: &Operation) -> bool {
    match one.state {
        gpush_api::OperationState::Done => true,
        gpush_api::OperationState::Queued
        | gpush_api::OperationState::Waiting
        | gpush_api::OperationState::Running
        | gpush_api::OperationState::Cancelling
        | gpush_api::OperationState::Interrupted
        | gpush_api::OperationState::RolledBack
        | gpush_api::OperationState::Failed => false,
    }
}

fn goes_on(one: &Operation, waited: Option<f64>) -> String {
    let id = &one.id;
    let waited = waited.map_or_else(String::new, |seconds| format!("{id} did not end in {seconds} s.\n"));
    format!(
        "{waited}{id} goes on in gpushd.\n  gpushctl operation show {id}   how far it is\n  gpushctl operation wait {id}   watch it again\n"
    )
}

async fn follow(
    client: &mut Client,
    one: &mut Operation,
    progress: &mut Progress,
    wait: Option<f64>,
    out: &Output,
) -> Result<Watched, Failure> {
    // Without a limit this sleeps for longer than any operation lasts.
    let limit = tokio::time::sleep(Duration::from_secs_f64(wait.unwrap_or(30.0 * 86_400.0)));
    let interrupt = tokio::signal::ctrl_c();
    tokio::pin!(limit, interrupt);
    let (mut away, mut told_away): (Option<Instant>, bool) = (None, false);
    loop {
        progress.update(one, &out.look);
        if one.state.is_final() {
            return Ok(Watched::Ended);
        }
        if wait == Some(0.0) {
            return Ok(Watched::TooLong);
        }
        let asked = {
            let asking = client.operation_after(&one.id, one.revision, POLL);
            let silence = tokio::time::sleep(super::SILENCE);
            tokio::pin!(asking, silence);
            let mut silent = true;
            loop {
                tokio::select! {
                    _ = &mut interrupt => return Ok(Watched::Interrupted),
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
            // An agent that was started anew may have given the id to something else.
            Ok(other) if !same(one, &other) => {
                let cause =
                    format!("gpushd was started anew, and its {} is another operation ({})", other.id, other.kind);
                return Err(lost_sight(one, cause).into());
            }
            Ok(newer) => {
                (away, told_away) = (None, false);
                *one = newer;
            }
            Err(error) if matches!(error.kind, Kind::Connect | Kind::Lost) => {
                // An agent that restarts is back soon; one that is gone shall not be waited for in vain.
                let since = *away.get_or_insert_with(Instant::now);
                if since.elapsed() > AWAY {
                    return Err(lost_sight(one, error.error.message).into());
                }
                if since.elapsed() > super::SILENCE && !told_away {
                    told_away = true;
                    progress.say(&format!("gpushd does not answer; trying for {} s", AWAY.as_secs()));
                }
                tokio::time::sleep(RETRY).await;
            }
            Err(error) if error.code() == Code::NotFound && away.is_some() | (error.kind == Kind::Answer) => {
                return Err(lost_sight(one, error.error.message).into());
            }
            Err(error) => return Err(error.into()),
        }
    }
}

/// Whether two answers are about one operation: the id alone is unique only within one life of the agent.
fn same(one: &Operation, other: &Operation) -> bool {
    one.id == other.id && one.kind == other.kind && one.created_at == other.created_at
}

/// The agent went away while the operation ran, or came back without it.
fn lost_sight(one: &Operation, cause: String) -> ApiError {
    let changed = one.plans.iter().filter(|p| !plan::as_wanted(p)).map(|p| p.gpu).collect::<Vec<_>>();
    let which = crate::render::status::gpu_numbers(&changed);
    ApiError::new(Code::Unreachable, format!("lost sight of {} on {which}: the agent went away while it ran", one.id))
        .cause(cause)
        .hint("`gpushctl status` tells how the GPUs are now, `journalctl -u gpushd` why it went")
}
