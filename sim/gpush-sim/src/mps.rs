//! `gpush-sim mps`: faults of the simulated MPS programs; and `gpush-sim mps-client`.

use std::process::ExitCode;

use clap::{Args, Subcommand};
use mps_sim::{
    fault::{FaultFile, Kind, Rule},
    work::Work,
};
use silicon::Host;

#[derive(Subcommand)]
pub(crate) enum Action {
    /// Add, list and clear faults of the MPS programs; they are in force at once
    Fault {
        #[command(subcommand)]
        action: FaultAction,
    },
}

#[derive(Subcommand)]
pub(crate) enum FaultAction {
    /// Add a fault, and print its number
    Add(Add),
    /// List the faults, with how often each happened
    List {
        /// As JSON
        #[arg(long)]
        json: bool,
    },
    /// Remove all faults, or one; what a fault held up goes on
    Clear {
        /// Number of the fault; without, all
        number: Option<u64>,
    },
}

#[derive(Args)]
pub(crate) struct Add {
    /// What goes wrong: silent-hello, foreign-hello, busy-ui, empty-reply, unread-pipe, stale-pid-file,
    /// server-dies, never-active, fault, orphan-server, hung-daemon, second-uid, slow-hello, slow-quit, slow-start
    kind: Kind,
    /// Only with the daemon whose pipe directory or visible device has this in it
    #[arg(long, value_name = "PART")]
    on: Option<String>,
    /// So often; without, until it is cleared
    #[arg(long)]
    times: Option<u64>,
    /// How much longer slow-hello, slow-quit and slow-start take; without, 3000
    #[arg(long)]
    ms: Option<u64>,
}

#[derive(Args)]
pub(crate) struct Client {
    /// Say what tests/gpu/client.py says of a program that computes; without, it does nothing
    #[arg(long)]
    compute: bool,
    /// For so long; without, until SIGTERM
    #[arg(long, requires = "compute")]
    seconds: Option<f64>,
    /// MiB of device memory to allocate
    #[arg(long, requires = "compute", default_value_t = 0)]
    allocate: u64,
    /// Kernels that fill little of the device
    #[arg(long, requires = "compute")]
    small: bool,
    /// Begin with a line on standard input
    #[arg(long, requires = "compute")]
    wait: bool,
}

pub(crate) fn client(&Client { compute, seconds, allocate, small, wait }: &Client) -> ExitCode {
    if compute {
        return mps_sim::work::main(Work { seconds, allocate, small, wait });
    }
    mps_sim::client::main()
}

pub(crate) fn act(host: &Host, action: Action) -> anyhow::Result<ExitCode> {
    let Action::Fault { action } = action;
    let file = FaultFile::of_host(host.dir());
    match action {
        FaultAction::Add(Add { kind, on, times, ms }) => println!("{}", file.add(kind, on, times, ms)?),
        FaultAction::List { json: true } => println!("{}", serde_json::to_string_pretty(&file.rules()?)?),
        FaultAction::List { json: false } => file.rules()?.iter().for_each(|rule| println!("{}", words(rule))),
        FaultAction::Clear { number } => println!("{} removed", file.clear(number)?),
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
