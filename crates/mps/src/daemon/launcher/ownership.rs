//! Identifies the processes of a target by facts that users cannot imitate.
//!
//! A user with a share can lock `control_lock`, and can start a process with the daemon's
//! environment and name. So these facts do not identify a process of gpushd. Only the file `lock`
//! identifies such a process. The file has mode 0600, and is the standard input of a daemon and of
//! everything that the daemon started.
//!
//! ```text
//!                   the daemon                               processes that it started
//! standard input    `lock`                                   `lock`
//! all four uids     gpushd's                                 the share's
//! program           the spec's, even if replaced since       any
//! pid namespace     gpushd's                                 any
//! control_lock      held, as the kernel reports              not held
//! ```
//!
//! After the start of the daemon, `lock` may have been deleted, with or without its directory. The kernel still reports
//! the path of a deleted `lock`. So gpush still finds the processes of such a daemon. A process is an orphan if its
//! lock file is not the current lock file of its directory: no user can reach the process, but it still uses the GPU.

use gpush_api::TargetUuid;
use std::{
    collections::BTreeSet,
    fs, io,
    path::{Path, PathBuf},
};

use crate::protocol::lock::{self, Holder};
use gpush_host::proc::{self, Environment, FileId, pids, program};

use super::DaemonProcess;
use crate::daemon::target_dir::{Spec, TargetDir};

/// Number of searches for the processes to kill. One search is not enough, because a process may start other processes
/// before it is killed.
const ROUNDS: u32 = 4;

/// The process that holds the lock of a pipe directory.
#[derive(Debug)]
pub(in crate::daemon) enum LockOwner {
    /// No process.
    Free,
    /// The daemon of the directory.
    Daemon(DaemonProcess),
    /// Another process, with its pid if the kernel reports it.
    Foreign(Option<i32>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::daemon) struct OwnedProcess {
    pub(in crate::daemon) pid: i32,
    /// Identity of the process's lock file.
    pub(in crate::daemon) lock: FileId,
    /// Whether the process is a control daemon. Otherwise the process is a server.
    pub(in crate::daemon) is_daemon: bool,
    /// Whether the process's lock is not the current lock of the directory.
    pub(in crate::daemon) is_orphan: bool,
}

/// The standard input of a process that may be a lock.
struct Input {
    file: FileId,
    owner: u32,
    /// Path of the file, even if the file was deleted.
    path: PathBuf,
}

impl Input {
    fn of(pid: i32) -> Option<Self> {
        let path = proc::open_file(pid, 0)?;
        // Check the name first, because it excludes nearly every process.
        if path.file_name()? != "lock" {
            return None;
        }
        let status = proc::open_file_status(pid, 0)?;
        status.is_regular.then_some(Self { file: status.id, owner: status.owner, path })
    }

    /// Returns whether this standard input is the lock of a directory, or was that lock until the file was deleted.
    fn is_of(&self, place: &TargetDir) -> bool {
        // A deleted lock file is recognized by its path, because only gpushd can create files in
        // the directory.
        let was = || self.owner == own_uid() && self.path.parent() == Some(canonical(place.dir()).as_path());
        Some(self.file) == place.lock_file() || was()
    }
}

/// Returns the process that holds the lock of the pipe directory, and whether that process is the
/// daemon of this spec.
pub(super) fn find(place: &TargetDir, spec: &Spec) -> io::Result<LockOwner> {
    let pipe = place.pipe(spec.tenure);
    let pid = match lock::taken_by(&pipe)? {
        Holder::Free => return Ok(LockOwner::Free),
        Holder::Unnamed => return Ok(LockOwner::Foreign(None)),
        Holder::Process(pid) => pid,
    };
    let Some(process) = DaemonProcess::of(pid)? else { return Ok(LockOwner::Free) };
    let ours = has_lock_of(place, pid) && is_daemon(pid) && program(pid).is_some_and(|own| own == spec.control);
    // The checks are valid only if the process is still alive. If it has ended, the checks may have
    // examined a later process with the same pid.
    if process.has_ended() || lock::taken_by(&pipe)? != Holder::Process(pid) {
        return Ok(LockOwner::Free);
    }
    Ok(if ours { LockOwner::Daemon(process) } else { LockOwner::Foreign(Some(pid)) })
}

/// Returns the scripted daemon of a directory. It does not hold `control_lock`, so its standard input identifies it.
#[cfg(any(test, feature = "scripted"))]
pub(super) fn find_scripted(place: &TargetDir, spec: &Spec) -> io::Result<LockOwner> {
    let daemon = processes(place, &spec.uuid).into_iter().find(|part| part.is_daemon && !part.is_orphan);
    let process = daemon.map_or(Ok(None), |part| DaemonProcess::of(part.pid))?;
    Ok(process.map_or(LockOwner::Free, LockOwner::Daemon))
}

/// Returns all processes of a target, including orphans.
pub(in crate::daemon) fn processes(place: &TargetDir, uuid: &TargetUuid) -> Vec<OwnedProcess> {
    let base = place.dir().parent().map(canonical);
    let here = place.lock_file();
    let part = |pid: i32| {
        let Input { file, owner, path } = Input::of(pid)?;
        let is_orphan = Some(file) != here;
        if is_orphan {
            let below = path.parent().and_then(Path::parent) == base.as_deref() && owner == own_uid();
            // The directory may have been renamed, so compare the target's UUID too.
            let its = || path.parent() == Some(canonical(place.dir()).as_path()) || serves(pid, uuid);
            if !below || !its() {
                return None;
            }
        }
        Some(OwnedProcess { pid, lock: file, is_daemon: is_daemon(pid), is_orphan })
    };
    pids().unwrap_or_default().into_iter().filter_map(part).collect()
}

/// Kills all processes that hold one of these locks. Returns the killed processes.
pub(in crate::daemon) fn kill(locks: &BTreeSet<FileId>) -> Vec<DaemonProcess> {
    let has_one = |pid: i32| Input::of(pid).is_some_and(|input| locks.contains(&input.file));
    let mut killed: Vec<DaemonProcess> = Vec::new();
    for _ in 0..ROUNDS {
        let before = killed.len();
        for pid in pids().unwrap_or_default() {
            if killed.iter().any(|one| one.pid == pid) || !has_one(pid) {
                continue;
            }
            let Ok(Some(process)) = DaemonProcess::of(pid) else { continue };
            // Between the search and the opening of the pid, another process may have got the pid.
            if !has_one(pid) {
                continue;
            }
            match process.kill() {
                Ok(()) => killed.push(process),
                Err(error) => tracing::error!("process {pid} of an MPS daemon can't be killed: {error}"),
            }
        }
        if killed.len() == before {
            break;
        }
    }
    killed
}

/// Returns the lock of a daemon, if that lock is, or was, the lock of this directory.
pub(super) fn lock_of(place: &TargetDir, daemon: &DaemonProcess) -> Option<FileId> {
    let input = Input::of(daemon.pid).filter(|input| input.is_of(place))?;
    (!daemon.has_ended()).then_some(input.file)
}

/// Returns whether a process holds the lock of a directory, even if the lock was deleted.
pub(super) fn has_lock_of(place: &TargetDir, pid: i32) -> bool {
    Input::of(pid).is_some_and(|input| input.is_of(place))
}

/// Returns whether a process that holds the lock is the control daemon. A server that runs as root is not the daemon.
/// A setuid program is not the daemon either: its real uid is that of the user that started it.
pub(super) fn is_daemon(pid: i32) -> bool {
    proc::uids(pid) == Some([own_uid(); 4])
        && proc::is_in_our_pid_namespace(pid)
        && proc::words(pid).is_some_and(|words| words.get(1).is_some_and(|word| word == b"-f"))
}

/// Returns a variable of a process's environment.
pub(super) fn variable(pid: i32, name: &str) -> Option<String> {
    match proc::environment(pid, name) {
        Ok(Environment::Set(value)) => String::from_utf8(value).ok(),
        Ok(Environment::Unset | Environment::Unknown) | Err(_) => None,
    }
}

fn serves(pid: i32, uuid: &TargetUuid) -> bool {
    variable(pid, "CUDA_VISIBLE_DEVICES").as_deref() == Some(uuid.as_str())
}

fn own_uid() -> u32 {
    nix::unistd::geteuid().as_raw()
}

/// Resolves a path as the kernel does. The file need not exist.
fn canonical(path: &Path) -> PathBuf {
    if let Ok(path) = fs::canonicalize(path) {
        return path;
    }
    match (path.parent(), path.file_name()) {
        (Some(parent), Some(name)) => canonical(parent).join(name),
        _ => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_of_a_missing_file_is_resolved() {
        let scratch = tempfile::tempdir().unwrap();
        let there = fs::canonicalize(scratch.path()).unwrap();
        assert_eq!(canonical(&scratch.path().join("a/b")), there.join("a/b"));
    }

    #[test]
    fn process_without_a_lock_of_gpushd_is_not_owned() {
        let me = std::process::id().cast_signed();
        assert_eq!(proc::owner(me), Some(own_uid()));
        assert!(program(me).is_some() && !is_daemon(me));
        let scratch = tempfile::tempdir().unwrap();
        let place = TargetDir::of(scratch.path(), "g1");
        assert!(!has_lock_of(&place, me) && processes(&place, &"GPU-1".into()).is_empty());
    }
}
