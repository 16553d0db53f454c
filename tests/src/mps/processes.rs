//! MPS daemons and their servers as `/proc` shows them.

use std::{
    fs,
    path::{Path, PathBuf},
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

/// File names of NVIDIA's programs.
pub(super) const CONTROL: &str = "nvidia-cuda-mps-control";
pub(super) const SERVER: &str = "nvidia-cuda-mps-server";

/// A process whose environment names a pipe directory.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Part {
    /// Pid of the process.
    pub pid: i32,
    /// Role of the process.
    pub role: Role,
    /// The pipe directory in the environment of the process.
    pub pipe: PathBuf,
}

/// The role of a process whose environment names a pipe directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Role {
    /// The control daemon.
    Control,
    /// A server of a control daemon.
    Server,
    /// Any other process, such as a client.
    Other,
}

/// Reads `/proc`. Returns the running processes whose environment names a pipe directory below
/// `base`.
///
/// # Panics
/// If `/proc` cannot be read.
#[must_use]
pub fn parts(base: &Path) -> Vec<Part> {
    let mut parts = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else { continue };
        // A zombie has no environment, so it is left out.
        let Ok(environment) = fs::read(entry.path().join("environ")) else { continue };
        let named =
            environment.split(|byte| *byte == 0).find_map(|word| word.strip_prefix(b"CUDA_MPS_PIPE_DIRECTORY="));
        let Some(pipe) = named.map(|path| PathBuf::from(String::from_utf8_lossy(path).into_owned())) else { continue };
        if !pipe.starts_with(base) {
            continue;
        }
        let called = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let mut words = called.split(|byte| *byte == 0).map(String::from_utf8_lossy);
        let (name, argument) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
        let role = match Path::new(name.as_ref()).file_name().and_then(|name| name.to_str()) {
            // The control program without `-f` is a front-end, not a daemon.
            Some(CONTROL) if argument == "-f" => Role::Control,
            Some(SERVER) => Role::Server,
            Some(_) | None => Role::Other,
        };
        parts.push(Part { pid, role, pipe });
    }
    parts.sort();
    parts
}

/// Returns the pids of the running control daemons below `base`.
#[must_use]
pub fn controls(base: &Path) -> Vec<i32> {
    let all = parts(base);
    all.into_iter().filter(|part| part.role == Role::Control).map(|part| part.pid).collect()
}

/// Sends a signal to a process. Returns whether the process exists.
#[must_use]
pub fn signal(pid: i32, signal: Signal) -> bool {
    kill(Pid::from_raw(pid), signal).is_ok()
}
