//! Whether a control program supports `-multiuser-server`: one server, run by root, for clients of several users.
//!
//! | version | `-multiuser-server` | an unknown argument |
//! |---|---|---|
//! | 535, 550 | ignored: starts the front-end | ignored: starts the front-end |
//! | 555, 580 | accepted; without `-d` or `-f` starts the front-end | prints the help |
//!
//! The help does not mention `-multiuser-server`, and the exit status is 1 in all cases of the
//! table. So gpushd runs the program with this option, and again with an argument that no version
//! supports. If the two results differ, the program supports the option. Neither run can reach or
//! start a daemon, because the pipe directory does not exist.

use std::{
    path::Path,
    process::{Output, Stdio},
    time::Duration,
};

use gpush_host::helper::Helpers;
use tokio::process::Command;

/// Makes a control daemon start one server as root for clients of all users.
pub const OPTION: &str = "-multiuser-server";

/// An argument that no version supports.
const UNKNOWN: &str = "-gpush-unknown-option";

/// A directory that does not exist, so that the front-end finds no daemon.
const NOWHERE: &str = "/nonexistent/gpush-mps";

/// How long each run may take.
const DEADLINE: Duration = Duration::from_secs(2);

/// Whether a control program supports the option.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Support {
    /// The program supports the option.
    Supported,
    /// The program serves one user at a time.
    Unsupported,
    /// Only root may use the option, and gpushd does not run as root.
    NeedsRoot,
    /// The program cannot be run.
    Unknown,
}

/// Determines whether a control program supports `-multiuser-server`.
pub async fn support(program: &Path) -> Support {
    if Helpers::may_run(&program.to_string_lossy()).is_err() {
        return Support::Unknown;
    }
    match (run(program, OPTION).await, run(program, UNKNOWN).await) {
        (Some(option), Some(unknown)) if option == unknown => Support::Unsupported,
        (Some(_), Some(_)) if nix::unistd::geteuid().is_root() => Support::Supported,
        (Some(_), Some(_)) => Support::NeedsRoot,
        (None, _) | (_, None) => Support::Unknown,
    }
}

async fn run(program: &Path, argument: &str) -> Option<Output> {
    let mut command = Command::new(program);
    command.arg(argument).env_clear().env("CUDA_MPS_PIPE_DIRECTORY", NOWHERE).env("CUDA_MPS_LOG_DIRECTORY", NOWHERE);
    command.current_dir("/").stdin(Stdio::null()).kill_on_drop(true);
    tokio::time::timeout(DEADLINE, command.output()).await.ok()?.ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// Creates a script in a directory that only root or this user can write to. gpushd refuses
    /// programs in other directories.
    fn script(dir: &Path, body: &str) -> std::path::PathBuf {
        let path = dir.join("nvidia-cuda-mps-control");
        std::fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o755)).unwrap();
        path
    }

    #[tokio::test]
    async fn support_is_detected_by_comparison_with_an_unknown_option() {
        let dir = tempfile::tempdir_in("/usr/local/share").or_else(|_| tempfile::tempdir()).unwrap();
        assert_eq!(support(&dir.path().join("missing")).await, Support::Unknown);
        let program = script(dir.path(), "echo Cannot find MPS control daemon process; exit 1");
        if Helpers::may_run(&program.to_string_lossy()).is_err() {
            println!("SKIPPED programs that answer: other users can write {}", dir.path().display());
            return;
        }
        assert_eq!(support(&program).await, Support::Unsupported);
        let supported = if nix::unistd::geteuid().is_root() { Support::Supported } else { Support::NeedsRoot };
        // The two runs of the program may differ only in their status, or only in their output.
        for body in [&format!("[ $1 = {OPTION} ]"), &format!("[ $1 = {OPTION} ] || echo help; exit 1")] {
            let program = script(dir.path(), body);
            assert_eq!(support(&program).await, supported, "{body}");
        }
    }

    /// Searches the data of the installed program for the option, as an independent check that
    /// gpushd itself does not make.
    #[tokio::test]
    async fn installed_control_program_is_judged_as_its_data_says() {
        let program = Path::new("/usr/bin/nvidia-cuda-mps-control");
        let Ok(bytes) = std::fs::read(program) else {
            return println!("SKIPPED the real one: nvidia-cuda-mps-control is not installed");
        };
        let names_it = bytes.split(|byte| *byte == 0).any(|word| word == OPTION.as_bytes());
        let support = support(program).await;
        assert_eq!(support != Support::Unsupported, names_it, "{support:?}");
    }
}
