//! The command line: what can be typed, and how it is explained.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use gpush_api::EventKind;
use jiff::Timestamp;

/// Columns, GPUs and files are the same words everywhere; what differs is told here once.
const EXIT_CODES: &str = "\
Exit status:
  0 done                   5 denied
  1 other                  6 agent not reachable
  2 usage                  7 unsupported
  3 differs or drift       8 timed out
  4 blocked or busy      130 interrupted

Environment:
  GPUSH_SOCKET  socket of the agent, as --socket
  GPUSH_CONFIG  config file for `config check` and offline plans
  NO_COLOR      no colours";

/// What a layout is, before a command's own examples.
macro_rules! with_layouts {
    ($examples:literal) => {
        concat!(
            "\
Without a layout, each GPU shall be as its rule in the config says.

An entry is [Nc.]PROFILE[@START][*COUNT], in quotes where it has a *:
  3g.40gb     one instance         1g.10gb*2    two of them
  1g.10gb@4   at memory slice 4    1c.3g.40gb   one compute slice of it
The layout `none` takes all idle instances away.

In a plan + is made, - is destroyed, = is kept, and ~ is kept with other
compute instances.

Examples:
",
            $examples
        )
    };
}

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

/// How long an operation may wait.
fn wait_seconds(text: &str) -> Result<u64, String> {
    match text.parse() {
        Ok(s) if s <= 30 * 86_400 => Ok(s),
        Ok(_) | Err(_) => Err("whole seconds from 0 to 2592000 (30 days) are meant".to_owned()),
    }
}

/// A time to wait, which may be none at all.
fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s.is_finite() && (0.0..=86_400.0).contains(&s) => Ok(s),
        Ok(_) | Err(_) => Err("seconds from 0 to 86400 are meant".to_owned()),
    }
}

/// A time in which an answer can come.
fn some_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s > 0.0 && s <= 86_400.0 => Ok(s),
        Ok(_) | Err(_) => Err("seconds above 0, up to 86400, are meant".to_owned()),
    }
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

#[derive(Debug, Subcommand)]
pub(crate) enum Gpu {
    /// One line a GPU; with --json all that the agent knows, profiles included
    #[command(after_help = "\
A saved list is a host that can be planned on elsewhere:
  gpushctl gpu list --json > host.json
  gpushctl mig plan --offline host.json --layout 3g.40gb,2g.20gb")]
    List(Which),
    /// All about one GPU or several
    #[command(after_help = "\
Examples:
  gpushctl gpu show 0
  gpushctl gpu show GPU-5e8c07a4 '*A30*'")]
    Show {
        /// GPUs, as for --gpu; all when none is named
        #[arg(value_name = "GPU", value_delimiter = ',')]
        gpus: Vec<String>,
        /// The same, as other commands name them
        #[arg(long = "gpu", short = 'g', value_name = "GPU", value_delimiter = ',', hide = true)]
        named: Vec<String>,
    },
    /// Keep new work off GPUs; what runs on them goes on
    #[command(after_help = "\
A cordoned GPU is not reshaped by `mig apply` without --gpu, nor by gpushd
itself; by name it is.

Examples:
  gpushctl gpu cordon 3 --reason 'fan replacement'")]
    Cordon {
        #[command(flatten)]
        which: Named,
        #[command(flatten)]
        why: Why,
    },
    /// Keep new work off GPUs, and wait until nothing uses them any more
    #[command(after_help = "\
Waiting ends with 8 when --wait is over, with 130 on Ctrl-C; the GPUs stay
cordoned either way.

Examples:
  gpushctl gpu drain 3 --reason 'new fan' --wait 3600 && echo idle")]
    Drain {
        #[command(flatten)]
        which: Named,
        #[command(flatten)]
        why: Why,
        /// Wait no longer than this; without it for as long as it takes
        #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
        wait: Option<f64>,
        /// Don't say who is waited for
        #[arg(long, short)]
        quiet: bool,
    },
    /// Let new work onto GPUs again, whoever or whatever had cordoned them
    Uncordon {
        #[command(flatten)]
        which: Named,
        #[command(flatten)]
        why: Why,
    },
}

/// GPUs that something is done to, which are named.
#[derive(Debug, Args)]
pub(crate) struct Named {
    /// GPUs, as for --gpu
    #[arg(value_name = "GPU", value_delimiter = ',', required_unless_present = "named")]
    pub(crate) gpus: Vec<String>,
    /// The same, as other commands name them
    #[arg(long = "gpu", short = 'g', value_name = "GPU", value_delimiter = ',', hide = true)]
    pub(crate) named: Vec<String>,
}

/// `--reason`.
#[derive(Debug, Args)]
pub(crate) struct Why {
    /// Why, for whoever comes across it
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Maintenance {
    /// Close every handle of the driver, until it is left: for resets, another driver, the board
    #[command(after_help = "\
Refused while an operation changes a GPU. It lasts over restarts of gpushd and
of the host; until it is left, what is shown is what was seen last, and nothing
is changed.

Examples:
  gpushctl maintenance enter --reason 'driver 570'
  apt-get install --yes nvidia-driver-570
  nvidia-smi --gpu-reset -i 3
  gpushctl maintenance leave")]
    Enter(Why),
    /// Give the GPUs back to the agent
    Leave(Why),
}

#[derive(Debug, Subcommand)]
pub(crate) enum Mig {
    /// What instances a GPU can hold, and where
    #[command(after_help = "\
Examples:
  gpushctl mig profiles --gpu 0
  gpushctl mig profiles --offline dgx-b200")]
    Profiles {
        #[command(flatten)]
        which: Which,
        /// Ask no agent: those of a preset, of a file of `gpu list --json`, or - for stdin
        #[arg(long, value_name = "PRESET|FILE")]
        offline: Option<String>,
    },
    /// MIG devices with the names that programs take
    #[command(after_help = "\
A program runs on a MIG device by its UUID:
  CUDA_VISIBLE_DEVICES=MIG-… program")]
    Show(Which),
    /// Show what would be done to reach a layout
    #[command(after_help = with_layouts!(
        "\x20 gpushctl mig plan                            as the config says
  gpushctl mig plan --gpu 0 --layout '3g.40gb,2g.20gb,1g.10gb*2'
  gpushctl mig plan --offline dgx-h100 --gpu 0 --layout '1g.10gb*7'"
    ))]
    Plan {
        #[command(flatten)]
        wanted: Wanted,
        #[command(flatten)]
        offline: Offline,
    },
    /// Reach a layout: nothing in use is touched, and nothing at all unless every GPU's plan stands
    #[command(after_help = with_layouts!(
        "\x20 gpushctl mig apply                           as the config says
  gpushctl mig apply --gpu 0-3 training        a layout of the config
  gpushctl mig apply --wait --reason 'job 17'  as soon as it can be
  gpushctl mig apply -f c.yaml -c all-1g.10gb  a mig-parted file's label
  gpushctl mig apply --gpu 0 --layout '3g.40gb,2g.20gb,1g.10gb*2'
  gpushctl mig apply --gpu 0 -l 7g.80gb --reason 'big run' --expires 2h
  gpushctl mig apply --gpu 0                   the rule's own again

A layout other than the rule's own makes an override: it is what is wanted of
the GPU, also after a reboot, until it expires, is cleared (`gpushctl config
overrides clear 0`) or the GPU is named without a layout. GPUs that are not
named keep theirs."
    ))]
    Apply {
        #[command(flatten)]
        wanted: Wanted,
        /// Only show the plan
        #[arg(long)]
        dry_run: bool,
        #[command(flatten)]
        watched: Watched,
        /// Wait in line for GPUs that another operation changes, and until instances in the way are
        /// idle, instead of being refused: so many seconds at most, or for as long as it takes
        #[arg(
            long,
            value_name = "SECONDS",
            num_args = 0..=1,
            require_equals = true,
            default_missing_value = LONGEST_WAIT,
            value_parser = wait_seconds
        )]
        wait: Option<u64>,
        #[command(flatten)]
        lasting: Lasting,
    },
    /// Write the present layouts as a mig-parted file
    #[command(after_help = "\
Examples:
  gpushctl mig export -o now.yaml && gpushctl mig assert -f now.yaml
  gpushctl mig export --gpu 0-3 --label training")]
    Export {
        #[command(flatten)]
        which: Which,
        /// Label in the file
        #[arg(long, value_name = "NAME", default_value = "current")]
        label: String,
        /// File to write; stdout without it
        #[arg(long, short, value_name = "FILE")]
        output: Option<PathBuf>,
    },
    /// Print a mig-parted file as layouts and rules of gpush's config
    #[command(after_help = "\
Examples:
  gpushctl mig import config.yaml                  all labels as layouts
  gpushctl mig import config.yaml -c all-balanced  one label as rules")]
    Import {
        /// mig-parted file, or - for stdin
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Label that becomes rules, which can be appended to any config
        #[arg(long, short = 'c', value_name = "LABEL")]
        label: Option<String>,
    },
    /// Exit with 3 unless the GPUs are as a layout wants them
    #[command(after_help = with_layouts!(
        "\x20 gpushctl mig assert || gpushctl mig apply    as the config says
  gpushctl mig assert -f config.yaml -c all-balanced
  gpushctl mig assert --gpu 0 --layout 7g.80gb"
    ))]
    Assert {
        #[command(flatten)]
        wanted: Wanted,
        #[command(flatten)]
        offline: Offline,
    },
}

/// Which layout, on which GPUs.
#[derive(Debug, Args)]
pub(crate) struct Wanted {
    /// Layout of the config, by name
    #[arg(value_name = "NAME", conflicts_with_all = ["layout", "file"])]
    pub(crate) name: Option<String>,
    /// Layout as entries with commas between
    #[arg(long, short, value_name = "ENTRIES", conflicts_with = "file")]
    pub(crate) layout: Option<String>,
    /// Layouts of a mig-parted file, or - for stdin
    #[arg(long, short, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Label of the mig-parted file; not needed when it has one
    #[arg(long, short = 'c', value_name = "LABEL", requires = "file", conflicts_with_all = ["name", "layout"])]
    pub(crate) label: Option<String>,
    #[command(flatten)]
    pub(crate) which: Which,
}

/// How long a layout stands above the rule of the config, and why.
#[derive(Debug, Args)]
pub(crate) struct Lasting {
    /// Make no override: what then differs from the config is drift
    #[arg(long, conflicts_with = "expires")]
    pub(crate) once: bool,
    /// Why, for everybody who looks
    #[arg(long, value_name = "TEXT")]
    pub(crate) reason: Option<String>,
    /// When the override ends by itself: 30m, 2h, 7d, or 2026-12-01T08:00Z
    #[arg(long, value_name = "TIME", value_parser = crate::expiry::parse)]
    pub(crate) expires: Option<jiff::Timestamp>,
}

/// Planning without an agent.
#[derive(Debug, Args)]
pub(crate) struct Offline {
    /// Plan without an agent: for a preset, a file of `gpu list --json`, or - for stdin
    #[arg(long, value_name = "PRESET|FILE")]
    pub(crate) offline: Option<String>,
    /// Config for an offline plan by rule or named layout [env: GPUSH_CONFIG]
    #[arg(long, value_name = "FILE", requires = "offline")]
    pub(crate) config: Option<PathBuf>,
}

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
    /// Only these: operation, gpu, config, driver, xid, change
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
    /// Only about this: an operation, or a GPU's UUID
    #[arg(long, value_name = "OBJECT")]
    pub(crate) object: Option<String>,
    /// The last so many, up to 1000 [default: 50, or all with --since]
    #[arg(long, short, value_name = "NUMBER", value_parser = some_records)]
    pub(crate) number: Option<usize>,
}

/// Records of the audit trail that are shown when nothing is said.
pub(crate) const AUDIT_USUALLY: usize = 50;

/// Seconds that stand for no end of waiting: the most that the agent takes.
const LONGEST_WAIT: &str = "2592000";

/// A point in time, as it is typed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Since {
    /// Then.
    At(Timestamp),
    /// So many seconds ago.
    Ago(i64),
}

impl Since {
    /// The time, told at `now`.
    pub(crate) fn before(self, now: Timestamp) -> Timestamp {
        match self {
            Self::At(then) => then,
            Self::Ago(seconds) => now.checked_sub(jiff::SignedDuration::from_secs(seconds)).unwrap_or(Timestamp::MIN),
        }
    }
}

fn since(text: &str) -> Result<Since, String> {
    if let Ok(then) = text.parse::<Timestamp>() {
        return Ok(Since::At(then));
    }
    if let Ok(local) = text.parse::<jiff::civil::DateTime>() {
        let zoned = local.to_zoned(jiff::tz::TimeZone::system()).map_err(|error| error.to_string())?;
        return Ok(Since::At(zoned.timestamp()));
    }
    let ago = text.char_indices().next_back().and_then(|(last, unit)| {
        let seconds = match unit {
            's' => 1,
            'm' => 60,
            'h' => 3600,
            'd' => 86_400,
            _ => return None,
        };
        Some(Since::Ago(i64::from(text[..last].parse::<u32>().ok()?) * seconds))
    });
    ago.ok_or_else(|| "a time such as 2026-01-31T08:00 or a span such as 30m, 12h, 7d is meant".to_owned())
}

fn kind(text: &str) -> Result<EventKind, String> {
    let named = EventKind::ALL.into_iter().find(|kind| kind.name() == text);
    named.ok_or_else(|| {
        let names: Vec<&str> = EventKind::ALL.iter().map(|kind| kind.name()).collect();
        format!("one of {} is meant", names.join(", "))
    })
}

fn some_number(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if number > 0 => Ok(number),
        Ok(_) | Err(_) => Err("a number above 0 is meant".to_owned()),
    }
}

fn some_records(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number) if (1..=1000).contains(&number) => Ok(number),
        Ok(_) | Err(_) => Err("a number from 1 to 1000 is meant; --since shows all since then".to_owned()),
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Config {
    /// Read a config file as the agent would, and say what is wrong with it
    #[command(after_help = "\
Examples:
  gpushctl config check /etc/gpush/config.toml
  gpushctl config check new.toml --offline dgx-a100   do layouts fit?
  gpushctl config check new.toml --offline host.json   or on a saved host?")]
    Check {
        /// File, or - for stdin [env: GPUSH_CONFIG] [default: /etc/gpush/config.toml]
        #[arg(value_name = "FILE")]
        file: Option<PathBuf>,
        /// Also match rules and plan layouts on a preset or a file of `gpu list --json`
        #[arg(long, value_name = "PRESET|FILE")]
        offline: Option<String>,
    },
    /// The config in force, with the GPUs that each rule claims
    Show {
        /// All of it as TOML, defaults filled in
        #[arg(long)]
        effective: bool,
    },
    /// Read the file again, as `systemctl reload gpushd` does, and say what changed
    #[command(after_help = "\
All of the file is taken or nothing. One that changes a rule on which an
override stands is refused. GPUs are not reshaped: `gpushctl mig apply` does
that.")]
    Reload {
        /// End overrides whose rule the file changes
        #[arg(long)]
        clear_overrides: bool,
    },
    /// How the file, the config in force and the GPUs differ; exit with 3 when they do
    Diff,
    /// Layouts that were asked for in place of the config's
    #[command(after_help = "\
Examples:
  gpushctl config overrides
  gpushctl config overrides clear 0    the rule's layout is wanted again")]
    Overrides {
        #[command(subcommand)]
        command: Option<Overrides>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Overrides {
    /// Those that stand
    List,
    /// End the override of a GPU; what stands on it is left as it is
    Clear {
        /// Index, UUID or its beginning, or PCI address
        gpu: String,
    },
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

    #[test]
    fn a_time_is_typed_as_one_or_as_a_span() {
        let now: Timestamp = "2026-01-31T12:00:00Z".parse().unwrap();
        let at = |text: &str| since(text).map(|since| since.before(now).to_string());
        assert_eq!(at("30m").as_deref(), Ok("2026-01-31T11:30:00Z"));
        assert_eq!(at("7d").as_deref(), Ok("2026-01-24T12:00:00Z"));
        assert_eq!(at("2026-01-30T00:00:01Z").as_deref(), Ok("2026-01-30T00:00:01Z"));
        assert!(since("2026-01-30").is_ok() && since("2026-01-30T08:00").is_ok());
        for wrong in ["", "d", "7", "-7d", "7w", "ü", "yesterday"] {
            assert!(since(wrong).is_err(), "{wrong}");
        }
    }
}
