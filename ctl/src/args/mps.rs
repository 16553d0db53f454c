//! `gpushctl mps`: daemons, their settings, and shares of a GPU or MIG device.

use clap::{ArgGroup, Args, Subcommand, ValueEnum};
use gpush_api::{MemoryLimit, Percentage, Priority};

use super::values::{pid, some_lines, span_seconds};

/// What a share is worth, before a command's own examples.
macro_rules! with_ceilings {
    ($examples:literal) => {
        concat!(
            "\
A percentage and a memory limit are ceilings that programs keep which leave
their environment as it is: no reservation, and no wall between clients.

Examples:
",
            $examples
        )
    };
}

#[derive(Debug, Subcommand)]
pub(crate) enum Mps {
    /// Targets that are shared through MPS, one line each
    List,
    /// Everything about one: settings, servers, clients, shares
    Show {
        #[command(flatten)]
        of: Target,
    },
    /// Who computes through MPS
    Clients {
        /// GPU or MIG device, as for `mps show`; all when none is named
        #[arg(value_name = "TARGET")]
        target: Option<String>,
    },
    /// Change what each client may have, above the config's rule
    #[command(group = at_least_one(), after_help = "\
It stands until it is taken back (--reset), or the rule says something else.
What it reaches is told: a running server keeps some of what it has.

Examples:
  gpushctl mps set 0 --percentage 25
  gpushctl mps set 1:2g.20gb@2 --memory 8G --priority below-normal")]
    Set {
        #[command(flatten)]
        of: Target,
        #[command(flatten)]
        ceilings: Ceilings,
        /// Take back what was set before: what is left out is the rule's again
        #[arg(long)]
        reset: bool,
    },
    /// Start a daemon that was stopped, or was given up
    Start {
        #[command(flatten)]
        of: Target,
        #[command(flatten)]
        followed: Followed,
    },
    /// Stop a daemon, until it is started again; refused under clients
    Stop {
        #[command(flatten)]
        of: Target,
        #[command(flatten)]
        force: Force,
        #[command(flatten)]
        followed: Followed,
    },
    /// Stop a daemon and start it again; refused under clients
    Restart {
        #[command(flatten)]
        of: Target,
        #[command(flatten)]
        force: Force,
        #[command(flatten)]
        followed: Followed,
    },
    /// Let nobody in any more, let the clients finish, and stop
    #[command(after_help = "\
Clients may take as long as they need, unless --end-after says how long. The
agent sees to it, also when nobody watches any more.

Examples:
  gpushctl mps drain 0 && gpushctl mps start 0
  gpushctl mps drain 0 --end-after 30m --no-wait")]
    Drain {
        #[command(flatten)]
        of: Target,
        /// End clients that are still there after so long: 90s, 30m, 2h
        #[arg(long, value_name = "DURATION", value_parser = span_seconds)]
        end_after: Option<u64>,
        /// Stop watching after so long; the agent goes on
        #[arg(long, value_name = "DURATION", value_parser = span_seconds)]
        wait: Option<u64>,
        /// Do not watch it
        #[arg(long)]
        no_wait: bool,
        /// Don't say who is waited for
        #[arg(long, short)]
        quiet: bool,
    },
    /// The last lines of a daemon's logs
    Logs {
        #[command(flatten)]
        of: Target,
        /// How many of each
        #[arg(long, short = 'n', value_name = "NUMBER", default_value = "40", allow_negative_numbers = true, value_parser = some_lines)]
        lines: usize,
        /// Also what only gpushd's own questions to the daemon have left there
        #[arg(long)]
        all: bool,
        /// Go on with what is new, until Ctrl-C; with --json one document a line
        #[arg(long, short)]
        follow: bool,
    },
    /// Take a share, and print the environment of programs that use it
    #[command(after_help = with_ceilings!(
        "\x20 eval \"$(gpushctl mps env 0 --percentage 25)\"     for this login session
  gpushctl mps env 0 --for 2h > share.env
  gpushctl mps env 1:2g.20gb@2 --memory 8G --shell fish | source

Without --for and --with the share ends with the session of the shell that
asks. `gpushctl mps release` gives it back before."
    ))]
    Env {
        #[command(flatten)]
        of: Target,
        #[command(flatten)]
        ceilings: Ceilings,
        #[command(flatten)]
        until: Until,
        /// In whose syntax
        #[arg(long, value_enum, value_name = "SHELL", default_value_t = Shell::Sh)]
        shell: Shell,
    },
    /// Run a command with a share, which is given back at its end
    #[command(after_help = with_ceilings!(
        "\x20 gpushctl mps run 0 --percentage 25 -- python train.py
  srun gpushctl mps run 1:2g.20gb@2 --memory 8G -- ./simulate

Exit status: the command's; 128 and the signal's number where one ended it; 125
where there is no share, 126 where the command can't be run, 127 where it is
not found. Signals are passed on."
    ))]
    Run {
        #[command(flatten)]
        of: Target,
        #[command(flatten)]
        ceilings: Ceilings,
        /// Command and its arguments
        #[arg(value_name = "COMMAND", required = true, last = true, num_args = 1..)]
        command: Vec<std::ffi::OsString>,
    },
    /// Give shares back
    Release {
        /// Such as s12
        #[arg(value_name = "SHARE", required = true)]
        shares: Vec<String>,
    },
}

/// A change that changes something.
fn at_least_one() -> ArgGroup {
    ArgGroup::new("change").args(["percentage", "memory", "priority", "reset"]).required(true).multiple(true)
}

/// What is shared.
#[derive(Debug, Args)]
pub(crate) struct Target {
    /// GPU or MIG device: index, 0:2g.20gb@2, UUID or its beginning, or short name
    #[arg(value_name = "TARGET")]
    pub(crate) target: String,
}

/// What each client may have.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Ceilings {
    /// Active thread percentage: over 0, up to 100, with one decimal at most
    #[arg(long, short, value_name = "PERCENT", allow_negative_numbers = true)]
    pub(crate) percentage: Option<Percentage>,
    /// Device memory of each client process: 8G, 1536M
    #[arg(long, short, value_name = "MEMORY", allow_negative_numbers = true)]
    pub(crate) memory: Option<MemoryLimit>,
    /// Priority of kernels: normal, below-normal
    #[arg(long, value_name = "PRIORITY")]
    pub(crate) priority: Option<Priority>,
}

/// `--force`.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Force {
    /// End clients that are there
    #[arg(long)]
    pub(crate) force: bool,
}

/// How a change of a daemon's life is followed. The agent carries it out whether or not anybody does.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Followed {
    /// Stop watching after so long; the agent goes on
    #[arg(long, value_name = "DURATION", default_value = "1m", value_parser = span_seconds)]
    pub(crate) wait: u64,
    /// Do not watch it
    #[arg(long, conflicts_with = "wait")]
    pub(crate) no_wait: bool,
    /// No progress meanwhile
    #[arg(long, short)]
    pub(crate) quiet: bool,
}

/// When a share ends by itself.
#[derive(Debug, Clone, Copy, Args)]
pub(crate) struct Until {
    /// The share ends after so long: 90s, 30m, 2h, 7d
    #[arg(long = "for", value_name = "DURATION", value_parser = span_seconds)]
    pub(crate) span: Option<u64>,
    /// The share ends with this process, which must be yours
    #[arg(long = "with", value_name = "PID", value_parser = pid, conflicts_with = "span")]
    pub(crate) with: Option<u32>,
}

/// `--shell`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Shell {
    Sh,
    Fish,
    Csh,
}
