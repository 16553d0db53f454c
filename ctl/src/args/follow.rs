//! `gpushctl operation`, `events` and `audit`.

use std::{sync::LazyLock, time::Duration};

use clap::{Args, Subcommand};
use gpush_api::EventKind;
use jiff::Timestamp;

use super::{
    Gpus, Waiting,
    values::{duration, kind, operation, since, some_number, some_records},
};

#[derive(Debug, Subcommand)]
pub(crate) enum Operation {
    /// List the last operations, oldest first
    #[command(
        alias = "ls",
        after_help = "\
Examples:
  gpushctl operation list -n 5
  gpushctl operation list -g 3"
    )]
    List {
        /// Number of operations
        #[arg(long, short, value_name = "NUMBER", default_value = "50", value_parser = some_number, allow_negative_numbers = true)]
        number: usize,
        /// Only operations before operation ID, for the previous page
        #[arg(long, value_name = "ID", value_parser = operation)]
        before: Option<String>,
        #[command(flatten)]
        which: Gpus,
    },
    /// Show one operation
    #[command(after_help = "\
Examples:
  gpushctl operation show           the last one
  gpushctl operation show op-17")]
    Show {
        /// Operation, such as op-17 or 17 [default: the last one]
        #[arg(value_name = "ID", value_parser = operation)]
        id: Option<String>,
    },
    /// Wait until an operation ends; exit with its result
    #[command(after_help = "\
Examples:
  gpushctl operation wait op-17 --timeout 5m")]
    Wait {
        /// Operation, such as op-17 or 17
        #[arg(value_name = "ID", value_parser = operation)]
        id: String,
        /// Do not show progress
        #[arg(long, short)]
        quiet: bool,
        /// Stop waiting after DURATION; gpushd continues [default: no limit]
        #[arg(long, value_name = "DURATION", value_parser = duration, allow_negative_numbers = true)]
        timeout: Option<Duration>,
    },
    /// Cancel an operation: end a queued one, roll back a running one
    #[command(after_help = "\
Exits with 0 if every change of the operation was rolled back, and with 4 if
the operation was done before it could be cancelled. A queued operation ends in
the state `not_started`, a running one in `rolled_back`.

Examples:
  gpushctl operation cancel op-17")]
    Cancel {
        /// Operation, such as op-17 or 17
        #[arg(value_name = "ID", value_parser = operation)]
        id: String,
        #[command(flatten)]
        waiting: Waiting,
    },
}

impl Operation {
    /// Returns whether the command prints a list. The formats `name`, `uuid` and `csv` are only for lists.
    pub(crate) fn prints_list(&self) -> bool {
        matches!(self, Self::List { .. })
    }
}

/// Help of `--kind`.
static KINDS: LazyLock<String> = LazyLock::new(|| format!("Only these kinds: {}", EventKind::names()));

#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    #[command(flatten)]
    pub(crate) which: Gpus,
    /// Print new events until Ctrl-C, after those of --since or -n; with --json one document per line
    #[arg(long, short)]
    pub(crate) follow: bool,
    #[arg(long = "kind", short, value_name = "KIND", value_delimiter = ',', value_parser = kind, help = KINDS.as_str())]
    pub(crate) kinds: Vec<EventKind>,
    /// Only events after TIME: a time such as 2026-01-31T08:00Z, or how long ago, such as 30m
    #[arg(long, value_name = "TIME", value_parser = since, allow_negative_numbers = true)]
    pub(crate) since: Option<Timestamp>,
    /// Only the last NUMBER events
    #[arg(long, short, value_name = "NUMBER", value_parser = some_number, allow_negative_numbers = true)]
    pub(crate) number: Option<usize>,
    /// Also show each step of an operation
    #[arg(long)]
    pub(crate) steps: bool,
}

#[derive(Debug, Args)]
pub(crate) struct AuditArgs {
    #[command(flatten)]
    pub(crate) which: Gpus,
    /// Only records after TIME: a time such as 2026-01-31T08:00Z, or how long ago, such as 30m
    #[arg(long, value_name = "TIME", value_parser = since, allow_negative_numbers = true)]
    pub(crate) since: Option<Timestamp>,
    /// Only records about OBJECT: an operation, lease, GPU, MIG device, MPS target or user, `config` or `host`
    #[arg(long, value_name = "OBJECT")]
    pub(crate) object: Option<String>,
    /// Only the last NUMBER records, up to 1000 [default: 50, or all with --since]
    #[arg(long, short, value_name = "NUMBER", value_parser = some_records, allow_negative_numbers = true)]
    pub(crate) number: Option<usize>,
    /// Print new records until Ctrl-C; with --json one document per line
    #[arg(long, short)]
    pub(crate) follow: bool,
}

#[cfg(test)]
impl Operation {
    /// Returns whether only administrators may run the command.
    pub(super) fn is_for_administrators(&self) -> bool {
        match self {
            Self::Cancel { .. } => true,
            Self::List { .. } | Self::Show { .. } | Self::Wait { .. } => false,
        }
    }
}
