//! `gpushctl process`.

use clap::Subcommand;

use super::Gpus;

#[derive(Debug, Subcommand)]
pub(crate) enum Process {
    /// List processes on GPUs with their users, jobs and shares
    #[command(
        alias = "ls",
        after_help = "\
A stray is a process on a shared GPU whose user has no share of it. The config
sets what gpushd does about strays.

Examples:
  gpushctl process list 0-3
  gpushctl process list --stray || mail -s strays root"
    )]
    List {
        /// Only strays; exit with 3 when there are some
        #[arg(long)]
        stray: bool,
        #[command(flatten)]
        which: Gpus,
    },
}
