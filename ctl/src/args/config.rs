//! `gpushctl config`: files, and what stands above them.

use std::path::PathBuf;

use clap::Subcommand;

#[derive(Debug, Subcommand)]
pub(crate) enum Config {
    /// Read a config file as the agent would, and say what is wrong with it
    #[command(after_help = "\
Examples:
  gpushctl config check /etc/gpush/config.toml
  gpushctl config check new.toml --offline dgx-a100   do layouts fit?
  gpushctl config check new.toml --offline host.json   or on a saved host?")]
    Check {
        /// File, or - for stdin [env: GPUSH_CONFIG] [default: /etc/gpush/config.toml]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
        /// Also match rules and plan layouts on a preset or a file of `gpu list --json`
        #[arg(long, value_name = "PRESET|FILE")]
        offline: Option<String>,
    },
    /// The config in force, with the GPUs that each rule claims
    Show {
        /// All of it as TOML, defaults filled in
        #[arg(long)]
        effective: bool,
    },
    /// Read the file again, as `systemctl reload gpushd` does, and say what changed
    #[command(after_help = "\
All of the file is taken or nothing. One that changes a rule on which an
override stands is refused. GPUs are not reshaped: `gpushctl mig apply` does
that.")]
    Reload {
        /// End overrides whose rule the file changes
        #[arg(long)]
        clear_overrides: bool,
    },
    /// How the file, the config in force and the GPUs differ; exit with 3 when they do
    Diff,
    /// Layouts that were asked for in place of the config's
    #[command(after_help = "\
Examples:
  gpushctl config overrides
  gpushctl config overrides clear 0    the rule's layout is wanted again")]
    Overrides {
        #[command(subcommand)]
        command: Option<Overrides>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Overrides {
    /// Those that stand
    List,
    /// End the override of a GPU; what stands on it is left as it is
    Clear {
        /// Index, UUID or its beginning, or PCI address
        gpu: String,
    },
}
