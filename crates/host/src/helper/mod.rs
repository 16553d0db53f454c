//! Helper units: programs that gpushd runs outside its own unit, such as resets, hooks, `systemctl` and `nvidia-smi`.
//!
//! Helper programs need more privileges than gpushd's sandbox allows. They must also outlive
//! gpushd: a reset that is interrupted does more harm than a reset whose caller no longer exists.
//! So each program runs under a keeper (`gpushd helper DIR`). With systemd, the keeper is a
//! transient unit that is named after the operation and the step. Without systemd, the keeper is a
//! child process in a separate session. A directory below the state directory records everything
//! about a run, so the next gpushd finds the run:
//!
//! ```text
//!              spec on disk          keeper has the lock         outcome on disk
//!  (nothing) ───────────────► asked ─────────────────────► runs ─────────────────► ended
//!                               │                           │ deadline: TERM, grace, KILL ─► ended: timed out
//!                               │ gpushd takes the lock     │ keeper and program have ended; gpushd
//!                               │ first, or the launch      │ takes the lock
//!                               ▼ fails                     ▼
//!                            void: the keeper finds       lost: the program ran, and how
//!                            the outcome, runs nothing    it ended is unknown
//! ```
//!
//! The run is in progress as long as the lock is held. Keeper and program share one descriptor of
//! the lock, so the kernel releases the lock when both have ended, in either order. Only the
//! process that holds the lock may change the run.
//!
//! gpushd runs only trusted programs ([`trust`]), with a clean environment. A keeper
//! stores the output of its program, up to a limit.
//!
//! | module | subject |
//! |---|---|
//! | `run_dir` | the files of a run |
//! | `launch` | starts keepers |
//! | `keeper` | the keeper's program |
//! | `trust` | which programs may run |
//! | `scripted` | programs in a script, for tests |

pub mod keeper;
mod launch;
mod run_dir;
#[cfg(any(test, feature = "scripted"))]
pub mod scripted;
pub mod trust;

#[cfg(any(test, feature = "scripted"))]
use std::sync::Arc;
use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Duration,
};

use gpush_api::{ApiError, Code};

pub use self::keeper::SEARCH;
pub use self::run_dir::{End, Ended};
use self::{
    launch::Launcher,
    run_dir::{RunDir, Spec},
};

/// Time between SIGTERM and SIGKILL.
const GRACE: Duration = Duration::from_secs(5);

/// How long gpushd waits for an outcome after deadline and grace. After this time, gpushd considers
/// the keeper hung.
const HANGS: Duration = Duration::from_secs(10);

/// First and longest interval between two polls of a run.
const POLL: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));

/// A program to run.
#[derive(Debug, Clone)]
pub struct Job {
    /// The operation that the program belongs to: `op-12`.
    pub operation: String,
    /// The step of the operation: `reset`, `hook-before`, `stop-nvidia-dcgm`. Consists of letters, digits and `-`.
    pub step: String,
    /// The program.
    pub program: String,
    /// Arguments of the program.
    pub args: Vec<String>,
    /// Environment of the program, in addition to `PATH`.
    pub env: BTreeMap<String, String>,
    /// What the program reads from its standard input; nothing if `None`.
    pub input: Option<String>,
    /// Maximum run time.
    pub deadline: Duration,
    /// Whether the job runs often. gpushd logs the runs of such a job only at debug level, and the
    /// caller logs changes of the result.
    pub routine: bool,
}

/// Runs programs as helper units. A handle; cloning it is cheap.
#[derive(Debug, Clone)]
pub struct Helpers {
    /// The directory with one subdirectory for each run.
    dir: PathBuf,
    launcher: Launcher,
    /// For tests: what the programs do.
    #[cfg(any(test, feature = "scripted"))]
    script: Option<Arc<dyn scripted::ScriptedPrograms>>,
}

impl Helpers {
    /// Creates a handle whose runs are stored below this state directory.
    pub fn new(state_dir: &Path) -> Self {
        let dir = std::path::absolute(state_dir).unwrap_or_else(|_| state_dir.to_owned()).join("helper");
        Self {
            dir,
            launcher: Launcher::of_this_host(),
            #[cfg(any(test, feature = "scripted"))]
            script: None,
        }
    }

    /// Sets the script that replaces all programs.
    #[cfg(any(test, feature = "scripted"))]
    #[must_use]
    pub fn with_script(self, script: Arc<dyn scripted::ScriptedPrograms>) -> Self {
        Self { script: Some(script), ..self }
    }

    /// Runs a program and waits for its end. If the caller stops waiting, the program continues until its end or its
    /// deadline.
    ///
    /// # Errors
    /// The program was not started.
    pub async fn run(&self, job: Job) -> Result<Ended, ApiError> {
        let program = Self::may_run(&job.program)?;
        #[cfg(any(test, feature = "scripted"))]
        if let Some(script) = self.script.clone() {
            let ended = crate::subtask::blocking(move || script.run(&job)).await;
            return Ok(ended.unwrap_or(Ended { end: End::Lost, output: String::new() }));
        }
        let spec = Spec {
            program,
            name: job.program.clone(),
            args: job.args.clone(),
            env: job.env.clone(),
            input: job.input.clone(),
            deadline_ms: millis(job.deadline),
            grace_ms: millis(GRACE),
        };
        let run = RunDir::create(&self.dir, &format!("{}.{}", job.operation, job.step), &spec)
            .map_err(|error| not_run(&job, &error.to_string()))?;
        if job.routine {
            tracing::debug!(operation = job.operation, "{}: {} {}", job.step, job.program, job.args.join(" "));
        } else {
            tracing::info!(operation = job.operation, "{}: {} {}", job.step, job.program, job.args.join(" "));
        }
        if let Err(why) = self.launcher.launch(&run).await {
            // The keeper may still start, unless gpushd takes the lock before the keeper does.
            match run.cancel() {
                Ok(true) => return Err(not_run(&job, &why)),
                Ok(false) => {}
                Err(error) => return Err(not_run(&job, &format!("{why}; {error}"))),
            }
        }
        let ended = follow(&run, job.deadline + GRACE + HANGS).await;
        match &ended.end {
            End::Void => return Err(not_run(&job, "the helper process did not start")),
            end if job.routine => {
                tracing::debug!(operation = job.operation, "{} {end}{}", job.step, ended.output_suffix());
            }
            End::Exited(0) => tracing::info!(operation = job.operation, "{} succeeded", job.step),
            End::Exited(_) | End::Signalled(_) | End::TimedOut | End::NotStarted(_) | End::Lost | End::Hangs => {
                tracing::warn!(operation = job.operation, "{} {}{}", job.step, ended.end, ended.output_suffix());
            }
        }
        Ok(ended)
    }

    /// Returns the file that a program's path leads to, if gpushd may run it.
    ///
    /// # Errors
    /// A user other than root and gpushd's own user could have changed the file; see [`trust`].
    pub fn may_run(program: &str) -> Result<PathBuf, ApiError> {
        trust::check(program, nix::unistd::geteuid().as_raw()).map_err(|error| {
            ApiError::new(Code::Unsupported, format!("gpushd does not run {program}: {error}")).hint(error.hint())
        })
    }

    /// Returns the steps of an operation that are still running.
    pub fn running(&self, operation: &str) -> Vec<String> {
        let runs = RunDir::all(&self.dir, operation);
        runs.into_iter().filter(RunDir::runs).map(|run| run.step().to_owned()).collect()
    }

    /// Waits for the runs of an operation that a previous gpushd began. Afterwards, none of these
    /// runs is in progress or can begin. Returns a clause for each run that failed or that does not
    /// end.
    pub async fn adopt(&self, operation: &str) -> Vec<String> {
        let mut failed = Vec::new();
        for run in RunDir::all(&self.dir, operation) {
            if run.outcome().is_some() {
                continue;
            }
            let patience = run.spec().map_or(HANGS, |spec| {
                Duration::from_millis(spec.deadline_ms) + Duration::from_millis(spec.grace_ms) + HANGS
            });
            let ended = follow(&run, patience).await;
            let (step, end) = (run.step(), &ended.end);
            tracing::info!(
                operation = operation,
                "{step}, started by the previous gpushd, {end}{}",
                ended.output_suffix()
            );
            if !matches!(end, End::Exited(0) | End::Void) {
                failed.push(format!("{step} {end}"));
            }
        }
        failed
    }

    /// Returns whether a step of an operation has ended with status 0.
    pub fn ended_well(&self, operation: &str, step: &str) -> bool {
        let runs = RunDir::all(&self.dir, operation);
        runs.iter().any(|run| run.step() == step && run.outcome().is_some_and(|ended| ended.end == End::Exited(0)))
    }

    /// Removes the runs of all operations except these.
    pub fn forget_others(&self, operations: &[String]) {
        for operation in RunDir::operations(&self.dir) {
            if !operations.contains(&operation) {
                self.forget(&operation);
            }
        }
    }

    /// Removes the runs of an operation that have ended.
    pub fn forget(&self, operation: &str) {
        for run in RunDir::all(&self.dir, operation) {
            if !run.runs() {
                run.remove();
            }
        }
    }
}

/// Waits for the end of a run, at most `patience`.
async fn follow(run: &RunDir, patience: Duration) -> Ended {
    let until = tokio::time::Instant::now() + patience;
    let mut pause = POLL.0;
    loop {
        if let Some(ended) = run.final_outcome() {
            return ended;
        }
        if tokio::time::Instant::now() >= until {
            return Ended { end: End::Hangs, output: String::new() };
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(POLL.1);
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn not_run(job: &Job, why: &str) -> ApiError {
    ApiError::new(Code::Internal, format!("cannot run {}", job.program))
        .cause(why.to_owned())
        .hint("see the log of gpushd: `journalctl -u gpushd`")
}
