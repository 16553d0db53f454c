//! What is going on and what was: operations, events, the audit trail.

use clap::{Args, Subcommand};
use gpush_api::EventKind;

use super::{
    Which,
    values::{Since, kind, since, some_number, some_records, some_seconds},
};

#[derive(Debug, Subcommand)]
pub(crate) enum Operation {
    /// Operations on record, the last ones
    List {
        /// How many
        #[arg(long, short, value_name = "NUMBER", default_value = "50", value_parser = some_number)]
        number: usize,
        /// Only those before this one: the first of the page after this
        #[arg(long, value_name = "ID")]
        before: Option<String>,
    },
    /// One operation; the last one when none is named
    Show {
        /// Such as op-17
        id: Option<String>,
    },
    /// Watch an operation until it ends; its result is the exit status
    Wait {
        /// Such as op-17
        id: String,
        /// No progress while it runs
        #[arg(long, short)]
        quiet: bool,
        /// Stop watching after so long
        #[arg(long, value_name = "SECONDS", value_parser = some_seconds, allow_negative_numbers = true)]
        watch: Option<f64>,
    },
    /// Take an operation back: one that waits ends at once, one that runs restores what was before
    #[command(after_help = "\
Ends with 0 when nothing of the operation is left, and with 4 when it was done
before it could be cancelled.")]
    Cancel {
        /// Such as op-17
        id: String,
        #[command(flatten)]
        watched: Watched,
    },
}

/// How an operation is watched. The agent carries it out whether or not anybody does.
#[derive(Debug, Args)]
pub(crate) struct Watched {
    /// No progress while it runs
    #[arg(long, short)]
    pub(crate) quiet: bool,
    /// Stop watching after so long; the agent goes on
    #[arg(long, value_name = "SECONDS", value_parser = some_seconds, allow_negative_numbers = true)]
    pub(crate) watch: Option<f64>,
    /// Do not watch it
    #[arg(long, conflicts_with_all = ["watch", "quiet"])]
    pub(crate) no_watch: bool,
}

#[derive(Debug, Args)]
pub(crate) struct EventsArgs {
    /// Tell what happens from now on, until Ctrl-C; with --json one document a line
    #[arg(long, short)]
    pub(crate) follow: bool,
    /// Only these: operation, gpu, config, driver, xid, mps, stray, change, resync
    #[arg(long = "kind", short, value_name = "KIND", value_delimiter = ',', value_parser = kind)]
    pub(crate) kinds: Vec<EventKind>,
    #[command(flatten)]
    pub(crate) which: Which,
}

#[derive(Debug, Args)]
pub(crate) struct AuditArgs {
    /// Only since then: a time such as 2026-01-31T08:00, or so long ago: 30m, 12h, 7d
    #[arg(long, value_name = "WHEN", value_parser = since)]
    pub(crate) since: Option<Since>,
    /// Only about this: an operation, `config`, `host`, or GPUs, named as with --gpu; what an operation
    /// did on a GPU is found under both
    #[arg(long, value_name = "OBJECT")]
    pub(crate) object: Option<String>,
    /// The last so many, up to 1000 [default: 50, or all with --since]
    #[arg(long, short, value_name = "NUMBER", value_parser = some_records)]
    pub(crate) number: Option<usize>,
}
