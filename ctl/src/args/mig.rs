//! `gpushctl mig` and `gpushctl apply`.

use std::path::PathBuf;

use clap::{Args, Subcommand};

use super::{GpuOption, Gpus, Lasting, Queueing, SomeGpus, Waiting, Why};

/// Adds the explanation of layouts to the help of a command, before its examples.
macro_rules! with_layouts {
    ($examples:literal) => {
        concat!(
            "\
Without LAYOUT, the command uses the desired layout of each GPU: the override
if there is one, else the layout of the rule in the config.

LAYOUT is the name of a layout in the config, or entries of the form
[Nc.]PROFILE[@START][*COUNT][:mps] separated by commas; quote entries with a *:
  3g.40gb     one instance         1g.10gb*2    two instances
  1g.10gb@4   at memory slice 4    1c.3g.40gb   one slice of a 3g.40gb
  1g.10gb:mps shared through MPS
The layout `none` removes all instances.

In a plan, + is created, - is destroyed, = is kept, and ~ is kept with other
compute instances.

Examples:
",
            $examples
        )
    };
}

#[derive(Debug, Subcommand)]
pub(crate) enum Mig {
    /// List MIG devices with their UUIDs, and whether they are free
    #[command(
        visible_alias = "show",
        alias = "ls",
        after_help = "\
Use of a device:
  free      no program and no lease has it
  granted   a lease has it
  in_use    processes run on it
  reserved  its GPU or MPS daemon takes no new work, or a queued operation
            or lease needs it

--free shows the devices that a new program can use now: with a lease if the
rule of the GPU has mode `mig`, and directly on a GPU without a managed mode.
The field `available` of the JSON document is true if a lease can have the
device.

To run a program on a MIG device, give the UUID of the device:
  CUDA_VISIBLE_DEVICES=MIG-... program

Examples:
  gpushctl mig list 0-3
  gpushctl mig list --free --profile 1g.10gb -o uuid"
    )]
    List {
        #[command(flatten)]
        which: Gpus,
        /// Only free devices; exit with 4 when there are none
        #[arg(long)]
        free: bool,
        /// Only devices of this profile, such as 1g.10gb
        #[arg(long, value_name = "PROFILE")]
        profile: Option<String>,
    },
    /// List the instance profiles of GPUs with their placements
    #[command(after_help = "\
Examples:
  gpushctl mig profiles 0
  gpushctl mig profiles --offline dgx-b200")]
    Profiles {
        #[command(flatten)]
        which: Gpus,
        /// Use a preset host, a file of `gpu list --json`, or - for stdin, instead of gpushd
        #[arg(long, value_name = "PRESET|FILE")]
        offline: Option<String>,
    },
    /// Apply a layout; instances in use are never destroyed
    #[command(after_help = with_layouts!(
        "\x20 gpushctl mig apply                             the desired layouts
  gpushctl mig apply training -g 0-3             a layout of the config
  gpushctl mig apply training -g 0-3 --wait      as soon as possible
  gpushctl mig apply '1g.10gb*7' --dry-run -g 0  show what would change
  gpushctl mig apply --check || gpushctl mig apply
  gpushctl mig apply --file c.yaml -c balanced   a mig-parted label
  gpushctl mig apply '3g.40gb,2g.20gb,1g.10gb*2' -g 0
  gpushctl mig apply 7g.80gb -g 0 --reason 'big run' --expires 2h
  gpushctl mig apply '1g.10gb*7' --dry-run -g 0 --offline dgx-h100

If several GPUs support MIG, a LAYOUT needs -g. With --dry-run or --check and
without -g, the command considers each GPU whose rule has mode `mig`.

A LAYOUT that differs from the layout of the rule becomes an override. The
override is the desired layout, also after a reboot, until it expires or until
`gpushctl config overrides clear 0` removes it. On a terminal, a plan that
destroys instances is shown and must be confirmed."
    ))]
    Apply {
        #[command(flatten)]
        wanted: Wanted,
        /// Change nothing; exit with 3 when a GPU does not have its layout
        #[arg(long, group = "preview")]
        check: bool,
        #[command(flatten)]
        offline: Offline,
        #[command(flatten)]
        change: LayoutChange,
    },
    /// Add instances to the present layout
    #[command(after_help = "\
The same as `mig apply` of the present layout with these entries added. The
present instances keep their starts. Only if there is no room for the new
instances, gpushd moves idle ones: it destroys them and creates them elsewhere.

Examples:
  gpushctl mig add 1g.10gb -g 0
  gpushctl mig add 1g.10gb@4 '2g.20gb*2' -g 0 --once")]
    Add {
        /// Entries to add: `PROFILE[@START][*COUNT][:mps]`
        #[arg(value_name = "ENTRY", value_delimiter = ',', required = true)]
        entries: Vec<String>,
        #[command(flatten)]
        which: GpuOption,
        #[command(flatten)]
        change: LayoutChange,
    },
    /// Remove instances from the present layout
    #[command(
        alias = "rm",
        after_help = "\
The same as `mig apply` of the present layout without these entries. Without
@START, free instances are removed first, and those without MPS before others.

Examples:
  gpushctl mig remove 1g.10gb@2 -g 0"
    )]
    Remove {
        /// Entries to remove: `PROFILE[@START][*COUNT][:mps]`
        #[arg(value_name = "ENTRY", value_delimiter = ',', required = true)]
        entries: Vec<String>,
        #[command(flatten)]
        which: GpuOption,
        #[command(flatten)]
        change: LayoutChange,
    },
    /// Enable MIG mode on GPUs, without instances
    #[command(after_help = "\
Examples:
  gpushctl mig on 0-3")]
    On {
        #[command(flatten)]
        which: SomeGpus,
        #[command(flatten)]
        change: LayoutChange,
    },
    /// Disable MIG mode on GPUs; their instances are destroyed
    #[command(after_help = "\
Fails while an instance or the GPU is in use, and then changes nothing. With
--wait, gpushd disables MIG mode when the GPU is idle. Afterwards, programs use
the whole GPU.

`mig off` makes no override. If the rule of the GPU has mode `mig`, the change
counts as drift: gpushd enables MIG mode again after a reboot, and within about
a minute if `auto_reconcile` is set. `gpushctl apply 2` applies the rule at
once. To keep MIG mode disabled, change the rule. On a GPU without a rule,
`gpushctl mig on 2` enables MIG mode again.

Examples:
  gpushctl mig off 2")]
    Off {
        #[command(flatten)]
        which: SomeGpus,
        #[command(flatten)]
        execution: Execution,
        #[command(flatten)]
        why: Why,
    },
    /// Print the present layouts as a mig-parted file
    #[command(after_help = "\
Examples:
  gpushctl mig export > now.yaml
  gpushctl mig apply --check --file now.yaml
  gpushctl mig export 0-3 --label training")]
    Export {
        #[command(flatten)]
        which: Gpus,
        /// Label in the file
        #[arg(long, value_name = "LABEL", default_value = "current")]
        label: String,
        /// Write to FILE instead of stdout
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
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
        /// Print this label as rules, which you can append to a config
        #[arg(long, short = 'c', value_name = "LABEL")]
        label: Option<String>,
    },
}

impl Mig {
    /// Returns whether the command prints a list. The formats `name`, `uuid` and `csv` are only for lists.
    pub(crate) fn prints_list(&self) -> bool {
        matches!(self, Self::List { .. } | Self::Profiles { .. })
    }
}

/// A layout, and the GPUs that it is for.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Wanted {
    /// Layout: a name of the config, or entries separated by commas
    #[arg(value_name = "LAYOUT", conflicts_with_all = ["layout", "file"])]
    pub(crate) name: Option<String>,
    /// The same as the LAYOUT argument
    #[arg(long, short, value_name = "LAYOUT", conflicts_with = "file")]
    pub(crate) layout: Option<String>,
    /// Read layouts from a mig-parted file, or - for stdin
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Label of the mig-parted file; optional when the file has only one
    #[arg(long, short = 'c', value_name = "LABEL", requires = "file", conflicts_with_all = ["name", "layout"])]
    pub(crate) label: Option<String>,
    #[command(flatten)]
    pub(crate) which: GpuOption,
}

/// Whether a plan is executed, whether the command asks first, and how it waits.
#[derive(Debug, Clone, Args)]
pub(crate) struct Execution {
    /// Only show the plan
    #[arg(long, group = "preview")]
    pub(crate) dry_run: bool,
    /// Do not ask before instances are destroyed
    #[arg(long, short)]
    pub(crate) yes: bool,
    #[command(flatten)]
    pub(crate) queueing: Queueing,
    #[command(flatten)]
    pub(crate) waiting: Waiting,
}

/// How a layout is applied.
#[derive(Debug, Clone, Args)]
pub(crate) struct LayoutChange {
    #[command(flatten)]
    pub(crate) execution: Execution,
    #[command(flatten)]
    pub(crate) lasting: Lasting,
}

/// `gpushctl apply`.
#[derive(Debug, Args)]
pub(crate) struct ApplyArgs {
    #[command(flatten)]
    pub(crate) which: Gpus,
    /// Restore the layout before the last change, as an override
    #[arg(long)]
    pub(crate) undo: bool,
    #[command(flatten)]
    pub(crate) execution: Execution,
    #[command(flatten)]
    pub(crate) why: Why,
}

/// Planning without gpushd.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct Offline {
    /// Plan or check for a preset host, a file of `gpu list --json`, or - for stdin, instead of gpushd
    #[arg(long, value_name = "PRESET|FILE", requires = "preview")]
    pub(crate) offline: Option<String>,
    /// Config for an offline plan that uses rules or layout names [env: GPUSH_CONFIG]
    #[arg(long, value_name = "FILE", requires = "offline")]
    pub(crate) config: Option<PathBuf>,
}

#[cfg(test)]
impl Mig {
    /// Returns whether only administrators may run the command.
    pub(super) fn is_for_administrators(&self) -> bool {
        match self {
            Self::Apply { change, check, .. } => !change.execution.dry_run && !check,
            Self::Add { change, .. } | Self::Remove { change, .. } | Self::On { change, .. } => {
                !change.execution.dry_run
            }
            Self::Off { execution, .. } => !execution.dry_run,
            Self::List { .. } | Self::Profiles { .. } | Self::Export { .. } | Self::Import { .. } => false,
        }
    }
}
