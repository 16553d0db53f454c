//! `gpushctl maintenance enter|leave` and `gpushctl recover`.

use std::time::Duration;

use gpush_api::{ApiError, Code, MaintenanceRequest, MaintenanceState, ReasonRequest};
use gpush_client::Client;
use gpush_core::duration;

use super::drain::TemporaryCordons;
use crate::{
    args::{Maintenance, Why},
    exit::{Failure, INTERRUPTED, Outcome},
    output::Output,
    render::host,
};

/// Pause between two attempts to enter maintenance.
const PAUSE: Duration = Duration::from_secs(1);

pub(super) async fn maintenance(client: &mut Client, command: Maintenance, out: &Output) -> Outcome {
    match command {
        Maintenance::Enter { why, queueing } => {
            let state = match queueing.limit() {
                None => client.enter_maintenance(&of_host(why.reason)).await?,
                Some(limit) => match enter_when_free(client, why, limit, out).await? {
                    Entered::Yes(state) => state,
                    Entered::Not(status) => return Ok(status),
                },
            };
            out.change(true, &state, |look| host::entered(state.maintenance.as_ref(), look))?;
        }
        Maintenance::Leave(Why { reason }) => {
            let before = client.health().await?.maintenance;
            let state = client.leave_maintenance(&of_host(reason)).await?;
            out.change(before.is_some(), &state, |look| host::left(before.as_ref(), look))?;
        }
    }
    Ok(0)
}

/// Returns a request for maintenance of the whole host.
fn of_host(reason: Option<String>) -> MaintenanceRequest {
    MaintenanceRequest { reason, gpu_uuids: Vec::new() }
}

/// How waiting for maintenance ended.
pub(super) enum Entered {
    Yes(MaintenanceState),
    /// The host is not in maintenance. The value is the exit status of the command.
    Not(u8),
}

/// Cordons all GPUs, so that no lease or operation begins. Enters maintenance as soon as no lease is in use and no
/// operation changes a GPU. Then clears the cordons: during maintenance gpushd grants nothing anyway.
async fn enter_when_free(client: &mut Client, why: Why, limit: Duration, out: &Output) -> Result<Entered, Failure> {
    let reason = why.reason.clone().unwrap_or_else(|| "waiting to enter maintenance".to_owned());
    let mut gpus = client.gpus(false).await?;
    let kept = TemporaryCordons::of(client, &mut gpus, &reason).await?;
    let entered = poll(client, &of_host(why.reason), "maintenance could not be entered", limit, out).await;
    kept.clear(client).await;
    entered
}

/// Tries repeatedly to enter maintenance, for at most `limit`. If no attempt succeeds, returns an error that begins
/// with `failure`.
pub(super) async fn poll(
    client: &mut Client,
    request: &MaintenanceRequest,
    failure: &str,
    limit: Duration,
    out: &Output,
) -> Result<Entered, Failure> {
    let until = tokio::time::sleep(limit);
    let interrupt = tokio::signal::ctrl_c();
    tokio::pin!(until, interrupt);
    let mut printed: Vec<String> = Vec::new();
    loop {
        let error = match client.enter_maintenance(request).await {
            Ok(state) => return Ok(Entered::Yes(state)),
            Err(error) if error.error.retryable && matches!(error.code(), Code::Blocked | Code::Conflict) => error,
            Err(error) => return Err(error.into()),
        };
        let left: Vec<String> = error.error.sentences().into_iter().map(str::to_owned).collect();
        if left != printed {
            for sentence in &left {
                out.remark(&(out.look.wrap("waiting: ", &out.look.clean(sentence)).join("\n") + "\n"));
            }
            printed = left;
        }
        tokio::select! {
            () = &mut until => {
                let within = duration::format(limit);
                let message = format!("{failure} within {within}");
                let mut timed_out = ApiError::new(Code::TimedOut, message);
                timed_out.causes = printed;
                return Err(timed_out.hint("wait longer with `--wait`, or end the lease or operation that prevents it").into());
            }
            _ = &mut interrupt => {
                out.remark("interrupted; nothing was changed.\n");
                return Ok(Entered::Not(INTERRUPTED));
            }
            () = tokio::time::sleep(PAUSE) => {}
        }
    }
}

pub(super) async fn recover(client: &mut Client, Why { reason }: Why, out: &Output) -> Outcome {
    let recovered = client.recover(&ReasonRequest { reason }).await?;
    // Read the GPUs to show their indexes; the response has only UUIDs.
    let gpus = if out.json { Vec::new() } else { client.gpus(false).await.unwrap_or_default() };
    out.change(recovered.cause.is_some(), &recovered, |look| host::recovered(&recovered, &gpus, look))?;
    Ok(0)
}
