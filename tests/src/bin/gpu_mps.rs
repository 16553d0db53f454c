//! Checks sharing through MPS on the first GPU of this host, with a separate gpushd and with
//! programs that compute. Changes no setting of the GPU. `tests/gpu/run` runs this program.
//!
//! `gpu_mps OUT CLIENT.py` writes `mps.json`, `mps.md` and the logs to OUT. gpushd and gpushctl
//! come from the directory of this program. The program reads two environment variables:
//! - `GPU_CLIENT`: the command of the clients, instead of `python3 CLIENT.py`. If it is set, the
//!   program accepts a simulated GPU, because this client may support a simulated GPU.
//! - `GPU_SECONDS`: the duration of each measurement.

use std::{path::Path, process::ExitCode};

use gpush_api::MpsUsers;
use gpush_tests::gpu::{
    checks,
    command::{self, Arguments},
    ground::{Ground, MpsPrograms, Stop},
    report::{Part, Report},
    service::Service,
};
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    command::program("gpu_mps", "MPS", run).await
}

/// Runs the checks. Returns `None` if a signal has interrupted them.
async fn run(Arguments { out, client, has_other_client, seconds }: Arguments) -> Result<Option<Report>, Stop> {
    let printed = |error: std::io::Error| Stop::Failed(error.to_string());
    let mut ground = Ground::look(has_other_client)?;
    ground.mps = Some(MpsPrograms::find(&ground)?);
    std::fs::create_dir_all(&out).map_err(printed)?;
    let programs = command::programs()?;
    command::introduce("MPS", &ground);
    // Install the handlers before any process is started.
    let mut interrupt = signal(SignalKind::interrupt()).map_err(printed)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(printed)?;
    let mut service = Service::new(&ground, &programs, &client, MpsUsers::One)?;
    let mut of_many = Service::new(&ground, &programs, &client, MpsUsers::Many)?;
    let mut report = Report::of(Part::MPS, ground, client, seconds);
    let logs = out.join("mps-logs");
    let outcome = tokio::select! {
        outcome = carried_out(&mut service, &mut of_many, &logs, &mut report) => Some(outcome),
        _ = interrupt.recv() => None,
        _ = terminate.recv() => None,
    };
    service.end(&logs).await;
    of_many.end(&out.join("mps-logs-many")).await;
    drop((service, of_many));
    let Some(outcome) = outcome else { return Ok(None) };
    outcome?;
    command::conclude(&mut report, &out)?;
    println!("results are in {0}/mps.json and {0}/mps.md, logs in {1}", out.display(), logs.display());
    Ok(Some(report))
}

/// Runs the checks if a client can compute. `of_many` is a service whose MPS daemon serves several
/// users.
async fn carried_out(
    service: &mut Service,
    of_many: &mut Service,
    logs: &Path,
    report: &mut Report,
) -> Result<(), Stop> {
    service.can_compute().await.map_err(Stop::Skipped)?;
    service.start().await?;
    let seconds = report.seconds;
    checks::all(service, seconds, report).await;
    service.end(logs).await;
    of_many.start().await?;
    report.add("several users", checks::several_users(of_many).await);
    Ok(())
}
