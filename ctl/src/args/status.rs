//! `gpushctl status`.

use std::time::Duration;

use clap::Args;

use super::{Gpus, values::duration};

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
    /// Redraw every DURATION until Ctrl-C [default without =DURATION: 2s]
    #[arg(
        long,
        short = 'w',
        value_name = "DURATION",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "2s",
        value_parser = duration
    )]
    pub(crate) watch: Option<Duration>,
}
