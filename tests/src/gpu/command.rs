//! The command lines and the exit codes of the programs with checks: `gpu_mps` and `gpu_use`.

use std::{
    path::{Path, PathBuf},
    process::ExitCode,
};

use super::{
    ground::{Ground, Stop},
    report::{Found, Report},
};

/// Default duration of each measurement in seconds.
const SECONDS: f64 = 5.0;

/// Exit code after SIGINT or SIGTERM, as a shell reports it.
const INTERRUPTED: u8 = 130;

/// The arguments and the environment of a program.
#[derive(Debug, Clone, PartialEq)]
pub struct Arguments {
    /// Directory for the results.
    pub out: PathBuf,
    /// Command of the clients.
    pub client: Vec<String>,
    /// Whether `GPU_CLIENT` replaces the default client. Then the GPU may be simulated, because this
    /// client may support a simulated GPU.
    pub has_other_client: bool,
    /// Duration of each measurement in seconds.
    pub seconds: f64,
}

impl Arguments {
    /// Reads `NAME OUT CLIENT.py`, `GPU_CLIENT` and `GPU_SECONDS`.
    fn read(name: &str) -> Result<Self, String> {
        let words: Vec<String> = std::env::args().skip(1).collect();
        let [out, script] = &words[..] else { return Err(format!("usage: {name} OUT CLIENT.py")) };
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
        let other = set("GPU_CLIENT");
        let seconds = match set("GPU_SECONDS") {
            None => SECONDS,
            Some(text) => {
                let number = text.parse().ok().filter(|number| *number > 0.0 && *number < 3600.0);
                number.ok_or_else(|| format!("GPU_SECONDS is {text:?}: say a number of seconds, such as 5"))?
            }
        };
        Ok(Self {
            out: out.into(),
            has_other_client: other.is_some(),
            client: match other {
                Some(command) => command.split_whitespace().map(str::to_owned).collect(),
                None => vec!["python3".to_owned(), script.clone()],
            },
            seconds,
        })
    }
}

/// Runs a program and returns its exit code. `what` names the checks in the line that says why they
/// are skipped. `run` returns `None` if a signal has interrupted the checks.
pub async fn program<F>(name: &str, what: &str, run: impl FnOnce(Arguments) -> F) -> ExitCode
where
    F: Future<Output = Result<Option<Report>, Stop>>,
{
    let arguments = match Arguments::read(name) {
        Ok(arguments) => arguments,
        Err(why) => {
            eprintln!("{why}");
            return ExitCode::from(2);
        }
    };
    match run(arguments).await {
        Ok(Some(report)) if report.failed() == 0 => ExitCode::SUCCESS,
        Ok(Some(_)) => ExitCode::FAILURE,
        Ok(None) => {
            println!("interrupted: what was started has been ended");
            ExitCode::from(INTERRUPTED)
        }
        Err(Stop::Skipped(why)) => {
            println!("SKIPPED {what}: {why}");
            ExitCode::SUCCESS
        }
        Err(Stop::Failed(why)) => {
            eprintln!("{name}: {why}");
            ExitCode::FAILURE
        }
    }
}

/// Returns the directory of this program, which also contains gpushd and gpushctl.
///
/// # Errors
/// If one of them is missing.
pub fn programs() -> Result<PathBuf, Stop> {
    let here = std::env::current_exe().map_err(|error| Stop::Failed(error.to_string()))?;
    let programs = here.parent().unwrap_or(Path::new("/")).to_owned();
    match ["gpushd", "gpushctl"].into_iter().find(|name| !programs.join(name).is_file()) {
        None => Ok(programs),
        Some(name) => {
            Err(Stop::Failed(format!("{name} is not in the directory of this program: {}", programs.display())))
        }
    }
}

/// Prints which GPU the checks use.
pub fn introduce(what: &str, Ground { name, memory_mib, driver, cuda, .. }: &Ground) {
    println!("{what} on GPU 0: {name}, {memory_mib} MiB, driver {driver}, CUDA {cuda}");
}

/// Adds the last check, which compares the settings of the GPU with those before, and writes the
/// results.
///
/// # Errors
/// If a file cannot be written.
pub fn conclude(report: &mut Report, out: &Path) -> Result<(), Stop> {
    let unchanged = report.gpu.unchanged();
    let words = "compute mode and MIG mode are as before".to_owned();
    report.add("GPU left as it was", unchanged.map(|()| Found { ok: true, words, ..Found::default() }));
    report.write(out)?;
    println!("{} checks, {} failed", report.checks.len(), report.failed());
    Ok(())
}
