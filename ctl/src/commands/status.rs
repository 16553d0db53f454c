//! `gpushctl status`.

use std::io::IsTerminal;

use gpush_api::HealthStatus;
use gpush_client::Client;

use crate::{
    args::StatusArgs,
    exit::{Failure, INTERRUPTED, Outcome},
    output::Output,
    render::{
        Appearance,
        status::{Status, status, status_with_sensors},
        summary,
    },
};

/// Escape sequence that moves the cursor home and clears the terminal.
const HOME: &str = "\x1b[H\x1b[J";

pub(super) async fn run(client: &mut Client, args: &StatusArgs, out: &Output) -> Outcome {
    let Some(every) = args.watch else {
        let (shown, code) = read(client, args.summary, &args.which.selectors(), out).await?;
        out.show(&shown, |look| draw(&shown, args, out.is_wide(), look))?;
        return Ok(code);
    };
    let redraws = !out.json && std::io::stdout().is_terminal();
    let interrupt = tokio::signal::ctrl_c();
    tokio::pin!(interrupt);
    loop {
        let look = Appearance { now: jiff::Timestamp::now(), ..out.look };
        match read(client, args.summary, &args.which.selectors(), out).await {
            Ok((shown, _)) if out.json => out.json_line(&shown)?,
            Ok((shown, _)) => {
                let text = draw(&shown, args, true, &look);
                out.text(&if redraws { format!("{HOME}{text}") } else { format!("{text}\n") })?;
            }
            // The next reading may succeed, for example after a restart of gpushd.
            Err(Failure::Error(error)) if redraws => out.error(&error),
            Err(failure) => return Err(failure),
        }
        tokio::select! {
            _ = &mut interrupt => return Ok(INTERRUPTED),
            () = tokio::time::sleep(every) => {}
        }
    }
}

fn draw(shown: &Status, args: &StatusArgs, with_sensors: bool, look: &Appearance) -> String {
    if args.summary {
        summary::summary(shown, look)
    } else if with_sensors {
        status_with_sensors(shown, args.brief, look)
    } else {
        status(shown, args.brief, look)
    }
}

/// Returns the status of the selected GPUs, and the exit status.
pub(super) async fn read(
    client: &mut Client,
    profiles: bool,
    selectors: &[String],
    out: &Output,
) -> Result<(Status, u8), Failure> {
    let version = client.version().await?;
    let health = client.health().await?;
    let gpus = match client.gpus(profiles).await {
        Ok(gpus) => super::select_of(client, gpus, selectors).await?,
        // Without a driver or during maintenance, health explains the error. The status then
        // contains no GPUs.
        Err(error)
            if health.status == HealthStatus::Degraded && health.errors.iter().any(|c| c.code == error.code()) =>
        {
            // An administrator has requested the maintenance, so it is not a failure.
            let code = if health.maintenance.is_some() { 0 } else { error.code().exit_status() };
            return Ok((Status { version, health, gpus: Vec::new(), mps: Vec::new(), leases: Vec::new() }, code));
        }
        Err(error) => return Err(Failure::from(error)),
    };
    let mps = super::mps::of(client, &gpus, out).await;
    let leases = super::lease::of(client, &gpus, out).await;
    Ok((Status { version, health, gpus, mps, leases }, 0))
}
