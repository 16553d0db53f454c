//! `gpush-sim mps`, which adds, lists and removes faults of the simulated MPS programs, and
//! `gpush-sim mps-client`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use mps_sim::outln;
use mps_sim::{
    fault::{FaultFile, Kind, Rule},
    work::Work,
};
use silicon::Host;

#[derive(Subcommand)]
pub(crate) enum Action {
    /// Add, list and clear faults of the MPS programs; changes take effect at once
    Fault {
        #[command(subcommand)]
        action: FaultAction,
    },
}

#[derive(Subcommand)]
pub(crate) enum FaultAction {
    /// Add a fault, and print its number
    Add(Add),
    /// List the faults, with the number of times that each happened
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove faults; programs that a fault has delayed continue
    Clear {
        /// Number of the fault [default: all]
        number: Option<u64>,
    },
}

#[derive(Args)]
pub(crate) struct Add {
    /// Kind of fault: silent-hello, foreign-hello, busy-ui, empty-reply, unread-pipe,
    /// stale-pid-file, server-dies, never-active, fault, orphan-server, hung-daemon, second-uid,
    /// slow-hello, slow-quit, slow-start
    kind: Kind,
    /// Only for daemons whose pipe directory or visible device contains PART
    #[arg(long, value_name = "PART")]
    on: Option<String>,
    /// Number of times that the fault happens [default: until it is cleared]
    #[arg(long)]
    times: Option<u64>,
    /// Delay of slow-hello, slow-quit and slow-start, in milliseconds [default: 3000]
    #[arg(long)]
    ms: Option<u64>,
}

#[derive(Args)]
pub(crate) struct Client {
    /// Print what tests/gpu/client.py prints about a program that computes [default: compute
    /// nothing]
    #[arg(long)]
    compute: bool,
    /// Run time in seconds [default: until SIGTERM]
    #[arg(long, requires = "compute")]
    seconds: Option<f64>,
    /// Device memory to allocate, in MiB
    #[arg(long, requires = "compute", default_value_t = 0)]
    allocate: u64,
    /// Use kernels that fill only a small part of the device
    #[arg(long, requires = "compute")]
    small: bool,
    /// Part of the time in which its kernels run, such as 0.3 [default: a load that depends on the pid]
    #[arg(long, requires = "compute", value_name = "PART")]
    duty: Option<f64>,
    /// Wait for a line on standard input before the start
    #[arg(long, requires = "compute")]
    wait: bool,
}

pub(crate) fn client(&Client { compute, seconds, allocate, small, duty, wait }: &Client) -> ExitCode {
    if compute {
        return mps_sim::work::main(Work { seconds, allocate, small, duty, wait });
    }
    mps_sim::client::main()
}

pub(crate) fn act(host: &Host, action: Action) -> anyhow::Result<ExitCode> {
    let Action::Fault { action } = action;
    let file = FaultFile::of_host(host.dir());
    match action {
        FaultAction::Add(Add { kind, on, times, ms }) => outln!("{}", file.add(kind, on, times, ms)?),
        FaultAction::List { json: true } => outln!("{}", serde_json::to_string_pretty(&file.rules()?)?),
        FaultAction::List { json: false } => file.rules()?.iter().for_each(|rule| outln!("{}", words(rule))),
        FaultAction::Clear { number } => outln!("{} removed", file.clear(number)?),
    }
    Ok(ExitCode::SUCCESS)
}

/// Formats a rule on one line.
fn words(rule: &Rule) -> String {
    let on = rule.on.as_ref().map(|part| format!(" on={part}"));
    let times = rule.times.map(|times| format!(" times={times}"));
    let ms = rule.ms.map(|ms| format!(" ms={ms}"));
    let others: String = [on, times, ms].into_iter().flatten().collect();
    format!("{}: {}{others} [happened {}]", rule.id, rule.kind.name(), rule.fired)
}
