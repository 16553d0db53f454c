//! The measurements in docs/benchmarks.md that use the real programs.
//!
//! `cargo xtask bench` runs this program once for each report. The program compares only ratios and
//! counts of one run, never times of different machines.

mod apply;
mod bare;
mod client;
mod ctl;
mod durable;
mod events;
mod footprint;
mod history;
mod hung;
mod leases;
mod minimum;
mod mps;
mod packages;
mod permute;
mod reads;
mod report;
mod scopes;
mod slurm;
mod speed;
mod usage;

use std::process::ExitCode;

fn main() -> ExitCode {
    // `cargo bench` appends `--bench`.
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    match arguments.first().map(String::as_str) {
        Some("apply") => apply::run().print(),
        Some("status") => speed::status().print(),
        Some("start") => speed::start().print(),
        Some("reads") => reads::run().print(),
        Some("durable") => durable::run().print(),
        Some("footprint") => footprint::run().print(),
        Some("leases") => leases::run().print(),
        Some("scopes") => scopes::run().print(),
        Some("mps") => mps::run().print(),
        Some("slurm") => slurm::run().print(),
        Some("events") => events::run().print(),
        Some("hung") => hung::run().print(),
        Some("usage") => usage::run().print(),
        Some("history") => history::run().print(),
        Some("packages") => packages::run().print(),
        Some("serve-static") => bare::serve(&arguments[1..]),
        Some("sample-calls") => bare::sample_calls(&arguments[1..]),
        Some("sample-wrapper") => bare::sample_wrapper(&arguments[1..]),
        Some("initialise") => bare::initialise(&arguments[1..]),
        Some("permute") => {
            if let Err(why) = apply::permute_main(&arguments[1..]) {
                eprintln!("{why}");
                return ExitCode::FAILURE;
            }
        }
        _ => {
            eprintln!(
                "one of: apply, status, start, reads, durable, leases, scopes, footprint, usage, history, mps, slurm, \
                 events, hung, packages"
            );
            return ExitCode::FAILURE;
        }
    }
    ExitCode::SUCCESS
}
