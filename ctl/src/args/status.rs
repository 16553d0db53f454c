//! `gpushctl status`.

use clap::Args;

use super::Gpus;

/// `gpushctl status`.
#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) which: Gpus,
    /// Show one line for each GPU, and its notes
    #[arg(long, short, conflicts_with = "summary")]
    pub(crate) brief: bool,
    /// Show only totals for each model and profile
    #[arg(long, short)]
    pub(crate) summary: bool,
}
