//! `gpushctl slurm`.

use std::{ffi::OsString, path::PathBuf, time::Duration};

use clap::{Args, Parser, Subcommand};

use super::{Cli, Command, Global, Gpus, values::duration};

#[derive(Debug, Subcommand)]
pub(crate) enum Slurm {
    /// Begin a job on this node; for Slurm's Prolog
    #[command(
        hide = true,
        after_help = "\
Requests the lease of the job. Prints nothing if all is well. Exits with 1 if
gpushd does not answer, or if a GPU of the job is not usable; Slurm then drains
the node. If the request is refused, prints the reason, sends it to the system
log, and exits with 0; TaskProlog then fails the tasks.

The script for Prolog, one line; the path is absolute, as PATH is not set:
  #!/usr/bin/gpushctl slurm prolog"
    )]
    Prolog {
        #[command(flatten)]
        files: HookFiles,
        #[command(flatten)]
        limits: HookLimits,
        /// Slurm's gres.conf [default: in the directory of SLURM_CONF, else /etc/slurm/gres.conf]
        #[arg(long, value_name = "FILE")]
        gres_conf: Option<PathBuf>,
    },
    /// End a job on this node; for Slurm's Epilog
    #[command(
        hide = true,
        after_help = "\
Ends the lease of the job, and the processes that the job left on its GPUs.
Prints nothing if all is well. Exits with 1 if a process of the job does not
end, or if gpushd does not answer; Slurm then drains the node.

The script for Epilog, one line:
  #!/usr/bin/gpushctl slurm epilog"
    )]
    Epilog {
        #[command(flatten)]
        files: HookFiles,
        #[command(flatten)]
        limits: HookLimits,
    },
    /// Print the environment of a task; for Slurm's TaskProlog
    #[command(
        hide = true,
        after_help = "\
Prints lines such as `export NAME=value`. Does not need gpushd. If the request
of the job was refused, prints the reason and exits with 1; Slurm then fails
the task.

The script for TaskProlog, one line:
  #!/usr/bin/gpushctl slurm task-prolog"
    )]
    TaskProlog {
        #[command(flatten)]
        files: HookFiles,
    },
    /// End leases of jobs that Slurm no longer knows
    #[command(after_help = "\
Ends leases that remain because Epilog did not run for a job. Run this command
after slurmd or gpushd starts, and regularly from cron. It asks squeue which
jobs are on this node. If squeue fails, no lease ends.

Examples:
  gpushctl slurm reconcile
  gpushctl slurm reconcile --squeue /opt/slurm/bin/squeue")]
    Reconcile {
        #[command(flatten)]
        files: HookFiles,
        #[command(flatten)]
        limits: HookLimits,
        /// Path of squeue
        #[arg(long, value_name = "FILE", default_value = "/usr/bin/squeue")]
        squeue: PathBuf,
        /// Only jobs of this cluster [env: SLURM_CLUSTER_NAME] [default: ClusterName of slurm.conf]
        #[arg(long, value_name = "NAME")]
        cluster: Option<String>,
    },
    /// Print the lines of gres.conf for this node
    #[command(after_help = "\
Describes the GPUs and MIG devices as they are now. Whole GPUs come first, as
Slurm numbers them. The last lines are for slurm.conf.

Examples:
  gpushctl slurm gres-conf
  gpushctl slurm gres-conf --node n1 0-3 > /etc/slurm/gres.conf")]
    GresConf {
        #[command(flatten)]
        which: Gpus,
        /// NodeName in slurm.conf [default: the name of this host without its domain]
        #[arg(long, value_name = "NAME")]
        node: Option<String>,
    },
    /// Show what a job used on this node: time, memory, energy
    #[command(after_help = "\
Lists the lease of each run of the job, also after its end. Users see their own
jobs, administrators all.

Examples:
  gpushctl slurm usage 812
  gpushctl slurm usage ci/812 -o csv")]
    Usage {
        /// Id of the job, such as 812, or with its cluster, such as ci/812
        #[arg(value_name = "JOB")]
        job: String,
    },
    /// Check the request of a job, without gpushd; for the SPANK plugin
    #[command(
        hide = true,
        after_help = "\
Prints nothing if the request is valid. Whether it can be granted depends on
the node of the job.

Examples:
  gpushctl slurm check-spec mps=25,memory=8G"
    )]
    CheckSpec {
        /// Request, as in --gpush=SPEC
        #[arg(value_name = "SPEC", allow_hyphen_values = true)]
        spec: String,
    },
}

/// Files of the hooks.
#[derive(Debug, Clone, Args)]
pub(crate) struct HookFiles {
    /// Config of gpushd [default: /etc/gpush/config.toml]
    #[arg(long, value_name = "FILE")]
    pub(crate) config: Option<PathBuf>,
    /// Directory for the job files [default: /run/gpush-slurm]
    #[arg(long, value_name = "DIR")]
    pub(crate) dir: Option<PathBuf>,
}

/// Time limit of the hooks.
#[derive(Debug, Clone, Args)]
pub(crate) struct HookLimits {
    /// Give up after DURATION [default: slurm.deadline of the config]
    #[arg(long, value_name = "DURATION", value_parser = duration, allow_negative_numbers = true)]
    pub(crate) deadline: Option<Duration>,
}

/// The command line of `gpushctl slurm`, without the other commands. Slurm runs several hooks for
/// each job, and it takes longer to define all commands than to do the work of a hook.
#[derive(Debug, Parser)]
#[command(name = "slurm")]
struct SlurmCli {
    #[command(flatten)]
    global: Global,
    #[command(subcommand)]
    command: Slurm,
}

/// Returns the command line of a script whose first line is `#!/usr/bin/gpushctl slurm prolog`. For
/// such a script, the kernel passes `slurm prolog` as one word, followed by the path of the script.
/// So a hook needs no shell, whose start would take about as long as the hook. Returns all other
/// command lines unchanged.
pub(crate) fn of_script(mut words: Vec<OsString>) -> Vec<OsString> {
    let line = words.get(1).and_then(|word| word.to_str()).unwrap_or_default();
    let line: Vec<OsString> = line.split_whitespace().map(OsString::from).collect();
    if line.len() > 1 && line[0] == "slurm" && words.len() > 2 {
        words.splice(1..3, line);
    }
    words
}

impl Cli {
    /// Parses the command line of one of Slurm's hooks. Returns `None` for all other commands, for
    /// an invalid command line, and for `--help`. In these cases, the parser of all commands
    /// handles the command line.
    pub(crate) fn of_hook(words: &[OsString]) -> Option<Self> {
        let hook = words.get(1..).filter(|words| words[..words.len().min(1)] == ["slurm"])?;
        let SlurmCli { global, command } = SlurmCli::try_parse_from(hook).ok()?;
        Some(Self { global, command: Command::Slurm(command) })
    }
}

impl Slurm {
    /// Returns whether the command prints a list.
    pub(crate) fn prints_list(&self) -> bool {
        matches!(self, Self::Usage { .. })
    }
}

#[cfg(test)]
impl Slurm {
    /// Returns whether only administrators may run the command.
    pub(super) fn is_for_administrators(&self) -> bool {
        match self {
            // Slurm runs Prolog and Epilog as root. Only root runs `reconcile`.
            Self::Prolog { .. } | Self::Epilog { .. } | Self::Reconcile { .. } => true,
            Self::TaskProlog { .. } | Self::GresConf { .. } | Self::CheckSpec { .. } | Self::Usage { .. } => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn script_stands_for_the_command_in_its_first_line() {
        let words = |words: &[&str]| words.iter().map(OsString::from).collect::<Vec<_>>();
        let script = "/usr/share/gpush/slurm/prolog";
        let line = |line: &str| of_script(words(&["/usr/bin/gpushctl", line, script]));
        assert_eq!(line("slurm prolog"), words(&["/usr/bin/gpushctl", "slurm", "prolog"]));
        assert_eq!(
            line("slurm prolog --deadline  5s"),
            words(&["/usr/bin/gpushctl", "slurm", "prolog", "--deadline", "5s"])
        );
        assert_eq!(line("slurm\tprolog\r"), words(&["/usr/bin/gpushctl", "slurm", "prolog"]));
        for other in [&["gpushctl", "slurm", "prolog"][..], &["gpushctl", "slurm prolog"], &["gpushctl", "status", "0"]]
        {
            assert_eq!(of_script(words(other)), words(other));
        }
    }

    #[test]
    fn hook_is_parsed_as_by_the_parser_of_all_commands() {
        let words = |line: &str| line.split(' ').map(OsString::from).collect::<Vec<_>>();
        for line in [
            "gpushctl slurm prolog",
            "gpushctl slurm epilog --socket /run/x",
            "gpushctl slurm gres-conf -o json",
            "gpushctl slurm check-spec mps=25",
        ] {
            let hook = Cli::of_hook(&words(line)).expect(line);
            let all = Cli::try_parse_from(words(line)).expect(line);
            assert_eq!(format!("{hook:?}"), format!("{all:?}"), "{line}");
        }
        for line in
            ["gpushctl", "gpushctl status", "gpushctl slurm", "gpushctl slurm prolog --nonsense", "gpushctl slurm -h"]
        {
            assert!(Cli::of_hook(&words(line)).is_none(), "{line}");
        }
    }
}
