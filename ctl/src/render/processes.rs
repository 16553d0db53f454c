//! The table of processes on GPUs, and which of them have no lease.

use gpush_api::{
    ApiError, GpuIndex, GpuProcess, GpuProcesses, USERS_UNKNOWN, UnknownProcesses, UnleasedPolicy, UnleasedStep,
};

use super::{
    Appearance,
    appearance::{BAD, NOTE, QUIET, count, gib, paint},
    listing::{Listing, widened},
    names::{gpu_numbers, user_name},
    process_names,
    table::{Align, Narrow},
    trouble,
};

/// Returns the width of the column with the command line. It is smaller if the table also explains unleased processes.
fn command_columns(unleased: bool, look: &Appearance) -> usize {
    (look.width / if unleased { 4 } else { 3 }).clamp(15, 60)
}

/// Text for a missing or unknown value.
const NONE: &str = "-";

/// Lists the processes for `gpushctl ps`. `unleased` is true if the user wants only unleased processes.
pub(crate) fn list(all: &GpuProcesses, unleased: bool, look: &Appearance) -> Listing {
    let mut out = String::new();
    for error in unknown(&all.unknown) {
        out += &(trouble::lines("!", &error, 0, look).join("\n") + "\n");
    }
    let found = all.processes.iter().filter(|one| one.unleased.is_some()).count();
    if found > 0 {
        let exempt = all.processes.iter().filter(|one| one.unleased_step == Some(UnleasedStep::Exempt)).count();
        let text = format!("{}: {}", found_in_words(found), policy_words(all.policy, found, exempt));
        out += &(look.wrap("", &text).iter().map(|line| paint(NOTE, line)).collect::<Vec<_>>().join("\n") + "\n");
    }
    // A driver that is only slow has not reported that there are no processes.
    let empty = match (unleased, all.unknown.is_empty()) {
        (true, true) => "No unleased process.",
        (true, false) => "No unleased process is known.",
        (false, true) => "No process uses a GPU.",
        (false, false) => "No process is known to use a GPU.",
    };
    table(&all.processes, look).or_empty(empty).after(&out)
}

/// Returns why the processes of some GPUs are not known. GPUs with the same reason, such as maintenance, get one error.
fn unknown(all: &[UnknownProcesses]) -> Vec<ApiError> {
    let mut groups: Vec<(Vec<GpuIndex>, &ApiError)> = Vec::new();
    for one in all {
        let same = |(_, first): &&mut (Vec<GpuIndex>, &ApiError)| {
            (first.code, &first.causes) == (one.error.code, &one.error.causes)
        };
        match groups.iter_mut().find(same) {
            Some((indexes, _)) => indexes.push(one.gpu),
            None => groups.push((vec![one.gpu], &one.error)),
        }
    }
    let reported = |(indexes, first): (Vec<GpuIndex>, &ApiError)| match indexes.as_slice() {
        [] | [_] => first.clone(),
        several => ApiError { message: format!("{}: {USERS_UNKNOWN}", gpu_numbers(several)), ..first.clone() },
    };
    groups.into_iter().map(reported).collect()
}

fn found_in_words(n: usize) -> String {
    if n == 1 { "1 process is unleased".to_owned() } else { format!("{} are unleased", processes(n)) }
}

fn processes(n: usize) -> String {
    if n == 1 { count(n, "process") } else { format!("{n} processes") }
}

/// Describes what gpushd does with the unleased processes. gpushd is not permitted to end `exempt` of these processes.
fn policy_words(policy: UnleasedPolicy, found: usize, exempt: usize) -> String {
    let them = if found == 1 { "it" } else { "them" };
    match policy {
        UnleasedPolicy::Report => format!("the config has unleased = \"report\", so gpushd does not end {them}"),
        UnleasedPolicy::Warn => {
            format!("the config has unleased = \"warn\", so gpushd logs a warning and does not end {them}")
        }
        UnleasedPolicy::End if exempt == found => {
            format!("the config has unleased = \"end\", but gpushd may not end {them}")
        }
        UnleasedPolicy::End if exempt > 0 => {
            format!("gpushd ends them (SIGTERM, a grace period, SIGKILL), but is not permitted to end {exempt} of them")
        }
        UnleasedPolicy::End => format!("gpushd ends {them}: SIGTERM, a grace period, SIGKILL"),
    }
}

fn table(processes: &[GpuProcess], look: &Appearance) -> Listing {
    use Align::{Left, Right};
    let mut columns = vec![
        ("TARGET", Left),
        ("PID", Right),
        ("USER", Left),
        ("KIND", Left),
        ("GIB", Right),
        ("BELONGS TO", Left),
        ("COMMAND", Left),
    ];
    let unleased = processes.iter().any(|one| one.unleased.is_some());
    if unleased {
        columns.push(("UNLEASED", Left));
    }
    let rows = processes.iter().map(|one| {
        let mut row = row(one, command_columns(unleased, look), look);
        if unleased {
            row.push(unleased_cell(one, look));
        }
        row
    });
    let (columns, rows) =
        widened(&columns, rows.collect(), processes, &[("GPU UUID", &|one| look.clean(one.gpu_uuid.as_str()))], look);
    Listing::new(&columns, rows, Narrow::spare(&["KIND", "GIB"]).prose(), look)
        .names(processes.iter().filter_map(|one| Some(one.process.pid?.to_string())))
        .uuids(processes.iter().map(|one| one.gpu_uuid.clone()))
}

fn row(one: &GpuProcess, room: usize, look: &Appearance) -> Vec<String> {
    let process = &one.process;
    let gpu = match &one.device {
        Some(device) => format!("{}:{}", one.gpu, look.clean(device)),
        None => one.gpu.to_string(),
    };
    let user = match (&process.user, process.uid) {
        (None, None) => None,
        (user, uid) => Some(look.clean(&user_name(user.as_deref(), uid.unwrap_or_default(), one.account.as_deref()))),
    };
    let command = match &process.command {
        Some(command) => look.fit(&look.clean(command), room),
        None if user.is_none() && process.pid.is_none() => process_names::ANOTHER.to_owned(),
        None => NONE.to_owned(),
    };
    vec![
        gpu,
        process.pid.map_or_else(|| NONE.to_owned(), |pid| pid.to_string()),
        user.unwrap_or_else(|| NONE.to_owned()),
        process_names::kind(process.kind).to_owned(),
        process.memory_mib.map_or_else(|| NONE.to_owned(), gib),
        belongs(one, look),
        command,
    ]
}

/// Describes to what a process belongs: the target of an MPS server, a lease, a Slurm job, or a systemd unit.
fn belongs(one: &GpuProcess, look: &Appearance) -> String {
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

/// Explains why a process is unleased, and what gpushd has done about it. Colors each word separately, because a table
/// breaks its cells at blanks.
fn unleased_cell(one: &GpuProcess, look: &Appearance) -> String {
    let Some(why) = &one.unleased else { return String::new() };
    let painted =
        |style, text: &str| look.clean(text).split(' ').map(|w| paint(style, w)).collect::<Vec<_>>().join(" ");
    let done = one.unleased_action.as_ref().map_or_else(String::new, |done| format!("; {}", painted(QUIET, done)));
    format!("{} {}{done}", paint(BAD, "!"), painted(NOTE, why))
}

#[cfg(test)]
mod tests {
    use gpush_api::Code;

    use super::*;

    #[test]
    fn gpus_whose_processes_are_unknown_for_one_reason_share_an_error() {
        let of = |gpu: GpuIndex, cause: &str| UnknownProcesses {
            gpu,
            gpu_uuid: format!("GPU-{gpu}").into(),
            error: ApiError::new(Code::DriverError, format!("GPU {gpu} (GPU-{gpu}): {USERS_UNKNOWN}")).cause(cause),
        };
        let all = [
            of(GpuIndex(0), "in maintenance"),
            of(GpuIndex(1), "in maintenance"),
            of(GpuIndex(2), "lost"),
            of(GpuIndex(3), "in maintenance"),
        ];
        let messages: Vec<String> = unknown(&all).into_iter().map(|error| error.message).collect();
        assert_eq!(messages, [format!("GPUs 0-1, 3: {USERS_UNKNOWN}"), format!("GPU 2 (GPU-2): {USERS_UNKNOWN}")]);
    }
}
