//! `gpush-sim`: creates simulated GPU hosts, runs programs on them, and changes them.
//!
//! If the program is called under the name `nvidia-smi`, or under the name of an MPS program, it
//! acts as this simulated program.

#![deny(clippy::print_stdout, clippy::print_stderr)] // `mps_sim::output` tells why

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context;
use clap::{Args, CommandFactory, Parser, Subcommand};
use mps_sim::{errln, out, outln};
use silicon::{Description, Host};

mod directory;
mod exec;
mod fault;
mod gpus;
mod load;
mod mps;
mod nvidia_smi;
mod pids;
mod process;
mod run;
mod show;

#[derive(Parser)]
#[command(
    name = "gpush-sim",
    version,
    about = "Makes simulated GPU hosts and runs programs on them",
    after_help = "Examples:\n  gpush-sim run dgx-a100 -- nvitop -1\n  gpush-sim up mixed /tmp/host && eval \"$(gpush-sim env /tmp/host)\"\n  gpush-sim fault /tmp/host add nvmlGpuInstanceDestroy --gpu 0 --rc IN_USE --times 1"
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Args)]
struct Source {
    /// Preset (`gpush-sim presets` lists them), or a TOML file that describes the host
    #[arg(value_name = "PRESET|FILE")]
    source: String,
    /// Let driver calls take as long as on hardware
    #[arg(long)]
    latencies: bool,
    /// Write a line to DIR/trace for each call that changes something
    #[arg(long)]
    trace: bool,
}

#[derive(Subcommand)]
enum Command {
    /// Create a simulated host, run a program on it, and remove the host when the program ends
    Run {
        #[command(flatten)]
        source: Source,
        /// Program and its arguments
        #[arg(last = true, required = true, value_name = "CMD")]
        command: Vec<OsString>,
    },
    /// Create a simulated host in a directory; the host stays until `gpush-sim down`
    Up {
        #[command(flatten)]
        source: Source,
        /// Directory of the host
        dir: PathBuf,
    },
    /// Run a program on a simulated host; for root, also with the simulated /proc/driver
    Exec {
        /// Directory of the host
        dir: PathBuf,
        /// Program and its arguments
        #[arg(last = true, required = true, value_name = "CMD")]
        command: Vec<OsString>,
    },
    /// Print the environment of a simulated host, for `eval` in a shell
    Env {
        /// Directory of the host
        dir: PathBuf,
    },
    /// End a simulated host, and remove its directory
    Down {
        /// Directory of the host
        dir: PathBuf,
        /// Proceed although programs have the driver open
        #[arg(long)]
        force: bool,
    },
    /// Add, list and clear fault rules
    Fault {
        /// Directory of the host
        dir: PathBuf,
        #[command(subcommand)]
        action: fault::Action,
    },
    /// Add, list and clear faults of the simulated MPS control daemon and server
    Mps {
        /// Directory of the host
        dir: PathBuf,
        #[command(subcommand)]
        action: mps::Action,
    },
    /// Act as a CUDA program: a client of the MPS daemon that the environment names
    MpsClient(mps::Client),
    /// Add, remove and list processes on simulated GPUs
    Process {
        /// Directory of the host
        dir: PathBuf,
        #[command(subcommand)]
        action: process::Action,
    },
    /// Report an Xid error
    Xid {
        /// Directory of the host
        dir: PathBuf,
        /// Xid number, such as 79
        xid: u64,
        /// Index of the GPU
        #[arg(long)]
        gpu: u32,
        /// Id of the affected GPU instance [default: none]
        #[arg(long)]
        gi: Option<u32>,
        /// Id of the affected compute instance [default: none]
        #[arg(long, requires = "gi")]
        ci: Option<u32>,
    },
    /// Report a memory error: the next reset replaces the row
    Remap {
        /// Directory of the host
        dir: PathBuf,
        /// Index of the GPU
        #[arg(long)]
        gpu: u32,
        /// Report an uncorrectable error instead of a correctable one
        #[arg(long)]
        uncorrectable: bool,
        /// Report that no spare row is left, so that the row is not replaced
        #[arg(long)]
        fail: bool,
    },
    /// Change the clock of a simulated host
    Clock {
        /// Directory of the host
        dir: PathBuf,
        #[command(subcommand)]
        action: load::ClockAction,
    },
    /// Change the power limit and the temperature of a board
    Board {
        /// Directory of the host
        dir: PathBuf,
        #[command(flatten)]
        wanted: load::BoardConditions,
    },
    /// Reboot a simulated host
    Reboot {
        /// Directory of the host
        dir: PathBuf,
    },
    /// Reset a GPU
    Reset {
        /// Directory of the host
        dir: PathBuf,
        /// Index of the GPU
        #[arg(long)]
        gpu: u32,
    },
    /// Draw a simulated host
    Show {
        /// Directory of the host
        dir: PathBuf,
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
    /// List the presets and the GPU models
    Presets,
    /// Write the man pages gpush-sim(1) and those of its commands
    #[command(hide = true)]
    Man {
        /// Directory for the pages
        dir: PathBuf,
    },
    /// Sleep until the host is removed; `process add --spawn` starts this
    #[command(hide = true)]
    Sleeper {
        /// Directory of the host
        dir: PathBuf,
    },
}

impl Source {
    /// Returns the description of the requested host. If `source` looks like a path, reads the
    /// description from this file. Otherwise, `source` is the name of a preset.
    fn description(&self) -> anyhow::Result<Description> {
        let path = Path::new(&self.source);
        let is_file = path.is_file() || self.source.contains('/') || self.source.ends_with(".toml");
        let mut description = if is_file {
            let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", self.source))?;
            let text = String::from_utf8(bytes).map_err(|error| {
                anyhow::anyhow!("{}: byte {} is not UTF-8", self.source, error.utf8_error().valid_up_to())
            })?;
            Description::parse(&text).map_err(|error| anyhow::anyhow!("{}: {error}", self.source))?
        } else {
            Description::preset(&self.source)
                .map_err(|error| anyhow::anyhow!("{error} (or name a TOML file that describes the host)"))?
        };
        description.latencies |= self.latencies;
        Ok(description)
    }
}

fn act(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        Command::Run { source, command } => run::run(&source.description()?, source.trace, &command),
        Command::Up { source, dir } => {
            directory::lay(&dir, &source.description()?, source.trace)?;
            let dir = dir.display();
            outln!("made a simulated host of {} in {dir}", source.source);
            outln!("use it:  eval \"$(gpush-sim env {dir})\"    end it:  gpush-sim down {dir}");
            Ok(ExitCode::SUCCESS)
        }
        Command::Exec { dir, command } => match exec::exec(&Host::open(&dir)?, &command)? {},
        Command::Env { dir } => {
            let host = Host::open(&dir)?;
            out!("{}", directory::environment_script(host.dir()));
            Ok(ExitCode::SUCCESS)
        }
        Command::Down { dir, force } => {
            directory::remove(&dir, force)?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Fault { dir, action } => fault::act(&Host::open(&dir)?, action),
        Command::Mps { dir, action } => mps::act(&Host::open(&dir)?, action),
        Command::MpsClient(client) => Ok(mps::client(&client)),
        Command::Process { dir, action } => process::act(&Host::open(&dir)?, action),
        Command::Xid { dir, xid, gpu, gi, ci } => {
            let host = Host::open(&dir)?;
            gpus::known_gpu(&host, gpu)?;
            host.update(|machine| machine.xid(gpu, xid, gi, ci)).map_err(|rc| {
                anyhow::anyhow!("GPU {gpu} has no such instance: {rc}; see `gpush-sim show {}`", dir.display())
            })?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Remap { dir, gpu, uncorrectable, fail } => {
            let host = Host::open(&dir)?;
            gpus::known_gpu(&host, gpu)?;
            host.update(|machine| machine.remap_row(gpu, uncorrectable, !fail))
                .map_err(|rc| anyhow::anyhow!("GPU {gpu} has no row to remap: {rc}"))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Clock { dir, action } => load::clock(&Host::open(&dir)?, &action),
        Command::Board { dir, wanted } => load::board(&Host::open(&dir)?, &wanted),
        Command::Reboot { dir } => {
            Host::open(&dir)?.reboot()?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Reset { dir, gpu } => {
            let host = Host::open(&dir)?;
            gpus::known_gpu(&host, gpu)?;
            match nvidia_smi::reset(&host, gpu)? {
                Ok(()) => Ok(ExitCode::SUCCESS),
                Err(why) => anyhow::bail!("GPU {gpu} was not reset: {why}"),
            }
        }
        Command::Show { dir, json } => {
            let host = Host::open(&dir)?;
            out!("{}", if json { show::json(&host)? } else { show::drawn(&host)? });
            Ok(ExitCode::SUCCESS)
        }
        Command::Presets => {
            out!("{}", show::presets());
            Ok(ExitCode::SUCCESS)
        }
        Command::Man { dir } => {
            gpush_man::write_pages(Cli::command(), "gpush-sim", &[gpush_man::DOCUMENTS], &dir)
                .with_context(|| format!("cannot write man pages into {}", dir.display()))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Sleeper { dir } => {
            process::sleep_beside(&dir);
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn main() -> ExitCode {
    let called = std::env::args_os().next().map(PathBuf::from).unwrap_or_default();
    if called.file_name().is_some_and(|name| name == "nvidia-smi") {
        return nvidia_smi::main(&called);
    }
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    // Check first whether this process is a sleeper, because a sleeper may have the file name of an
    // MPS program.
    let sleeps = arguments.first().is_some_and(|first| first == process::SLEEPER);
    if !sleeps && let Some(ended) = mps_sim::main(&called, &arguments) {
        return ended;
    }
    match act(Cli::parse()) {
        Ok(code) => code,
        Err(error) => {
            errln!("gpush-sim: {error:#}");
            ExitCode::FAILURE
        }
    }
}
