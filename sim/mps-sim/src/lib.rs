//! Simulated versions of NVIDIA's MPS programs: the control daemon with its front-end, the server,
//! and a client that connects as libcuda does.
//!
//! No program that ships uses this crate. `gpush-sim` puts the programs into the directory `bin` of
//! a simulated host under their real names, and tests run them through [`main`]. The programs
//! behave as NVIDIA's programs were observed to behave. The README.md of this crate describes the
//! observations, and the behaviour that is still unknown.
//!
//! ```text
//!  user interface ──4──► control_privileged ─┐                       ┌── clients with their limits
//!                                            ▼                       ▼
//!  client ────2────────► control ──────► daemon ──starts, asks──► server (of one uid)
//!     └────────────────────────────────────── its own socket ────────▲
//!                                        handed to both by the daemon
//! ```
//!
//! Fault rules are in a file, not in the environment, because callers may start these programs with
//! an empty environment: see [`fault`].

#![deny(clippy::print_stdout, clippy::print_stderr)] // `output` tells why

use std::{ffi::OsString, path::Path, process::ExitCode};

use self::{options::Action, servers::Users};

#[macro_use]
pub mod output;

pub mod client;
mod command;
mod daemon;
pub mod fault;
mod files;
mod front;
mod log;
mod options;
mod place;
mod server;
mod servers;
mod state;
mod value;
mod wire;
pub mod work;

/// Names of this crate's programs in a host's `bin`.
pub const PROGRAMS: [&str; 2] = [CONTROL, SERVER];
const CONTROL: &str = "nvidia-cuda-mps-control";
const SERVER: &str = "nvidia-cuda-mps-server";

/// Runs the program whose name is the last component of the path `called`. Returns `None` for other
/// names.
#[must_use]
pub fn main(called: &Path, arguments: &[OsString]) -> Option<ExitCode> {
    let name = called.file_name()?;
    let ended = if name == CONTROL {
        control(called, arguments)
    } else if name == SERVER {
        server::run(place::Environment::of(called))
    } else {
        return None;
    };
    Some(ended.unwrap_or_else(|error| {
        errln!("{} (simulated): {error:#}", name.display());
        ExitCode::FAILURE
    }))
}

/// Runs the control program as the version of the simulated host.
fn control(called: &Path, arguments: &[OsString]) -> anyhow::Result<ExitCode> {
    let place = place::Environment::of(called);
    let users = |multi_user| if multi_user { Users::Many } else { Users::One };
    match Action::of(place.version(), arguments) {
        Action::Foreground { multi_user } => daemon::foreground(place, users(multi_user)),
        Action::Background { multi_user } => daemon::background(called, users(multi_user)),
        Action::Behind { multi_user } => daemon::behind(place, users(multi_user)),
        Action::FrontEnd => front::run(),
        Action::Help => {
            outln!("{HELP}");
            Ok(ExitCode::SUCCESS)
        }
        Action::Usage => {
            outln!("{HELP}");
            Ok(ExitCode::FAILURE)
        }
        Action::OnlyRoot => {
            outln!("Only root user may enable -multiuser-server!");
            Ok(ExitCode::FAILURE)
        }
    }
}

const HELP: &str = "CUDA MPS Control for Linux/Unix, a stand-in.\n
  -d  start the daemon in the background
  -f  start it in the foreground
  -h  this text
Without one of these, commands are read from standard input.\n";
