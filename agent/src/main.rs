//! `gpushd`, the gpush host agent: it manages how the GPUs of one host are shared.
//!
//! ```text
//! serve ─┬─► state (snapshots, redacted for the caller)                    reads
//!        └─► operations ─► modes ─► Hardware                               changes
//! reconcile ─────┘                     │
//!                           gpushd driver-worker ─► libnvidia-ml.so.1
//! ```
//!
//! `gpush-core` makes the decisions, and the worker of `gpush-nvml` makes the driver calls. This crate determines when
//! they happen, for which caller, and how failures are handled.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests start their own tasks"))]

use std::process::ExitCode;

use clap::Parser;

use crate::system::options;

mod enforcement;
mod lease_policies;
mod leases;
mod lifecycle;
mod metrics;
mod modes;
mod notices;
mod operations;
mod processes;
mod reconcile;
mod requests;
mod serve;
mod slurm;
mod state;
mod system;
mod usage;

fn main() -> ExitCode {
    // Check this first: the driver worker is the same program, and must not run code that it does not need.
    if std::env::args_os().nth(1).is_some_and(|argument| argument == "driver-worker") {
        return gpush_nvml::worker::main();
    }
    let arguments = options::Arguments::parse();
    match &arguments.command {
        Some(options::Command::DriverWorker) => return gpush_nvml::worker::main(),
        Some(options::Command::Helper { dir }) => return gpush_host::helper::keeper::main(dir),
        Some(options::Command::MpsDaemon { dir }) => return gpush_mps::daemon::exec::main(dir),
        Some(options::Command::DeviceProbe { major, minor, path }) => {
            return gpush_host::device_probe::main(*major, *minor, path);
        }
        Some(options::Command::Man) => {
            let written = options::man_page().and_then(|page| std::io::Write::write_all(&mut std::io::stdout(), &page));
            return match written {
                Ok(()) => ExitCode::SUCCESS,
                Err(error) => {
                    eprintln!("gpushd: the man page can't be written: {error}");
                    ExitCode::FAILURE
                }
            };
        }
        None => {}
    }
    match lifecycle::run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("gpushd: {error:#}");
            ExitCode::FAILURE
        }
    }
}
