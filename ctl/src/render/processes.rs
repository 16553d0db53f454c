//! The table of processes on GPUs, and which of them have no lease.

use gpush_api::{GpuProcess, GpuProcesses, StrayPolicy};

use super::{
    Look,
    listing::Listing,
    look::{BAD, NOTE, QUIET, count, gib, paint},
    table::{Align, Narrow},
    trouble, who,
};

/// Returns the width of a command line on a terminal. It is smaller if the table explains strays.
fn command_columns(strays: bool, look: &Look) -> usize {
    (look.width / if strays { 4 } else { 3 }).clamp(16, 60)
}

/// Text for a missing or unknown value.
const NONE: &str = "-";

/// Lists the processes of `gpushctl process list`. `strays` says that only strays are requested.
pub(crate) fn list(all: &GpuProcesses, strays: bool, look: &Look) -> Listing {
    let mut out = String::new();
    for error in &all.unseen {
        out += &(trouble::lines("!", error, 0, look).join("\n") + "\n");
    }
    let found = all.processes.iter().filter(|one| one.stray.is_some()).count();
    if found > 0 {
        let left = all.processes.iter().filter(|one| is_left(one)).count();
        let text = format!("{}: {}", strays_in_words(found), what_is_done(all.policy, found, left));
        out += &(look.wrap("", &text).iter().map(|line| paint(NOTE, line)).collect::<Vec<_>>().join("\n") + "\n");
    }
    let empty = if strays { "No stray process." } else { "No process uses a GPU." };
    table(&all.processes, look).or_empty(empty).after(&out)
}

fn strays_in_words(n: usize) -> String {
    if n == 1 { "1 process is a stray".to_owned() } else { format!("{} are strays", processes(n)) }
}

fn processes(n: usize) -> String {
    if n == 1 { count(n, "process") } else { format!("{n} processes") }
}

/// Returns whether gpushd leaves a stray alone although the config says that strays are ended.
fn is_left(one: &GpuProcess) -> bool {
    one.stray.is_some() && one.stray_action.as_ref().is_some_and(|done| done.starts_with("left"))
}

/// Describes what the config does about the strays, of which `left` are left alone.
fn what_is_done(policy: StrayPolicy, found: usize, left: usize) -> String {
    let them = if found == 1 { "it" } else { "them" };
    match policy {
        StrayPolicy::Report => format!("the config has stray = \"report\", so gpushd does not end {them}"),
        StrayPolicy::Warn => format!(
            "the config has stray = \"warn\", so gpushd warns in its log and does not end \
            {them}"
        ),
        StrayPolicy::End if left == found => format!("the config has stray = \"end\", but gpushd may not end {them}"),
        StrayPolicy::End if left > 0 => {
            format!("gpushd ends them (SIGTERM, a grace period, SIGKILL), except {left} that it may not end")
        }
        StrayPolicy::End => format!("gpushd ends {them}: SIGTERM, a grace period, SIGKILL"),
    }
}

fn table(processes: &[GpuProcess], look: &Look) -> Listing {
    use Align::{Left, Right};
    let mut columns = vec![
        ("GPU", Left),
        ("PID", Right),
        ("USER", Left),
        ("KIND", Left),
        ("GIB", Right),
        ("BELONGS TO", Left),
        ("COMMAND", Left),
    ];
    let strays = processes.iter().any(|one| one.stray.is_some());
    if strays {
        columns.push(("STRAY", Left));
    }
    let rows = processes.iter().map(|one| {
        let mut row = row(one, command_columns(strays, look), look);
        if strays {
            row.push(stray(one, look));
        }
        row
    });
    Listing::new(&columns, rows.collect(), Narrow { spare: &["KIND", "GIB"], prose: true }, look)
        .names(processes.iter().filter_map(|one| Some(one.process.pid?.to_string())))
        .uuids(processes.iter().map(|one| one.gpu_uuid.clone()))
}

fn row(one: &GpuProcess, room: usize, look: &Look) -> Vec<String> {
    let process = &one.process;
    let gpu = match &one.device {
        Some(device) => format!("{} {}", one.gpu, look.clean(device)),
        None => one.gpu.to_string(),
    };
    let user = match (&process.user, process.uid) {
        (Some(user), _) => Some(look.clean(user)),
        (None, Some(uid)) => Some(format!("uid {uid}")),
        (None, None) => None,
    };
    let command = match &process.command {
        Some(command) => look.fit(&look.clean(command), room),
        None if user.is_none() && process.pid.is_none() => who::ANOTHER.to_owned(),
        None => NONE.to_owned(),
    };
    vec![
        gpu,
        process.pid.map_or_else(|| NONE.to_owned(), |pid| pid.to_string()),
        user.unwrap_or_else(|| NONE.to_owned()),
        who::kind(process.kind).to_owned(),
        process.memory_mib.map_or_else(|| NONE.to_owned(), gib),
        belongs(one, look),
        command,
    ]
}

/// Describes what a process belongs to: the target that it serves, a lease, a job or a unit.
fn belongs(one: &GpuProcess, look: &Look) -> String {
    if let Some(serves) = &one.serves {
        return look.clean(serves);
    }
    let job = one.slurm_job.map(|job| format!("job {job}"));
    let lease = one.lease.as_ref().map(|lease| match one.unattributed {
        false => format!("lease {}", look.clean(lease)),
        true => format!("perhaps lease {}", look.clean(lease)),
    });
    let unit = one.unit.as_ref().filter(|_| job.is_none() && lease.is_none()).map(|unit| look.clean(unit));
    let allowed = one.allowed.then(|| "allowed".to_owned());
    let parts: Vec<String> = lease.into_iter().chain(allowed).chain(job).chain(unit).collect();
    if parts.is_empty() { NONE.to_owned() } else { parts.join(", ") }
}

/// Explains why a process is a stray, and what gpushd did. Each word is colored separately, because cells break at
/// blanks.
fn stray(one: &GpuProcess, look: &Look) -> String {
    let Some(why) = &one.stray else { return String::new() };
    let painted =
        |style, text: &str| look.clean(text).split(' ').map(|w| paint(style, w)).collect::<Vec<_>>().join(" ");
    let done = one.stray_action.as_ref().map_or_else(String::new, |done| format!("; {}", painted(QUIET, done)));
    format!("{} {}{done}", paint(BAD, "!"), painted(NOTE, why))
}
