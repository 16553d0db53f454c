//! Programs that run beside gpushd: resets, hooks, `systemctl stop` and `start`.
//!
//! They need more than gpushd's sandbox allows, and they must outlive it: a reset that is cut off
//! half way is worse than one that nobody waits for. So each runs under a keeper of its own
//! (`gpushd beside DIR`), which is a transient systemd unit named after operation and step where
//! systemd runs, and a child in a session of its own elsewhere. All that is known of a run lies in
//! its directory below the state directory, so a gpushd that is started again finds it:
//!
//! ```text
//!              spec on disk          keeper has the lock         outcome on disk
//!  (nothing) ───────────────► asked ─────────────────────► runs ─────────────────► ended
//!                               │                           │ deadline: TERM, grace, KILL ─► ended: timed out
//!                               │ gpushd takes the lock     │ keeper and program are gone, gpushd
//!                               │ first, or it can't be     │ takes the lock
//!                               ▼ launched                  ▼
//!                            void: the keeper finds       lost: it ran, how it ended
//!                            the outcome, runs nothing    is not known
//! ```
//!
//! "The lock is held" means "it runs": keeper and program share one descriptor of it, so the lock
//! falls when both are gone, whoever was killed first. Who may change a run: before the lock is
//! taken nobody but the one that takes it, then the keeper alone.
//!
//! A program is absolute, as are all directories to it; it and they belong to root (or to the user
//! that gpushd runs as) and nobody else may write them. It gets a clean environment, no input, and
//! what it says is kept up to a bound.

pub mod keeper;
mod run_dir;
pub mod trust;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use gpush_api::{ApiError, Code, text};
use tokio::io::AsyncReadExt;

pub use self::run_dir::{End, Ended};
use self::run_dir::{Place, Spec};
use crate::systemd;

/// Between being told to end and being killed.
const GRACE: Duration = Duration::from_secs(5);

/// How long a keeper may take to begin.
const LAUNCH: Duration = Duration::from_secs(30);

/// Beyond deadline and grace: a keeper that has not told the end by then hangs with its program.
const HANGS: Duration = Duration::from_secs(10);

/// Between two looks at a run.
const LOOK: (Duration, Duration) = (Duration::from_millis(5), Duration::from_millis(100));

/// A program to be run.
#[derive(Debug, Clone)]
pub struct Job {
    /// On whose behalf: `op-12`.
    pub operation: String,
    /// As what: `reset`, `hook-before`, `stop-nvidia-dcgm`; letters, digits and `-`.
    pub step: String,
    /// The program.
    pub program: String,
    /// Its arguments.
    pub args: Vec<String>,
    /// Its environment, besides `PATH`.
    pub env: BTreeMap<String, String>,
    /// How long it may take.
    pub deadline: Duration,
    /// Whether it is run so often that the log is spared of it; whoever has it run says what is new.
    pub routine: bool,
}

/// Runs programs beside gpushd. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub struct Helpers {
    /// A directory a run.
    dir: PathBuf,
    /// `systemd-run`, where systemd runs.
    systemd_run: Option<PathBuf>,
}

impl Helpers {
    /// Below this state directory. `systemd_run` is used where systemd is the service manager.
    pub fn new(state_dir: &Path, systemd_run: Option<PathBuf>) -> Self {
        let dir = std::path::absolute(state_dir).unwrap_or_else(|_| state_dir.to_owned()).join("beside");
        let systemd_run =
            systemd_run.or_else(|| systemd::is_the_service_manager().then(|| PathBuf::from("/usr/bin/systemd-run")));
        Self { dir, systemd_run }
    }

    /// Runs a program and waits for its end. It runs to its end or its deadline whether or not
    /// anybody waits.
    ///
    /// # Errors
    /// When it was not run at all.
    pub async fn run(&self, job: Job) -> Result<Ended, ApiError> {
        let program = Self::may_run(&job.program)?;
        let spec = Spec {
            program,
            name: job.program.clone(),
            args: job.args.clone(),
            env: job.env.clone(),
            deadline_ms: millis(job.deadline),
            grace_ms: millis(GRACE),
        };
        let place = Place::lay(&self.dir, &format!("{}.{}", job.operation, job.step), &spec)
            .map_err(|error| not_begun(&job, &error.to_string()))?;
        if job.routine {
            tracing::debug!(op = job.operation, "{}: {} {}", job.step, job.program, job.args.join(" "));
        } else {
            tracing::info!(op = job.operation, "{}: {} {}", job.step, job.program, job.args.join(" "));
        }
        if let Err(why) = self.launch(&place).await {
            // It may begin all the same, unless the lock is ours.
            match place.void() {
                Ok(true) => return Err(not_begun(&job, &why)),
                Ok(false) => {}
                Err(error) => return Err(not_begun(&job, &format!("{why}; {error}"))),
            }
        }
        let ended = follow(&place, job.deadline + GRACE + HANGS).await;
        match &ended.end {
            End::Void => return Err(not_begun(&job, "its keeper did not come up")),
            end if job.routine => tracing::debug!(op = job.operation, "{} {end}{}", job.step, ended.said()),
            End::Exited(0) => tracing::info!(op = job.operation, "{} ended well", job.step),
            End::Exited(_) | End::Signalled(_) | End::TimedOut | End::NotStarted(_) | End::Lost | End::Hangs => {
                tracing::warn!(op = job.operation, "{} {}{}", job.step, ended.end, ended.said());
            }
        }
        Ok(ended)
    }

    /// The file behind a program, if it may be run: it is there, and nobody but root or ourselves can have
    /// written it.
    ///
    /// # Errors
    /// Why not.
    pub fn may_run(program: &str) -> Result<PathBuf, ApiError> {
        trust::check(program, nix::unistd::geteuid().as_raw()).map_err(|error| refused(program, &error))
    }

    /// Steps of an operation that still run.
    pub fn running(&self, operation: &str) -> Vec<String> {
        let places = Place::all(&self.dir, operation);
        places.into_iter().filter(Place::runs).map(|place| place.step().to_owned()).collect()
    }

    /// Waits for what still runs on behalf of an operation. Afterwards nothing does, and nothing
    /// that was asked for will; gives what ended badly or can't be ended, in words.
    pub async fn adopt(&self, operation: &str) -> Vec<String> {
        let mut told = Vec::new();
        for place in Place::all(&self.dir, operation) {
            if place.outcome().is_some() {
                continue;
            }
            let patience = place.spec().map_or(HANGS, |spec| {
                Duration::from_millis(spec.deadline_ms) + Duration::from_millis(spec.grace_ms) + HANGS
            });
            let ended = follow(&place, patience).await;
            tracing::info!(
                op = operation,
                "{}, begun by the gpushd before, {}{}",
                place.step(),
                ended.end,
                ended.said()
            );
            if !matches!(ended.end, End::Exited(0) | End::Void) {
                told.push(format!("{} {}", place.step(), ended.end));
            }
        }
        told
    }

    /// Whether a step of an operation has been run to a good end.
    pub fn ended_well(&self, operation: &str, step: &str) -> bool {
        let places = Place::all(&self.dir, operation);
        places.iter().any(|p| p.step() == step && p.outcome().is_some_and(|ended| ended.end == End::Exited(0)))
    }

    /// Forgets the runs of all operations but these.
    pub fn forget_others(&self, operations: &[String]) {
        for operation in Place::operations(&self.dir) {
            if !operations.contains(&operation) {
                self.forget(&operation);
            }
        }
    }

    /// Forgets the runs of an operation.
    pub fn forget(&self, operation: &str) {
        for place in Place::all(&self.dir, operation) {
            if !place.runs() {
                place.remove();
            }
        }
    }

    /// Has a keeper started; `Ok` once it has the lock.
    async fn launch(&self, place: &Place) -> Result<(), String> {
        let mut command = match &self.systemd_run {
            Some(program) => {
                // A unit outlives what started it, so it needs a path that does so too.
                let own = std::env::current_exe().map_err(|error| error.to_string())?;
                let own = own.to_string_lossy().trim_end_matches(" (deleted)").to_owned();
                let mut command = tokio::process::Command::new(program);
                command
                    .arg("--quiet")
                    .arg("--collect")
                    .arg(format!("--unit=gpush-{}", place.name()))
                    .arg(format!("--description=gpush {}: {}", place.operation(), place.step()))
                    .args([
                        "--service-type=notify",
                        "--property=NotifyAccess=main",
                        "--property=KillMode=control-group",
                    ])
                    .args(["--property=TimeoutStartSec=30", "--slice=gpush.slice", "--", &own]);
                command
            }
            None => tokio::process::Command::new("/proc/self/exe"),
        };
        command.arg("beside").arg(place.dir()).env_clear().current_dir("/").stdin(Stdio::null()).stderr(Stdio::piped());
        // With systemd-run the line comes from a unit that has no descriptor of ours.
        command.stdout(if self.systemd_run.is_some() { Stdio::null() } else { Stdio::piped() });
        let mut child = command.spawn().map_err(|error| format!("its keeper can't be started: {error}"))?;
        let begun = async {
            if let Some(mut out) = child.stdout.take() {
                let mut said = [0; 8];
                let read = out.read(&mut said).await.unwrap_or_default();
                if read > 0 {
                    return Ok(());
                }
            }
            let mut why = String::new();
            if let Some(err) = child.stderr.take() {
                let _ = err.take(4096).read_to_string(&mut why).await;
            }
            let status = child.wait().await.map_err(|error| error.to_string())?;
            if status.success() && self.systemd_run.is_some() {
                Ok(())
            } else {
                Err(format!("its keeper ended with {status}: {}", text::plain(why.trim())))
            }
        };
        let begun =
            tokio::time::timeout(LAUNCH, begun).await.unwrap_or_else(|_| Err("its keeper does not begin".to_owned()));
        // Reaped in the background; its end is told by the outcome.
        tokio::spawn(async move { child.wait().await });
        begun
    }
}

/// Waits for the end of a run, at most so long.
async fn follow(place: &Place, patience: Duration) -> Ended {
    let until = tokio::time::Instant::now() + patience;
    let mut pause = LOOK.0;
    loop {
        if let Some(ended) = place.concluded() {
            return ended;
        }
        if tokio::time::Instant::now() >= until {
            return Ended { end: End::Hangs, output: String::new() };
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LOOK.1);
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

fn refused(program: &str, error: &trust::Untrusted) -> ApiError {
    ApiError::new(Code::Unsupported, format!("{program} is not run: {error}")).hint(error.hint())
}

fn not_begun(job: &Job, why: &str) -> ApiError {
    ApiError::new(Code::Internal, format!("{} could not be run", job.program))
        .cause(why.to_owned())
        .hint("see the log of gpushd: `journalctl -u gpushd`")
}
