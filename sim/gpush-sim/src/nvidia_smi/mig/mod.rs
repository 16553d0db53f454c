//! `nvidia-smi mig`: lists, creates and destroys GPU instances and compute instances.
//!
//! The options and the output are those of the real program, as far as programs that edit MIG
//! layouts use them. Each call applies the fault rules and is written to the trace. The trace names
//! a call by the NVML function that the real program calls.

mod changes;
mod tables;

use std::process::ExitCode;

use mps_sim::outln;
use silicon::machine::Machine;
use silicon::{Host, HostError, Return};

/// A command of `nvidia-smi mig` with its options.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Asked {
    command: Option<Command>,
    gpus: Option<Vec<String>>,
    gpu_instances: Option<Vec<u32>>,
    compute_instances: Option<Vec<u32>>,
    /// Whether `-C` is given: also create a compute instance in each new GPU instance.
    with_compute: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Command {
    Help,
    ListGpuProfiles,
    ListPlacements,
    ListGpuInstances,
    ListComputeProfiles,
    ListComputeInstances,
    CreateGpuInstances(Vec<String>),
    CreateComputeInstances(Vec<String>),
    DestroyGpuInstances,
    DestroyComputeInstances,
}

/// Parses the command line after `nvidia-smi mig`.
pub(super) fn parse(arguments: &[String]) -> Result<Asked, String> {
    let mut asked = Asked::default();
    let mut rest = arguments.iter().peekable();
    while let Some(argument) = rest.next() {
        let list = |text: &String| text.split(',').map(|word| word.trim().to_owned()).collect::<Vec<_>>();
        let mut value = || rest.next_if(|next| !next.starts_with('-')).map(list);
        let command = match argument.as_str() {
            "-h" | "--help" => Command::Help,
            "-lgip" | "--list-gpu-instance-profiles" => Command::ListGpuProfiles,
            "-lgipp" | "--list-gpu-instance-possible-placements" => Command::ListPlacements,
            "-lgi" | "--list-gpu-instances" => Command::ListGpuInstances,
            "-lcip" | "--list-compute-instance-profiles" => Command::ListComputeProfiles,
            "-lci" | "--list-compute-instances" => Command::ListComputeInstances,
            "-cgi" | "--create-gpu-instance" => {
                Command::CreateGpuInstances(value().ok_or_else(|| format!("Option {argument} needs a value."))?)
            }
            "-cci" | "--create-compute-instance" => Command::CreateComputeInstances(value().unwrap_or_default()),
            "-dgi" | "--destroy-gpu-instance" => Command::DestroyGpuInstances,
            "-dci" | "--destroy-compute-instance" => Command::DestroyComputeInstances,
            "-C" | "--default-compute-instance" => {
                asked.with_compute = true;
                continue;
            }
            "-i" | "--id" => {
                asked.gpus = value();
                continue;
            }
            "-gi" | "--gpu-instance-id" => {
                asked.gpu_instances = numbers(value())?;
                continue;
            }
            "-ci" | "--compute-instance-id" => {
                asked.compute_instances = numbers(value())?;
                continue;
            }
            _ => return Err(format!("Option {argument} is not recognized. Please run 'nvidia-smi mig -h'.")),
        };
        if asked.command.replace(command).is_some() {
            return Err("One, and only one, mig command allowed at a time".to_owned());
        }
    }
    Ok(asked)
}

fn numbers(words: Option<Vec<String>>) -> Result<Option<Vec<u32>>, String> {
    let number = |word: &String| word.parse().map_err(|_| format!("\"{word}\" is not an instance ID."));
    words.map(|words| words.iter().map(number).collect()).transpose()
}

pub(super) fn act(host: &Host, asked: &Asked) -> Result<ExitCode, HostError> {
    let command = asked.command.clone().unwrap_or(Command::Help);
    if command == Command::Help {
        outln!("    mig -- Multi Instance GPU management.\n");
        outln!("    nvidia-smi mig -lgip | -lgipp | -lgi | -lcip | -lci [-i GPUS] [-gi GPU-INSTANCES]");
        outln!("    nvidia-smi mig -cgi PROFILE[:START],... [-C] [-i GPUS]");
        outln!("    nvidia-smi mig -cci [PROFILE,...] [-gi GPU-INSTANCES] [-i GPUS]");
        outln!("    nvidia-smi mig -dgi | -dci [-gi GPU-INSTANCES] [-ci COMPUTE-INSTANCES] [-i GPUS]");
        return Ok(ExitCode::SUCCESS);
    }
    let named = asked.gpus.is_some();
    let gpus = match super::gpus(host, asked.gpus.clone()) {
        Ok(gpus) => gpus,
        Err(code) => return Ok(code),
    };
    let machine = host.read()?;
    let with_mig = |gpu: &u32| machine.gpus().get(*gpu as usize).is_some_and(|gpu| gpu.mig && !gpu.lost);
    let gpus: Vec<u32> = gpus.into_iter().filter(with_mig).collect();
    if gpus.is_empty() {
        outln!("No MIG-enabled devices found.");
        return Ok(ExitCode::from(if named { 3 } else { 6 }));
    }
    let changes = !matches!(
        command,
        Command::Help
            | Command::ListGpuProfiles
            | Command::ListPlacements
            | Command::ListGpuInstances
            | Command::ListComputeProfiles
            | Command::ListComputeInstances
    );
    if changes && !host.privileged() {
        outln!("Insufficient Permissions");
        return Ok(super::exit_code(Return::NoPermission));
    }
    match command {
        Command::Help => Ok(ExitCode::SUCCESS),
        Command::ListGpuProfiles => Ok(tables::list_gpu_profiles(&machine, &gpus)),
        Command::ListPlacements => Ok(tables::list_placements(&machine, &gpus)),
        Command::ListGpuInstances => Ok(tables::list_gpu_instances(&machine, &gpus)),
        Command::ListComputeProfiles => Ok(tables::list_compute_profiles(&machine, &gpus, asked)),
        Command::ListComputeInstances => Ok(tables::list_compute_instances(&machine, &gpus, asked)),
        Command::CreateGpuInstances(profiles) => {
            changes::create_gpu_instances(host, &gpus, &profiles, asked.with_compute)
        }
        Command::CreateComputeInstances(profiles) => changes::create_compute_instances(host, &gpus, &profiles, asked),
        Command::DestroyGpuInstances => changes::destroy(host, &gpus, asked, false),
        Command::DestroyComputeInstances => changes::destroy(host, &gpus, asked, true),
    }
}

/// Returns the GPU instances that `-gi` names. Without `-gi`, returns all GPU instances of the GPU.
fn chosen(machine: &Machine, gpu: u32, asked: &Asked) -> Vec<silicon::machine::GpuInstance> {
    let all = machine.gpu(gpu).map_or(&[][..], |at| at.instances.as_slice());
    let named = |id: u32| asked.gpu_instances.as_ref().is_none_or(|ids| ids.contains(&id));
    all.iter().filter(|gi| named(gi.id)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Asked, String> {
        parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn command_lines_of_mig_editors_are_parsed() {
        let asked = read("-i 0 -cgi 9,3g.20gb:4 -C").unwrap();
        assert_eq!(asked.command, Some(Command::CreateGpuInstances(vec!["9".to_owned(), "3g.20gb:4".to_owned()])));
        assert!(asked.with_compute && asked.gpus == Some(vec!["0".to_owned()]));
        assert_eq!(read("-gi 2 -cci 0").unwrap().command, Some(Command::CreateComputeInstances(vec!["0".to_owned()])));
        assert_eq!(read("-cci -gi 2").unwrap().command, Some(Command::CreateComputeInstances(Vec::new())));
        assert_eq!(read("-dci -ci 0 -gi 1,2").unwrap().gpu_instances, Some(vec![1, 2]));
        for wrong in ["-cgi", "-lgi -lci", "-dgi -gi x", "-x"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
