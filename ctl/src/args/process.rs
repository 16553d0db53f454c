//! `gpushctl process`.

use clap::Subcommand;

use super::Gpus;

#[derive(Debug, Subcommand)]
pub(crate) enum Process {
    /// List processes on GPUs with their users, jobs and leases
    #[command(
        alias = "ls",
        after_help = "\
A stray is a process without a lease on a GPU whose rule requires one. The
config sets what gpushd does about strays.

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
