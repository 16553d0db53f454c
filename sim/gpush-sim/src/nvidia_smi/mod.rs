//! The simulated `nvidia-smi`. It resets GPUs, sets their MIG mode, persistence mode, compute mode and
//! time-slice level, lists and queries them, and manages MIG instances. It rejects other commands.
//!
//! The exit codes are those of the nvidia-smi manual: 2 for an invalid argument, 3 for "not
//! supported", 4 for "no permission", 6 for "not found", 9 if the driver is not loaded, 15 for a
//! lost GPU, and 255 for all other errors.

use std::path::Path;
use std::process::ExitCode;

use mps_sim::{errln, outln};
use silicon::machine::{COMPUTE_MODES, Pid};
use silicon::{Call, Host, HostError, Machine, Return, fault};

mod compute_policy;
mod mig;
mod query;
mod report;

/// Applies the fault rules, and resets a GPU. The outer error means that the simulated host failed.
/// The inner error means that the reset failed.
pub(crate) fn reset(host: &Host, gpu: u32) -> Result<Result<(), String>, HostError> {
    let decision = host.before(&Call::on(fault::GPU_RESET, gpu))?;
    let done = match decision.rc {
        Some(rc) => Err(rc),
        None => host.update(|machine| machine.reset(gpu, None)),
    };
    host.trace(fault::GPU_RESET, Some(gpu), "", done.err().unwrap_or(Return::Success));
    host.after(decision);
    Ok(match done {
        Ok(()) => Ok(()),
        Err(Return::InUse) => Err(format!("it is in use by {}", holders(host, gpu)?)),
        Err(rc) => Err(rc.to_string()),
    })
}

/// Describes the processes that have the driver or the GPU open.
fn holders(host: &Host, gpu: u32) -> Result<String, HostError> {
    let machine = host.read()?;
    let clients = machine.clients(None).map(|client| client.pid);
    let on = machine.gpus().iter().filter(|at| at.index == gpu).flat_map(|at| at.processes.iter().map(|p| p.pid));
    let mut pids: Vec<u32> = clients.chain(on).filter(|pid| pid.is_alive()).map(|pid| pid.pid).collect();
    pids.sort_unstable();
    pids.dedup();
    Ok(match pids.as_slice() {
        [] => "no process that is left".to_owned(),
        pids => pids.iter().map(|&pid| crate::pids::describe(pid)).collect::<Vec<_>>().join(", "),
    })
}

/// The request in the arguments.
enum Asked {
    List,
    Reset(Option<Vec<String>>),
    Mig(bool, Option<Vec<String>>),
    Persistence(bool, Option<Vec<String>>),
    ComputeMode(u32, Option<Vec<String>>),
}

fn parse(arguments: &[String]) -> Option<Asked> {
    let mut reset = false;
    let (mut mig, mut persistence, mut compute) = (None, None, None);
    let mut ids = None;
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let split = |text: &str| text.split(',').map(|id| id.trim().to_owned()).collect();
        match argument.as_str() {
            "-L" | "--list-gpus" if arguments.len() == 1 => return Some(Asked::List),
            "-r" | "--gpu-reset" => reset = true,
            "-mig" | "--multi-instance-gpu" => mig = Some(mode(rest.next()?)?),
            "-pm" | "--persistence-mode" => persistence = Some(mode(rest.next()?)?),
            "-c" | "--compute-mode" => compute = Some(compute_mode(rest.next()?)?),
            "-i" | "--id" => ids = Some(split(rest.next()?)),
            other if other.starts_with("-c=") || other.starts_with("--compute-mode=") => {
                compute = Some(compute_mode(other.split_once('=')?.1)?);
            }
            other => match other.strip_prefix("-mig=").or_else(|| other.strip_prefix("--multi-instance-gpu=")) {
                Some(text) => mig = Some(mode(text)?),
                None => ids = Some(split(other.strip_prefix("--id=").or_else(|| other.strip_prefix("-i="))?)),
            },
        }
    }
    match (reset, mig, persistence, compute) {
        (true, None, None, None) => Some(Asked::Reset(ids)),
        (false, Some(enable), None, None) => Some(Asked::Mig(enable, ids)),
        (false, None, Some(enable), None) => Some(Asked::Persistence(enable, ids)),
        (false, None, None, Some(mode)) => Some(Asked::ComputeMode(mode, ids)),
        (true | false, ..) => None,
    }
}

/// Parses a compute mode: NVML's number, or the name. EXCLUSIVE_THREAD is no longer supported.
fn compute_mode(text: &str) -> Option<u32> {
    let numbers = (0..).zip(COMPUTE_MODES).filter(|(_, name)| *name != "EXCLUSIVE_THREAD");
    numbers.into_iter().find(|(number, name)| text == *name || text == number.to_string()).map(|(number, _)| number)
}

fn mode(text: &str) -> Option<bool> {
    match text {
        "0" | "DISABLED" => Some(false),
        "1" | "ENABLED" => Some(true),
        _ => None,
    }
}

/// Returns the host that the environment names. A caller may clear the environment. So if the
/// environment names no host, returns the host to which the program's path belongs
/// (`DIR/bin/nvidia-smi`).
fn host(called: &Path) -> Result<Host, HostError> {
    if std::env::var_os(silicon::host::STATE_VARIABLE).is_some() {
        return Host::from_environment();
    }
    match called.parent().and_then(Path::parent) {
        Some(dir) if dir.join("state").exists() => Host::open(dir),
        Some(_) | None => Host::from_environment(),
    }
}

fn list(host: &Host) -> Result<(), HostError> {
    let machine = host.read()?;
    for (slot, gpu) in host.hardware().slots.iter().zip(machine.gpus()) {
        outln!("GPU {}: {} (UUID: {})", gpu.index, slot.identity.name, slot.identity.uuid);
        for device in machine.mig_devices(gpu.index).unwrap_or_default() {
            let profile = gpu.instance(device.gpu_instance).and_then(|gi| {
                let ci = gi.compute(device.compute_instance)?;
                let profile = slot.part.profile(gi.profile_id).ok()?.compute(ci.profile_id)?;
                Some(profile.name.clone())
            });
            let name = profile.unwrap_or_default();
            outln!("  MIG {name:<15} Device {:>2}: (UUID: {})", device.index, device.uuid);
        }
    }
    Ok(())
}

/// Finds the GPU that an `-i` argument names by index, UUID or PCI address. Returns its index.
fn find(host: &Host, id: &str) -> Option<u32> {
    let slots = host.hardware().slots.iter().zip(0..);
    let lower = id.to_lowercase();
    slots
        .filter(|(slot, index)| {
            let pci = slot.identity.pci_address();
            index.to_string() == id || slot.identity.uuid == id || pci == lower || format!("0000{pci}") == lower
        })
        .map(|(_, index)| index)
        .next()
}

/// Returns the indexes of the GPUs that `-i` names, or of all GPUs. If a GPU does not exist,
/// returns the exit code.
fn gpus(host: &Host, ids: Option<Vec<String>>) -> Result<Vec<u32>, ExitCode> {
    let Some(ids) = ids else { return Ok((0..).take(host.hardware().slots.len()).collect()) };
    let find = |id: &String| {
        find(host, id).ok_or_else(|| {
            errln!("No devices were found: there is no GPU {id}");
            ExitCode::from(6)
        })
    };
    ids.iter().map(find).collect()
}

/// Returns the exit code that the manual documents for a return code.
fn exit_code(rc: Return) -> ExitCode {
    ExitCode::from(match rc {
        Return::Success => 0,
        Return::InvalidArgument => 2,
        Return::NotSupported => 3,
        Return::NoPermission => 4,
        Return::NotFound => 6,
        Return::GpuIsLost => 15,
        _ => 255,
    })
}

/// The text with which the program describes itself.
const ABOUT: &str = "This is gpush-sim's stand-in for nvidia-smi on a simulated host.";

/// The supported commands.
const KNOWN: &str = "It knows `nvidia-smi -L`, `nvidia-smi --query-gpu=FIELDS --format=csv`, \
                     `nvidia-smi --query-compute-apps=FIELDS --format=csv`, `nvidia-smi mig`, \
                     `nvidia-smi -q`, `nvidia-smi --gpu-reset -i N`, `nvidia-smi -i N -mig 0|1`, \
                     `nvidia-smi -i N -pm 0|1`, `nvidia-smi -i N -c 0|2|3` and \
                     `nvidia-smi compute-policy`; for the rest use gpushctl, nvitop or `gpush-sim show`.";

/// Prints an error. Returns the exit code for an invalid command line.
fn invalid(why: &str) -> ExitCode {
    outln!("{why}");
    ExitCode::from(2)
}

pub(crate) fn main(called: &Path) -> ExitCode {
    let arguments: Vec<String> = std::env::args_os().skip(1).map(|a| a.to_string_lossy().into_owned()).collect();
    if let Some(("compute-policy", rest)) = arguments.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        return match compute_policy::parse(rest) {
            Ok(asked) => ended(host(called).and_then(|host| compute_policy::act(&host, asked))),
            Err(why) => invalid(&why),
        };
    }
    if let Some(("mig", rest)) = arguments.split_first().map(|(first, rest)| (first.as_str(), rest)) {
        return match mig::parse(rest) {
            Ok(asked) => ended(host(called).and_then(|host| mig::act(&host, &asked))),
            Err(why) => invalid(&why),
        };
    }
    match query::parse(&arguments) {
        Some(Ok(query)) => return ended(host(called).and_then(|host| query::act(&host, &query))),
        Some(Err(why)) => return invalid(&why),
        None => {}
    }
    match report::parse(&arguments) {
        Some(Ok(report)) => return ended(host(called).and_then(|host| report::act(&host, &report))),
        Some(Err(why)) => return invalid(&why),
        None => {}
    }
    if let [only] = arguments.as_slice()
        && (only == "-h" || only == "--help")
    {
        outln!("{ABOUT}\n{KNOWN}");
        return ExitCode::SUCCESS;
    }
    let Some(asked) = parse(&arguments) else {
        errln!("{ABOUT}\n{KNOWN}");
        return ExitCode::from(2);
    };
    let outcome = host(called).and_then(|host| match asked {
        Asked::List => list(&host).map(|()| ExitCode::SUCCESS),
        Asked::Reset(ids) => reset_all(&host, ids),
        Asked::Mig(enable, ids) => switch_all(&host, enable, ids),
        Asked::Persistence(enable, ids) => keep_all(&host, enable, ids),
        Asked::ComputeMode(mode, ids) => limit_all(&host, mode, ids),
    });
    ended(outcome)
}

fn ended(outcome: Result<ExitCode, HostError>) -> ExitCode {
    outcome.unwrap_or_else(|error| {
        errln!("nvidia-smi (simulated): {error}");
        ExitCode::from(9)
    })
}

fn reset_all(host: &Host, ids: Option<Vec<String>>) -> Result<ExitCode, HostError> {
    let all = || (0..host.hardware().slots.len()).map(|index| index.to_string()).collect();
    if !host.privileged() {
        errln!("Resetting a GPU is not allowed: insufficient permissions (the host's owner is not root on it)");
        return Ok(ExitCode::from(4));
    }
    if host.hardware().virtual_machine {
        errln!("Resetting a GPU is not supported: the GPUs are passed through to this virtual machine");
        return Ok(ExitCode::from(3));
    }
    let mut gpus = Vec::new();
    for id in ids.unwrap_or_else(all) {
        let Some(gpu) = find(host, &id) else {
            errln!("No devices were found: there is no GPU {id}");
            return Ok(ExitCode::from(6));
        };
        gpus.push(gpu);
    }
    let address = |gpu: u32| host.hardware().slots[gpu as usize].identity.pci_address();
    let machine = host.read()?;
    for &gpu in &gpus {
        let with = machine.reset_with(gpu).unwrap_or_default();
        let left: Vec<String> = with.into_iter().filter(|peer| !gpus.contains(peer)).map(address).collect();
        if !left.is_empty() {
            errln!("GPU 0000{} could not be reset: 0000{} must be reset with it", address(gpu), left.join(", 0000"));
            return Ok(ExitCode::from(255));
        }
    }
    for gpu in gpus {
        let pci = address(gpu);
        match reset(host, gpu)? {
            Ok(()) => outln!("GPU 0000{pci} was successfully reset."),
            Err(why) => {
                errln!("GPU 0000{pci} could not be reset: {why}");
                let lost = host.read()?.gpu(gpu) == Err(Return::GpuIsLost);
                return Ok(ExitCode::from(if lost { 15 } else { 255 }));
            }
        }
    }
    outln!("All done.");
    Ok(ExitCode::SUCCESS)
}

/// Sets MIG mode. If the mode stays pending, prints a warning and no error, as the real program
/// does.
fn switch_all(host: &Host, enable: bool, ids: Option<Vec<String>>) -> Result<ExitCode, HostError> {
    let all = || (0..host.hardware().slots.len()).map(|index| index.to_string()).collect();
    if !host.privileged() {
        errln!("Changing MIG mode is not allowed: insufficient permissions (the host's owner is not root on it)");
        return Ok(ExitCode::from(4));
    }
    let (done, pending) = if enable { ("Enabled", "enable") } else { ("Disabled", "disable") };
    for id in ids.unwrap_or_else(all) {
        let Some(gpu) = find(host, &id) else {
            errln!("No devices were found: there is no GPU {id}");
            return Ok(ExitCode::from(6));
        };
        let pci = host.hardware().slots[gpu as usize].identity.pci_address();
        let decision = host.before(&Call::on("nvmlDeviceSetMigMode", gpu))?;
        let switched = match decision.rc {
            Some(rc) => Err(rc),
            None => host.update(|machine| machine.set_mig_mode(gpu, enable, std::process::id())),
        };
        host.after(decision);
        match switched {
            Ok(Return::Success) => outln!("{done} MIG Mode for GPU 0000{pci}"),
            Ok(why) => {
                outln!("Warning: MIG mode is in pending {pending} state for GPU 0000{pci}: {why}");
                outln!(
                    "It comes into force with `nvidia-smi --gpu-reset -i {gpu}`, which requires that no process has it open."
                );
            }
            Err(why) => {
                errln!("Unable to {pending} MIG Mode for GPU 0000{pci}: {why}");
                return Ok(ExitCode::from(if why == Return::NotSupported { 3 } else { 255 }));
            }
        }
    }
    outln!("All done.");
    Ok(ExitCode::SUCCESS)
}

/// Sets persistence mode. With persistence mode, a GPU stays initialised while no process has it
/// open.
fn keep_all(host: &Host, enable: bool, ids: Option<Vec<String>>) -> Result<ExitCode, HostError> {
    let done = if enable { "Enabled" } else { "Disabled" };
    set_all(host, "persistence mode", "nvmlDeviceSetPersistenceMode", ids, |machine, gpu, pci| {
        machine.set_persistence(gpu, enable)?;
        Ok(format!("{done} persistence mode for GPU {pci}."))
    })
}

/// Sets the compute mode.
fn limit_all(host: &Host, mode: u32, ids: Option<Vec<String>>) -> Result<ExitCode, HostError> {
    let name = COMPUTE_MODES.get(mode as usize).unwrap_or(&"?");
    set_all(host, "compute mode", "nvmlDeviceSetComputeMode", ids, |machine, gpu, pci| {
        machine.set_compute_mode(gpu, mode)?;
        Ok(format!("Set compute mode to {name} for GPU {pci}."))
    })
}

/// Changes a setting of each GPU with one NVML function. While the program runs, it has the driver open. `set` returns
/// the line that it prints for a GPU.
fn set_all(
    host: &Host,
    what: &str,
    function: &'static str,
    ids: Option<Vec<String>>,
    set: impl Fn(&mut Machine, u32, &str) -> Result<String, Return>,
) -> Result<ExitCode, HostError> {
    if !host.privileged() {
        errln!("Changing {what} is not allowed: insufficient permissions (the host's owner is not root on it)");
        return Ok(exit_code(Return::NoPermission));
    }
    let gpus = match gpus(host, ids) {
        Ok(gpus) => gpus,
        Err(code) => return Ok(code),
    };
    for gpu in gpus {
        let pci = format!("0000{}", host.hardware().slots[gpu as usize].identity.pci_address());
        let decision = host.before(&Call::on(function, gpu))?;
        let done = match decision.rc {
            Some(rc) => Err(rc),
            None => host.update(|machine| {
                machine.open(Pid::own());
                let done = set(machine, gpu, &pci);
                machine.close(Pid::own());
                done
            }),
        };
        host.after(decision);
        match done {
            Ok(line) => outln!("{line}"),
            Err(why) => {
                errln!("Unable to set the {what} for GPU {pci}: {why}");
                return Ok(exit_code(why));
            }
        }
    }
    outln!("All done.");
    Ok(ExitCode::SUCCESS)
}
