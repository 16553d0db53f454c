//! Checks sharing through MPS on the first GPU of this host, with a separate gpushd and with
//! programs that compute. Changes no setting of the GPU. `tests/gpu/run` runs this program.
//!
//! `gpu_mps OUT CLIENT.py` writes `mps.json`, `mps.md` and the logs to OUT. gpushd and gpushctl
//! come from the directory of this program. The program reads two environment variables:
//! - `GPU_CLIENT`: the command of the clients, instead of `python3 CLIENT.py`. If it is set, the
//!   program accepts a simulated GPU, because this client may support a simulated GPU.
//! - `GPU_SECONDS`: the duration of each measurement.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use gpush_api::MpsUsers;
use gpush_tests::gpu::{
    checks,
    client::Work,
    ground::{Ground, Stop},
    report::{Found, Report},
    service::Service,
};
use serde_json::Value;
use tokio::signal::unix::{SignalKind, signal};

/// Default duration of each measurement.
const SECONDS: f64 = 5.0;

/// Exit code after SIGINT or SIGTERM, as a shell reports it.
const INTERRUPTED: u8 = 130;

struct Arguments {
    out: PathBuf,
    client: Vec<String>,
    /// Whether `GPU_CLIENT` replaces the default client.
    other_client: bool,
    seconds: f64,
}

fn arguments() -> Result<Arguments, String> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [out, script] = &words[..] else { return Err("usage: gpu_mps OUT CLIENT.py".to_owned()) };
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
    let other = set("GPU_CLIENT");
    let seconds = match set("GPU_SECONDS") {
        None => SECONDS,
        Some(text) => {
            let number = text.parse().ok().filter(|number| *number > 0.0 && *number < 3600.0);
            number.ok_or_else(|| format!("GPU_SECONDS is {text:?}: say a number of seconds, such as 5"))?
        }
    };
    Ok(Arguments {
        out: out.into(),
        other_client: other.is_some(),
        client: match other {
            Some(command) => command.split_whitespace().map(str::to_owned).collect(),
            None => vec!["python3".to_owned(), script.clone()],
        },
        seconds,
    })
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::from(2);
        }
    };
    match run(&arguments).await {
        Ok(Some(report)) if report.failed() == 0 => ExitCode::SUCCESS,
        Ok(Some(_)) => ExitCode::FAILURE,
        Ok(None) => {
            println!("interrupted: what was started has been ended");
            ExitCode::from(INTERRUPTED)
        }
        Err(Stop::Skipped(why)) => {
            println!("SKIPPED MPS: {why}");
            ExitCode::SUCCESS
        }
        Err(Stop::Failed(why)) => {
            eprintln!("gpu_mps: {why}");
            ExitCode::FAILURE
        }
    }
}

/// Runs the checks. Returns `None` if a signal has interrupted them.
async fn run(Arguments { out, client, other_client, seconds }: &Arguments) -> Result<Option<Report>, Stop> {
    let printed = |error: std::io::Error| Stop::Failed(error.to_string());
    let ground = Ground::look(*other_client)?;
    std::fs::create_dir_all(out).map_err(printed)?;
    let programs = std::env::current_exe().map_err(printed)?;
    let programs = programs.parent().unwrap_or(Path::new("/"));
    for name in ["gpushd", "gpushctl"] {
        if !programs.join(name).is_file() {
            return Err(Stop::Failed(format!(
                "{name} is not in the directory of this program: {}",
                programs.display()
            )));
        }
    }
    println!(
        "MPS on GPU 0: {}, {} MiB, driver {}, CUDA {}",
        ground.name, ground.memory_mib, ground.driver, ground.cuda
    );
    // Install the handlers before any process is started.
    let mut interrupt = signal(SignalKind::interrupt()).map_err(printed)?;
    let mut terminate = signal(SignalKind::terminate()).map_err(printed)?;
    let mut service = Service::new(&ground, programs, client, MpsUsers::One)?;
    let mut of_many = Service::new(&ground, programs, client, MpsUsers::Many)?;
    let mut report = Report::of(ground, client.clone(), *seconds);
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
    let unchanged = report.gpu.unchanged();
    let found =
        |()| Found { ok: true, words: "compute mode and MIG mode are as before".to_owned(), figures: Value::Null };
    report.add("GPU left as it was", unchanged.map(found));
    report.write(out)?;
    println!("{} checks, {} failed", report.checks.len(), report.failed());
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
    let came_up = match service.with(None, Work::NONE) {
        Ok(mut client) => client.ended().await.map(|_| ()),
        Err(why) => Err(why),
    };
    if let Err(why) = came_up {
        return Err(Stop::Skipped(format!("`{}` can't compute here: {why}", report.client.join(" "))));
    }
    service.start().await?;
    let seconds = report.seconds;
    checks::all(service, seconds, report).await;
    service.end(logs).await;
    of_many.start().await?;
    report.add("several users", checks::several_users(of_many).await);
    Ok(())
}
