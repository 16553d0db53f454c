//! The specs of the target directories, read from `spec.json`. If gpushd cannot read that file, for example after a full
//! disk, it recovers the spec from the running daemon.
//!
//! Without a spec, gpushd does not know the pipe directory, the user and the logs of a daemon.
//! gpushd would have to treat the daemon as leftovers and wait for its clients to end. The
//! environment of the daemon contains these values. gpushd trusts this environment, because only
//! root can have set the environment of a process that holds the lock.

use std::{
    fs,
    os::unix::ffi::OsStringExt,
    path::{Path, PathBuf},
};

use crate::protocol::lock;
use gpush_api::{MpsSettings, TargetUuid};
use gpush_host::proc;

use super::ownership;
use crate::daemon::{
    multi_user,
    target_dir::{Spec, TargetDir},
};

impl TargetDir {
    /// Lists the target directories whose spec is known, sorted by name. The spec's `gpu_uuid` is empty if the GPU is
    /// not known yet. Omits renamed directories, which no user can reach.
    pub fn all(base: &Path) -> Vec<(Self, Spec)> {
        let entries = fs::read_dir(base).into_iter().flatten().filter_map(Result::ok);
        let mut all: Vec<_> = entries
            .filter_map(|entry| {
                let place = Self::at(&entry.path());
                let spec = place.known_spec()?;
                if entry.file_name() != spec.target.as_str() {
                    return None;
                }
                Some((place, spec))
            })
            .collect();
        all.sort_by(|(one, _), (other, _)| one.dir().cmp(other.dir()));
        all
    }

    /// Reads the spec. If that fails, recovers the spec from the running daemon.
    pub(in crate::daemon) fn known_spec(&self) -> Option<Spec> {
        self.spec().or_else(|| recovered_spec(self))
    }
}

/// Returns the spec of the daemon that runs in a directory; `None` if there is none.
fn recovered_spec(place: &TargetDir) -> Option<Spec> {
    if !place.is_locked() {
        return None;
    }
    let parts: Vec<i32> = proc::pids().ok()?.into_iter().filter(|pid| ownership::has_lock_of(place, *pid)).collect();
    let daemons = parts.iter().copied().filter(|pid| ownership::is_daemon(*pid));
    daemons.filter_map(|daemon| of(place, daemon, &parts)).next()
}

fn of(place: &TargetDir, daemon: i32, parts: &[i32]) -> Option<Spec> {
    let pipe = PathBuf::from(ownership::variable(daemon, "CUDA_MPS_PIPE_DIRECTORY")?);
    let tenure = pipe.file_name()?.to_str()?.parse().ok()?;
    // A server that runs as root has the same environment, but never holds `control_lock`.
    if place.pipe(tenure) != pipe || lock::holder(&pipe).ok()? != Some(daemon) {
        return None;
    }
    let uuid = TargetUuid::from(ownership::variable(daemon, "CUDA_VISIBLE_DEVICES")?);
    let name = proc::words(daemon)?.swap_remove(0);
    let multi_user = proc::words(daemon)?.iter().any(|word| word == multi_user::OPTION.as_bytes());
    let server = parts.iter().filter(|pid| **pid != daemon).find_map(|server| proc::owner(*server));
    let admitted = || place.users_with_access(tenure).unwrap_or_default().into_iter().next();
    Some(Spec {
        target: place.dir().file_name()?.to_str()?.to_owned(),
        // The GPU of a MIG device is not known before the first reading.
        gpu_uuid: uuid.to_gpu().unwrap_or_default(),
        uuid,
        tenure,
        // If the user is unknown, the daemon's own user is recorded, so that the next user gets another directory.
        user: (!multi_user).then(|| server.or_else(admitted).or_else(|| proc::owner(daemon))).flatten(),
        multi_user,
        control: proc::program(daemon)?,
        name: std::ffi::OsString::from_vec(name).into(),
        servers: ownership::variable(daemon, "PATH")?.into(),
        logs: ownership::variable(daemon, "CUDA_MPS_LOG_DIRECTORY")?.into(),
        // The next probe reads the real settings from the daemon.
        settings: MpsSettings::default(),
    })
}
