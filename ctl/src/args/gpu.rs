//! `gpushctl gpu` and `gpushctl maintenance`.

use clap::{Args, Subcommand};

use super::{Which, values::seconds};

#[derive(Debug, Subcommand)]
pub(crate) enum Gpu {
    /// One line a GPU; with --json all that the agent knows, profiles included
    #[command(after_help = "\
A saved list is a host that can be planned on elsewhere:
  gpushctl gpu list --json > host.json
  gpushctl mig plan --offline host.json --layout 3g.40gb,2g.20gb")]
    List(Which),
    /// All about one GPU or several
    #[command(after_help = "\
Examples:
  gpushctl gpu show 0
  gpushctl gpu show GPU-5e8c07a4 '*A30*'")]
    Show {
        /// GPUs, as for --gpu; all when none is named
        #[arg(value_name = "GPU", value_delimiter = ',')]
        gpus: Vec<String>,
        /// The same, as other commands name them
        #[arg(long = "gpu", short = 'g', value_name = "GPU", value_delimiter = ',', hide = true)]
        named: Vec<String>,
    },
    /// Keep new work off GPUs; what runs on them goes on
    #[command(after_help = "\
A cordoned GPU is not reshaped by `mig apply` without --gpu, nor by gpushd
itself; by name it is.

Examples:
  gpushctl gpu cordon 3 --reason 'fan replacement'")]
    Cordon {
        #[command(flatten)]
        which: Named,
        #[command(flatten)]
        why: Why,
    },
    /// Keep new work off GPUs, and wait until nothing uses them any more
    #[command(after_help = "\
Waiting ends with 8 when --wait is over, with 130 on Ctrl-C; the GPUs stay
cordoned either way.

Examples:
  gpushctl gpu drain 3 --reason 'new fan' --wait 3600 && echo idle")]
    Drain {
        #[command(flatten)]
        which: Named,
        #[command(flatten)]
        why: Why,
        /// Wait no longer than this; without it for as long as it takes
        #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
        wait: Option<f64>,
        /// Don't say who is waited for
        #[arg(long, short)]
        quiet: bool,
    },
    /// Let new work onto GPUs again, whoever or whatever had cordoned them
    Uncordon {
        #[command(flatten)]
        which: Named,
        #[command(flatten)]
        why: Why,
    },
}

/// GPUs that something is done to, which are named.
#[derive(Debug, Args)]
pub(crate) struct Named {
    /// GPUs, as for --gpu
    #[arg(value_name = "GPU", value_delimiter = ',', required_unless_present = "named")]
    pub(crate) gpus: Vec<String>,
    /// The same, as other commands name them
    #[arg(long = "gpu", short = 'g', value_name = "GPU", value_delimiter = ',', hide = true)]
    pub(crate) named: Vec<String>,
}

/// `--reason`.
#[derive(Debug, Args)]
pub(crate) struct Why {
    /// Why, for whoever comes across it
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Maintenance {
    /// Close every handle of the driver, until it is left: for resets, another driver, the board
    #[command(after_help = "\
Refused while an operation changes a GPU. It lasts over restarts of gpushd and
of the host; until it is left, what is shown is what was seen last, and nothing
is changed.

Examples:
  gpushctl maintenance enter --reason 'driver 570'
  apt-get install --yes nvidia-driver-570
  nvidia-smi --gpu-reset -i 3
  gpushctl maintenance leave")]
    Enter(Why),
    /// Give the GPUs back to the agent
    Leave(Why),
}
