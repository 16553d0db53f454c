//! Refusals as errors: one sentence that names the GPU and the reason, and a hint.
//!
//! A refusal is data ([`gpush_api::Refusal`]), so that programs can use it. Only this module
//! converts refusals to text, for gpushd and for offline `gpushctl`.

use gpush_api::{ApiError, Blocker, Code, GpuIndex, LeaseUse, Process, Refusal, Remedy};

use crate::{holders, lease::usage, plan::PartialRestore};

/// Returns the error for a refusal on the GPU with this index. `gpu` is the GPU's name in the
/// sentence, such as `GPU 0 (A100-SXM4-80GB)`.
#[must_use]
pub fn explain(refusal: &Refusal, index: GpuIndex, gpu: &str) -> ApiError {
    let profiles = format!("gpushctl mig profiles --gpu {index}");
    match refusal {
        Refusal::UnknownProfile { profile, nearest } => {
            let error = ApiError::new(Code::UnknownProfile, format!("{gpu} has no profile {profile}"));
            match nearest.as_slice() {
                [] => error.hint(format!("run `{profiles}` to see the profiles of this GPU")),
                names => error.hint(format!(
                    "did you mean {}? Run `{profiles}` to see the profiles of this GPU",
                    list(names, "or")
                )),
            }
        }
        Refusal::NoSuchPlacement { profile, start, possible } => {
            let starts: Vec<String> = possible.iter().map(u8::to_string).collect();
            ApiError::new(Code::LayoutImpossible, format!("on {gpu} a {profile} can't start at memory slice {start}"))
                .hint(match starts.as_slice() {
                    [] => format!("run `{profiles}` to see the profiles of this GPU"),
                    starts => format!(
                        "write a start of {}; `{profiles}` shows the placements of each profile",
                        list(starts, "or")
                    ),
                })
        }
        Refusal::PlacementsOverlap { first, second } => {
            ApiError::new(Code::LayoutImpossible, format!("on {gpu} the placements of {first} and {second} overlap"))
                .hint(format!("leave out one @START, or run `{profiles}` to see where each instance can be placed"))
        }
        Refusal::TooMany { profile, wanted, most } => {
            let instances = if *most == 1 { "instance" } else { "instances" };
            let message =
                format!("{gpu} has room for at most {most} {instances} of {profile}, but the layout has {wanted}");
            ApiError::new(Code::LayoutImpossible, message)
                .hint(format!("use at most {most}, or a smaller profile: `{profiles}` lists the profiles"))
        }
        Refusal::TooManySlices { kind, wanted, have } => ApiError::new(
            Code::LayoutImpossible,
            format!("the layout needs {wanted} {kind} slices, but {gpu} has {have}"),
        )
        .hint(format!("use fewer or smaller instances: `{profiles}` shows the slices of each profile")),
        Refusal::NoEngine { engine, wanted, have } => ApiError::new(
            Code::LayoutImpossible,
            format!("the layout needs {wanted} {} engines, but {gpu} has {have}", engine_name(engine)),
        )
        .hint(format!("use profiles without that engine: `{profiles}` shows the engines of each profile")),
        Refusal::NoArrangement { entries } => ApiError::new(
            Code::LayoutImpossible,
            format!("{} cannot be placed together on {gpu}", list(&counted(entries), "and")),
        )
        .cause("there are enough slices and engines, but in each arrangement some placements overlap")
        .hint(format!("`{profiles}` shows the placements of each profile")),
        Refusal::ComputeDoesNotFit { profile, compute } => ApiError::new(
            Code::LayoutImpossible,
            format!("on {gpu} the compute instances {} do not fit into {profile}", list(&counted(compute), "and")),
        )
        .hint(format!("`{profiles}` shows the compute instances that fit into a {profile}")),
        Refusal::Blocked { blockers } => blocked(&format!("cannot apply the layout to {gpu}"), index, blockers),
        Refusal::Held { holders, leases } => holders::explain(gpu, holders, leases),
        Refusal::Reboot { enables } => reboot_error(gpu, *enables),
        Refusal::NoMig => ApiError::new(Code::Unsupported, format!("{gpu} does not support MIG"))
            .remedy(Remedy::ChooseMigGpus, "choose GPUs that support it: `gpushctl gpu list` shows them"),
    }
}

/// Returns the error for a refusal to disable MIG mode, like [`explain`].
#[must_use]
pub fn explain_mig_off(refusal: &Refusal, index: GpuIndex, gpu: &str) -> ApiError {
    match refusal {
        Refusal::Blocked { blockers } => blocked(&format!("cannot disable MIG mode on {gpu}"), index, blockers),
        other => explain(other, index, gpu),
    }
}

/// Returns the error for a previous layout that was restored only in part. `gpu` is the GPU's name
/// in the sentence.
#[must_use]
pub fn partly_restored(partial: &PartialRestore, index: GpuIndex, gpu: &str) -> ApiError {
    let missing: Vec<String> = partial.missing.iter().map(|missing| missing.what.clone()).collect();
    let but = if missing.is_empty() {
        "with additional instances".to_owned()
    } else {
        format!("without {}", list(&counted(&missing), "and"))
    };
    let mut error = ApiError::new(Code::Blocked, format!("{gpu}: the previous layout was restored {but}"));
    for blocker in &partial.stays {
        error = error.cause(match blocker.holders.as_slice() {
            [] if partial.others.contains(&blocker.gi) => {
                format!("{} remains: another program created it in the meantime", instance(blocker))
            }
            [] => format!("{} remains: it may be in use by a process that the driver does not list", instance(blocker)),
            _ => format!("{} remains: it is in use by {}", instance(blocker), held_by(blocker, index)),
        });
    }
    for missing in &partial.missing {
        let behind = partial.stays.iter().filter(|blocker| missing.behind.contains(&blocker.placement));
        let behind: Vec<String> = behind.map(placement_name).collect();
        let verb = if behind.len() == 1 { "is" } else { "are" };
        error = error.cause(format!("{} was not restored: {} {verb} in its place", missing.what, list(&behind, "and")));
    }
    let apply = format!("`gpushctl apply {index}` (administrator)");
    match holders_of(&partial.stays).as_slice() {
        [] => error.hint(format!(
            "run `gpushctl gpu holders {index}` (administrator) to see what has the GPU open, then apply a layout: \
            {apply}"
        )),
        holders => error.hint(format!("stop {}, then apply a layout: {apply}", list(holders, "and"))),
    }
}

/// Returns the error for a GPU whose MIG mode changes when its virtual machine reboots.
fn reboot_error(gpu: &str, enables: bool) -> ApiError {
    let to = if enables { "on" } else { "off" };
    let message = format!("MIG mode of {gpu} turns {to} only when this virtual machine reboots");
    ApiError::new(Code::Conflict, message)
        .cause("the mode is set, but a virtual machine cannot reset the GPU")
        .hint("reboot this virtual machine; if the GPU then still differs, repeat the command")
}

/// Returns the error for instances in use. `failure` says what failed.
fn blocked(failure: &str, index: GpuIndex, blockers: &[Blocker]) -> ApiError {
    let names: Vec<String> = blockers.iter().map(placement_name).collect();
    let verb = if blockers.len() == 1 { "is" } else { "are" };
    let mut error =
        ApiError::new(Code::Blocked, format!("{failure}: {} {verb} in use", list(&names, "and"))).retryable();
    for blocker in blockers {
        error = error.cause(format!("{} is held by {}", instance(blocker), held_by(blocker, index)));
    }
    let mut leases: Vec<LeaseUse> = blockers.iter().flat_map(|blocker| blocker.leases.iter().cloned()).collect();
    leases.sort_by_key(|lease| lease.id);
    let stop = holders_of(blockers);
    if let Some(hint) = usage::hint(leases.iter().map(|lease| lease.id)) {
        error.hint(hint)
    } else if stop.is_empty() {
        error.hint("run `gpushctl status` to see what uses the GPU, and try again when the instances are not in use")
    } else {
        error.hint(wait_hint(&stop))
    }
}

/// Returns the hint for holders of instances. The caller can stop only holders with a pid.
fn wait_hint(holders: &[String]) -> String {
    let (pids, others): (Vec<String>, Vec<String>) = holders.iter().cloned().partition(|one| one.starts_with("pid"));
    let them = if pids.len() == 1 { "it" } else { "them" };
    match (pids.is_empty(), others.is_empty()) {
        (false, true) => format!("stop {}, or wait for {them} to end, and try again", list(&pids, "and")),
        (false, false) => {
            format!("stop {}, wait for {} to end, and try again", list(&pids, "and"), list(&others, "and"))
        }
        (true, _) => format!("wait for {} to end, and try again", list(&others, "and")),
    }
}

/// Returns each holder once, in a short form for a hint. The causes of the error contain the
/// details.
fn holders_of(blockers: &[Blocker]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for process in blockers.iter().flat_map(|blocker| &blocker.holders) {
        let name = match (process.pid, &process.command) {
            (Some(pid), _) => format!("pid {pid}"),
            // This holder is a lease. The cause of the error names the lease.
            (None, Some(_)) => "the lease".to_owned(),
            (None, None) => "the other processes that use the GPU".to_owned(),
        };
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names.sort_by_key(|name| !name.starts_with("pid"));
    names
}

/// Describes the holders of one instance. If the caller may not see some holders, names the command
/// that shows these holders to users with permission.
fn held_by(blocker: &Blocker, index: GpuIndex) -> String {
    let (named, hidden): (Vec<&Process>, Vec<&Process>) = blocker.holders.iter().partition(|one| one.pid.is_some());
    // The end of a lease comes last, so that it does not look like the end of a process.
    let mut holders: Vec<String> = named.into_iter().map(holder).collect();
    holders.extend(blocker.leases.iter().map(LeaseUse::to_string));
    let leases: Vec<String> = hidden.iter().filter_map(|one| one.command.clone()).collect();
    if hidden.len() > leases.len() || (holders.is_empty() && leases.is_empty()) {
        let whose = format!("`gpushctl gpu show {index}` shows this process to its owner and to administrators");
        holders.push(format!("a process ({whose})"));
    }
    holders.extend(leases);
    list(&holders, "and")
}

/// Returns profile and start: `3g.40gb@0`.
fn placement_name(blocker: &Blocker) -> String {
    format!("{}@{}", blocker.profile, blocker.placement.start)
}

/// Returns profile, start and ids: `3g.40gb@0 (GPU instance 2, compute instance 0)`. If the compute
/// instance has a profile with another name, the text also contains that profile.
fn instance(blocker: &Blocker) -> String {
    let name = placement_name(blocker);
    match (blocker.ci, &blocker.compute_profile) {
        (Some(ci), None) => format!("{name} (GPU instance {}, compute instance {ci})", blocker.gi),
        (Some(ci), Some(profile)) => {
            format!("{name} (GPU instance {}, compute instance {ci} of profile {profile})", blocker.gi)
        }
        (None, _) => format!("{name} (GPU instance {})", blocker.gi),
    }
}

/// Describes a process that holds an instance. The text contains all known facts:
/// `pid 4711 (alice, python train.py)`.
#[must_use]
pub fn holder(process: &Process) -> String {
    let about: Vec<&str> = [process.user.as_deref(), process.command.as_deref()].into_iter().flatten().collect();
    match (process.pid, about.as_slice()) {
        (Some(pid), []) => format!("pid {pid}"),
        (Some(pid), about) => format!("pid {pid} ({})", about.join(", ")),
        (None, []) => "a process".to_owned(),
        (None, about) => format!("a process ({})", about.join(", ")),
    }
}

fn engine_name(engine: &str) -> &str {
    match engine {
        "jpeg" => "JPEG",
        "ofa" => "optical flow (OFA)",
        "decoder" => "video decoder",
        "encoder" => "video encoder",
        other => other,
    }
}

/// Combines equal words, with their count: `2g.20gb*3`.
fn counted(words: &[String]) -> Vec<String> {
    let mut counts: Vec<(&String, u32)> = Vec::new();
    for word in words {
        match counts.iter_mut().find(|(known, _)| *known == word) {
            Some((_, count)) => *count += 1,
            None => counts.push((word, 1)),
        }
    }
    let text = |(word, count): (&String, u32)| if count == 1 { word.clone() } else { format!("{word}*{count}") };
    counts.into_iter().map(text).collect()
}

/// Maximum number of words in a list.
const MOST_NAMED: usize = 8;

/// Joins words to a list: `a`, `a or b`, `a, b or c`. Of many words, joins the first ones, with the number of the others:
/// `a, b and 12 more`.
#[must_use]
pub fn list(words: &[String], last: &str) -> String {
    match words {
        // Name one word more than the limit: the text `1 more` would take as much space.
        many if many.len() > MOST_NAMED + 1 => {
            format!("{} {last} {} more", many[..MOST_NAMED].join(", "), many.len() - MOST_NAMED)
        }
        [] => String::new(),
        [one] => one.clone(),
        [first @ .., end] => format!("{} {last} {end}", first.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_list_is_folded() {
        let words = |number: u32| (1..=number).map(|pid| format!("pid {pid}")).collect::<Vec<_>>();
        assert_eq!(list(&words(2), "and"), "pid 1 and pid 2");
        assert!(list(&words(9), "and").ends_with("pid 8 and pid 9"));
        assert_eq!(list(&words(20), "and"), "pid 1, pid 2, pid 3, pid 4, pid 5, pid 6, pid 7, pid 8 and 12 more");
    }
}
