//! MPS control daemons without NVIDIA's programs, for tests of programs that supervise daemons.
//!
//! The supervisor task, the launcher, the directories, and the checks of settings and replies are the real ones. Only two
//! things are replaced: the program of a daemon, and its answers to commands.

use std::{fmt, path::Path, process};

use super::{
    command::{Command, Pid},
    session::{Answer, Daemon, SessionError},
};

/// The daemons of a host, in a script.
pub trait ScriptedDaemons: fmt::Debug + Send + Sync {
    /// Returns the program that replaces the daemon of a target directory. Like `gpushd mps-daemon`, the program inherits the
    /// lock of the directory as its standard input. It reports errors on its standard error, and closes its standard error
    /// when it runs.
    fn program(&self, dir: &Path) -> process::Command;

    /// Answers a command to the daemon with this pid.
    ///
    /// # Errors
    /// If the script says that the daemon does not answer.
    fn answer(&self, daemon: Pid, pipe: &Path, command: &Command) -> Result<Vec<String>, SessionError>;
}

/// Sends a command to a scripted daemon.
pub(super) fn ask(
    script: &dyn ScriptedDaemons,
    daemon: Pid,
    pipe: &Path,
    command: &Command,
) -> Result<Answer, SessionError> {
    let text = script.answer(daemon, pipe, command)?;
    Ok(Answer { daemon: Daemon { pid: daemon, uid: nix::unistd::geteuid().as_raw() }, text, status: 0 })
}
