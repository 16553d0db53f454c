//! `gpushctl mps`: daemons, their settings, servers and clients.

use std::time::Duration;

use clap::{ArgGroup, Args, Subcommand};
use gpush_api::{MemoryLimit, Percentage, Priority};

use super::{
    GpuOption, Gpus, Queueing,
    values::{duration, some_lines, whole_seconds},
};

#[derive(Debug, Subcommand)]
pub(crate) enum Mps {
    /// List GPUs and MIG devices shared through MPS, one line each
    #[command(
        alias = "ls",
        after_help = "\
Examples:
  gpushctl mps list
  gpushctl mps list 0-3 -o wide"
    )]
    List {
        #[command(flatten)]
        which: Gpus,
    },
    /// Show one MPS target: settings, servers, clients, leases
    #[command(after_help = "\
Examples:
  gpushctl mps show 0
  gpushctl mps show 1:2g.20gb@2")]
    Show {
        #[command(flatten)]
        of: Target,
    },
    /// List MPS clients
    #[command(after_help = "\
Examples:
  gpushctl mps clients
  gpushctl mps clients 0")]
    Clients {
        /// GPU or MIG device, as for `mps show` [default: all]
        #[arg(value_name = "TARGET")]
        target: Option<String>,
        #[command(flatten)]
        which: GpuOption,
    },
    /// Set limits for each client, instead of the limits in the rule
    #[command(group = at_least_one(), override_usage = "gpushctl mps set [OPTIONS] <TARGET>", after_help = "\
The limits last until `--reset`, or until the rule changes. The output says
which clients they apply to, because a running server keeps some settings.

Examples:
  gpushctl mps set 0 --percentage 25
  gpushctl mps set 1:2g.20gb@2 --memory 8G --priority below-normal")]
    Set {
        #[command(flatten)]
        of: Target,
        #[command(flatten)]
        ceilings: Ceilings,
        /// Use the limits of the rule again, except for the limits given here
        #[arg(long)]
        reset: bool,
    },
    /// Start a daemon that was stopped, is draining, or failed too often
    #[command(after_help = "\
Examples:
  gpushctl mps start 0")]
    Start {
        #[command(flatten)]
        of: Target,
        #[command(flatten)]
        followed: Followed,
    },
    /// Stop a daemon until `mps start`; fails while it is in use
    #[command(after_help = "\
A daemon with clients or leases is in use. With --wait, the daemon admits no
new clients, and gpushd stops the daemon when the present clients and leases
have ended, also if this command has ended before. If they do not end within
the DURATION of --wait, the daemon admits new clients again.

Examples:
  gpushctl mps stop 0
  gpushctl mps stop 0 --wait=30m
  gpushctl mps stop 0 --wait --end-after 30m --detach")]
    Stop {
        #[command(flatten)]
        of: Target,
        #[command(flatten)]
        force: Force,
        #[command(flatten)]
        queueing: Queueing,
        /// With --wait: end the remaining clients after DURATION [default: never]
        #[arg(long, value_name = "DURATION", requires = "seconds", conflicts_with = "force",
              value_parser = whole_seconds, allow_negative_numbers = true)]
        end_after: Option<u64>,
        #[command(flatten)]
        followed: Followed,
    },
    /// Restart a daemon; fails while it has clients or leases
    #[command(after_help = "\
Examples:
  gpushctl mps restart 0
  gpushctl mps stop 0 --wait && gpushctl mps start 0")]
    Restart {
        #[command(flatten)]
        of: Target,
        #[command(flatten)]
        force: Force,
        #[command(flatten)]
        followed: Followed,
    },
    /// Print the last lines of a daemon's logs
    #[command(
        alias = "log",
        after_help = "\
Examples:
  gpushctl mps logs 0
  gpushctl mps logs 0 -f --number 5"
    )]
    Logs {
        #[command(flatten)]
        of: Target,
        /// Number of lines of each log, up to 1000
        #[arg(long, short, alias = "lines", value_name = "NUMBER", default_value = "40", allow_negative_numbers = true, value_parser = some_lines)]
        number: usize,
        /// Also print the lines that probes of gpushd cause
        #[arg(long)]
        all: bool,
        /// Print new lines until Ctrl-C; with --json one document per line
        #[arg(long, short)]
        follow: bool,
    },
}

impl Mps {
    /// Returns whether the command prints a list. The formats `name`, `uuid` and `csv` are only for lists.
    pub(crate) fn prints_list(&self) -> bool {
        matches!(self, Self::List { .. } | Self::Clients { .. })
    }
}

/// Requires at least one limit, or `--reset`.
fn at_least_one() -> ArgGroup {
    ArgGroup::new("change").args(["percentage", "memory", "priority", "reset"]).required(true).multiple(true)
}

/// A GPU or MIG device that is shared through MPS.
#[derive(Debug, Args)]
pub(crate) struct Target {
    /// GPU or MIG device: index, 0:2g.20gb@2, (start of) UUID, or short name
    #[arg(value_name = "TARGET", required_unless_present = "gpu")]
    target_or_gpu: Option<String>,
    /// The same as the argument
    #[arg(long, short, short_alias = 'i', value_name = "TARGET", conflicts_with = "target_or_gpu")]
    gpu: Option<String>,
}

impl Target {
    /// Returns the target as the user typed it.
    pub(crate) fn text(&self) -> &str {
        self.target_or_gpu.as_deref().or(self.gpu.as_deref()).unwrap_or_default()
    }
}

/// Limits of each client.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Ceilings {
    /// Active thread percentage: above 0, up to 100, with at most one decimal
    #[arg(long, short, value_name = "PERCENT", allow_negative_numbers = true)]
    pub(crate) percentage: Option<Percentage>,
    /// Maximum device memory of each client process, such as 8G or 1536M
    #[arg(long, short, value_name = "MEMORY", allow_negative_numbers = true)]
    pub(crate) memory: Option<MemoryLimit>,
    /// Priority of kernels: normal or below-normal
    #[arg(long, value_name = "PRIORITY")]
    pub(crate) priority: Option<Priority>,
}

/// `--force`.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Force {
    /// Proceed even if there are clients or leases; ends the clients
    #[arg(long)]
    pub(crate) force: bool,
}

/// How a command waits for a daemon. gpushd finishes the change in any case.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Followed {
    /// Stop waiting after DURATION; gpushd continues [default: 1m, but no limit with `stop --wait`]
    #[arg(long, value_name = "DURATION", value_parser = duration, allow_negative_numbers = true)]
    pub(crate) timeout: Option<Duration>,
    /// Do not wait until the change is done
    #[arg(long, conflicts_with_all = ["timeout", "quiet"])]
    pub(crate) detach: bool,
    /// Do not show progress
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

#[cfg(test)]
impl Mps {
    /// Returns whether only administrators may run the command.
    pub(super) fn is_for_administrators(&self) -> bool {
        match self {
            Self::Set { .. } | Self::Start { .. } | Self::Stop { .. } | Self::Restart { .. } | Self::Logs { .. } => {
                true
            }
            Self::List { .. } | Self::Show { .. } | Self::Clients { .. } => false,
        }
    }
}
