//! The command line: what can be typed, and how it is explained.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

/// Columns, GPUs and files are the same words everywhere; what differs is told here once.
const EXIT_CODES: &str = "\
Exit status:
  0 done   1 other   2 usage   3 differs or drift   4 blocked or busy   5 denied
  6 agent not reachable   7 unsupported   8 timed out   130 interrupted

Environment:
  GPUSH_SOCKET  socket of the agent, as --socket      NO_COLOR  no colours
  GPUSH_CONFIG  config file for `config check` and offline plans";

/// What a layout is, before a command's own examples.
macro_rules! with_layouts {
    ($examples:literal) => {
        concat!(
            "\
Without a layout, each GPU shall be as its rule in the config says.
An entry is [Nc.]PROFILE[@START][*COUNT]:
  3g.40gb     one instance         1g.10gb*2    two of them
  1g.10gb@4   at memory slice 4    1c.3g.40gb   one compute slice of it
The layout `none` takes all idle instances away.

In a plan: + is made, - is destroyed, = is kept, ~ is kept with other compute instances.

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
    /// Socket of the agent [env: GPUSH_SOCKET] [default: /run/gpush/gpushd.sock]
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

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(s) if s.is_finite() && (0.0..=86_400.0).contains(&s) => Ok(s),
        Ok(_) | Err(_) => Err("seconds from 0 to 86400 are meant".to_owned()),
    }
}

/// A time in which an answer can come.
fn some_seconds(text: &str) -> Result<f64, String> {
    match seconds(text) {
        Ok(s) if s > 0.0 => Ok(s),
        Ok(_) | Err(_) => Err("seconds above 0, up to 86400, are meant".to_owned()),
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Draw every GPU as its slices: what is free, what is used, by whom
    #[command(after_help = "\
Marks: ● in use   ○ idle   ! without a compute instance
Memory: in use/total, of the whole GPU in its heading and of each instance. What
the driver reserves for itself counts as in use, so an idle GPU shows some.
The numbers below a drawing are placements, as in the layout entry 2g.20gb@4.

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
While GPUs are held, gpushd neither reshapes them nor hands them out: nobody knows what was promised
about them. See first that nobody relies on them as they are: `gpushctl status` shows who uses what.
Afterwards they stay as they are, and what differs from the config shows as drift.")]
    Recover(Why),
    /// Plan, apply and check MIG layouts
    #[command(subcommand)]
    Mig(Mig),
    /// Follow what the agent is doing, and what it did
    #[command(subcommand)]
    Operation(Operation),
    /// Check a config file, or show the one in force
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
A cordoned GPU is not reshaped by `mig apply` without --gpu, nor by gpushd itself; by name it is.

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
Waiting ends with 8 when --wait is over, with 130 on Ctrl-C; the GPUs stay cordoned either way.

Examples:
  gpushctl gpu drain 3 --reason 'fan replacement' --wait 3600 && echo idle")]
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
Refused while an operation changes a GPU. It lasts over restarts of gpushd and of the host; until it
is left, what is shown is what was seen last, and nothing is changed.

Examples:
  gpushctl maintenance enter --reason 'driver 570' && apt-get install --yes nvidia-driver-570
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
        "\x20 gpushctl mig plan                                as the config says
  gpushctl mig plan --gpu 0 --layout 3g.40gb,2g.20gb,1g.10gb*2
  gpushctl mig plan --offline dgx-h100 --gpu 0 --layout 1g.10gb*7"
    ))]
    Plan {
        #[command(flatten)]
        wanted: Wanted,
        #[command(flatten)]
        offline: Offline,
    },
    /// Reach a layout: nothing in use is touched, and nothing at all unless every GPU's plan stands
    #[command(after_help = with_layouts!(
        "\x20 gpushctl mig apply                               as the config says
  gpushctl mig apply --gpu 0-3 training            a layout of the config
  gpushctl mig apply -f config.yaml -c all-1g.10gb a label of a mig-parted file
  gpushctl mig apply --gpu 0 --layout 3g.40gb,2g.20gb,1g.10gb*2"
    ))]
    Apply {
        #[command(flatten)]
        wanted: Wanted,
        /// Only show the plan
        #[arg(long)]
        dry_run: bool,
        /// No progress while it runs
        #[arg(long, short)]
        quiet: bool,
        /// Stop watching after so long; the agent goes on. 0 does not watch at all
        #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
        wait: Option<f64>,
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
  gpushctl mig import config.yaml -c all-balanced  one label, with its rules")]
    Import {
        /// mig-parted file, or - for stdin
        #[arg(value_name = "FILE")]
        file: PathBuf,
        /// Label that becomes rules
        #[arg(long, short = 'c', value_name = "LABEL")]
        label: Option<String>,
    },
    /// Exit with 3 unless the GPUs are as a layout wants them
    #[command(after_help = with_layouts!(
        "\x20 gpushctl mig assert || gpushctl mig apply        as the config says
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
    /// Operations of this agent's life
    List,
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
        #[arg(long, value_name = "SECONDS", value_parser = seconds, allow_negative_numbers = true)]
        wait: Option<f64>,
    },
}

#[derive(Debug, Subcommand)]
pub(crate) enum Config {
    /// Read a config file as the agent would, and say what is wrong with it
    #[command(after_help = "\
Examples:
  gpushctl config check /etc/gpush/config.toml
  gpushctl config check new.toml --offline dgx-a100    do the layouts fit there?
  gpushctl config check new.toml --offline host.json   or on this saved host?")]
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_answer_comes_in_no_time() {
        assert!(some_seconds("0").is_err() && some_seconds("-1").is_err() && some_seconds("x").is_err());
        assert_eq!((some_seconds("0.5"), seconds("0")), (Ok(0.5), Ok(0.0)));
        assert!(Cli::try_parse_from(["gpushctl", "--timeout", "0", "status"]).is_err());
    }
}
