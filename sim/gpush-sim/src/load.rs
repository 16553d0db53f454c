//! The load of simulated processes, the clock of a host and the conditions of a board.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use mps_sim::outln;
use silicon::machine::{Conditions, Load};
use silicon::{Host, Return};

use crate::gpus::known_gpu;

/// The load of a process, in percent of its place: of its GPU instance, or of the GPU without one.
#[derive(Args)]
pub(crate) struct LoadArgs {
    /// Active streaming multiprocessors, in percent [default: the process keeps its usual load]
    #[arg(long, value_parser = ppm, value_name = "PERCENT")]
    sm: Option<u32>,
    /// Time in which a kernel runs, in percent [default: as --sm]
    #[arg(long, value_parser = ppm, value_name = "PERCENT", requires = "sm")]
    busy: Option<u32>,
    /// Active tensor cores, in percent [default: 0]
    #[arg(long, value_parser = ppm, value_name = "PERCENT", requires = "sm")]
    tensor: Option<u32>,
    /// Memory bandwidth, in percent [default: 0]
    #[arg(long, value_parser = ppm, value_name = "PERCENT", requires = "sm")]
    dram: Option<u32>,
    /// Power above that of an idle context, in W [default: derived from the load]
    #[arg(long, value_name = "WATTS", requires = "sm")]
    power: Option<u32>,
}

/// Parses a percentage from 0 to 100 and returns it in parts per million.
fn ppm(text: &str) -> Result<u32, String> {
    let percent: f64 = text.parse().map_err(|_| format!("`{text}` is not a percentage"))?;
    if (0.0..=100.0).contains(&percent) {
        // The range was checked, so the result is at most a million.
        Ok((percent * 10_000.0).round() as u32)
    } else {
        Err(format!("`{text}` is not a percentage from 0 to 100"))
    }
}

impl LoadArgs {
    /// Returns the load, or `None` if the command does not set one.
    pub(crate) fn load(&self) -> Option<Load> {
        self.sm.map(|sm_ppm| Load {
            busy_ppm: self.busy.unwrap_or(sm_ppm),
            sm_ppm,
            tensor_ppm: self.tensor.unwrap_or(0),
            dram_ppm: self.dram.unwrap_or(0),
            power_mw: self.power.map(|watts| watts.saturating_mul(1000)),
        })
    }
}

#[derive(Args)]
pub(crate) struct Set {
    /// Process id
    pid: u32,
    /// Only on this GPU, by index [default: on all GPUs]
    #[arg(long)]
    gpu: Option<u32>,
    #[command(flatten)]
    load: LoadArgs,
    /// Return to the usual load
    #[arg(long, conflicts_with = "sm")]
    usual: bool,
    /// Memory in use, in MiB [default: unchanged]
    #[arg(long)]
    memory: Option<u64>,
}

/// Changes the load and the memory of a process in one step.
pub(crate) fn set(host: &Host, wanted: &Set) -> anyhow::Result<()> {
    if let Some(gpu) = wanted.gpu {
        known_gpu(host, gpu)?;
    }
    let load = wanted.load.load();
    if load.is_none() && !wanted.usual && wanted.memory.is_none() {
        bail!("nothing to change: give --sm, --usual or --memory");
    }
    let pid = wanted.pid;
    let changed = host.update(|machine| {
        let on = |gpu: &&silicon::machine::Gpu| {
            wanted.gpu.is_none_or(|index| index == gpu.index) && gpu.processes.iter().any(|p| p.pid.pid == pid)
        };
        let gpus: Vec<u32> = machine.gpus().iter().filter(on).map(|gpu| gpu.index).collect();
        for gpu in &gpus {
            if load.is_some() || wanted.usual {
                machine.set_load(*gpu, pid, load)?;
            }
            if let Some(memory_mib) = wanted.memory {
                machine.set_memory(*gpu, pid, memory_mib)?;
            }
        }
        Ok::<_, Return>(gpus.len())
    });
    match changed {
        Ok(0) => bail!("pid {pid} is on no GPU there; see `gpush-sim process {} list`", host.dir().display()),
        Ok(_) => Ok(()),
        Err(Return::NotFound) => bail!("pid {pid} has no context on the GPU, so it cannot have a load"),
        Err(Return::InsufficientResources) => bail!("the GPU has no {} MiB left", wanted.memory.unwrap_or(0)),
        Err(rc) => bail!("cannot change pid {pid}: {rc}"),
    }
}

#[derive(Subcommand)]
pub(crate) enum ClockAction {
    /// Advance the clock: all programs see that this time has passed
    Advance {
        /// Duration, such as 90s, 15m or 2h
        #[arg(value_parser = duration)]
        by: Duration,
    },
    /// Stop the clock: it only moves with `advance` and `set`
    Stop,
    /// Let a stopped clock run on
    Start,
    /// Set the clock; an earlier time is possible
    Set {
        /// Milliseconds since the epoch
        to_ms: u64,
    },
    /// Print the time in milliseconds since the epoch
    Show,
}

/// Parses a duration.
fn duration(text: &str) -> Result<Duration, String> {
    let span: jiff::SignedDuration = text.parse().map_err(|_| format!("`{text}` is not a duration, such as 90s"))?;
    Duration::try_from(span).map_err(|_| format!("`{text}` is negative; use `clock DIR set`"))
}

pub(crate) fn clock(host: &Host, action: &ClockAction) -> anyhow::Result<ExitCode> {
    match action {
        ClockAction::Advance { by } => host.advance(*by)?,
        ClockAction::Stop => host.set_clock(silicon::machine::Clock::stopped)?,
        ClockAction::Start => host.set_clock(silicon::machine::Clock::started)?,
        ClockAction::Set { to_ms } => host.set_clock(|clock, real| clock.set(*to_ms, real))?,
        ClockAction::Show => outln!("{}", host.now_ms(&*host.read()?)),
    }
    Ok(ExitCode::SUCCESS)
}

#[derive(Args)]
pub(crate) struct BoardConditions {
    /// Index of the GPU
    #[arg(long)]
    gpu: u32,
    /// Power limit in W [default: that of the model]
    #[arg(long, value_name = "WATTS")]
    power_limit: Option<u32>,
    /// Additional temperature in °C
    #[arg(long, value_name = "DEGREES", default_value_t = 0)]
    heat: u32,
}

pub(crate) fn board(host: &Host, wanted: &BoardConditions) -> anyhow::Result<ExitCode> {
    known_gpu(host, wanted.gpu)?;
    let power_limit_mw = wanted.power_limit.map(|watts| watts.saturating_mul(1000));
    let conditions = Conditions { power_limit_mw, heat_c: wanted.heat };
    host.update(|machine| machine.set_conditions(wanted.gpu, conditions)).map_err(|rc| match rc {
        Return::InvalidArgument => anyhow::anyhow!("the power limit must be above 0 and at most that of the model"),
        rc => anyhow::anyhow!("cannot change GPU {}: {rc}", wanted.gpu),
    })?;
    Ok(ExitCode::SUCCESS)
}

/// Sets the load of a process that was just added.
pub(crate) fn start_with(host: &Host, gpu: u32, pid: u32, load: Load) -> anyhow::Result<()> {
    host.update(|machine| machine.set_load(gpu, pid, Some(load)))
        .map_err(|rc| anyhow::anyhow!("{rc}"))
        .with_context(|| format!("cannot set the load of pid {pid}: only a process with a context can have one"))
}
