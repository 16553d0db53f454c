//! `gpushctl process`.

use clap::Subcommand;

use super::Gpus;

#[derive(Debug, Subcommand)]
pub(crate) enum Process {
    /// List processes on GPUs with their users, jobs and leases
    #[command(
        alias = "ls",
        after_help = "\
A process is unleased if it has no lease on a GPU whose rule requires one. The
config sets what gpushd does about unleased processes.

Examples:
  gpushctl process list 0-3
  gpushctl process list --unleased || mail -s unleased root"
    )]
    List {
        /// Only unleased processes; exit with 3 when there are some
        #[arg(long)]
        unleased: bool,
        #[command(flatten)]
        which: Gpus,
    },
}

impl Process {
    /// Returns whether the command prints a list. The formats `name`, `uuid` and `csv` are only for lists.
    pub(crate) fn prints_list(&self) -> bool {
        matches!(self, Self::List { .. })
    }
}
