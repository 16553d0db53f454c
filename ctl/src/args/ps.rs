//! `gpushctl ps`.

use clap::Args;

use super::Gpus;

/// `gpushctl ps`.
#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// Only unleased processes; exit with 3 when there are some
    #[arg(long)]
    pub(crate) unleased: bool,
    #[command(flatten)]
    pub(crate) which: Gpus,
}
