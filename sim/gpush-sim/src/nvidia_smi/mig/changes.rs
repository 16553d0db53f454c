//! The changes of `nvidia-smi mig`: creates and destroys GPU instances and compute instances.
//!
//! Each change applies the fault rules and is written to the trace. The trace names a change by the
//! NVML function that the real program calls.

use std::process::ExitCode;

use mps_sim::outln;
use silicon::machine::{GpuInstanceHandle, Machine, Placement, Profile};
use silicon::{Call, Host, HostError, Return};

use super::super::exit_code;
use super::{Asked, chosen};

/// Applies the fault rules to one change, makes the change, and writes it to the trace.
fn change<T>(
    host: &Host,
    call: &Call<'_>,
    arguments: &str,
    make: impl FnOnce(&mut Machine) -> Result<T, Return>,
) -> Result<Result<T, Return>, HostError> {
    let decision = host.before(call)?;
    let made = match decision.rc {
        Some(rc) => Err(rc),
        None => host.update(make),
    };
    let rc = made.as_ref().err().copied().unwrap_or(Return::Success);
    host.trace(call.function, call.gpu, arguments, rc);
    host.after(decision);
    Ok(made)
}

/// Finds a profile by its id, or by its name. The name may begin with `MIG `.
fn profile_of<'p>(profiles: &'p [Profile], word: &str) -> Option<&'p Profile> {
    let name = word.strip_prefix("MIG ").unwrap_or(word);
    profiles.iter().find(|profile| profile.data.name.eq_ignore_ascii_case(name) || profile.data.id.to_string() == name)
}

pub(super) fn create_gpu_instances(
    host: &Host,
    gpus: &[u32],
    words: &[String],
    with_compute: bool,
) -> Result<ExitCode, HostError> {
    for &gpu in gpus {
        let machine = host.read()?;
        let Ok(part) = machine.part(gpu) else { continue };
        for word in words {
            let (name, start) = match word.split_once(':') {
                Some((name, start)) => (name, Some(start)),
                None => (word.as_str(), None),
            };
            let Some(profile) = profile_of(&part.profiles, name) else {
                outln!("Unable to create a GPU instance on GPU {gpu:>2} using profile {name}: Invalid Argument");
                outln!("Failed to create GPU instances: Invalid Argument");
                return Ok(exit_code(Return::InvalidArgument));
            };
            let at = |start: &str| profile.placements().map(|(at, _)| at).find(|at| at.start.to_string() == start);
            let placement = match start.map(at) {
                Some(None) => {
                    outln!("Unable to create a GPU instance on GPU {gpu:>2} using profile {name}: Invalid Argument");
                    return Ok(exit_code(Return::InvalidArgument));
                }
                Some(placement) => placement,
                None => None,
            };
            let id = profile.data.id;
            let function = if placement.is_some() {
                "nvmlDeviceCreateGpuInstanceWithPlacement"
            } else {
                "nvmlDeviceCreateGpuInstance"
            };
            let made = change(host, &Call::on(function, gpu), &created(id, placement), |machine| {
                machine.create_gpu_instance(gpu, id, placement)
            })?;
            let handle = match made {
                Ok(handle) => handle,
                Err(rc) => {
                    outln!("Unable to create a GPU instance on GPU {gpu:>2} using profile {id}: {}", words_of(rc));
                    outln!("Failed to create GPU instances: {}", words_of(rc));
                    return Ok(exit_code(rc));
                }
            };
            outln!(
                "Successfully created GPU instance ID {:>2} on GPU {gpu:>2} using profile MIG {} (ID {id:>2})",
                handle.id,
                profile.data.name
            );
            if with_compute && let Err(code) = create_compute_instance(host, profile, handle, None)? {
                return Ok(code);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn created(profile: u32, placement: Option<Placement>) -> String {
    match placement {
        Some(at) => format!("profile={profile} placement={}:{}", at.start, at.size),
        None => format!("profile={profile}"),
    }
}

/// Creates a compute instance. Uses the default profile, unless the argument names a profile.
fn create_compute_instance(
    host: &Host,
    within: &Profile,
    handle: GpuInstanceHandle,
    word: Option<&str>,
) -> Result<Result<(), ExitCode>, HostError> {
    let name = word.map_or(within.data.name.as_str(), |word| word.strip_prefix("MIG ").unwrap_or(word));
    let mut all = within.data.compute.iter();
    let found = all.find(|compute| compute.name.eq_ignore_ascii_case(name) || compute.id.to_string() == name);
    let (gpu, gi) = (handle.gpu, handle.id);
    let Some(compute) = found else {
        outln!(
            "Unable to create a compute instance on GPU {gpu:>2} GPU instance ID {gi:>2} using profile {name}: Invalid Argument"
        );
        outln!("Failed to create compute instances: Invalid Argument");
        return Ok(Err(exit_code(Return::InvalidArgument)));
    };
    let call = Call { gpu_instance: Some(gi), ..Call::on("nvmlGpuInstanceCreateComputeInstance", gpu) };
    let made = change(host, &call, &created(compute.id, None), |machine| {
        machine.create_compute_instance(handle, compute.id, None)
    })?;
    Ok(match made {
        Ok(made) => {
            outln!(
                "Successfully created compute instance ID {:>2} on GPU {gpu:>2} GPU instance ID {gi:>2} using profile MIG {} (ID {:>2})",
                made.id,
                compute.name,
                compute.id
            );
            Ok(())
        }
        Err(rc) => {
            outln!(
                "Unable to create a compute instance on GPU {gpu:>2} GPU instance ID {gi:>2} using profile {}: {}",
                compute.id,
                words_of(rc)
            );
            outln!("Failed to create compute instances: {}", words_of(rc));
            Err(exit_code(rc))
        }
    })
}

pub(super) fn create_compute_instances(
    host: &Host,
    gpus: &[u32],
    words: &[String],
    asked: &Asked,
) -> Result<ExitCode, HostError> {
    let mut any = false;
    for &gpu in gpus {
        let machine = host.read()?;
        let Ok(part) = machine.part(gpu) else { continue };
        for gi in chosen(&machine, gpu, asked) {
            any = true;
            let (Ok(within), handle) =
                (part.profile(gi.profile_id), GpuInstanceHandle { gpu, id: gi.id, generation: gi.generation })
            else {
                continue;
            };
            let words: Vec<Option<&str>> =
                if words.is_empty() { vec![None] } else { words.iter().map(|word| Some(word.as_str())).collect() };
            for word in words {
                if let Err(code) = create_compute_instance(host, within, handle, word)? {
                    return Ok(code);
                }
            }
        }
    }
    if any {
        return Ok(ExitCode::SUCCESS);
    }
    outln!("No GPU instances found: Not Found");
    Ok(exit_code(Return::NotFound))
}

/// Destroys the selected GPU instances. If `compute` is true, destroys the selected compute
/// instances in them instead.
pub(super) fn destroy(host: &Host, gpus: &[u32], asked: &Asked, compute: bool) -> Result<ExitCode, HostError> {
    let kind = if compute { "compute" } else { "GPU" };
    let mut done = 0;
    for &gpu in gpus {
        let machine = host.read()?;
        for gi in chosen(&machine, gpu, asked) {
            let handle = GpuInstanceHandle { gpu, id: gi.id, generation: gi.generation };
            if !compute {
                let call = Call { gpu_instance: Some(gi.id), ..Call::on("nvmlGpuInstanceDestroy", gpu) };
                let gone =
                    change(host, &call, &format!("gi={}", gi.id), |machine| machine.destroy_gpu_instance(handle))?;
                let what = format!("GPU instance ID {:>2} from GPU {gpu:>2}", gi.id);
                if let Err(code) = destroyed(gone, &what, kind) {
                    return Ok(code);
                }
                done += 1;
                continue;
            }
            let named = |id: u32| asked.compute_instances.as_ref().is_none_or(|ids| ids.contains(&id));
            for ci in gi.instances.iter().filter(|ci| named(ci.id)) {
                let call = Call {
                    gpu_instance: Some(gi.id),
                    compute_instance: Some(ci.id),
                    ..Call::on("nvmlComputeInstanceDestroy", gpu)
                };
                let gone = change(host, &call, &format!("gi={} ci={}", gi.id, ci.id), |machine| {
                    machine.destroy_compute_instance(machine.compute_instance_handle(handle, ci.id)?)
                })?;
                let what = format!("compute instance ID {:>2} from GPU {gpu:>2} GPU instance ID {:>2}", ci.id, gi.id);
                if let Err(code) = destroyed(gone, &what, kind) {
                    return Ok(code);
                }
                done += 1;
            }
        }
    }
    if done > 0 {
        return Ok(ExitCode::SUCCESS);
    }
    outln!("No {kind} instances found: Not Found");
    Ok(exit_code(Return::NotFound))
}

fn destroyed(gone: Result<(), Return>, what: &str, kind: &str) -> Result<(), ExitCode> {
    match gone {
        Ok(()) => {
            outln!("Successfully destroyed {what}");
            Ok(())
        }
        Err(rc) => {
            outln!("Unable to destroy {what}: {}", words_of(rc));
            outln!("Failed to destroy {kind} instances: {}", words_of(rc));
            Err(exit_code(rc))
        }
    }
}

/// Returns the text that the program prints for a return code.
fn words_of(rc: Return) -> &'static str {
    match rc {
        Return::InUse => "In use by another client",
        Return::InsufficientResources => "Insufficient Resources",
        Return::InvalidArgument => "Invalid Argument",
        Return::NotFound => "Not Found",
        Return::NotSupported => "Not Supported",
        Return::NoPermission => "Insufficient Permissions",
        Return::GpuIsLost => "GPU is lost",
        _ => "Unknown Error",
    }
}
