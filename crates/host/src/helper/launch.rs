//! Starts keepers, the processes that run helper programs. A keeper is a transient unit if systemd
//! is the service manager, otherwise a child process.

use std::{process::Stdio, sync::Arc, time::Duration};

use gpush_api::text;
use tokio::io::AsyncReadExt;

use super::run_dir::RunDir;
use crate::systemd::{self, Manager, TransientService};

/// How long a keeper may take to start.
const LAUNCH: Duration = Duration::from_secs(30);

/// The slice that contains the helper units.
const SLICE: &str = "gpush.slice";

/// Maximum number of bytes of a keeper's error output that are kept.
const ERROR_OUTPUT: u64 = 4096;

/// How keepers are started.
#[derive(Debug, Clone)]
pub(super) enum Launcher {
    /// Starts keepers as transient systemd units.
    Systemd(Arc<Manager>),
    /// Starts keepers as detached child processes, which outlive gpushd.
    Child,
}

impl Launcher {
    /// Chooses the launcher for this host. systemd starts system units only for root.
    pub(super) fn of_this_host() -> Self {
        let is_root = nix::unistd::geteuid().is_root();
        if is_root && systemd::is_the_service_manager() { Self::Systemd(Arc::default()) } else { Self::Child }
    }

    /// Starts the keeper of a run and waits until the keeper holds the lock.
    ///
    /// # Errors
    /// The keeper did not report its start, but may still start later.
    pub(super) async fn launch(&self, run: &RunDir) -> Result<(), String> {
        let started = async {
            match self {
                Self::Systemd(manager) => start_unit(manager, run).await,
                Self::Child => start_child(run).await,
            }
        };
        let in_time = tokio::time::timeout(LAUNCH, started).await;
        in_time.unwrap_or_else(|_| Err(format!("the helper process did not start within {}s", LAUNCH.as_secs())))
    }
}

async fn start_unit(manager: &Manager, run: &RunDir) -> Result<(), String> {
    // systemd starts the program, so `/proc/self/exe` would not lead to gpushd.
    let own = std::env::current_exe().map_err(|error| error.to_string())?;
    let own = own.to_string_lossy().trim_end_matches(" (deleted)").to_owned();
    let unit = TransientService {
        name: format!("gpush-{}.service", run.name()),
        description: format!("gpush {}: {}", run.operation(), run.step()),
        command: vec![own, "helper".to_owned(), run.dir().to_string_lossy().into_owned()],
        slice: SLICE.to_owned(),
        start_timeout: LAUNCH,
    };
    manager.start_transient(&unit).await.map_err(|error| error.in_full())
}

#[expect(clippy::disallowed_methods, reason = "the task only waits for a process")]
async fn start_child(run: &RunDir) -> Result<(), String> {
    let mut command = tokio::process::Command::new("/proc/self/exe");
    command.arg("helper").arg(run.dir()).env_clear().current_dir("/").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().map_err(|error| format!("cannot start the helper process: {error}"))?;
    let (output, errors) = (child.stdout.take(), child.stderr.take());
    // The outcome on disk shows how the run ended. The child only has to be reaped.
    let end = tokio::spawn(async move { child.wait().await });
    if let Some(mut output) = output
        && output.read(&mut [0; 8]).await.is_ok_and(|read| read > 0)
    {
        return Ok(());
    }
    let mut why = String::new();
    if let Some(errors) = errors {
        let _ = errors.take(ERROR_OUTPUT).read_to_string(&mut why).await;
    }
    match end.await {
        Ok(Ok(status)) => Err(format!("the helper process ended with {status}: {}", text::plain(why.trim()))),
        Ok(Err(error)) => Err(error.to_string()),
        Err(error) => Err(error.to_string()),
    }
}
