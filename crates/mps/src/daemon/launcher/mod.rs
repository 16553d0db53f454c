//! Starts a daemon's process, reports how the process ended, and kills the process with everything
//! that it started. The supervisor ([`gpush_core::supervisor`]) does not depend on the kind of
//! launcher.
//!
//! ```text
//!               process launcher                   systemd launcher
//! check_free    no process holds the lock          and the unit is inactive
//! start         gpushd mps-daemon DIR, detached    StartUnit gpushd-mps@DIR, then its main process
//! ended         pidfd of the daemon                pidfd of the daemon
//! exit_reason   exit status of the child           Result of the unit, which is then reset
//! kill          all processes that hold the lock   KillUnit: the unit's cgroup
//! ```
//!
//! gpushd watches adopted and new daemons in the same way, through a pidfd. To adopt a daemon,
//! gpushd needs only the pid. [`ownership`] gets the pid from the lock and identifies the daemon.
//! So gpushd does not need systemd to notice that the daemon of a unit has ended. It asks systemd
//! only for the reason. If the bus fails, gpushd cannot start daemons; everything else works.

mod known_spec;
mod ownership;
mod process;
mod systemd;

#[cfg(any(test, feature = "scripted"))]
use std::sync::Arc;
use std::{collections::BTreeSet, io, path::Path, process::ExitStatus};

use gpush_host::{cgroup, pidfd::AsyncPidFd, proc::ProcessId};
use nix::sys::signal::Signal;
use tokio::task::JoinHandle;

pub(super) use self::ownership::{LockOwner, OwnedProcess, kill, processes};
use self::systemd::Units;
use super::target_dir::{Spec, TargetDir};
use crate::SYSTEM_DIRECTORY;
#[cfg(any(test, feature = "scripted"))]
use crate::protocol::scripted::ScriptedDaemons;

/// Why a daemon was not started.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum StartError {
    /// The daemon cannot be started yet, because leftovers still run or systemd does not answer.
    /// This is not counted as a failure of the daemon.
    #[error("{0}")]
    Later(String),
    /// The system refused the start, or the process ended before it became the daemon.
    #[error("{0}")]
    Failed(String),
}

impl StartError {
    fn locked() -> Self {
        Self::Later("processes of the previous MPS daemon are still running".to_owned())
    }
}

/// Starts, watches and kills the daemons of this host.
#[derive(Debug, Clone)]
pub struct Launcher {
    kind: Kind,
    /// For tests: the programs and answers of the daemons.
    #[cfg(any(test, feature = "scripted"))]
    script: Option<Arc<dyn ScriptedDaemons>>,
}

#[derive(Debug, Clone)]
enum Kind {
    /// Daemons are children of gpushd that outlive it.
    Process,
    /// Each daemon is a systemd unit.
    Systemd(Units),
}

impl Kind {
    /// Chooses the launcher. Unit names contain only the target, so the systemd launcher works only in the system's
    /// directory.
    fn choose(base: &Path, is_root: bool, has_systemd: impl Fn() -> bool) -> Self {
        if base == Path::new(SYSTEM_DIRECTORY) && is_root && has_systemd() {
            Self::Systemd(Units::default())
        } else {
            Self::Process
        }
    }
}

impl Launcher {
    /// Returns the launcher for daemons below `base`.
    #[must_use]
    pub fn of(base: &Path) -> Self {
        let is_root = nix::unistd::geteuid().is_root();
        Self {
            kind: Kind::choose(base, is_root, gpush_host::systemd::is_the_service_manager),
            #[cfg(any(test, feature = "scripted"))]
            script: None,
        }
    }

    /// Returns a process launcher for scripted daemons.
    #[cfg(any(test, feature = "scripted"))]
    #[must_use]
    pub fn scripted(script: Arc<dyn ScriptedDaemons>) -> Self {
        Self { kind: Kind::Process, script: Some(script) }
    }

    /// Returns the script, if the daemons are scripted.
    #[cfg(any(test, feature = "scripted"))]
    pub(super) fn script(&self) -> Option<Arc<dyn ScriptedDaemons>> {
        self.script.clone()
    }

    /// Checks that no process of a previous daemon still runs. Only then may the caller prepare the directory and start
    /// a daemon.
    pub(super) async fn check_free(&self, dir: &TargetDir) -> Result<(), StartError> {
        if dir.is_locked() {
            return Err(StartError::locked());
        }
        match &self.kind {
            Kind::Process => Ok(()),
            Kind::Systemd(units) => units.check_free(dir).await,
        }
    }

    /// Returns the process that holds the lock of the pipe directory, and whether that process is the daemon of this
    /// spec. Where daemons are units, the daemon must be in its unit: only root can put a process there.
    ///
    /// # Errors
    /// The lock cannot be read.
    pub(super) fn find(&self, dir: &TargetDir, spec: &Spec) -> io::Result<LockOwner> {
        #[cfg(any(test, feature = "scripted"))]
        if self.script.is_some() {
            return ownership::find_scripted(dir, spec);
        }
        Ok(match ownership::find(dir, spec)? {
            LockOwner::Daemon(process) if !self.is_in_unit(process.pid, &spec.target) => {
                LockOwner::Foreign(Some(process.pid))
            }
            found => found,
        })
    }

    /// Returns whether a process is in the unit of a target's daemon. Returns `true` where daemons are not units.
    pub(super) fn is_in_unit(&self, pid: i32, target: &str) -> bool {
        match &self.kind {
            Kind::Process => true,
            Kind::Systemd(_) => {
                cgroup::of(pid).and_then(|found| found.unit).is_some_and(|unit| unit == unit_of_target(target))
            }
        }
    }

    /// Starts the daemon that the directory's spec describes.
    pub(super) async fn start(&self, dir: &TargetDir) -> Result<DaemonProcess, StartError> {
        if dir.is_locked() {
            return Err(StartError::locked());
        }
        #[cfg(any(test, feature = "scripted"))]
        if let Some(script) = &self.script {
            return process::run(script.program(dir.dir()).into()).await;
        }
        match &self.kind {
            Kind::Process => process::start(dir).await,
            Kind::Systemd(units) => units.start(dir).await,
        }
    }

    /// Describes how a process ended, and resets a failed unit so that it can be started again.
    /// Call this after the process has ended.
    pub(super) async fn exit_reason(&self, dir: &TargetDir, process: DaemonProcess) -> String {
        match &self.kind {
            Kind::Process => process::exit_reason(process).await,
            Kind::Systemd(units) => units.exit_reason(dir, process.pid).await,
        }
    }

    /// Kills a daemon that is still alive, and all processes that it started.
    pub(super) async fn kill(&self, dir: &TargetDir, daemon: Option<&DaemonProcess>) {
        match &self.kind {
            Kind::Process => kill_all(dir, daemon),
            Kind::Systemd(units) => units.kill(dir, daemon).await,
        }
    }

    /// Returns whether each daemon is a systemd unit.
    pub(super) fn has_units(&self) -> bool {
        matches!(self.kind, Kind::Systemd(_))
    }

    /// Returns whether the launcher itself tracks daemons whose directories were deleted. Such a
    /// launcher starts no other daemon in place of these daemons, and ends them when they have no
    /// clients.
    pub(super) fn tracks_orphans(&self) -> bool {
        self.has_units()
    }

    /// Ends daemons whose directories were deleted and whose targets are not in `known`. Ends each
    /// daemon when it has no clients, and returns when all have ended.
    pub async fn end_orphans(&self, known: BTreeSet<String>) {
        match &self.kind {
            // The process launcher does not track these daemons. gpushd finds them when their targets get a daemon
            // again.
            Kind::Process => {}
            Kind::Systemd(units) => units.end_orphans(known).await,
        }
    }
}

/// Returns the unit of a target's daemon, where daemons are units.
pub(super) fn unit_of_target(short: &str) -> String {
    systemd::of(short)
}

/// The process of a daemon. It need not be a child of gpushd.
#[derive(Debug)]
pub(super) struct DaemonProcess {
    pub(super) pid: i32,
    /// The pid with its start time; `None` if the process had already ended when gpushd opened it.
    pub(super) id: Option<ProcessId>,
    handle: AsyncPidFd,
    /// The exit status, if the process is a child of this gpushd.
    status: Option<JoinHandle<io::Result<ExitStatus>>>,
}

impl DaemonProcess {
    /// Opens the process with this pid; `None` if there is none.
    pub(super) fn of(pid: i32) -> io::Result<Option<Self>> {
        let Some(handle) = AsyncPidFd::open(pid)? else { return Ok(None) };
        // If the process has ended, the start time may be that of a later process with the same pid.
        let id = ProcessId::of(pid).filter(|_| !handle.has_ended());
        Ok(Some(Self { pid, id, handle, status: None }))
    }

    /// Waits until the process has ended.
    pub(super) async fn ended(&self) {
        self.handle.wait_until_ended().await;
    }

    /// Sends SIGTERM to the process.
    fn terminate(&self) -> io::Result<()> {
        self.handle.signal(Signal::SIGTERM)
    }

    /// Kills the process. Returns `Ok` if it has already ended.
    fn kill(&self) -> io::Result<()> {
        self.handle.kill()
    }

    pub(super) fn has_ended(&self) -> bool {
        self.handle.has_ended()
    }
}

/// Kills all processes that hold the directory's current lock file. If the daemon holds another lock file, also kills
/// all processes that hold that file.
fn kill_all(dir: &TargetDir, daemon: Option<&DaemonProcess>) {
    let locks = dir.lock_file().into_iter().chain(daemon.and_then(|daemon| ownership::lock_of(dir, daemon)));
    let locks: BTreeSet<_> = locks.collect();
    // Kill the daemon first, so that it starts no more servers. A daemon that is still starting may
    // not hold a lock yet.
    if let Some(daemon) = daemon
        && let Err(error) = daemon.kill()
    {
        tracing::error!("the MPS daemon {} can't be killed: {error}", daemon.pid);
    }
    ownership::kill(&locks);
}

/// Describes a process that exited with a status.
fn exited(status: i32) -> String {
    format!("ended with status {status}")
}

/// Describes a process that was ended by a signal.
fn signalled(signal: i32) -> String {
    format!("was ended by signal {signal}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn pid_without_process_opens_nothing() {
        assert!(DaemonProcess::of(-1).unwrap().is_none() && DaemonProcess::of(0).unwrap().is_none());
        let me = DaemonProcess::of(std::process::id().cast_signed()).unwrap().unwrap();
        assert!(!me.has_ended());
    }

    #[test]
    fn systemd_launcher_is_used_only_by_root_in_its_directory() {
        let system = Path::new(SYSTEM_DIRECTORY);
        let is_systemd =
            |base: &Path, is_root, has_systemd| matches!(Kind::choose(base, is_root, || has_systemd), Kind::Systemd(_));
        assert!(is_systemd(system, true, true));
        assert!(!is_systemd(system, true, false));
        assert!(!is_systemd(system, false, true));
        assert!(!is_systemd(Path::new("/tmp/gpush-mps"), true, true));
    }
}
