//! The lists of `nvidia-smi mig`: profiles, placements and instances as the real program prints
//! them.

use std::process::ExitCode;

use mps_sim::{out, outln};
use silicon::machine::Machine;

use super::{Asked, chosen};

/// Formats MiB as GiB with two decimals. The value is truncated, not rounded: 20096 MiB is 19.62.
fn gib(mib: u64) -> String {
    format!("{}.{:02}", mib / 1024, mib % 1024 * 100 / 1024)
}

pub(super) fn list_gpu_profiles(machine: &Machine, gpus: &[u32]) -> ExitCode {
    let rule = format!("+{}+", "-".repeat(79));
    outln!("{rule}");
    outln!("| GPU instance profiles:                                                        |");
    outln!("| GPU   Name               ID    Instances   Memory     P2P    SM    DEC   ENC  |");
    outln!("|                                Free/Total   GiB              CE    JPEG  OFA  |");
    outln!("|{}|", "=".repeat(79));
    for &gpu in gpus {
        let Ok(part) = machine.part(gpu) else { continue };
        for profile in &part.profiles {
            let data = &profile.data;
            let free = machine.remaining_gpu_instances(gpu, data.id).unwrap_or_default();
            let (name, instances) = (format!("MIG {}", data.name), format!("{free}/{}", data.max));
            let e = &data.engines;
            outln!(
                "| {gpu:>3}  {name:<19} {:<5} {instances:<11} {:<10} No    {:>3}   {:>3}   {:>3}   |",
                data.id,
                gib(data.memory_mib),
                data.sm,
                e.decoder,
                e.encoder
            );
            outln!("| {:57} {:>3}   {:>3}   {:>3}   |", "", e.copy, e.jpeg, e.ofa);
            outln!("{rule}");
        }
    }
    ExitCode::SUCCESS
}

pub(super) fn list_placements(machine: &Machine, gpus: &[u32]) -> ExitCode {
    for &gpu in gpus {
        let Ok(part) = machine.part(gpu) else { continue };
        for profile in &part.profiles {
            let starts: Vec<String> = profile.placements().map(|(at, _)| at.start.to_string()).collect();
            let size = profile.placements().map(|(at, _)| at.size).next().unwrap_or_default();
            outln!("GPU {gpu:>2} Profile ID {:>2} Placements: {{{}}}:{size}", profile.data.id, starts.join(","));
        }
    }
    ExitCode::SUCCESS
}

pub(super) fn list_gpu_instances(machine: &Machine, gpus: &[u32]) -> ExitCode {
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
        outln!("No GPU instances found: Not Found");
        return ExitCode::from(6);
    }
    outln!("+{}+", "-".repeat(57));
    outln!("| GPU instances:                                          |");
    outln!("| GPU   Name             Profile  Instance   Placement    |");
    outln!("|                          ID       ID       Start:Size   |");
    outln!("|{}|", "=".repeat(57));
    out!("{rows}");
    ExitCode::SUCCESS
}

pub(super) fn list_compute_profiles(machine: &Machine, gpus: &[u32], asked: &Asked) -> ExitCode {
    let rule = format!("+{}+", "-".repeat(86));
    outln!("{rule}");
    outln!("| Compute instance profiles:                                                           |");
    outln!("| GPU     GPU       Name             Profile  Instances   Exclusive       Shared       |");
    outln!("|       Instance                       ID     Free/Total     SM       DEC   ENC   OFA  |");
    outln!("|         ID                                                          CE    JPEG       |");
    outln!("|{}|", "=".repeat(86));
    for &gpu in gpus {
        let Ok(part) = machine.part(gpu) else { continue };
        for gi in chosen(machine, gpu, asked) {
            let Ok(within) = part.profile(gi.profile_id) else { continue };
            for compute in &within.data.compute {
                // The asterisk marks the default profile: the profile that occupies the whole GPU
                // instance.
                let star = if compute.name == within.data.name { "*" } else { "" };
                let (name, id) = (format!("MIG {}", compute.name), format!("{}{star}", compute.id));
                let free = format!("{}/{}", gi.remaining(within, compute), compute.max);
                let e = &within.data.engines;
                outln!(
                    "| {gpu:>3}    {:>3}       {name:<18}{id:>4}     {free:>5}       {:>4}       {:>3}   {:>3}   {:>3}  |",
                    gi.id,
                    compute.sm,
                    e.decoder,
                    e.encoder,
                    e.ofa
                );
                outln!("| {:66}{:>3}   {:>3}        |", "", e.copy, e.jpeg);
                outln!("{rule}");
            }
        }
    }
    ExitCode::SUCCESS
}

pub(super) fn list_compute_instances(machine: &Machine, gpus: &[u32], asked: &Asked) -> ExitCode {
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
        outln!("No compute instances found: Not Found");
        return ExitCode::from(6);
    }
    outln!("+{}+", "-".repeat(68));
    outln!("| Compute instances:                                                 |");
    outln!("| GPU     GPU       Name             Profile   Instance   Placement  |");
    outln!("|       Instance                       ID        ID       Start:Size |");
    outln!("|         ID                                                         |");
    outln!("|{}|", "=".repeat(68));
    out!("{rows}");
    ExitCode::SUCCESS
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_truncated_to_two_decimals() {
        assert_eq!([gib(20096), gib(9984), gib(81152)], ["19.62", "9.75", "79.25"]);
    }
}
