//! The command line: commands, options and their help.
//!
//! | file | subject |
//! |---|---|
//! | `mps`, `ps`, `config`, `quota`, `status`, `metrics`, `top` | the commands of these names |
//! | `gpu` | `gpu` and `maintenance` |
//! | `mig` | `mig` and `apply` |
//! | `lease`, `lease_idle` | `lease` and `run` |
//! | `request` | the flags of a lease request |
//! | `enforce` | `enforce` |
//! | `slurm` | Slurm's hooks |
//! | `support_bundle` | `support-bundle` |
//! | `advise` | `advise` |
//! | `format` | the format and colors of the output, and the shells |
//! | `follow` | operations, events, the audit trail |
//! | `gpus` | how a command names GPUs |
//! | `waiting` | how a command waits, and the reason and end of a change |
//! | `waitable` | the typed command with `--wait`, for hints |
//! | `correction` | the command that was meant, for a command line that clap refuses |
//! | `synonyms` | words of other tools, and the commands that gpushctl has instead |
//! | `phrases` | command lines of other tools, and the command lines that gpushctl has instead |
//! | `proposal` | the hint that proposes a command line, with a share that the caller may lease |
//! | `slurm_job` | the command of Slurm for a request, where only Slurm jobs can lease the GPUs |
//! | `request_line` | command lines that request a share in the form of Slurm, Docker and other tools |
//! | `missing` | hints for missing arguments |
//! | `docker_line` | `docker run` in the place of `run` |
//! | `spelling` | misspelled commands and options |
//! | `words` | what a typed word can mean: an index, a profile, a lease, a duration |
//! | `topic` | the topics of `explain` |
//! | `typed` | command lines in hints |
//! | `default_verb` | the verb that a group of commands has without one: `gpushctl lease` lists leases |
//! | `help` | the order of a help page, and the groups of commands on the first page |
//! | `habits` | command lines in the form of nvidia-smi and other tools |
//! | `config_settings` | commands that would change a setting of the config |
//! | `misplaced` | words that a command reads as GPUs, but that name something else |
//! | `misplaced_options` | options of `run` at a wrong place |
//! | `foreign_layout` | layouts in the form of other tools |
//! | `foreign_values` | values of options in the notation of other tools |
//! | `values` | durations, times, numbers |

mod advise;
mod bill;
mod config;
mod config_settings;
pub(crate) mod correction;
pub(crate) mod default_verb;
mod docker_line;
mod enforce;
mod follow;
pub(crate) mod foreign_layout;
mod foreign_values;
mod format;
mod gpu;
mod gpus;
pub(crate) mod habits;
pub(crate) mod help;
#[cfg(test)]
mod hints;
mod lease;
mod lease_idle;
mod metrics;
mod mig;
mod misplaced;
mod misplaced_options;
pub(crate) mod missing;
mod month;
mod mps;
#[cfg(test)]
pub(crate) mod pages;
mod phrases;
mod proposal;
mod ps;
mod quota;
mod request;
mod request_line;
mod request_options;
mod slurm;
mod slurm_job;
pub(crate) mod spelling;
mod status;
mod support_bundle;
mod synonyms;
mod top;
pub(crate) mod topic;
pub(crate) mod typed;
mod usage;
mod values;
pub(crate) mod waitable;
mod waiting;
pub(crate) mod words;

use std::{path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand};

use self::values::{duration, duration_or_zero};
pub(crate) use self::{
    advise::{
        Advise, AdviseFromUseArgs, AdviseMechanismArgs, AdviseQueueArgs, AdviseSubject, DemandFlags, DriverName,
        WorkloadName, YesNo,
    },
    bill::BillArgs,
    config::{Config, ConfigInitArgs, IsolationName, Overrides, SiteName},
    enforce::{Enforce, EnforceOnArgs},
    follow::{AuditArgs, EventsArgs, Operation},
    format::{Color, Format, Shell},
    gpu::{DrainArgs, Gpu, Maintenance},
    gpus::{GpuOption, Gpus, SomeGpus},
    lease::{EndedNumber, Lease, LeaseBindingFlags, LeaseEndArgs, RunArgs},
    lease_idle::{LeaseIdleArgs, LeaseKeepArgs},
    metrics::{Metrics, MetricsSelection, MetricsServeArgs, MetricsShowArgs, MetricsWriteArgs},
    mig::{ApplyArgs, Execution, LayoutChange, Mig, Offline, Wanted},
    mps::{Ceilings, Followed, Mps},
    proposal::{OfferedShare, Offers, as_hint},
    ps::PsArgs,
    quota::QuotaArgs,
    request::RequestFlags,
    slurm::{HookFiles, HookLimits, Slurm, of_script},
    slurm_job::as_typed as as_typed_job,
    status::StatusArgs,
    support_bundle::SupportBundleArgs,
    top::TopArgs,
    topic::Topic,
    usage::UsageArgs,
    values::AUDIT_USUALLY,
    waiting::{Lasting, Queueing, Waiting, Why},
};

/// Share and observe the GPUs of this host through gpushd.
#[derive(Debug, Parser)]
#[command(name = "gpushctl", version, after_help = help::FIRST_PAGE_NOTES, max_term_width = 100)]
pub(crate) struct Cli {
    #[command(flatten)]
    pub(crate) global: Global,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Options of every command.
#[derive(Debug, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct Global {
    /// Socket of gpushd, like $GPUSH_SOCKET
    #[arg(long, global = true, value_name = "PATH")]
    pub(crate) socket: Option<PathBuf>,
    /// table, wide or json; lists: name, uuid, csv
    #[arg(long, short, global = true, value_enum, value_name = "FORMAT")]
    pub(crate) output: Option<Format>,
    /// As -o json: one document, errors too
    #[arg(long, global = true, conflicts_with = "output")]
    pub(crate) json: bool,
    /// Print lists without headings
    #[arg(long, global = true)]
    pub(crate) no_headers: bool,
    /// auto, always or never [default: auto]
    #[arg(long, global = true, value_enum, value_name = "WHEN", default_value_t = Color::Auto)]
    pub(crate) color: Color,
    /// Draw with ASCII only
    #[arg(long, global = true)]
    pub(crate) ascii: bool,
    /// Longest wait for each answer [default: 10s]
    #[arg(long, global = true, value_name = "DURATION", default_value = "10s", value_parser = duration, allow_negative_numbers = true)]
    pub(crate) request_timeout: Duration,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Show GPUs with their slices: who uses which, and what is free
    #[command(after_help = "\
Marks: ● in use   ◐ granted by a lease   ⊘ reserved   ○ idle
       ! no compute instance
Notes: ! fault or difference from the config   * requested by a user
Memory is shown as in use/total: of the whole GPU in the heading, and of each
instance. Memory that the driver reserves counts as in use, so the value of an
idle GPU is not 0. The numbers below a drawing are placements, as in the layout
entry 2g.20gb@4. GPUs that differ only in index, address and UUIDs are drawn
once; `-o wide` draws each GPU, with its sensors. A reserved instance accepts
no new work, for example because its GPU is cordoned or a queued operation
needs it. IN USE, GRANTED and FREE count MIG devices, and GPUs without MIG.
With --summary, ROOM is the number of further instances that fit into the free
slices. On a GPU with a dynamic layout, a lease can get more, because gpushd
replaces idle instances.

Examples:
  gpushctl status
  gpushctl status 0-3 --brief
  gpushctl status --summary")]
    Status(StatusArgs),
    /// Watch the activity, memory and power of GPUs, leases, processes
    #[command(after_help = top::NOTES)]
    Top(TopArgs),
    /// Bring GPUs to their desired state, or undo a change of layouts
    #[command(after_help = "\
Applies the mode and layout that each GPU should have: those of the config and
its overrides. If the config file has changed, gpushd loads it first. GPUs
without a rule do not change. If you name no GPU, cordoned GPUs do not change
either. Instances in use are never destroyed.

With --undo, the command restores the MIG layout that the GPUs had before the
last operation that changed them. If you name no GPU, it restores the GPUs of
the last operation. --undo itself counts as a change: a second --undo restores
the layout that the first one replaced, and earlier changes cannot be undone.

Examples:
  gpushctl apply            all GPUs
  gpushctl apply 2 --wait   GPU 2, as soon as possible
  gpushctl apply --undo     the layout before the last change")]
    Apply(ApplyArgs),
    /// Run a command on a share of a GPU
    #[command(after_help = "\
The lease ends with the command. If no flag names a share, and the GPUs offer
only one kind of share, gpushctl requests that kind.

MIG separates memory, compute and faults in hardware. An MPS percentage and
memory limit apply only to programs that keep their environment unchanged.
Time-slicing limits nothing.

Exit status: that of the command, or 128 + the number of the signal that ended
it; 125 if no lease was granted, 126 if the command cannot be run, 127 if it is
not found. Signals reach the command.

Examples:
  gpushctl run --mig 1g.10gb -- python train.py
  gpushctl run --memory 10G --wait -- python train.py
  gpushctl run --mps 25 --memory 8G -- ./simulate
  gpushctl run --whole --count 2 --for 8h -- torchrun train.py
  gpushctl run --lease L17 -- nvidia-smi")]
    Run(RunArgs),
    /// Request, list, show, renew and end leases of shares of GPUs
    #[command(subcommand, alias = "leases")]
    Lease(Lease),
    /// Show your quota: limits, what you use, and what is left
    #[command(after_help = quota::NOTES)]
    Quota(QuotaArgs),
    /// Show who used how much: time, GPU hours, memory, energy
    #[command(after_help = usage::NOTES)]
    Usage(UsageArgs),
    /// Show what the shares of a month cost, by user, account or job
    #[command(after_help = bill::NOTES)]
    Bill(BillArgs),
    /// List, show, cordon, drain and reset GPUs
    #[command(subcommand, alias = "gpus")]
    Gpu(Gpu),
    /// Apply and check MIG layouts; list MIG devices
    #[command(subcommand)]
    Mig(Mig),
    /// Start, stop and show MPS daemons; list their clients
    #[command(subcommand)]
    Mps(Mps),
    /// List processes on GPUs with their users, jobs and leases
    #[command(after_help = "\
A process is unleased if it has no lease on a GPU whose rule requires one. The
config sets what gpushd does about unleased processes.

Examples:
  gpushctl ps
  gpushctl ps 0-3
  gpushctl ps --unleased || mail -s unleased root")]
    Ps(PsArgs),
    /// List, show, wait for and cancel operations
    #[command(subcommand, visible_alias = "op", alias = "operations", alias = "ops")]
    Operation(Operation),
    /// Show recent events, or follow new ones
    #[command(
        alias = "event",
        after_help = "\
Examples:
  gpushctl events --since 1h               events of the last hour
  gpushctl events -f                       only new events
  gpushctl events -f --since 5m            the last 5 minutes and new ones
  gpushctl events -f --kind xid,driver --json"
    )]
    Events(EventsArgs),
    /// Print metrics, write them to a file, or serve them over HTTP
    #[command(subcommand)]
    Metrics(Metrics),
    /// Show who changed what; for administrators
    #[command(after_help = "\
Examples:
  gpushctl audit --since 7d
  gpushctl audit -g 3
  gpushctl audit --object op-17")]
    Audit(AuditArgs),
    /// Check, show, compare and reload the config; list overrides
    #[command(subcommand)]
    Config(Config),
    /// Enter and leave maintenance, to replace drivers or hardware
    #[command(subcommand)]
    Maintenance(Maintenance),
    /// Let the kernel deny the GPUs to login sessions without a lease
    #[command(subcommand)]
    Enforce(Enforce),
    /// Release held GPUs after gpushd's database was lost
    #[command(
        hide = true,
        after_help = "\
While GPUs are held, gpushd changes nothing on them and grants nothing: it does
not know which leases were granted. First check with `gpushctl status` that no
user relies on the present instances. Afterwards, gpushctl shows differences
from the config as drift."
    )]
    Recover(Why),
    /// After a start, wait until layouts are applied and MPS daemons are ready
    #[command(
        hide = true,
        after_help = "\
Waits until the layouts are applied after a boot and all MPS daemons are ready.
If the config has a rule, it also waits until the driver is loaded.
It does not wait for GPUs that are held, cordoned or in maintenance, or for MPS
daemons that an administrator has stopped: these need an administrator.
It fails at once if a GPU did not get its layout or a daemon failed too often.
The unit gpush-ready.service runs this command, so that services can start
after it.

Examples:
  gpushctl ready --timeout 5m && gpushctl status"
    )]
    Ready {
        /// Stop waiting after DURATION
        #[arg(long, value_name = "DURATION", value_parser = duration_or_zero, default_value = "90s",
              allow_negative_numbers = true)]
        timeout: Duration,
        /// Do not show what the command waits for
        #[arg(long, short)]
        quiet: bool,
    },
    /// Examine this host for problems that affect gpush
    #[command(after_help = "\
Examines files, processes and gpushd, and changes nothing. Works without
gpushd. As root it sees more. Exit status 3 if there is a problem.

Examples:
  gpushctl doctor
  gpushctl doctor --only driver,config
  gpushctl doctor --only slurm --quiet")]
    Doctor {
        /// Examine only these areas: system, driver, devices, mps, managers, agent, config, disk, security,
        /// slurm
        #[arg(long, value_name = "AREA", value_delimiter = ',')]
        only: Vec<gpush_doctor::Area>,
        /// Print only problems, one line each
        #[arg(long, short)]
        quiet: bool,
    },
    /// Choose how to share GPUs, from needs or from recorded use
    #[command(subcommand, alias = "advice")]
    Advise(Advise),
    /// Write an archive for a bug report; works without gpushd
    #[command(after_help = support_bundle::NOTES)]
    SupportBundle(SupportBundleArgs),
    /// Explain a mechanism, a state, an Xid error, a code or a lint
    #[command(after_help = topic::NOTES)]
    Explain {
        /// Name of a topic, or the UUID of a MIG device
        #[arg(value_parser = Topic::parse)]
        topic: Option<Topic>,
    },
    /// Print gres.conf; end leases of jobs that Slurm no longer knows
    #[command(subcommand)]
    Slurm(Slurm),
    /// Show the versions of gpushctl, gpushd, its API and the driver
    #[command(after_help = "\
Examples:
  gpushctl version
  gpushctl version --json")]
    Version,
    /// Print the script with which a shell completes commands and values
    #[command(
        hide = true,
        after_help = "\
The shell calls gpushctl for completions, which asks gpushd for GPUs,
profiles, layouts, MPS targets, leases and operations.

Examples:
  source <(gpushctl completions bash)
  gpushctl completions bash > /etc/bash_completion.d/gpushctl
  gpushctl completions zsh > \"${fpath[1]}/_gpushctl\""
    )]
    Completions {
        /// Shell
        shell: Shell,
    },
    /// Write the man pages into a directory
    #[command(hide = true)]
    Man {
        /// Directory; created if it does not exist
        dir: PathBuf,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_fit_a_narrow_terminal_and_a_man_page() {
        fn look(command: &clap::Command) {
            let after = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            for line in after.lines() {
                // In the help, an example starts with two spaces. In a man page, an example starts in column seven, so
                // examples must be shorter than other lines.
                let most = if line.starts_with(' ') { 74 } else { 79 };
                assert!(line.chars().count() <= most, "{}: {line}", command.get_name());
            }
            command.get_subcommands().for_each(look);
        }
        look(&<Cli as clap::CommandFactory>::command());
    }

    #[test]
    fn gpus_are_arguments_or_options_everywhere() {
        for (words, expected) in
            [(&["status", "0-1", "-g", "3", "-i", "4,5"][..], &["0-1", "3", "4", "5"][..]), (&["status"], &[])]
        {
            let cli = Cli::try_parse_from([&["gpushctl"], words].concat()).unwrap();
            let Command::Status(args) = cli.command else { panic!("{words:?}") };
            assert_eq!(args.which.selectors(), expected);
        }
        // In these commands, the GPU selectors are a field of the subcommand.
        for words in [&["audit"][..], &["op", "list"], &["mps", "list"], &["config", "overrides", "list"]] {
            let parsed = Cli::try_parse_from([&["gpushctl"], words, &["0-1", "-g", "3"]].concat()).unwrap();
            let text = format!("{:?}", parsed.command);
            assert!(text.contains(r#"arguments: ["0-1"], options: ["3"]"#), "{words:?}: {text}");
        }
        fn leaves(command: &clap::Command, path: &str) {
            for one in command.get_subcommands() {
                let path = format!("{path} {}", one.get_name());
                leaves(one, &path);
                let names_gpus = one.get_arguments().any(|arg| {
                    arg.is_positional()
                        && arg.get_value_names().is_some_and(|names| names == ["GPU"] || names == ["TARGET"])
                });
                let has_option = one.get_arguments().any(|arg| arg.get_short() == Some('g'));
                assert!(!names_gpus || has_option, "{path} has no -g");
            }
        }
        leaves(&<Cli as clap::CommandFactory>::command(), "gpushctl");
    }

    #[test]
    fn aliases_mean_the_same_command() {
        for (alias, name) in [
            (&["op", "ls"][..], &["operation", "list"][..]),
            (&["operations", "show", "2"], &["operation", "show", "op-2"]),
            (&["gpus", "ls"], &["gpu", "list"]),
            (&["gpu", "undrain", "3"], &["gpu", "uncordon", "3"]),
            (&["mig", "show"], &["mig", "list"]),
            (&["leases", "ls", "-o", "json"], &["lease", "list", "-o", "json"]),
        ] {
            let parsed =
                |words: &[&str]| format!("{:?}", Cli::try_parse_from([&["gpushctl"], words].concat()).unwrap().command);
            assert_eq!(parsed(alias), parsed(name));
        }
    }

    #[test]
    fn exit_code_page_lists_every_command() {
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
    fn request_timeout_zero_or_negative_is_refused() {
        for wrong in ["0", "-1", "x"] {
            assert!(Cli::try_parse_from(["gpushctl", "--request-timeout", wrong, "status"]).is_err(), "{wrong}");
        }
        let cli = Cli::try_parse_from(["gpushctl", "--request-timeout", "0.5s", "status"]).unwrap();
        assert_eq!(cli.global.request_timeout, Duration::from_millis(500));
    }

    #[test]
    fn wait_takes_its_duration_after_an_equals_sign_only() {
        let wait = |words: &[&str]| match Cli::try_parse_from([&["gpushctl", "mig", "apply"], words].concat())?.command
        {
            Command::Mig(Mig::Apply { change, wanted, .. }) => Ok((change.execution.queueing.seconds, wanted.name)),
            other => panic!("{other:?}"),
        };
        let wait = |words: &[&str]| wait(words).map_err(|error: clap::Error| error.to_string());
        assert_eq!(wait(&[]), Ok((None, None)));
        // The word after `--wait` is not the value of `--wait`, but the layout.
        assert_eq!(wait(&["--wait", "mixed"]), Ok((Some(2_592_000), Some("mixed".to_owned()))));
        assert_eq!(wait(&["--wait=1m", "mixed"]), Ok((Some(60), Some("mixed".to_owned()))));
        assert!(wait(&["--wait=2592001"]).is_err() && wait(&["--wait=soon"]).is_err());
    }
}
