//! `gpushctl advise`.

use std::{path::PathBuf, time::Duration};

use clap::{Args, Subcommand, ValueEnum};
use gpush_api::{MemoryLimit, Percentage};

use super::{IsolationName, values::duration};

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
}

/// `gpushctl advise mechanism`.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct AdviseMechanismArgs {
    /// Number of users, services or customers that share the host
    #[arg(long, value_name = "NUMBER", allow_negative_numbers = true)]
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
    #[arg(long, value_name = "NUMBER", conflicts_with = "arrivals", allow_negative_numbers = true)]
    pub(crate) tenants: Option<u32>,
    /// Requests each second of a tenant; a list gives one value for each tenant [default: 12]
    #[arg(
        long = "rate",
        value_name = "NUMBER",
        value_delimiter = ',',
        conflicts_with = "arrivals",
        allow_negative_numbers = true
    )]
    pub(crate) rates: Vec<f64>,
    /// Milliseconds of the whole GPU for a request
    #[arg(long, value_name = "NUMBER", default_value_t = 10.0, allow_negative_numbers = true)]
    pub(crate) service: f64,
    /// Length of the period; only requests that finish within it count
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = duration, allow_negative_numbers = true)]
    pub(crate) period: Duration,
    /// Number of equal MIG instances on the GPU
    #[arg(long, value_name = "NUMBER", default_value_t = 7, allow_negative_numbers = true)]
    pub(crate) instances: u32,
    /// Read the arrivals from a CSV file with the columns arrival_s and tenant, or - for stdin
    #[arg(long, value_name = "FILE")]
    pub(crate) arrivals: Option<PathBuf>,
    /// Also show what a hostile tenant costs the others
    #[arg(long)]
    pub(crate) hostile: bool,
    /// Start value of the random arrivals; equal values give equal results
    #[arg(long, value_name = "NUMBER", default_value_t = 1)]
    pub(crate) seed: u64,
    #[command(flatten)]
    pub(crate) demand: DemandFlags,
    /// With --memory or --compute: use a preset host or a file of `gpu list --json` instead of gpushd
    #[arg(long, value_name = "PRESET|FILE")]
    pub(crate) offline: Option<String>,
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
