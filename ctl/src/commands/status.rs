//! `gpushctl status`.

use gpush_api::HealthStatus;
use gpush_client::Client;

use crate::{
    args::StatusArgs,
    exit::{Failure, Outcome},
    output::Output,
    render::status::{Status, status},
};

pub(super) async fn run(client: &mut Client, args: &StatusArgs, out: &Output) -> Outcome {
    let version = client.version().await?;
    let health = client.health().await?;
    let gpus = match client.gpus(false).await {
        Ok(gpus) => super::select_of(client, gpus, &args.which).await?,
        // An agent without a driver, or in maintenance, is up and says why: that is its status, and no GPUs.
        Err(error)
            if health.status == HealthStatus::Degraded && health.causes.iter().any(|c| c.code == error.code()) =>
        {
            // Maintenance is no failure: somebody wants it so.
            let code = if health.maintenance.is_some() { 0 } else { error.code().exit_status() };
            let shown = Status { version, health, gpus: Vec::new(), mps: Vec::new() };
            out.show(&shown, |look| status(&shown, args.brief, look))?;
            return Ok(code);
        }
        Err(error) => return Err(Failure::from(error)),
    };
    let mps = super::mps::of(client, &gpus, out).await;
    let shown = Status { version, health, gpus, mps };
    out.show(&shown, |look| status(&shown, args.brief, look))?;
    Ok(0)
}
