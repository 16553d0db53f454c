//! What a daemon was started with, asked of itself: for when the spec in its directory can't be read.
//!
//! It has it as its environment, which nobody but root can have given to what has our lock.

use std::{os::unix::ffi::OsStringExt, path::PathBuf};

use crate::protocol::lock;
use gpush_api::MpsSettings;
use gpush_host::proc;

use super::ownership;
use crate::daemon::target_dir::{Spec, TargetDir};

/// The spec of the daemon that runs in a place; `None` when none does.
pub(in crate::daemon) fn recovered_spec(place: &TargetDir) -> Option<Spec> {
    if !place.is_taken() {
        return None;
    }
    let parts: Vec<i32> = proc::pids().filter(|pid| ownership::has_lock_of(place, *pid)).collect();
    let daemons = parts.iter().copied().filter(|pid| ownership::is_daemon(*pid));
    daemons.filter_map(|daemon| of(place, daemon, &parts)).next()
}

fn of(place: &TargetDir, daemon: i32, parts: &[i32]) -> Option<Spec> {
    let pipe = PathBuf::from(ownership::variable(daemon, "CUDA_MPS_PIPE_DIRECTORY")?);
    let tenure = pipe.file_name()?.to_str()?.parse().ok()?;
    // A server of root's has the same environment, and never this lock.
    if place.pipe(tenure) != pipe || lock::holder(&pipe).ok()? != Some(daemon) {
        return None;
    }
    let uuid = ownership::variable(daemon, "CUDA_VISIBLE_DEVICES")?;
    let name = proc::words(daemon)?.swap_remove(0);
    let server = parts.iter().filter(|pid| **pid != daemon).find_map(|server| proc::owner(*server));
    let admitted = || place.admitted(tenure).unwrap_or_default().into_iter().next();
    Some(Spec {
        target: place.dir().file_name()?.to_str()?.to_owned(),
        // Whose a MIG device is only they know who see the GPU.
        gpu_uuid: if uuid.starts_with("GPU-") { uuid.clone() } else { String::new() },
        uuid,
        tenure,
        // Where that can't be told it is nobody's who may come: the next user gets another directory.
        user: server.or_else(admitted).or_else(|| proc::owner(daemon)),
        control: proc::program(daemon)?,
        name: std::ffi::OsString::from_vec(name).into(),
        servers: ownership::variable(daemon, "PATH")?.into(),
        logs: ownership::variable(daemon, "CUDA_MPS_LOG_DIRECTORY")?.into(),
        // What it has is read back from it; the next one gets what is wanted then.
        settings: MpsSettings::default(),
    })
}
