//! The processes that have GPUs open. The directory `proc` of a host shows them in the form of
//! `/proc`.

use std::collections::BTreeSet;
use std::io;
use std::os::unix::fs::symlink;

use super::{Host, HostError};
use crate::machine::Machine;

/// Directory of the processes that have GPUs open, relative to the host's directory.
pub const PROC: &str = "proc";

impl Host {
    /// Records that a process has a GPU's device node open. `cmdline` and other files are links to
    /// the real `/proc`. When the process has ended or is detached, an update of the state removes these files.
    ///
    /// # Errors
    /// If the operating system reports an error.
    pub fn show_open(&self, gpu: u32, pid: u32) -> Result<(), HostError> {
        let dir = self.dir().join(PROC).join(pid.to_string());
        let minor = self.hardware().slots[gpu as usize].identity.minor;
        let links = ["cmdline", "comm", "cgroup", "status"].map(|name| (dir.join(name), format!("/proc/{pid}/{name}")));
        let node = (dir.join("fd").join(gpu.to_string()), format!("/dev/nvidia{minor}"));
        let laid = std::fs::create_dir_all(dir.join("fd")).and_then(|()| {
            links.into_iter().chain([node]).try_for_each(|(link, target)| match symlink(target, link) {
                Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
                Ok(()) | Err(_) => Ok(()),
            })
        });
        laid.map_err(|cause| HostError::io("cannot make", &dir, cause))
    }

    /// Removes the files of processes that were on a GPU before an update, and are not there after it. Ignores errors:
    /// a process may be registered without files, or its files may belong to another user.
    pub(super) fn hide_closed(&self, before: &Machine, after: &Machine) {
        let on = |machine: &Machine| -> BTreeSet<(u32, u32)> {
            let all = machine.gpus().iter().flat_map(|gpu| gpu.processes.iter().map(|one| (one.pid.pid, gpu.index)));
            all.collect()
        };
        let now = on(after);
        for (pid, gpu) in on(before).difference(&now) {
            let dir = self.dir().join(PROC).join(pid.to_string());
            let _best_effort = if now.iter().any(|(other, _)| other == pid) {
                std::fs::remove_file(dir.join("fd").join(gpu.to_string()))
            } else {
                std::fs::remove_dir_all(dir)
            };
        }
    }
}
