//! Measures how exact the figures about use are on the first GPU of this host, and what they cost.
//! Changes no setting of the GPU, and takes at most 5 minutes. `tests/gpu/run` runs this program.
//!
//! `gpu_use OUT CLIENT.py` writes `use.json`, `use.md` and the logs to OUT. gpushd and gpushctl come
//! from the directory of this program. Without nvidia-cuda-mps-control or without root, the checks
//! under MPS are not done. The program reads two environment variables:
//! - `GPU_CLIENT`: the command of the clients, instead of `python3 CLIENT.py`. If it is set, the
//!   program accepts a simulated GPU, because this client may support a simulated GPU.
//! - `GPU_SECONDS`: the duration of each measurement.

use std::process::ExitCode;

use gpush_api::MpsUsers;
use gpush_tests::gpu::{
    command::{self, Arguments},
    ground::{Ground, MpsPrograms, Stop},
    report::{Part, Report},
    service::Service,
    usage::{self, Drivers},
};
use tokio::signal::unix::{SignalKind, signal};

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    command::program("gpu_use", "use", run).await
}

/// Runs the checks. Returns `None` if a signal has interrupted them.
async fn run(Arguments { out, client, has_other_client, seconds }: Arguments) -> Result<Option<Report>, Stop> {
    let printed = |error: std::io::Error| Stop::Failed(error.to_string());
    let mut ground = Ground::look(has_other_client)?;
    let mps = match MpsPrograms::find(&ground) {
        Ok(programs) => {
            ground.mps = Some(programs);
            Ok(())
        }
        Err(Stop::Skipped(why)) => Err(why),
        Err(failed) => return Err(failed),
    };
    std::fs::create_dir_all(&out).map_err(printed)?;
    let programs = command::programs()?;
    command::introduce("use", &ground);
    // Install the handlers before any process is started.
    let mut interrupt = signal(SignalKind::interrupt()).map_err(printed)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(printed)?;
    let mut service = Service::new(&ground, &programs, &client, MpsUsers::One)?;
    let drivers = Drivers::open(&ground)?;
    let mut report = Report::of(Part::USE, ground, client, seconds);
    let logs = out.join("use-logs");
    let checks = async {
        service.can_compute().await.map_err(Stop::Skipped)?;
        usage::all(&mut service, &drivers, mps, &mut report).await;
        Ok::<(), Stop>(())
    };
    let outcome = tokio::select! {
        outcome = checks => Some(outcome),
        _ = interrupt.recv() => None,
        _ = terminate.recv() => None,
    };
    service.end(&logs).await;
    drop((service, drivers));
    let Some(outcome) = outcome else { return Ok(None) };
    outcome?;
    command::conclude(&mut report, &out)?;
    println!("results are in {0}/use.json and {0}/use.md, logs in {1}", out.display(), logs.display());
    Ok(Some(report))
}
