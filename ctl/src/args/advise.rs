//! `gpushctl advise`.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand, ValueEnum};
use gpush_api::{MemoryLimit, Percentage};
use jiff::Timestamp;

use super::{
    IsolationName,
    values::{duration, since},
};

#[derive(Debug, Subcommand)]
pub(crate) enum Advise {
    /// Choose a mechanism and a layout, and print config lines
    #[command(
        override_usage = "\
gpushctl advise mechanism --tenants <NUMBER> --workload <WORKLOAD>
       [--isolation <ISOLATION>] [OPTIONS]",
        after_help = "\
Answers for each GPU model of the host. On a terminal, the command asks for
what the flags do not say. Otherwise, it needs --tenants, --workload and, for
several tenants, --isolation. Let the strictest tenant decide. The command
changes nothing.

Examples:
  gpushctl advise --tenants 120 --isolation hard --workload notebooks
  gpushctl advise --tenants 8 --isolation shared --workload kernels \\
      --shared-faults yes --memory 6G --compute 12
  gpushctl advise --tenants 1 --workload training --offline dgx-h100"
    )]
    Mechanism(AdviseMechanismArgs),
    /// Estimate the latency of tenants that share one GPU
    #[command(after_help = "\
A model, not a measurement: each request needs the whole GPU for a fixed time,
and the requests of each tenant arrive at random. With --hostile, tenant 0
sends twice as many requests, each of which takes ten times as long. With
--memory or --compute, the command also prints how many tenants fit on the GPUs
of the host.

Examples:
  gpushctl advise queue --tenants 7 --rate 12 --service 10
  gpushctl advise queue --tenants 7 --rate 12 --service 10 --hostile
  gpushctl advise queue --arrivals requests.csv --service 4.5
  gpushctl advise queue --memory 6G --compute 12 --offline dgx-a100")]
    Queue(AdviseQueueArgs),
    /// Advise smaller shares and other layouts, from recorded use
    #[command(after_help = "\
For leases, users and GPUs, the command names the smallest share that would
have been enough, what it frees, and how sure that is. For the host, it replays
the recorded requests, and names the layouts that would have met the most. It
changes nothing. Users see their own leases, administrators those of all users.
`advise --from-use` is the same command.

Examples:
  gpushctl advise from-use
  gpushctl advise from-use lease L17 --since 2d
  gpushctl advise from-use user --since 30d
  gpushctl advise from-use host")]
    FromUse(AdviseFromUseArgs),
}

/// `gpushctl advise from-use`.
#[derive(Debug, Clone, Args)]
pub(crate) struct AdviseFromUseArgs {
    /// What the advice is about
    #[arg(value_enum, value_name = "SUBJECT", default_value = "lease")]
    pub(crate) subject: AdviseSubject,
    /// Only these leases, users or GPUs [default: all]
    #[arg(value_name = "NAME")]
    pub(crate) names: Vec<String>,
    /// Only the use after TIME: a time such as 2026-01-31T08:00Z, or how long ago, such as 30d [default: 7d]
    #[arg(long, value_name = "TIME", value_parser = since, allow_negative_numbers = true)]
    pub(crate) since: Option<Timestamp>,
}

/// What advice from recorded use is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum AdviseSubject {
    /// each lease
    #[value(alias = "leases")]
    Lease,
    /// the leases of each user together
    #[value(alias = "users")]
    User,
    /// the leases on each GPU together
    #[value(alias = "gpus")]
    Gpu,
    /// the layouts of all GPUs
    #[value(aliases = ["layout", "layouts"])]
    Host,
}

/// `gpushctl advise mechanism`.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct AdviseMechanismArgs {
    /// Number of users, services or customers that share the host
    #[arg(long, value_name = "NUMBER", value_parser = whole_number, allow_negative_numbers = true)]
    pub(crate) tenants: Option<u32>,
    /// Isolation of tenants: hard (in hardware) or shared (they trust each other)
    #[arg(long, value_enum, value_name = "ISOLATION")]
    pub(crate) isolation: Option<IsolationName>,
    /// What the programs do
    #[arg(long, value_enum, value_name = "WORKLOAD")]
    pub(crate) workload: Option<WorkloadName>,
    #[command(flatten)]
    pub(crate) demand: DemandFlags,
    /// Who installs the driver: own, or managed by a cloud or another team [default: own]
    #[arg(long, value_enum, value_name = "WHO")]
    pub(crate) driver: Option<DriverName>,
    /// Inference: whether the memory of each tenant must be bounded [default: no]
    #[arg(long, value_enum, value_name = "YES|NO")]
    pub(crate) bounded_memory: Option<YesNo>,
    /// With bounded memory: whether a limit of compute that is not exact is enough [default: no]
    #[arg(long, value_enum, value_name = "YES|NO")]
    pub(crate) soft_compute: Option<YesNo>,
    /// Whether a fault of one tenant may end the programs of others [default: no]
    #[arg(long, value_enum, value_name = "YES|NO")]
    pub(crate) shared_faults: Option<YesNo>,
    /// Use a preset host, a file of `gpu list --json`, or - for stdin, instead of gpushd
    #[arg(long, value_name = "PRESET|FILE")]
    pub(crate) offline: Option<String>,
}

/// What one tenant needs of a GPU.
#[derive(Debug, Clone, Copy, Default, Args)]
pub(crate) struct DemandFlags {
    /// Memory of one tenant, such as 6G [default: not known]
    #[arg(long, value_name = "MEMORY")]
    pub(crate) memory: Option<MemoryLimit>,
    /// Part of a whole GPU that one tenant needs, in percent [default: not known]
    #[arg(long, value_name = "PERCENT")]
    pub(crate) compute: Option<Percentage>,
}

/// `gpushctl advise queue`.
#[derive(Debug, Clone, Args)]
pub(crate) struct AdviseQueueArgs {
    /// Number of tenants [default: 7, or one for each value of --rate]
    #[arg(
        long,
        value_name = "NUMBER",
        value_parser = whole_number,
        conflicts_with = "arrivals",
        allow_negative_numbers = true
    )]
    pub(crate) tenants: Option<u32>,
    /// Requests of one tenant per second, or a list with one value for each tenant [default: 12]
    #[arg(
        long = "rate",
        value_name = "NUMBER",
        value_parser = decimal,
        value_delimiter = ',',
        conflicts_with = "arrivals",
        allow_negative_numbers = true
    )]
    pub(crate) rates: Vec<f64>,
    /// Milliseconds of the whole GPU for a request
    #[arg(long, value_name = "NUMBER", default_value = "10", value_parser = decimal, allow_negative_numbers = true)]
    pub(crate) service: f64,
    /// Length of the period; only requests that finish within it count
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = duration, allow_negative_numbers = true)]
    pub(crate) period: Duration,
    /// Number of equal MIG instances on the GPU
    #[arg(long, value_name = "NUMBER", default_value = "7", value_parser = whole_number, allow_negative_numbers = true)]
    pub(crate) instances: u32,
    /// Read the arrivals from a CSV file with the columns arrival_s and tenant, or - for stdin
    #[arg(long, value_name = "FILE")]
    pub(crate) arrivals: Option<PathBuf>,
    /// Also show what a hostile tenant costs the others
    #[arg(long)]
    pub(crate) hostile: bool,
    /// Start value of the random arrivals; equal values give equal results
    #[arg(long, value_name = "NUMBER", default_value = "1", value_parser = seed, allow_negative_numbers = true)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) demand: DemandFlags,
    /// With --memory or --compute: use a preset host or a file of `gpu list --json` instead of gpushd
    #[arg(long, value_name = "PRESET|FILE")]
    pub(crate) offline: Option<String>,
}

/// Parses a number of tenants or instances.
fn whole_number(text: &str) -> Result<u32, String> {
    text.parse().map_err(|_| "write a whole number, such as 8".to_owned())
}

/// Parses a rate or a number of milliseconds. The unit is fixed.
fn decimal(text: &str) -> Result<f64, String> {
    text.parse().map_err(|_| "write a number without a unit, such as 12 or 4.5".to_owned())
}

fn seed(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "write a whole number of 0 or more".to_owned())
}

/// What programs do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum WorkloadName {
    /// fills the GPU
    Training,
    /// batch jobs such as preprocessing
    Batch,
    /// latency matters
    Inference,
    /// interactive work
    Notebooks,
    /// many small kernels
    Kernels,
}

/// Who controls the driver.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum DriverName {
    /// the administrators of this host
    Own,
    /// a cloud provider or another team
    Managed,
}

/// An answer on the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum YesNo {
    Yes,
    No,
}
