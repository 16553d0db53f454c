//! `gpushctl config`: the config file and the overrides.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};

use super::{Gpus, SomeGpus};

#[derive(Debug, Subcommand)]
pub(crate) enum Config {
    /// Check a config file
    #[command(after_help = "\
Examples:
  gpushctl config check new.toml                      on this host
  gpushctl config check new.toml --offline dgx-a100   on another host
  gpushctl config check new.toml --offline host.json  on a saved host")]
    Check {
        /// File, or - for stdin [env: GPUSH_CONFIG] [default: the file of the gpushd that runs, or
        /// /etc/gpush/config.toml]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
        /// Check rules and layouts on a preset host, or on a host saved with `gpu list --json` [default: the GPUs that
        /// the gpushd that runs lists]
        #[arg(long, value_name = "PRESET|FILE")]
        offline: Option<String>,
    },
    /// Print a config to begin with, for the GPUs of this host
    #[command(after_help = "\
Without --site, the command asks what the host is for. The config has fewer
than 20 lines for a host with one GPU model, and each rule has a comment.

Examples:
  gpushctl config init --site lab --group students
  gpushctl config init --site inference --isolation shared
  gpushctl config init --site slurm --file /etc/gpush/config.toml
  gpushctl config init --site lab --offline dgx-h100")]
    Init(ConfigInitArgs),
    /// Show the effective config, with the GPUs that each rule claims
    #[command(after_help = "\
Examples:
  gpushctl config show
  gpushctl config show --effective    as TOML, with defaults")]
    Show {
        /// Print all settings as TOML, with defaults
        #[arg(long)]
        effective: bool,
    },
    /// Reload the config file, and show what changed
    #[command(after_help = "\
The whole file takes effect, or none of it. A file that changes an overridden
rule is refused. A reload does not change GPUs, but it restarts MPS daemons
whose settings differ. `gpushctl apply` loads the file too, and then changes
the GPUs.

Examples:
  gpushctl config check && gpushctl config reload
  gpushctl config reload --clear-overrides")]
    Reload {
        /// Clear the overrides of GPUs whose rule differs in the new file
        #[arg(long)]
        clear_overrides: bool,
    },
    /// Compare the file, the effective config and the GPUs; exit with 3 when they differ
    #[command(after_help = "\
Examples:
  gpushctl config diff || gpushctl apply")]
    Diff,
    /// List or clear overrides: layouts that replace those of the config
    #[command(
        alias = "override",
        after_help = "\
Examples:
  gpushctl config overrides
  gpushctl config overrides clear 0    use the rule's layout again"
    )]
    Overrides {
        #[command(subcommand)]
        command: Option<Overrides>,
    },
}

/// `gpushctl config init`.
#[derive(Debug, Args)]
pub(crate) struct ConfigInitArgs {
    /// What the host is for
    #[arg(long, value_enum, value_name = "SITE")]
    pub(crate) site: Option<SiteName>,
    /// How users are separated: hard (MIG) or shared (MPS)
    #[arg(long, value_enum, value_name = "ISOLATION", default_value_t = IsolationName::Hard)]
    pub(crate) isolation: IsolationName,
    /// Groups whose members may lease, for a lab; repeatable [default: all users]
    #[arg(long = "group", value_name = "GROUP", value_delimiter = ',')]
    pub(crate) groups: Vec<String>,
    /// Use a preset host, a file of `gpu list --json`, or - for stdin, instead of gpushd
    #[arg(long, value_name = "PRESET|FILE")]
    pub(crate) offline: Option<String>,
    /// Write to FILE, which must not exist, instead of stdout
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
}

/// What a host is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum SiteName {
    /// users log in and share the GPUs
    Lab,
    /// Slurm starts jobs
    Slurm,
    /// services share the GPUs
    Inference,
}

/// How users are separated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum IsolationName {
    /// MIG, or whole GPUs where the model has no MIG
    Hard,
    /// MPS
    Shared,
}

impl Config {
    /// Returns whether the command prints a list. The formats `name`, `uuid` and `csv` are only for lists.
    pub(crate) fn prints_list(&self) -> bool {
        matches!(self, Self::Overrides { command: None | Some(Overrides::List { .. }) })
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Overrides {
    /// List active overrides
    #[command(
        alias = "ls",
        after_help = "\
Examples:
  gpushctl config overrides 0-3"
    )]
    List {
        #[command(flatten)]
        which: Gpus,
    },
    /// Clear the overrides of GPUs; the instances stay as they are
    #[command(after_help = "\
Examples:
  gpushctl config overrides clear 0 && gpushctl apply 0")]
    Clear {
        #[command(flatten)]
        which: SomeGpus,
    },
}

#[cfg(test)]
impl Config {
    /// Returns whether only administrators may run the command.
    pub(super) fn is_for_administrators(&self) -> bool {
        match self {
            // `config diff` also shows a file that is not active yet.
            Self::Reload { .. } | Self::Diff => true,
            Self::Overrides { command } => matches!(command, Some(Overrides::Clear { .. })),
            Self::Check { .. } | Self::Init(_) | Self::Show { .. } => false,
        }
    }
}
