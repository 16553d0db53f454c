//! `gpushctl mig`: layouts, and the options of those who take one.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{
    Watched, Which,
    values::{LONGEST_WAIT, wait_seconds},
};

/// What a layout is, before a command's own examples.
macro_rules! with_layouts {
    ($examples:literal) => {
        concat!(
            "\
Without a layout, each GPU shall be as its rule in the config says.

An entry is [Nc.]PROFILE[@START][*COUNT][:mps], in quotes where it has a *:
  3g.40gb     one instance         1g.10gb*2    two of them
  1g.10gb@4   at memory slice 4    1c.3g.40gb   one compute slice of it
  1g.10gb:mps shared through MPS
The layout `none` takes all idle instances away.

In a plan + is made, - is destroyed, = is kept, and ~ is kept with other
compute instances.

Examples:
",
            $examples
        )
    };
}

#[derive(Debug, Subcommand)]
pub(crate) enum Mig {
    /// What instances a GPU can hold, and where
    #[command(after_help = "\
Examples:
  gpushctl mig profiles --gpu 0
  gpushctl mig profiles --offline dgx-b200")]
    Profiles {
        #[command(flatten)]
        which: Which,
        /// Ask no agent: those of a preset, of a file of `gpu list --json`, or - for stdin
        #[arg(long, value_name = "PRESET|FILE")]
        offline: Option<String>,
    },
    /// MIG devices with the names that programs take
    #[command(after_help = "\
A program runs on a MIG device by its UUID:
  CUDA_VISIBLE_DEVICES=MIG-… program")]
    Show(Which),
    /// Show what would be done to reach a layout
    #[command(after_help = with_layouts!(
        "\x20 gpushctl mig plan                            as the config says
  gpushctl mig plan --gpu 0 --layout '3g.40gb,2g.20gb,1g.10gb*2'
  gpushctl mig plan --offline dgx-h100 --gpu 0 --layout '1g.10gb*7'"
    ))]
    Plan {
        #[command(flatten)]
        wanted: Wanted,
        #[command(flatten)]
        offline: Offline,
    },
    /// Reach a layout: nothing in use is touched, and nothing at all unless every GPU's plan stands
    #[command(after_help = with_layouts!(
        "\x20 gpushctl mig apply                           as the config says
  gpushctl mig apply --gpu 0-3 training        a layout of the config
  gpushctl mig apply --wait --reason 'job 17'  as soon as it can be
  gpushctl mig apply -f c.yaml -c all-1g.10gb  a mig-parted file's label
  gpushctl mig apply --gpu 0 --layout '3g.40gb,2g.20gb,1g.10gb*2'
  gpushctl mig apply --gpu 0 -l 7g.80gb --reason 'big run' --expires 2h
  gpushctl mig apply --gpu 0                   the rule's own again

A layout other than the rule's own makes an override: it is what is wanted of
the GPU, also after a reboot, until it expires, is cleared (`gpushctl config
overrides clear 0`) or the GPU is named without a layout. GPUs that are not
named keep theirs."
    ))]
    Apply {
        #[command(flatten)]
        wanted: Wanted,
        /// Only show the plan
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        watched: Watched,
        /// Wait in line for GPUs that another operation changes, and until instances in the way are
        /// idle, instead of being refused: so many seconds at most, or for as long as it takes
        #[arg(
            long,
            value_name = "SECONDS",
            num_args = 0..=1,
            require_equals = true,
            default_missing_value = LONGEST_WAIT,
            value_parser = wait_seconds
        )]
        wait: Option<u64>,
        #[command(flatten)]
        lasting: Lasting,
    },
    /// Write the present layouts as a mig-parted file
    #[command(after_help = "\
Examples:
  gpushctl mig export -o now.yaml && gpushctl mig assert -f now.yaml
  gpushctl mig export --gpu 0-3 --label training")]
    Export {
        #[command(flatten)]
        which: Which,
        /// Label in the file
        #[arg(long, value_name = "NAME", default_value = "current")]
        label: String,
        /// File to write; stdout without it
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Print a mig-parted file as layouts and rules of gpush's config
    #[command(after_help = "\
Examples:
  gpushctl mig import config.yaml                  all labels as layouts
  gpushctl mig import config.yaml -c all-balanced  one label as rules")]
    Import {
        /// mig-parted file, or - for stdin
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Label that becomes rules, which can be appended to any config
        #[arg(long, short = 'c', value_name = "LABEL")]
        label: Option<String>,
    },
    /// Exit with 3 unless the GPUs are as a layout wants them
    #[command(after_help = with_layouts!(
        "\x20 gpushctl mig assert || gpushctl mig apply    as the config says
  gpushctl mig assert -f config.yaml -c all-balanced
  gpushctl mig assert --gpu 0 --layout 7g.80gb"
    ))]
    Assert {
        #[command(flatten)]
        wanted: Wanted,
        #[command(flatten)]
        offline: Offline,
    },
}

/// Which layout, on which GPUs.
#[derive(Debug, Args)]
pub(crate) struct Wanted {
    /// Layout of the config, by name
    #[arg(value_name = "NAME", conflicts_with_all = ["layout", "file"])]
    pub(crate) name: Option<String>,
    /// Layout as entries with commas between
    #[arg(long, short, value_name = "ENTRIES", conflicts_with = "file")]
    pub(crate) layout: Option<String>,
    /// Layouts of a mig-parted file, or - for stdin
    #[arg(long, short, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Label of the mig-parted file; not needed when it has one
    #[arg(long, short = 'c', value_name = "LABEL", requires = "file", conflicts_with_all = ["name", "layout"])]
    pub(crate) label: Option<String>,
    #[command(flatten)]
    pub(crate) which: Which,
}

/// How long a layout stands above the rule of the config, and why.
#[derive(Debug, Args)]
pub(crate) struct Lasting {
    /// Make no override: what then differs from the config is drift
    #[arg(long, conflicts_with = "expires")]
    pub(crate) once: bool,
    /// Why, for everybody who looks
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// When the override ends by itself: 30m, 2h, 7d, or 2026-12-01T08:00Z
    #[arg(long, value_name = "TIME", value_parser = crate::expiry::parse)]
    pub(crate) expires: Option<jiff::Timestamp>,
}

/// Planning without an agent.
#[derive(Debug, Args)]
pub(crate) struct Offline {
    /// Plan without an agent: for a preset, a file of `gpu list --json`, or - for stdin
    #[arg(long, value_name = "PRESET|FILE")]
    pub(crate) offline: Option<String>,
    /// Config for an offline plan by rule or named layout [env: GPUSH_CONFIG]
    #[arg(long, value_name = "FILE", requires = "offline")]
    pub(crate) config: Option<PathBuf>,
}
