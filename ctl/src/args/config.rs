//! `gpushctl config`: the config file and the overrides.

use std::path::PathBuf;

use clap::Subcommand;

use super::{Gpus, SomeGpus};

#[derive(Debug, Subcommand)]
pub(crate) enum Config {
    /// Check a config file
    #[command(after_help = "\
Examples:
  gpushctl config check /etc/gpush/config.toml
  gpushctl config check new.toml --offline dgx-a100   do the layouts fit?
  gpushctl config check new.toml --offline host.json   or on a saved host?")]
    Check {
        /// File, or - for stdin [env: GPUSH_CONFIG] [default: the file of the gpushd that runs, or
        /// /etc/gpush/config.toml]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
        /// Also check rules and layouts on a preset host, or on a host saved with `gpu list --json`
        #[arg(long, value_name = "PRESET|FILE")]
        offline: Option<String>,
    },
    /// Show the effective config, with the GPUs that each rule claims
    Show {
        /// Print all settings as TOML, with defaults
        #[arg(long)]
        effective: bool,
    },
    /// Reload the config file, and show what changed
    #[command(after_help = "\
The whole file takes effect, or none of it. A file that changes an overridden
rule is refused. A reload does not change GPUs; `gpushctl apply` does.")]
    Reload {
        /// Clear the overrides of GPUs whose rule differs in the new file
        #[arg(long)]
        clear_overrides: bool,
    },
    /// Compare the file, the effective config and the GPUs; exit with 3 when they differ
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

impl Config {
    /// Returns whether the command prints a list. The formats `name`, `uuid` and `csv` are only for lists.
    pub(crate) fn prints_list(&self) -> bool {
        matches!(self, Self::Overrides { command: None | Some(Overrides::List { .. }) })
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Overrides {
    /// List active overrides
    #[command(alias = "ls")]
    List {
        #[command(flatten)]
        which: Gpus,
    },
    /// Clear the overrides of GPUs; the instances stay as they are
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
            Self::Check { .. } | Self::Show { .. } => false,
        }
    }
}
