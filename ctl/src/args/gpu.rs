//! `gpushctl gpu` and `maintenance`.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::{Gpus, Queueing, SomeGpus, Why, values::duration_or_zero};

#[derive(Debug, Subcommand)]
pub(crate) enum Gpu {
    /// List GPUs, one line each
    #[command(
        alias = "ls",
        after_help = "\
A list saved as JSON describes a host for offline plans.

Examples:
  gpushctl gpu list
  gpushctl gpu list --json > host.json
  gpushctl mig apply 3g.40gb,2g.20gb --dry-run --offline host.json"
    )]
    List(Gpus),
    /// Show all details of GPUs
    #[command(after_help = "\
Examples:
  gpushctl gpu show 0
  gpushctl gpu show GPU-5e8c07a4 '*A30*'")]
    Show(Gpus),
    /// List what has GPUs open: processes, MPS servers, kernel modules
    #[command(after_help = "\
The driver lists only processes that compute. This list also has monitors and
services: they block a reset, and some changes of MIG mode. Users see pid and
command of their own processes, administrators those of all processes.

Examples:
  gpushctl gpu holders 0
  gpushctl gpu holders 0 -o name          # the pids")]
    Holders(Gpus),
    /// Block new work on GPUs; running processes continue
    #[command(after_help = "\
Administrators can still change a cordoned GPU, but must name it. Requests for
all GPUs fail while one is cordoned.

Examples:
  gpushctl gpu cordon 3 --reason 'fan replacement'")]
    Cordon {
        #[command(flatten)]
        which: SomeGpus,
        #[command(flatten)]
        why: Why,
    },
    /// Block new work on GPUs, and wait until they are idle
    #[command(after_help = "\
Exits with 8 after --timeout and with 130 on Ctrl-C. The GPUs stay cordoned.
The wait is not an operation of gpushd, so --detach prints no operation id. To
wait later, run the command again.

--end-after ends leases and their processes. First the leases end, and `lease
show` has the reason. The processes get SIGTERM at --end-after, which is one
--notice later, and then SIGKILL. Processes without a lease are never ended.

Examples:
  gpushctl gpu drain 3 --reason 'new fan' --timeout 1h && echo idle
  gpushctl gpu drain 0-3 --reason 'new driver' --end-after 2h --notice 10m
  gpushctl gpu drain 3 --detach")]
    Drain(DrainArgs),
    /// Allow new work on GPUs again
    #[command(
        visible_alias = "undrain",
        after_help = "\
Examples:
  gpushctl gpu uncordon 3
  gpushctl gpu uncordon all --reason 'maintenance is over'"
    )]
    Uncordon {
        #[command(flatten)]
        which: SomeGpus,
        #[command(flatten)]
        why: Why,
    },
    /// Reset GPUs; fails while a GPU is in use
    #[command(after_help = "\
Enters maintenance, runs `nvidia-smi --gpu-reset`, and leaves maintenance.
Leases and processes on other GPUs continue; gpushd changes no GPU meanwhile.
MIG instances of the GPUs are lost; `gpushctl apply` creates them again. With
--wait the GPUs are cordoned until they are idle and the reset is done.
A GPU that has fallen off the bus cannot be reset: reboot the host.

Examples:
  gpushctl gpu reset 3 --wait
  gpushctl gpu drain 3 && gpushctl gpu reset 3 && gpushctl gpu uncordon 3")]
    Reset {
        #[command(flatten)]
        which: SomeGpus,
        /// Do not ask before instances are destroyed
        #[arg(long, short)]
        yes: bool,
        #[command(flatten)]
        why: Why,
        #[command(flatten)]
        queueing: Queueing,
    },
}

/// `gpushctl gpu drain`.
#[derive(Debug, Args)]
pub(crate) struct DrainArgs {
    #[command(flatten)]
    pub(crate) which: SomeGpus,
    #[command(flatten)]
    pub(crate) why: Why,
    /// Stop waiting after DURATION [default: no limit]
    #[arg(long, value_name = "DURATION", value_parser = duration_or_zero, allow_negative_numbers = true)]
    pub(crate) timeout: Option<Duration>,
    /// End remaining leases and their processes after DURATION [default: never]
    #[arg(long, value_name = "DURATION", conflicts_with = "detach", value_parser = duration_or_zero,
          allow_negative_numbers = true)]
    pub(crate) end_after: Option<Duration>,
    /// Time from the end of the leases to SIGTERM for their processes [default: 1m]
    #[arg(long, value_name = "DURATION", requires = "end_after", value_parser = duration_or_zero,
          allow_negative_numbers = true)]
    pub(crate) notice: Option<Duration>,
    /// Do not wait until the GPUs are idle; exit once they are cordoned
    #[arg(long, conflicts_with_all = ["timeout", "quiet"])]
    pub(crate) detach: bool,
    /// Do not show what the command waits for
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

impl Gpu {
    /// Returns whether the command prints a list. The formats `name`, `uuid` and `csv` are only for lists.
    pub(crate) fn prints_list(&self) -> bool {
        matches!(self, Self::List(_) | Self::Holders(_))
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Maintenance {
    /// Close all driver handles of gpushd until `maintenance leave`
    #[command(after_help = "\
Fails while an operation changes a GPU, or a lease is in use. With --wait, the
command waits until they have ended; meanwhile the GPUs are cordoned.
Maintenance continues after restarts of gpushd and of the host. During
maintenance, gpushd shows the values that it read last, and changes nothing.
To reset a GPU, one command is enough: `gpushctl gpu reset GPU`.

Examples:
  gpushctl maintenance enter --reason 'driver 570'
  apt-get install --yes nvidia-driver-570
  gpushctl maintenance leave")]
    Enter {
        #[command(flatten)]
        why: Why,
        #[command(flatten)]
        queueing: Queueing,
    },
    /// End maintenance: gpushd opens the GPUs again
    #[command(after_help = "\
Examples:
  gpushctl maintenance leave && gpushctl status")]
    Leave(Why),
}

#[cfg(test)]
impl Gpu {
    /// Returns whether only administrators may run the command.
    pub(super) fn is_for_administrators(&self) -> bool {
        match self {
            Self::Cordon { .. } | Self::Drain(_) | Self::Uncordon { .. } | Self::Reset { .. } => true,
            Self::List(_) | Self::Show(_) | Self::Holders(_) => false,
        }
    }
}

#[cfg(test)]
impl Maintenance {
    /// Returns whether only administrators may run the command.
    pub(super) fn is_for_administrators(&self) -> bool {
        match self {
            Self::Enter { .. } | Self::Leave(_) => true,
        }
    }
}
