//! `gpushctl process`.

use clap::Subcommand;

use super::Which;

#[derive(Debug, Subcommand)]
pub(crate) enum Process {
    /// Processes on GPUs: whose they are, and what they belong to
    #[command(after_help = "\
A stray is a process on a shared GPU that belongs to nobody who was given a
share of it. The config says what is done about it.

Examples:
  gpushctl process list --gpu 0-3
  gpushctl process list --stray || mail -s strays root")]
    List {
        /// Only strays; exit with 3 when there are some
        #[arg(long)]
        stray: bool,
        #[command(flatten)]
        which: Which,
    },
}
