//! The command line: what can be typed, and how it is explained.
//!
//! | file | subject |
//! |---|---|
//! | `gpu`, `mig`, `mps`, `process`, `config` | the commands of these names |
//! | `follow` | operations, events, the audit trail |
//! | `values` | spans, times, numbers |

mod config;
mod follow;
mod gpu;
mod mig;
mod mps;
mod process;
mod values;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use self::values::some_seconds;
pub(crate) use self::{
    config::{Config, Overrides},
    follow::{AuditArgs, EventsArgs, Operation, Watched},
    gpu::{Gpu, Maintenance, Named, Why},
    mig::{Lasting, Mig, Offline, Wanted},
    mps::{Ceilings, Followed, Mps, Shell, Until},
    process::Process,
    values::AUDIT_USUALLY,
};

/// Columns, GPUs and files are the same words everywhere; what differs is told here once.
const EXIT_CODES: &str = "\
Exit status:
  0 done                   5 denied
  1 other                  6 agent not reachable
  2 usage                  7 unsupported
  3 differs or drift       8 timed out
  4 blocked or busy      130 interrupted
  125-127 of `mps run` alone: no share, not runnable, not found

Environment:
  GPUSH_SOCKET  socket of the agent, as --socket
  GPUSH_CONFIG  config file for `config check` and offline plans
  NO_COLOR      no colours";

/// Shape and watch the GPUs of this host through its agent, gpushd.
#[derive(Debug, Parser)]
#[command(name = "gpushctl", version, after_help = EXIT_CODES, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options that every command takes.
#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// Socket of the agent [env: GPUSH_SOCKET] [default: /run/gpush/gpushd.sock, or your own agent's,
    /// $XDG_RUNTIME_DIR/gpush/gpushd.sock, where only that is there]
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// Print one JSON document of the API's types on stdout, errors too
    #[arg(long, global = true)]
    pub(crate) json: bool,
    /// When to use colours; auto is on a terminal, unless NO_COLOR is set
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value_t = Color::Auto)]
    pub(crate) color: Color,
    /// Draw with ASCII only; by itself where the locale is not UTF-8
    #[arg(long, global = true)]
    pub(crate) ascii: bool,
    /// How long each answer of the agent may take
    #[arg(long, global = true, value_name = "SECONDS", default_value = "10", value_parser = some_seconds, allow_negative_numbers = true)]
    pub(crate) timeout: f64,
}

/// `--color`; `auto` is on a terminal, unless `NO_COLOR` is set. (Docs on the values would make --help
/// spell out every option over many lines.)
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Color {
    Auto,
    Always,
    Never,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Draw every GPU as its slices: what is free, what is used, by whom
    #[command(after_help = "\
Marks: ● in use   ○ idle   ! without a compute instance
Memory: in use/total, of the whole GPU in its heading and of each instance.
What the driver reserves for itself counts as in use, so an idle GPU shows
some. The numbers below a drawing are placements, as in the layout entry
2g.20gb@4.

Examples:
  gpushctl status
  gpushctl status --gpu 0-3 --brief
  watch -c gpushctl status --color always")]
    Status(StatusArgs),
    /// List GPUs, or show all about them
    #[command(subcommand)]
    Gpu(Gpu),
    /// Take the GPUs out of the agent's hands, and give them back
    #[command(subcommand)]
    Maintenance(Maintenance),
    /// Accept that the agent's database was lost: held GPUs are released
    #[command(after_help = "\
While GPUs are held, gpushd neither reshapes them nor hands them out: nobody
knows what was promised about them. See first that nobody relies on them as
they are: `gpushctl status` shows who uses what. Afterwards they stay as they
are, and what differs from the config shows as drift.")]
    Recover(Why),
    /// Plan, apply and check MIG layouts
    #[command(subcommand)]
    Mig(Mig),
    /// Share GPUs and MIG devices through MPS: daemons, clients, shares
    #[command(subcommand)]
    Mps(Mps),
    /// See who uses GPUs, and who was given no share
    #[command(subcommand)]
    Process(Process),
    /// Follow what the agent is doing, and what it did
    #[command(subcommand)]
    Operation(Operation),
    /// Tell what happened lately, or what happens
    #[command(after_help = "\
Examples:
  gpushctl events                          what gpushd still keeps
  gpushctl events -f                       from now on
  gpushctl events -f --kind xid,driver --json")]
    Events(EventsArgs),
    /// Who changed what, for administrators
    #[command(after_help = "\
Examples:
  gpushctl audit --since 7d
  gpushctl audit --object op-17")]
    Audit(AuditArgs),
    /// Check a config file, show or reload the one in force, list what overrides it
    #[command(subcommand)]
    Config(Config),
    /// Versions of gpushctl, the agent, its API and the driver
    Version,
    /// Print the completion script of a shell
    #[command(after_help = "\
Examples:
  gpushctl completions bash > /etc/bash_completion.d/gpushctl
  gpushctl completions zsh > \"${fpath[1]}/_gpushctl\"")]
    Completions {
        /// Shell
        shell: clap_complete::Shell,
    },
    /// Write the man pages into a directory
    #[command(hide = true)]
    Man {
        /// Directory; made if it is absent
        dir: PathBuf,
    },
}

#[derive(Debug, Args)]
pub(crate) struct StatusArgs {
    #[command(flatten)]
    pub(crate) which: Which,
    /// Drawings only, without a line for each instance
    #[arg(long, short)]
    pub(crate) brief: bool,
}

/// `--gpu`.
#[derive(Debug, Args)]
pub(crate) struct Which {
    /// GPUs: index, range 0-3, UUID or its beginning, PCI address, or model such as '*A100*'
    #[arg(long = "gpu", short = 'g', value_name = "GPU", value_delimiter = ',')]
    pub(crate) gpus: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrapped_by_hand_fits_a_narrow_terminal_and_a_page() {
        fn look(command: &clap::Command) {
            let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            for line in after.lines() {
                // A man page indents what stands as it is by seven columns, in place of these two.
                let most = if line.starts_with(' ') { 74 } else { 79 };
                assert!(line.chars().count() <= most, "{}: {line}", command.get_name());
            }
            command.get_subcommands().for_each(look);
        }
        look(&<Cli as clap::CommandFactory>::command());
    }

    #[test]
    fn the_page_of_exit_codes_has_every_command() {
        fn leaves(command: &clap::Command, path: &str, found: &mut Vec<String>) {
            let path = format!("{path} {}", command.get_name());
            if command.has_subcommands() {
                command.get_subcommands().for_each(|one| leaves(one, &path, found));
            } else {
                found.push(path.trim_start().trim_start_matches("gpushctl ").to_owned());
            }
        }
        let page = include_str!("../../../docs/exit-codes.md");
        let table: String = page.lines().filter(|line| line.starts_with("| `")).collect();
        let mut found = Vec::new();
        leaves(&<Cli as clap::CommandFactory>::command(), "", &mut found);
        assert!(found.len() > 20, "{found:?}");
        let missing: Vec<_> = found.iter().filter(|path| !table.contains(&format!("`{path}`"))).collect();
        assert!(missing.is_empty(), "{missing:?}");
    }

    #[test]
    fn no_answer_comes_in_no_time() {
        assert!(some_seconds("0").is_err() && some_seconds("-1").is_err() && some_seconds("x").is_err());
        assert_eq!(some_seconds("0.5"), Ok(0.5));
        assert!(Cli::try_parse_from(["gpushctl", "--timeout", "0", "status"]).is_err());
    }

    #[test]
    fn waiting_takes_its_seconds_behind_an_equals_sign_only() {
        let wait = |words: &[&str]| match Cli::try_parse_from([&["gpushctl", "mig", "apply"], words].concat())?.command
        {
            Command::Mig(Mig::Apply { wait, wanted, .. }) => Ok((wait, wanted.name)),
            other => panic!("{other:?}"),
        };
        let wait = |words: &[&str]| wait(words).map_err(|error: clap::Error| error.to_string());
        assert_eq!(wait(&[]), Ok((None, None)));
        // What follows is the layout's name, as without it.
        assert_eq!(wait(&["--wait", "mixed"]), Ok((Some(2_592_000), Some("mixed".to_owned()))));
        assert_eq!(wait(&["--wait=60", "mixed"]), Ok((Some(60), Some("mixed".to_owned()))));
        assert!(wait(&["--wait=2592001"]).is_err() && wait(&["--wait=soon"]).is_err());
    }
}
