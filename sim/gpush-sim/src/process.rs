//! `gpush-sim process`: real processes on simulated GPUs.

use std::ffi::{CString, OsStr};
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::{Args, Subcommand, ValueEnum};
use mps_sim::{out, outln};
use silicon::machine::{COMPUTE_MODES, Load, Pid, Process, ProcessKind};
use silicon::{Host, Return};

use crate::gpus::known_gpu;
use crate::{load, pids};

#[derive(Subcommand)]
pub(crate) enum Action {
    /// Add a process to a GPU or MIG device
    Add(Add),
    /// Change the load or the memory of a process
    Set(load::Set),
    /// Remove a process; a process that `add --spawn` started is also ended
    Remove {
        /// Process id
        pid: u32,
        /// Remove the process only from this GPU, by index [default: from all GPUs]
        #[arg(long)]
        gpu: Option<u32>,
    },
    /// List the processes on GPUs, and the programs that have the driver open
    List {
        /// Print JSON
        #[arg(long)]
        json: bool,
    },
}

#[derive(Args)]
pub(crate) struct Add {
    /// Index of the GPU
    #[arg(long, required_unless_present = "mig")]
    gpu: Option<u32>,
    /// Id of the GPU instance [default: the whole GPU]
    #[arg(long)]
    gi: Option<u32>,
    /// Id of the compute instance in it [default: none, only the GPU instance has the process]
    #[arg(long, requires = "gi")]
    ci: Option<u32>,
    /// UUID of the MIG device, instead of --gpu
    #[arg(long, conflicts_with_all = ["gpu", "gi", "ci"])]
    mig: Option<String>,
    /// Id of a running process
    #[arg(long, required_unless_present = "spawn")]
    pid: Option<u32>,
    /// Start a process that sleeps until it is removed or the host ends, and print its id
    #[arg(long, conflicts_with = "pid")]
    spawn: bool,
    /// How the process uses the GPU; mps: as a client of an MPS server; mps-server: as that server,
    /// which the driver lists as a compute process; handle: it has the GPU open, but no driver call
    /// lists it
    #[arg(long, value_enum, default_value = "compute")]
    kind: Kind,
    /// Memory in use, in MiB
    #[arg(long, default_value_t = 512)]
    memory: u64,
    #[command(flatten)]
    load: load::LoadArgs,
}

#[derive(Clone, Copy, ValueEnum)]
enum Kind {
    Compute,
    Graphics,
    Mps,
    MpsServer,
    Handle,
}

impl Kind {
    /// Returns the process name that a spawned process must have, or `None` if it can have any
    /// name. Monitors recognise an MPS server by its process name.
    fn process_name(self) -> Option<&'static str> {
        match self {
            Kind::MpsServer => Some("nvidia-cuda-mps-server"),
            Kind::Compute | Kind::Graphics | Kind::Mps | Kind::Handle => None,
        }
    }
}

impl From<Kind> for ProcessKind {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Compute | Kind::MpsServer => Self::Compute,
            Kind::Graphics => Self::Graphics,
            Kind::Mps => Self::Mps,
            Kind::Handle => Self::Handle,
        }
    }
}

pub(crate) fn act(host: &Host, action: Action) -> anyhow::Result<ExitCode> {
    match action {
        Action::Add(wanted) => add(host, &wanted)?,
        Action::Set(wanted) => load::set(host, &wanted)?,
        Action::Remove { pid, gpu } => {
            let gone = host.update(|machine| Ok::<_, silicon::HostError>(machine.detach(pid, gpu)))?;
            if gone == 0 {
                bail!("pid {pid} is on no GPU there; see `gpush-sim process {} list`", host.dir().display());
            }
            pids::sleepers(host.dir()).into_iter().filter(|sleeper| sleeper.pid == pid).for_each(pids::end);
        }
        Action::List { json } => out!("{}", list(host, json)?),
    }
    Ok(ExitCode::SUCCESS)
}

fn add(host: &Host, wanted: &Add) -> anyhow::Result<()> {
    let shown = host.dir().display();
    let (gpu, gi, ci) = match (&wanted.mig, wanted.gpu) {
        (Some(uuid), _) => {
            let found = host.read()?.mig_device_by_uuid(uuid);
            let found =
                found.map_err(|_| anyhow::anyhow!("there is no MIG device {uuid}; see `gpush-sim show {shown}`"))?;
            (found.gpu, Some(found.gpu_instance), Some(found.id))
        }
        (None, Some(gpu)) => (gpu, wanted.gi, wanted.ci),
        (None, None) => bail!("give --gpu or --mig"),
    };
    known_gpu(host, gpu)?;
    let pid = match wanted.pid {
        Some(pid) => Pid::find(pid).with_context(|| format!("there is no living process {pid}"))?,
        None => spawn(host, wanted.kind.process_name())?,
    };
    let process =
        Process { pid, kind: wanted.kind.into(), memory_mib: wanted.memory, gpu_instance: gi, compute_instance: ci };
    if let Err(rc) = host.update(|machine| machine.attach(gpu, process)) {
        if wanted.spawn {
            pids::end(pid);
        }
        match rc {
            Return::NotFound => bail!("GPU {gpu} has no such instance; see `gpush-sim show {shown}`"),
            Return::InvalidArgument => {
                bail!("GPU {gpu} is in MIG mode, where a process needs an instance: give --gi and --ci, or --mig UUID")
            }
            Return::InsufficientResources => {
                bail!("GPU {gpu} has no {} MiB left there; give a lower --memory", wanted.memory)
            }
            Return::InUse => {
                let mode = host.read()?.gpu(gpu).map_or(0, |at| at.compute_mode);
                let mode = COMPUTE_MODES.get(mode as usize).unwrap_or(&"?");
                bail!("GPU {gpu} is in compute mode {mode}, which allows no further process; CUDA reports error 46")
            }
            rc => bail!("cannot put pid {} on GPU {gpu}: {rc}", pid.pid),
        }
    }
    // An MPS server only schedules the work of its clients.
    let usual = matches!(wanted.kind, Kind::MpsServer).then_some(Load::IDLE);
    if let Some(load) = wanted.load.load().or(usual) {
        load::start_with(host, gpu, pid.pid, load)?;
    }
    host.show_open(gpu, pid.pid)?;
    outln!("{}", pid.pid);
    Ok(())
}

/// Subcommand that runs a sleeper: a process that only sleeps.
pub(crate) const SLEEPER: &str = "sleeper";

/// Starts a sleeper with a process name. Records the sleeper, so that it ends with the host.
fn spawn(host: &Host, name: Option<&str>) -> anyhow::Result<Pid> {
    use std::os::unix::process::CommandExt;
    let own = std::env::current_exe().context("cannot find my own executable")?;
    let child = Command::new(&own)
        .arg0(name.map_or(own.as_os_str(), OsStr::new))
        .arg(SLEEPER)
        .arg(host.dir())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .process_group(0)
        .spawn()
        .context("cannot start a process")?;
    let pid = Pid::find(child.id()).context("the process that was started is gone")?;
    let noted = OpenOptions::new().create(true).append(true).open(host.dir().join("sleepers"));
    if let Err(error) = noted.and_then(|mut file| writeln!(file, "{} {}", pid.pid, pid.start)) {
        pids::end(pid);
        return Err(error).context("cannot note the process");
    }
    Ok(pid)
}

/// Sleeps until the host's directory is removed.
pub(crate) fn sleep_beside(dir: &Path) {
    // At the start of a process, the kernel sets its process name to the name of the program file.
    // So the sleeper must set its process name itself.
    let called = std::env::args_os().next().unwrap_or_default();
    let name = Path::new(&called).file_name().and_then(|name| CString::new(name.as_encoded_bytes()).ok());
    if let Some(name) = name {
        let _stays = nix::sys::prctl::set_name(&name);
    }
    while dir.join("state").exists() {
        std::thread::sleep(Duration::from_millis(500));
    }
}

fn list(host: &Host, json: bool) -> anyhow::Result<String> {
    let machine = host.read()?;
    let mut text = String::new();
    if json {
        let on = |gpu: &silicon::machine::Gpu| serde_json::json!({"gpu": gpu.index, "processes": gpu.processes});
        let all: Vec<_> = machine.gpus().iter().map(on).collect();
        let clients: Vec<u32> = machine.clients(None).map(|client| client.pid.pid).collect();
        return Ok(serde_json::to_string_pretty(&serde_json::json!({"gpus": all, "clients": clients}))?
            + "
");
    }
    for gpu in machine.gpus() {
        for process in &gpu.processes {
            let place = match (process.gpu_instance, process.compute_instance) {
                (Some(gi), Some(ci)) => format!(" GI {gi} CI {ci}"),
                (Some(gi), None) => format!(" GI {gi}"),
                (None, _) => String::new(),
            };
            let (kind, mib) = (process.kind.name(), process.memory_mib);
            let load = machine.load(gpu.index, process).ok().filter(|_| process.kind != ProcessKind::Handle);
            let load = load.map_or_else(String::new, |load| format!(" SM {} %", load.sm_ppm / 10_000));
            let _infallible =
                writeln!(text, "GPU {}{place}: {} {kind} {mib} MiB{load}", gpu.index, pids::describe(process.pid.pid));
        }
    }
    for client in machine.clients(None).filter(|client| client.pid.is_alive()) {
        let _infallible = writeln!(text, "driver open: {}", pids::describe(client.pid.pid));
    }
    Ok(text)
}
