//! `gpushctl run` and `gpushctl lease`.

use std::ffi::OsString;

use clap::{Args, Subcommand};
use gpush_api::LeaseId;
use jiff::Timestamp;

use super::{
    Gpus,
    lease_idle::{IDLE_NOTES, KEEP_NOTES, LeaseIdleArgs, LeaseKeepArgs},
    request::RequestFlags,
    values::{lease, pid, since, some_ended, whole_seconds, whole_seconds_or_zero},
};

#[derive(Debug, Args)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    pub(crate) request: RequestFlags,
    /// Use LEASE, which must be yours, instead of requesting one
    #[arg(long, value_name = "LEASE", value_parser = lease)]
    pub(crate) lease: Option<LeaseId>,
    /// Do not show the place in the queue and the granted share
    #[arg(long, short)]
    pub(crate) quiet: bool,
    /// Command and its arguments
    #[arg(value_name = "COMMAND", required = true, last = true, num_args = 1..)]
    pub(crate) command: Vec<OsString>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Lease {
    /// Request a lease that outlives this command
    #[command(after_help = "\
The lease ends when you release it. Without --for and --with, it also ends with
your login session. Print its environment with `lease env LEASE`, or run
commands in it with `run --lease LEASE -- COMMAND`.

Examples:
  gpushctl lease request --mig 1g.10gb --for 2h
  gpushctl lease request --whole --count 2 --wait=30m
  LEASE=$(gpushctl lease request --mps 25 -o name)")]
    Request {
        #[command(flatten)]
        request: RequestFlags,
        #[command(flatten)]
        held: LeaseBindingFlags,
        /// Do not show the place in the queue
        #[arg(long, short)]
        quiet: bool,
    },
    /// List leases in order of arrival
    #[command(
        alias = "ls",
        after_help = "\
Leases of other users are shown with user, share and end only.

Examples:
  gpushctl lease list 0-3
  gpushctl lease list --user anna
  gpushctl lease list --mine --ended=5
  gpushctl lease list --job 449 --ended
  gpushctl lease list --ended --since 7d --user anna -o csv"
    )]
    List {
        #[command(flatten)]
        which: Gpus,
        /// Only your leases
        #[arg(long)]
        mine: bool,
        /// Only leases of USER
        #[arg(long, short, value_name = "USER", conflicts_with = "mine")]
        user: Option<String>,
        /// Only leases of the Slurm job JOB
        #[arg(long, value_name = "JOB")]
        job: Option<u32>,
        /// Also list the last NUMBER ended leases [if =NUMBER is omitted: 20, or all since TIME]
        #[arg(long, value_name = "NUMBER", num_args = 0..=1, require_equals = true, default_missing_value = USUAL,
              value_parser = EndedNumber::parse)]
        ended: Option<EndedNumber>,
        /// Also list the leases that ended after TIME: 2026-01-31T08:00Z, or how long ago, such as 7d
        #[arg(long, value_name = "TIME", value_parser = since, allow_negative_numbers = true)]
        since: Option<Timestamp>,
    },
    /// Show leases: state, shares, end, place in the queue, what they wait for
    #[command(after_help = "\
Examples:
  gpushctl lease show              your leases
  gpushctl lease show L17 L18")]
    Show {
        /// Leases, such as L17 [default: your leases]
        #[arg(value_name = "LEASE", value_parser = lease)]
        leases: Vec<LeaseId>,
    },
    /// Set a new end for a lease
    #[command(after_help = "\
Examples:
  gpushctl lease renew L17 --for 2h   ends in 2 h from now")]
    Renew {
        /// Lease, such as L17
        #[arg(value_name = "LEASE", value_parser = lease)]
        lease: LeaseId,
        /// Time from now to the new end, such as 2h
        #[arg(long = "for", value_name = "DURATION", value_parser = whole_seconds, allow_negative_numbers = true)]
        duration: u64,
    },
    /// Keep a lease for a time, although it is not used
    #[command(after_help = KEEP_NOTES)]
    Keep(LeaseKeepArgs),
    /// List unused leases, and what happens to them
    #[command(after_help = IDLE_NOTES)]
    Idle(LeaseIdleArgs),
    /// End leases, or cancel waiting ones
    #[command(after_help = "\
An ended lease admits no new process. Its capacity is free when its processes
have ended; `lease show` lists what the lease waits for.

Without --reason, the command ends your own leases. With --reason, it ends
leases of any user, which only administrators may do; the holders see the
reason. Running processes may finish, unless --kill is given.

Examples:
  gpushctl lease end L17
  gpushctl lease end --all                  all your leases
  gpushctl lease end -g 3 --reason 'new driver at 18:00'
  gpushctl lease end --user anna --reason maintenance --kill --notice 10m")]
    End(LeaseEndArgs),
    /// Print the environment of a lease; without LEASE, request a lease first
    #[command(after_help = "\
Output (-o): sh (default), fish, csh, json, or docker: arguments of
`docker run`, one on each line. A failure prints `false`, so that `eval` fails
too.

Without LEASE, a lease is requested first, as with `lease request`; its id is
printed on stderr.

Examples:
  eval \"$(gpushctl lease env L17)\"
  eval \"$(gpushctl lease env --mps 25 --memory 8G)\"   until you log out
  docker run --rm $(gpushctl lease env L17 -o docker) IMAGE")]
    Env {
        /// Lease, such as L17 [default: a new one]
        #[arg(value_name = "LEASE", value_parser = lease)]
        lease: Option<LeaseId>,
        #[command(flatten)]
        request: RequestFlags,
        #[command(flatten)]
        held: LeaseBindingFlags,
        /// Do not show the place in the queue
        #[arg(long, short)]
        quiet: bool,
    },
}

/// What `--ended` means without a number.
const USUAL: &str = "usual";

/// A number of ended leases.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum EndedNumber {
    /// The usual number, or all since a time.
    Usual,
    /// At most this number.
    AtMost(usize),
}

impl EndedNumber {
    fn parse(text: &str) -> Result<Self, String> {
        if text == USUAL { Ok(Self::Usual) } else { some_ended(text).map(Self::AtMost) }
    }
}

/// `gpushctl lease end`.
#[derive(Debug, Args)]
pub(crate) struct LeaseEndArgs {
    /// Leases, such as L17
    #[arg(value_name = "LEASE", value_parser = lease, required_unless_present_any = ["all", "gpus", "user"],
          conflicts_with_all = ["all", "gpus", "user"])]
    pub(crate) leases: Vec<LeaseId>,
    /// All your leases; with --reason, all leases of the host
    #[arg(long, conflicts_with_all = ["gpus", "user"])]
    pub(crate) all: bool,
    /// Your leases on these GPUs; with --reason, all leases on them
    #[arg(long = "gpu", short = 'g', short_alias = 'i', value_name = "GPU", value_delimiter = ',')]
    pub(crate) gpus: Vec<String>,
    /// Leases of USER
    #[arg(long, value_name = "USER", requires = "reason")]
    pub(crate) user: Option<String>,
    /// End leases of any user, and show TEXT to the holders; for administrators
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// End the processes too: SIGTERM, then SIGKILL
    #[arg(long, requires = "reason")]
    pub(crate) kill: bool,
    /// Time until SIGTERM [default: 1m]
    #[arg(long, value_name = "DURATION", requires = "kill", value_parser = whole_seconds_or_zero,
          allow_negative_numbers = true)]
    pub(crate) notice: Option<u64>,
    /// Time from SIGTERM to SIGKILL [default: `processes.grace` of the config]
    #[arg(long, value_name = "DURATION", requires = "kill", value_parser = whole_seconds_or_zero,
          allow_negative_numbers = true)]
    pub(crate) grace: Option<u64>,
    /// Do not ask before leases of other users end
    #[arg(long, short)]
    pub(crate) yes: bool,
}

impl Lease {
    /// Returns whether the command prints a list. The formats `name`, `uuid` and `csv` are only for lists.
    pub(crate) fn prints_list(&self) -> bool {
        matches!(self, Self::Request { .. } | Self::List { .. } | Self::Show { .. } | Self::Idle(_))
    }
}

/// The holder of a lease, and the process that it is bound to.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct LeaseBindingFlags {
    /// End the lease when process PID exits; the holder must own the process
    #[arg(long, value_name = "PID", value_parser = pid, allow_negative_numbers = true)]
    pub(crate) with: Option<u32>,
    /// Request the lease for USER; for administrators
    #[arg(long, value_name = "USER")]
    pub(crate) user: Option<String>,
}

#[cfg(test)]
impl Lease {
    /// Returns whether only administrators may run the command.
    pub(super) fn is_for_administrators(&self) -> bool {
        match self {
            Self::End(args) => args.reason.is_some(),
            Self::Request { .. }
            | Self::List { .. }
            | Self::Show { .. }
            | Self::Renew { .. }
            | Self::Keep(_)
            | Self::Idle(_)
            | Self::Env { .. } => false,
        }
    }
}
