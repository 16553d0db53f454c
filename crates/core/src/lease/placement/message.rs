//! Error messages for requests that cannot be placed.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{ApiError, Code, ComputeMode, GpuIndex, GpuState, LOST_GPU_HINT, LeaseKind, Mode};

use super::{
    Closed, FreeShare, GpuOffer, Host, NoAssignment, Obstacle, PlacementPolicy, PlacementRequest, RequestedDevice,
    RequestedShare, Unoffered,
    error_context::{ErrorContext, percent},
    gang, nominal_mib,
    obstacle_text::{busy, cause, verb_for},
    other_requests::{fewer, free_elsewhere},
};
use crate::{duration, layout::DYNAMIC, lease::request::flags};

/// Maximum number of GPUs that a message names.
const MOST_NAMED: usize = 16;

impl NoAssignment {
    /// Returns the error for the caller. gpushd adds the leases and processes that hold the
    /// capacity.
    #[must_use]
    pub fn error(&self, wanted: &PlacementRequest, context: ErrorContext<'_>) -> ApiError {
        let what = match (wanted.share.kind(), wanted.count) {
            (LeaseKind::Mig, 1) => "a MIG device".to_owned(),
            (LeaseKind::Mig, count) => format!("{count} MIG devices"),
            (LeaseKind::Mps, _) => "an MPS share".to_owned(),
            (LeaseKind::Timeslice, _) => "a time-slice replica".to_owned(),
            (LeaseKind::Whole, 1) => "a whole GPU".to_owned(),
            (LeaseKind::Whole, count) => format!("{count} whole GPUs"),
        };
        let error = |code, why: String| ApiError::new(code, format!("cannot grant {what}: {why}"));
        let (gpus, is_one) = named_gpus(wanted);
        let verb = |one: &str, several: &str| format!("{gpus} {}", if is_one { one } else { several });
        match self {
            Self::NotOffered { offered, unoffered, .. } if offered.is_empty() => {
                let code = unoffered_code(unoffered.iter());
                let now = if code == Code::Blocked { " now" } else { "" };
                let mut error = error(code, format!("{gpus} cannot be leased{now}"));
                error.retryable = code == Code::Blocked;
                error.causes.extend(
                    unoffered.iter().take(MOST_NAMED).flat_map(|(gpu, why)| unoffered_causes(*gpu, *why, context)),
                );
                error.hint(
                    free_elsewhere(wanted, context)
                        .or_else(|| apply_hint(unoffered.iter()))
                        .unwrap_or_else(|| "choose other GPUs: `gpushctl status` shows the modes".to_owned()),
                )
            }
            Self::NotOffered { kind, offered, unoffered } => {
                let kinds: Vec<&str> = offered.iter().map(|(kind, _)| kind.name()).collect();
                let would_offer: Vec<_> = unoffered.iter().filter(|(_, why)| kind_of(*why) == Some(*kind)).collect();
                if !would_offer.is_empty() {
                    let code = unoffered_code(would_offer.iter().copied());
                    let mut error = error(code, format!("no GPU offers leases of kind {kind} now"));
                    error.retryable = code == Code::Blocked;
                    let named = would_offer.iter().take(MOST_NAMED);
                    let causes = named.flat_map(|(gpu, why)| unoffered_causes(*gpu, *why, context));
                    error.causes.extend(causes);
                    error.causes.push(format!("the other GPUs offer only leases of kind {}", kinds.join(", ")));
                    error.hint = free_elsewhere(wanted, context).or_else(|| apply_hint(would_offer.into_iter()));
                    return error;
                }
                let selected = context.host.selected(wanted);
                let mut requests = match &wanted.share {
                    // A request by size stays as large in another kind of lease.
                    RequestedShare::Mig(device @ RequestedDevice::AtLeast { .. }) => {
                        context.large_enough(&selected, device)
                    }
                    _ => Vec::new(),
                };
                if requests.is_empty() {
                    requests.extend(offered.iter().filter_map(|(_, one)| context.permitted(&selected, one)));
                }
                let offer = format!("{} only leases of kind {}", verb("offers", "offer"), kinds.join(", "));
                let mut error = error(Code::Unsupported, offer).hint(match requests.first() {
                    None => "choose other GPUs; `gpushctl quota` shows what you may lease".to_owned(),
                    Some(first) => {
                        let examples: Vec<String> =
                            requests.iter().map(|request| format!("`{}`", flags(request))).collect();
                        let (examples, first, gpus) = (examples.join(" or "), flags(first), gpu_option(wanted));
                        format!("request {examples}, as with `gpushctl run {first}{gpus} -- COMMAND`")
                    }
                });
                error.causes.extend(pending(wanted, context));
                error
            }
            Self::UnknownProfile { profile, nearest } => {
                let has_not = match wanted.gpus {
                    Some(_) => format!("{} not have the profile {profile}", verb("does", "do")),
                    None => format!("no GPU has the profile {profile}"),
                };
                let error = error(Code::UnknownProfile, has_not);
                let near = nearest.iter().map(String::as_str);
                let near: Vec<&str> = near.filter(|name| context.permits_device_somewhere(name)).collect();
                match near.as_slice() {
                    [] => error.hint("list the profiles with `gpushctl mig profiles`"),
                    near => error.hint(format!(
                        "did you mean {}? List the profiles with `gpushctl mig profiles`",
                        near.join(" or ")
                    )),
                }
            }
            Self::SharedThroughMps(devices) => {
                let names: Vec<&str> = devices.iter().take(MOST_NAMED).map(|(_, name)| name.as_str()).collect();
                let first = names.first().copied().unwrap_or_default();
                let gpus: BTreeSet<GpuIndex> = devices.iter().map(|(gpu, _)| *gpu).collect();
                let changes: Vec<String> = gpus.into_iter().flat_map(|gpu| pending_of(gpu, context)).collect();
                let (are, wait) = match (names.len(), changes.is_empty()) {
                    (1, true) => ("is shared", ""),
                    (_, true) => ("are shared", ""),
                    // The devices are shared only after the change.
                    (_, false) => ("will be shared", " --wait"),
                };
                let devices = if names.len() == 1 { "MIG device" } else { "MIG devices" };
                let end = context.duration.map_or_else(String::new, |d| format!(" --for {}", duration::format(d)));
                let mut error = error(Code::Unsupported, format!("{devices} {} {are} through MPS", names.join(", ")));
                let named = first.split_once(':').and_then(|(gpu, device)| Some((gpu.parse().ok()?, device)));
                let share = named.and_then(|(gpu, device): (u32, &str)| {
                    let memory_mib = nominal_mib(device).unwrap_or_default();
                    context.largest_percentage(GpuIndex(gpu), memory_mib, 250)
                });
                error.hint = share.map(|tenths| {
                    let share = percent(tenths);
                    format!(
                        "request a share of the device: `gpushctl lease request --mps {share} --target {first}{end}{wait}`"
                    )
                });
                error.causes.extend(changes);
                error
            }
            Self::TooLarge { most: 0 } => {
                let too_small = match wanted.gpus {
                    Some(_) => format!("{} not meet the request, even when idle", verb("does", "do")),
                    None => "no GPU meets the request, not even an idle one".to_owned(),
                };
                let mut error = error(Code::BadRequest, too_small);
                error.causes.extend(layouts(wanted, context));
                error.hint(too_large_hint(wanted, context, flag))
            }
            Self::TooLarge { most } => {
                error(Code::BadRequest, format!("{} room for only {most}, even when idle", verb("has", "have")))
                    .hint(fewer(*most, wanted, context))
            }
            Self::Busy { obstacles, free } => {
                let is_lost = |index| context.gpus.iter().any(|gpu| gpu.index == index && gpu.state == GpuState::Lost);
                let mut error = if obstacles.iter().all(|(index, _)| is_lost(*index)) {
                    // Only a reboot of the host brings the GPUs back, so the request must not be repeated.
                    error(Code::Blocked, verb_for(obstacles, "is lost", "are lost")).hint(LOST_GPU_HINT)
                } else {
                    error(Code::Blocked, busy(obstacles, wanted, context.host)).retryable()
                };
                for (gpu, obstacle) in obstacles.iter().take(MOST_NAMED) {
                    let reasons = match obstacle {
                        Obstacle::Closed(_) => {
                            context.gpus.iter().find(|one| one.index == *gpu).map_or(&[][..], |gpu| &gpu.reasons)
                        }
                        _ => &[],
                    };
                    let changes = match obstacle {
                        Obstacle::Closed(Closed::Pending) => pending_of(*gpu, context),
                        _ => Vec::new(),
                    };
                    if !changes.is_empty() {
                        error.causes.extend(changes);
                        continue;
                    }
                    error.causes.extend(match (reasons, obstacles.as_slice()) {
                        _ if matches!(
                            obstacle,
                            Obstacle::Closed(Closed::Prohibited | Closed::StillShared | Closed::NotShared)
                        ) =>
                        {
                            vec![cause(*gpu, *obstacle, wanted, context.host)]
                        }
                        // The message already names the state of the only GPU.
                        (reasons, [(_, Obstacle::Closed(_))]) => reasons.to_vec(),
                        ([], _) => vec![cause(*gpu, *obstacle, wanted, context.host)],
                        (reasons, _) => reasons.iter().map(|reason| format!("GPU {gpu}: {reason}")).collect(),
                    });
                }
                let open = obstacles.iter().filter(|(_, one)| *one != Obstacle::Closed(Closed::Pending));
                error.causes.extend(open.flat_map(|(gpu, _)| pending_of(*gpu, context)).take(MOST_NAMED));
                error.hint = error.hint.or_else(|| free_elsewhere(wanted, context));
                error.hint = error.hint.or_else(|| compute_mode_hint(obstacles, context.host));
                error.hint = error.hint.or_else(|| share_hint(obstacles));
                if let Some(more) = obstacles.len().checked_sub(MOST_NAMED).filter(|more| *more > 0) {
                    error = error.cause(format!("other GPUs that are in use: {more}"));
                }
                // The user can have the same share on another GPU.
                match free.as_ref().filter(|_| free_elsewhere(wanted, context).is_none()) {
                    None => error,
                    Some(FreeShare::Percentage { gpu, tenths }) => {
                        let offer = context.host.gpus.iter().find(|offer| offer.index == *gpu);
                        let target_mib = offer.iter().flat_map(|offer| &offer.mps).map(|mps| mps.memory_mib).max();
                        let possible = context.largest_percentage(*gpu, target_mib.unwrap_or_default(), *tenths);
                        let free = percent(*tenths);
                        let mut error = error.cause(format!("GPU {gpu} has the most free capacity: {free} %"));
                        if let Some(tenths) = possible {
                            error.hint = Some(format!("request {} % or less", percent(tenths)));
                        }
                        error
                    }
                    Some(FreeShare::Larger { gpu, profile } | FreeShare::Smaller { gpu, profile })
                        if wanted.count == 1 && !context.permits_device(*gpu, profile) =>
                    {
                        error
                    }
                    Some(FreeShare::Larger { gpu, profile }) if wanted.count == 1 => error
                        .cause(format!("the smallest free MIG device that is large enough is {profile}, on GPU {gpu}"))
                        .hint(format!("request {}", device_flag(profile))),
                    Some(FreeShare::Smaller { gpu, profile }) if wanted.count == 1 => error
                        .cause(format!("the largest free MIG device is {profile}, on GPU {gpu}"))
                        .hint(format!("request {}", device_flag(profile))),
                    Some(FreeShare::Larger { .. } | FreeShare::Smaller { .. }) => {
                        error.hint("request fewer MIG devices")
                    }
                }
            }
        }
    }
}

impl NoAssignment {
    /// Returns the hint for the user of a Slurm job, if it differs from the hint of [`Self::error`].
    #[must_use]
    pub fn hint_for_job(&self, wanted: &PlacementRequest, context: ErrorContext<'_>) -> Option<String> {
        let offered = match self {
            Self::NotOffered { offered, .. } => offered,
            Self::TooLarge { most: 0 } => return Some(too_large_hint(wanted, context, comment)),
            Self::Busy {
                free: Some(FreeShare::Larger { gpu, profile } | FreeShare::Smaller { gpu, profile }), ..
            } if wanted.count == 1 && context.permits_device(*gpu, profile) => {
                return Some(format!("submit the job with {}", device_comment(profile)));
            }
            Self::UnknownProfile { .. } | Self::SharedThroughMps(_) | Self::TooLarge { .. } | Self::Busy { .. } => {
                return None;
            }
        };
        let selected = context.host.selected(wanted);
        let requests = offered.iter().filter_map(|(_, request)| context.permitted(&selected, request));
        let options = requests.map(|request| format!("`--comment=gpush:{request}`")).collect::<Vec<_>>();
        (!options.is_empty()).then(|| format!("submit the job with {}", options.join(" or ")))
    }
}

/// Returns the names of the GPUs that a request may use, and whether there is exactly one such GPU.
fn named_gpus(wanted: &PlacementRequest) -> (String, bool) {
    let indexes: Vec<GpuIndex> = wanted.gpus.iter().flatten().copied().collect();
    match indexes.as_slice() {
        [] => ("the GPUs".to_owned(), false),
        some if some.len() <= MOST_NAMED => (gpu_names(some), some.len() == 1),
        _ => ("the selected GPUs".to_owned(), false),
    }
}

/// Returns the option that selects the GPUs of a request: ` -g 0,2`. Empty if the request may use all GPUs, or too many
/// to name.
fn gpu_option(wanted: &PlacementRequest) -> String {
    let indexes: Vec<String> = wanted.gpus.iter().flatten().map(GpuIndex::to_string).collect();
    if (1..=MOST_NAMED).contains(&indexes.len()) { format!(" -g {}", indexes.join(",")) } else { String::new() }
}

/// Names GPUs: `GPU 3`, or `GPUs 0, 2`.
fn gpu_names(indexes: &[GpuIndex]) -> String {
    let names: Vec<String> = indexes.iter().map(GpuIndex::to_string).collect();
    format!("GPU{} {}", if names.len() == 1 { "" } else { "s" }, names.join(", "))
}

/// Describes the pending changes of a GPU, one clause each.
fn pending_of(gpu: GpuIndex, context: ErrorContext<'_>) -> Vec<String> {
    let of_gpu = context.host.gpus.iter().filter(|one| one.index == gpu);
    of_gpu.flat_map(|gpu| gpu.pending.iter().map(|change| change.describe(gpu.index))).collect()
}

/// Describes the pending changes of the GPUs that a request may use.
fn pending(wanted: &PlacementRequest, context: ErrorContext<'_>) -> Vec<String> {
    let selected = context.host.selected(wanted);
    selected.gpus.iter().flat_map(|gpu| pending_of(gpu.index, context)).take(MOST_NAMED).collect()
}

/// Returns why a GPU offers no lease, one clause for each reason.
fn unoffered_causes(gpu: GpuIndex, why: Unoffered, context: ErrorContext<'_>) -> Vec<String> {
    match why {
        Unoffered::Pending(_) => pending_of(gpu, context),
        Unoffered::NotReady(_)
        | Unoffered::NoRule
        | Unoffered::Unmanaged
        | Unoffered::OtherMode(_)
        | Unoffered::NoMps
        | Unoffered::Reboot(_) => vec![unoffered_cause(gpu, why)],
    }
}

/// Returns the code of the error that GPUs offer nothing: `blocked` if a GPU will offer leases without a change of the
/// config or a command.
fn unoffered_code<'a>(mut unoffered: impl Iterator<Item = &'a (GpuIndex, Unoffered)>) -> Code {
    let changes_later = |why: &Unoffered| match why {
        Unoffered::Pending(_) | Unoffered::NotReady(_) | Unoffered::Reboot(_) => true,
        Unoffered::NoRule | Unoffered::Unmanaged | Unoffered::NoMps | Unoffered::OtherMode(_) => false,
    };
    if unoffered.any(|(_, why)| changes_later(why)) { Code::Blocked } else { Code::Unsupported }
}

fn unoffered_cause(gpu: GpuIndex, why: Unoffered) -> String {
    match why {
        Unoffered::Pending(mode) => format!("GPU {gpu} changes to mode `{}` later", mode.name()),
        Unoffered::Reboot(mode) => {
            format!("GPU {gpu} gets mode `{}` when this virtual machine reboots", mode.name())
        }
        Unoffered::NotReady(_) => format!("GPU {gpu} is not ready"),
        Unoffered::NoRule => format!("no rule of the config claims GPU {gpu}"),
        Unoffered::Unmanaged => format!("GPU {gpu} has mode `unmanaged`: gpushd grants no leases on it"),
        Unoffered::NoMps => format!("the rule of GPU {gpu} has mode `mps`, which the GPU does not support"),
        Unoffered::OtherMode(mode) => format!("GPU {gpu} is not in mode `{}`, which its rule requires", mode.name()),
    }
}

/// Returns the kind of lease that a GPU would offer in the mode of its rule.
fn kind_of(why: Unoffered) -> Option<LeaseKind> {
    let mode = match why {
        Unoffered::OtherMode(mode) | Unoffered::NotReady(mode) | Unoffered::Pending(mode) | Unoffered::Reboot(mode) => {
            mode
        }
        Unoffered::NoRule | Unoffered::Unmanaged | Unoffered::NoMps => return None,
    };
    match mode {
        Mode::Mig => Some(LeaseKind::Mig),
        Mode::Mps => Some(LeaseKind::Mps),
        Mode::Timeslice => Some(LeaseKind::Timeslice),
        Mode::Exclusive => Some(LeaseKind::Whole),
        Mode::NoRule | Mode::Unmanaged => None,
    }
}

/// Returns the hint to bring GPUs to the mode of their rules; `None` if no GPU is in another mode.
fn apply_hint<'a>(unoffered: impl Iterator<Item = &'a (GpuIndex, Unoffered)>) -> Option<String> {
    let differ = unoffered.filter(|(_, why)| matches!(why, Unoffered::OtherMode(_)));
    let gpus: Vec<String> = differ.map(|(gpu, _)| gpu.to_string()).collect();
    let text =
        || format!("to bring the GPUs to the mode of their rules: `gpushctl apply {}` (administrator)", gpus.join(","));
    (!gpus.is_empty()).then(text)
}

/// Returns the hint to let programs use GPUs in compute mode PROHIBITED; `None` if there is no such GPU.
fn compute_mode_hint(obstacles: &[(GpuIndex, Obstacle)], host: &Host) -> Option<String> {
    let prohibited = obstacles.iter().filter(|(_, obstacle)| *obstacle == Obstacle::Closed(Closed::Prohibited));
    let offers = prohibited.filter_map(|(index, _)| host.gpus.iter().find(|gpu| gpu.index == *index));
    let by_rule = |gpu: &&GpuOffer| gpu.timeslice.is_some_and(|one| one.compute_mode == Some(ComputeMode::Prohibited));
    let (ruled, offers): (Vec<&GpuOffer>, Vec<&GpuOffer>) = offers.partition(by_rule);
    if let ([gpu, ..], []) = (ruled.as_slice(), offers.as_slice()) {
        let rule = "its `compute_mode` keeps all programs from the GPU";
        return Some(format!("an administrator can change the rule of GPU {}: {rule}", gpu.index));
    }
    let (indexes, uuids): (Vec<GpuIndex>, Vec<&str>) =
        offers.into_iter().take(MOST_NAMED).map(|gpu| (gpu.index, gpu.uuid.as_str())).unzip();
    (!uuids.is_empty()).then(|| {
        let gpus = gpu_names(&indexes);
        format!("`nvidia-smi -i {} -c DEFAULT` lets programs use {gpus} again (administrator)", uuids.join(","))
    })
}

/// Returns the hint to start the MPS daemons of GPUs; `None` if no GPU lacks the daemon
/// that its rule requires.
fn share_hint(obstacles: &[(GpuIndex, Obstacle)]) -> Option<String> {
    let not_shared = obstacles.iter().filter(|(_, obstacle)| *obstacle == Obstacle::Closed(Closed::NotShared));
    let gpus: Vec<GpuIndex> = not_shared.take(MOST_NAMED).map(|(index, _)| *index).collect();
    let list = || gpus.iter().map(GpuIndex::to_string).collect::<Vec<_>>().join(",");
    (!gpus.is_empty())
        .then(|| format!("`gpushctl apply {}` shares {} through MPS (administrator)", list(), gpu_names(&gpus)))
}

/// Says where the selected GPUs get their static layouts from, one sentence for each layout.
fn layouts(wanted: &PlacementRequest, context: ErrorContext<'_>) -> Vec<String> {
    if wanted.share.kind() != LeaseKind::Mig {
        return Vec::new();
    }
    let selected = context.host.selected(wanted);
    let mut gpus_of: BTreeMap<(String, Option<String>), Vec<GpuIndex>> = BTreeMap::new();
    for gpu in context.gpus.iter().filter(|gpu| selected.gpus.iter().any(|one| one.index == gpu.index)) {
        let Some(layout) = gpu.layout.as_ref().filter(|layout| gpu.mode == Mode::Mig && **layout != [DYNAMIC]) else {
            continue;
        };
        let by =
            gpu.overridden.as_ref().map(|one| one.by.user.clone().unwrap_or_else(|| format!("uid {}", one.by.uid)));
        gpus_of.entry((layout.join(", "), by)).or_default().push(gpu.index);
    }
    let sentence = |((layout, by), gpus): ((String, Option<String>), Vec<GpuIndex>)| {
        let gpus = gpu_names(&gpus);
        match by {
            None => format!("the layout of {gpus} is {layout}"),
            Some(by) => {
                format!("an override of {by} sets the layout {layout} on {gpus}; `gpushctl config overrides` shows it")
            }
        }
    };
    gpus_of.into_iter().take(MOST_NAMED).map(sentence).collect()
}

/// Returns the option that requests a MIG device on a command line.
fn device_flag(profile: &str) -> String {
    flag(&format!("mig={profile}"))
}

/// Returns the options of a request on a command line.
fn flag(request: &str) -> String {
    format!("`{}`", flags(request))
}

/// Returns the option with which a Slurm job requests a MIG device.
fn device_comment(profile: &str) -> String {
    comment(&format!("mig={profile}"))
}

/// Returns the option with which a Slurm job makes a request.
fn comment(request: &str) -> String {
    format!("`--comment=gpush:{request}`")
}

/// Returns what the user can do about a request that the selected GPUs cannot meet even when idle.
fn too_large_hint(wanted: &PlacementRequest, context: ErrorContext<'_>, request_of: impl Fn(&str) -> String) -> String {
    let selected = context.host.selected(wanted);
    let elsewhere = PlacementRequest { gpus: None, targets: None, ..wanted.clone() };
    let could_meet = |gpu: &&GpuOffer| {
        context.allowed.is_none_or(|allowed| allowed.contains(&gpu.index))
            && selected.gpus.iter().all(|one| one.index != gpu.index)
            && gang::capacity(&gpu.emptied(), &elsewhere, PlacementPolicy::Pack) >= wanted.count
    };
    let others: Vec<String> = context.host.gpus.iter().filter(could_meet).map(|gpu| gpu.index.to_string()).collect();
    if !others.is_empty() {
        return format!("choose a GPU that can meet the request: `-g {}`", others.join(","));
    }
    match &wanted.share {
        RequestedShare::Mig(device) => {
            let migs = || selected.gpus.iter().filter_map(|gpu| Some((gpu.index, gpu.mig.as_ref()?)));
            let instances = migs().flat_map(|(gpu, mig)| mig.instances.iter().map(move |one| (gpu, one)));
            let devices = instances
                .flat_map(|(gpu, one)| one.devices.iter().map(move |device| (gpu, one.placement.size, device)));
            let granted =
                devices.filter(|(gpu, _, device)| !device.shared && context.permits_device(*gpu, &device.profile));
            let mut sizes: BTreeSet<(u8, &str)> =
                granted.map(|(_, size, device)| (size, device.profile.as_str())).collect();
            if migs().any(|(_, mig)| mig.dynamic) {
                sizes.clear();
            }
            let enough = if wanted.count == 1 { context.large_enough(&selected, device) } else { Vec::new() };
            let joined = |requests: Vec<String>| {
                requests.iter().map(|request| request_of(request)).collect::<Vec<_>>().join(" or ")
            };
            let devices = joined(sizes.iter().rev().map(|(_, name)| format!("mig={name}")).collect());
            // The devices of a layout can be larger than a requested profile, but not than a requested size.
            let is_size = matches!(device, RequestedDevice::AtLeast { .. });
            match (enough.is_empty(), sizes.is_empty()) {
                (true, true) => "request less; `gpushctl status` shows what the GPUs have".to_owned(),
                (true, false) if is_size => format!("request less: {devices}"),
                (true, false) => format!("request {devices}"),
                (false, true) => format!("request {}", joined(enough)),
                (false, false) if is_size => format!("request {}; or less: {devices}", joined(enough)),
                (false, false) => format!("request {} or {devices}", joined(enough)),
            }
        }
        RequestedShare::Mps { .. } => "request less; `gpushctl status` shows what the GPUs have".to_owned(),
        RequestedShare::Timeslice | RequestedShare::Whole => "`gpushctl status` shows what the GPUs have".to_owned(),
    }
}
