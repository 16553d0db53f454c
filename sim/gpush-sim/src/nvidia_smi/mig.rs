//! `nvidia-smi mig`: lists, creates and destroys GPU instances and compute instances.
//!
//! Options and output follow the real program as MIG editors read it. Each call goes through the fault rules and the
//! trace under the name of the NVML function that the real program calls.

use std::process::ExitCode;

use silicon::machine::{GpuInstanceHandle, Machine, Placement, Profile};
use silicon::{Call, Host, HostError, Return};

/// One command with its options.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Asked {
    command: Option<Command>,
    gpus: Option<Vec<String>>,
    gpu_instances: Option<Vec<u32>>,
    compute_instances: Option<Vec<u32>>,
    /// `-C`: a compute instance in each new GPU instance.
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

/// Reads the command line behind `nvidia-smi mig`.
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

/// Executes the command.
pub(super) fn act(host: &Host, asked: &Asked) -> Result<ExitCode, HostError> {
    let command = asked.command.clone().unwrap_or(Command::Help);
    if command == Command::Help {
        println!("    mig -- Multi Instance GPU management.\n");
        println!("    nvidia-smi mig -lgip | -lgipp | -lgi | -lcip | -lci [-i GPUS] [-gi GPU-INSTANCES]");
        println!("    nvidia-smi mig -cgi PROFILE[:START],... [-C] [-i GPUS]");
        println!("    nvidia-smi mig -cci [PROFILE,...] [-gi GPU-INSTANCES] [-i GPUS]");
        println!("    nvidia-smi mig -dgi | -dci [-gi GPU-INSTANCES] [-ci COMPUTE-INSTANCES] [-i GPUS]");
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
        println!("No MIG-enabled devices found.");
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
        println!("Insufficient Permissions");
        return Ok(super::exit_code(Return::NoPermission));
    }
    match command {
        Command::Help => Ok(ExitCode::SUCCESS),
        Command::ListGpuProfiles => Ok(list_gpu_profiles(&machine, &gpus)),
        Command::ListPlacements => Ok(list_placements(&machine, &gpus)),
        Command::ListGpuInstances => Ok(list_gpu_instances(&machine, &gpus)),
        Command::ListComputeProfiles => Ok(list_compute_profiles(&machine, &gpus, asked)),
        Command::ListComputeInstances => Ok(list_compute_instances(&machine, &gpus, asked)),
        Command::CreateGpuInstances(profiles) => create_gpu_instances(host, &gpus, &profiles, asked.with_compute),
        Command::CreateComputeInstances(profiles) => create_compute_instances(host, &gpus, &profiles, asked),
        Command::DestroyGpuInstances => destroy(host, &gpus, asked, false),
        Command::DestroyComputeInstances => destroy(host, &gpus, asked, true),
    }
}

/// A figure in GiB with two decimals, cut and not rounded: 19.62 of 20096 MiB.
fn gib(mib: u64) -> String {
    format!("{}.{:02}", mib / 1024, mib % 1024 * 100 / 1024)
}

fn list_gpu_profiles(machine: &Machine, gpus: &[u32]) -> ExitCode {
    let rule = format!("+{}+", "-".repeat(79));
    println!("{rule}");
    println!("| GPU instance profiles:                                                        |");
    println!("| GPU   Name               ID    Instances   Memory     P2P    SM    DEC   ENC  |");
    println!("|                                Free/Total   GiB              CE    JPEG  OFA  |");
    println!("|{}|", "=".repeat(79));
    for &gpu in gpus {
        let Ok(part) = machine.part(gpu) else { continue };
        for profile in &part.profiles {
            let data = &profile.data;
            let free = machine.remaining_gpu_instances(gpu, data.id).unwrap_or_default();
            let (name, instances) = (format!("MIG {}", data.name), format!("{free}/{}", data.max));
            let e = &data.engines;
            println!(
                "| {gpu:>3}  {name:<19} {:<5} {instances:<11} {:<10} No    {:>3}   {:>3}   {:>3}   |",
                data.id,
                gib(data.memory_mib),
                data.sm,
                e.decoder,
                e.encoder
            );
            println!("| {:57} {:>3}   {:>3}   {:>3}   |", "", e.copy, e.jpeg, e.ofa);
            println!("{rule}");
        }
    }
    ExitCode::SUCCESS
}

fn list_placements(machine: &Machine, gpus: &[u32]) -> ExitCode {
    for &gpu in gpus {
        let Ok(part) = machine.part(gpu) else { continue };
        for profile in &part.profiles {
            let starts: Vec<String> = profile.placements().map(|(at, _)| at.start.to_string()).collect();
            let size = profile.placements().map(|(at, _)| at.size).next().unwrap_or_default();
            println!("GPU {gpu:>2} Profile ID {:>2} Placements: {{{}}}:{size}", profile.data.id, starts.join(","));
        }
    }
    ExitCode::SUCCESS
}

fn list_gpu_instances(machine: &Machine, gpus: &[u32]) -> ExitCode {
    let mut rows = String::new();
    for &gpu in gpus {
        let (Ok(at), Ok(part)) = (machine.gpu(gpu), machine.part(gpu)) else { continue };
        for gi in &at.instances {
            let name = part.profile(gi.profile_id).map_or_else(|_| "?".to_owned(), |p| format!("MIG {}", p.data.name));
            let place = format!("{}:{}", gi.placement.start, gi.placement.size);
            rows += &format!("| {gpu:>3}  {name:<19}{:>3}      {:>3}      {place:>6}     |\n", gi.profile_id, gi.id);
            rows += &format!("+{}+\n", "-".repeat(57));
        }
    }
    if rows.is_empty() {
        println!("No GPU instances found: Not Found");
        return ExitCode::from(6);
    }
    println!("+{}+", "-".repeat(57));
    println!("| GPU instances:                                          |");
    println!("| GPU   Name             Profile  Instance   Placement    |");
    println!("|                          ID       ID       Start:Size   |");
    println!("|{}|", "=".repeat(57));
    print!("{rows}");
    ExitCode::SUCCESS
}

/// The GPU instances of a GPU that `-gi` names, or all.
fn chosen(machine: &Machine, gpu: u32, asked: &Asked) -> Vec<silicon::machine::GpuInstance> {
    let all = machine.gpu(gpu).map_or(&[][..], |at| at.instances.as_slice());
    let named = |id: u32| asked.gpu_instances.as_ref().is_none_or(|ids| ids.contains(&id));
    all.iter().filter(|gi| named(gi.id)).cloned().collect()
}

fn list_compute_profiles(machine: &Machine, gpus: &[u32], asked: &Asked) -> ExitCode {
    let rule = format!("+{}+", "-".repeat(86));
    println!("{rule}");
    println!("| Compute instance profiles:                                                           |");
    println!("| GPU     GPU       Name             Profile  Instances   Exclusive       Shared       |");
    println!("|       Instance                       ID     Free/Total     SM       DEC   ENC   OFA  |");
    println!("|         ID                                                          CE    JPEG       |");
    println!("|{}|", "=".repeat(86));
    for &gpu in gpus {
        let Ok(part) = machine.part(gpu) else { continue };
        for gi in chosen(machine, gpu, asked) {
            let Ok(within) = part.profile(gi.profile_id) else { continue };
            for compute in &within.data.compute {
                // The asterisk marks the default: the whole GPU instance.
                let star = if compute.name == within.data.name { "*" } else { "" };
                let (name, id) = (format!("MIG {}", compute.name), format!("{}{star}", compute.id));
                let free = format!("{}/{}", gi.remaining(within, compute), compute.max);
                let e = &within.data.engines;
                println!(
                    "| {gpu:>3}    {:>3}       {name:<18}{id:>4}     {free:>5}       {:>4}       {:>3}   {:>3}   {:>3}  |",
                    gi.id, compute.sm, e.decoder, e.encoder, e.ofa
                );
                println!("| {:66}{:>3}   {:>3}        |", "", e.copy, e.jpeg);
                println!("{rule}");
            }
        }
    }
    ExitCode::SUCCESS
}

fn list_compute_instances(machine: &Machine, gpus: &[u32], asked: &Asked) -> ExitCode {
    let mut rows = String::new();
    for &gpu in gpus {
        let Ok(part) = machine.part(gpu) else { continue };
        for gi in chosen(machine, gpu, asked) {
            for ci in &gi.instances {
                let found = part.profile(gi.profile_id).ok().and_then(|within| within.compute(ci.profile_id));
                let name = found.map_or_else(|| "?".to_owned(), |found| format!("MIG {}", found.name));
                let place = format!("{}:{}", ci.placement.start, ci.placement.size);
                rows += &format!(
                    "| {gpu:>3}    {:>3}       {name:<18}{:>4}       {:>3}        {place:>5}     |\n",
                    gi.id, ci.profile_id, ci.id
                );
                rows += &format!("+{}+\n", "-".repeat(68));
            }
        }
    }
    if rows.is_empty() {
        println!("No compute instances found: Not Found");
        return ExitCode::from(6);
    }
    println!("+{}+", "-".repeat(68));
    println!("| Compute instances:                                                 |");
    println!("| GPU     GPU       Name             Profile   Instance   Placement  |");
    println!("|       Instance                       ID        ID       Start:Size |");
    println!("|         ID                                                         |");
    println!("|{}|", "=".repeat(68));
    print!("{rows}");
    ExitCode::SUCCESS
}

/// One changing call through the fault rules and the trace.
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

/// The profile that a word names: an id, or a name with or without `MIG `.
fn profile_of<'p>(profiles: &'p [Profile], word: &str) -> Option<&'p Profile> {
    let name = word.strip_prefix("MIG ").unwrap_or(word);
    profiles.iter().find(|profile| profile.data.name.eq_ignore_ascii_case(name) || profile.data.id.to_string() == name)
}

fn create_gpu_instances(
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
                println!("Unable to create a GPU instance on GPU {gpu:>2} using profile {name}: Invalid Argument");
                println!("Failed to create GPU instances: Invalid Argument");
                return Ok(super::exit_code(Return::InvalidArgument));
            };
            let at = |start: &str| profile.placements().map(|(at, _)| at).find(|at| at.start.to_string() == start);
            let placement = match start.map(at) {
                Some(None) => {
                    println!("Unable to create a GPU instance on GPU {gpu:>2} using profile {name}: Invalid Argument");
                    return Ok(super::exit_code(Return::InvalidArgument));
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
                    println!("Unable to create a GPU instance on GPU {gpu:>2} using profile {id}: {}", words_of(rc));
                    println!("Failed to create GPU instances: {}", words_of(rc));
                    return Ok(super::exit_code(rc));
                }
            };
            println!(
                "Successfully created GPU instance ID {:>2} on GPU {gpu:>2} using profile MIG {} (ID {id:>2})",
                handle.id, profile.data.name
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

/// Creates a compute instance, of the default profile without a word for another one.
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
        println!(
            "Unable to create a compute instance on GPU {gpu:>2} GPU instance ID {gi:>2} using profile {name}: Invalid Argument"
        );
        println!("Failed to create compute instances: Invalid Argument");
        return Ok(Err(super::exit_code(Return::InvalidArgument)));
    };
    let call = Call { gpu_instance: Some(gi), ..Call::on("nvmlGpuInstanceCreateComputeInstance", gpu) };
    let made = change(host, &call, &created(compute.id, None), |machine| {
        machine.create_compute_instance(handle, compute.id, None)
    })?;
    Ok(match made {
        Ok(made) => {
            println!(
                "Successfully created compute instance ID {:>2} on GPU {gpu:>2} GPU instance ID {gi:>2} using profile MIG {} (ID {:>2})",
                made.id, compute.name, compute.id
            );
            Ok(())
        }
        Err(rc) => {
            println!(
                "Unable to create a compute instance on GPU {gpu:>2} GPU instance ID {gi:>2} using profile {}: {}",
                compute.id,
                words_of(rc)
            );
            println!("Failed to create compute instances: {}", words_of(rc));
            Err(super::exit_code(rc))
        }
    })
}

fn create_compute_instances(host: &Host, gpus: &[u32], words: &[String], asked: &Asked) -> Result<ExitCode, HostError> {
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
    println!("No GPU instances found: Not Found");
    Ok(super::exit_code(Return::NotFound))
}

/// Destroys the chosen GPU instances, or the chosen compute instances in them.
fn destroy(host: &Host, gpus: &[u32], asked: &Asked, compute: bool) -> Result<ExitCode, HostError> {
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
    println!("No {kind} instances found: Not Found");
    Ok(super::exit_code(Return::NotFound))
}

fn destroyed(gone: Result<(), Return>, what: &str, kind: &str) -> Result<(), ExitCode> {
    match gone {
        Ok(()) => {
            println!("Successfully destroyed {what}");
            Ok(())
        }
        Err(rc) => {
            println!("Unable to destroy {what}: {}", words_of(rc));
            println!("Failed to destroy {kind} instances: {}", words_of(rc));
            Err(super::exit_code(rc))
        }
    }
}

/// A return code as the program prints it.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn read(line: &str) -> Result<Asked, String> {
        parse(&line.split(' ').map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn command_lines_of_mig_editors_are_read() {
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

    #[test]
    fn memory_is_cut_to_two_decimals() {
        assert_eq!([gib(20096), gib(9984), gib(81152)], ["19.62", "9.75", "79.25"]);
    }
}
