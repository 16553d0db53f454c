//! `gpush-sim exec`: runs a program that sees a simulated host, including its `/proc/driver`.
//!
//! Slurm and container tools read the driver's files by absolute path. If root runs `exec`, the
//! program gets a separate mount namespace, in which the host's directory is mounted over
//! `/proc/driver`. If another user runs `exec`, the program gets only the environment, and
//! gpush-sim prints a message.

use std::convert::Infallible;
use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use anyhow::Context;
use mps_sim::errln;
use silicon::Host;
use silicon::host::{DRIVER, PROC};

use crate::directory;

/// A script that mounts `$1` over `/proc/driver`, and then executes the command in the remaining
/// arguments. `unshare` keeps the mount private to this process.
const SCRIPT: &str = "mount --bind -- \"$1\" /proc/driver || exit 125; shift; exec \"$@\"";

/// Replaces this process with the program.
pub(crate) fn exec(host: &Host, command: &[OsString]) -> anyhow::Result<Infallible> {
    let (program, arguments) = command.split_first().context("no program is given")?;
    let mut child = if nix::unistd::geteuid().is_root() {
        let mut child = Command::new("unshare");
        child.args(["--mount", "--", "sh", "-c", SCRIPT, "sh"]).arg(host.dir().join(PROC).join(DRIVER)).arg(program);
        child
    } else {
        errln!("gpush-sim: only root can mount {DRIVER} files over /proc/driver; the program does not see them");
        Command::new(program)
    };
    child.args(arguments);
    directory::Environment::of(host.dir()).extend(&mut child)?;
    let error = child.exec();
    Err(error).with_context(|| format!("cannot run {}", program.display()))
}
