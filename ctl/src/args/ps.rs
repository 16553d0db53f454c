//! `gpushctl ps`.

use clap::Args;

use super::Gpus;

/// `gpushctl ps`.
#[derive(Debug, Args)]
pub(crate) struct PsArgs {
    /// Only unleased processes; exit with 3 when there are some
    #[arg(long)]
    pub(crate) unleased: bool,
    /// Only processes of USER
    #[arg(long, short, value_name = "USER")]
    pub(crate) user: Option<String>,
    #[command(flatten)]
    pub(crate) which: Gpus,
}
