//! Time-sliced GPUs: their level, and whether the driver supports levels.

use gpush_api::{Gpu, GpuState, LeaseKind, LeaseUse, TimesliceState, TimesliceView};

use super::{
    Appearance,
    appearance::{NOTE, QUIET, STRONG, count, pad, paint, product},
    listing::{Listing, widened},
    names, process_names,
    table::{Align, Narrow},
};

/// What time-slicing does not provide. gpushctl says so wherever it shows a time-sliced GPU.
const LIMITS: &str = "no memory or fault isolation, no guaranteed share";

/// Describes the time-slice level of a GPU: `time-slice level long`.
pub(crate) fn level(turns: &TimesliceView) -> String {
    match (turns.state, turns.level) {
        (TimesliceState::Known, Some(level)) => format!("time-slice level {level}"),
        (TimesliceState::Unsupported, _) => "no time-slice levels".to_owned(),
        (TimesliceState::Known | TimesliceState::Unknown, _) => "time-slice level not known".to_owned(),
    }
}

/// Draws the line about time-slicing below a GPU in `status`. If there is a problem, adds a note.
pub(crate) fn below(gpu: &Gpu, indent: usize, look: &Appearance) -> Vec<String> {
    let Some(turns) = &gpu.timeslice else { return Vec::new() };
    let margin = " ".repeat(indent);
    let read = read(turns, look);
    let text = format!("{}, {}{read}: {LIMITS}", count(turns.replicas as usize, "replica"), level(turns));
    let mut out = look.wrap(&format!("{margin}time-sliced  "), &look.clean(&text));
    out.iter_mut().for_each(|line| *line = paint(QUIET, line));
    if let Some(why) = trouble(turns) {
        let lines = look.wrap(&format!("{margin}! level: "), &look.clean(why));
        out.extend(lines.iter().map(|line| paint(NOTE, line)));
    }
    out
}

/// Describes when the level was read. This may be earlier than the reading of the GPU.
fn read(turns: &TimesliceView, look: &Appearance) -> String {
    let read = turns.read_at.filter(|_| turns.state == TimesliceState::Known);
    read.map(|at| format!(", read {}", look.ago(at))).unwrap_or_default()
}

/// Returns why a GPU does not have its desired level, if this is worth a note.
fn trouble(turns: &TimesliceView) -> Option<&str> {
    let reported = match turns.state {
        TimesliceState::Known => turns.level != Some(turns.wanted),
        TimesliceState::Unsupported => false,
        // If the level was never read, show no note, because gpushd reads it soon.
        TimesliceState::Unknown => turns.since.is_some(),
    };
    turns.reason.as_deref().filter(|_| reported)
}

/// Lists the GPUs of `gpushctl timeslice list`.
pub(crate) fn list(gpus: &[Gpu], look: &Appearance) -> Listing {
    use Align::{Left, Right};
    let columns = [
        ("GPU", Right),
        ("PRODUCT", Left),
        ("REPLICAS", Right),
        ("LEVEL", Left),
        ("LEASED", Right),
        ("HOLDERS", Left),
        ("PROCESSES", Right),
        ("DETAIL", Left),
    ];
    let row = |gpu: &Gpu| {
        let view = gpu.timeslice.as_ref();
        let level = |view: &TimesliceView| match (view.state, view.level) {
            (TimesliceState::Known, Some(level)) => level.to_string(),
            (TimesliceState::Unsupported, _) => "unsupported".to_owned(),
            (TimesliceState::Known | TimesliceState::Unknown, _) => "unknown".to_owned(),
        };
        vec![
            gpu.index.to_string(),
            look.clean(product(&gpu.name)),
            view.map_or_else(|| "-".to_owned(), |view| view.replicas.to_string()),
            view.map_or_else(|| "-".to_owned(), level),
            view.map_or_else(
                || "-".to_owned(),
                |view| match look.exact {
                    true => replicas(gpu).count().to_string(),
                    false => format!("{}/{}", replicas(gpu).count(), view.replicas),
                },
            ),
            holders(gpu, look).unwrap_or_else(|| "-".to_owned()),
            gpu.processes.len().to_string(),
            look.clean(&detail(gpu)),
        ]
    };
    let rows = gpus.iter().map(row).collect();
    let (columns, rows) = widened(
        &columns,
        rows,
        gpus,
        &[("PCI", &|gpu| look.clean(&gpu.pci)), ("UUID", &|gpu| look.clean(gpu.uuid.as_str()))],
        look,
    );
    Listing::new(&columns, rows, Narrow::spare(&["PRODUCT"]).prose(), look)
        .names(gpus.iter().map(|gpu| gpu.index.to_string()))
        .uuids(gpus.iter().map(|gpu| gpu.uuid.clone()))
        .or_empty("No GPU is time-sliced. A rule of the config with `mode = \"timeslice\"` time-slices its GPUs.")
}

/// Describes the pending changes and the drift of a GPU, and its state unless the GPU is ready.
fn detail(gpu: &Gpu) -> String {
    let state =
        (gpu.state != GpuState::Ready).then(|| format!("the GPU has the state `{}`", names::state(gpu.state).0));
    let pending = gpu.pending.iter().map(|change| change.describe(gpu.index));
    state.into_iter().chain(pending).chain(gpu.drift.iter().cloned()).collect::<Vec<_>>().join("; ")
}

/// Returns the leases of the replicas of a GPU. While a change to mode `timeslice` is pending, the GPU has leases of
/// another kind.
fn replicas(gpu: &Gpu) -> impl Iterator<Item = &LeaseUse> {
    gpu.leases.iter().filter(|lease| lease.kind == LeaseKind::Timeslice)
}

/// Returns the holders of the replicas of a GPU, each with the id of the lease: `alice (L3), bob (L4)`. Returns `None`
/// if there is none.
fn holders(gpu: &Gpu, look: &Appearance) -> Option<String> {
    let holder = |lease: &LeaseUse| {
        let user = lease.holder.user.clone().unwrap_or_else(|| format!("uid {}", lease.holder.uid));
        format!("{} ({})", look.clean(&user), lease.id)
    };
    let holders: Vec<String> = replicas(gpu).map(holder).collect();
    (!holders.is_empty()).then(|| holders.join(", "))
}

/// Draws `gpushctl timeslice show`.
pub(crate) fn show(gpus: &[Gpu], look: &Appearance) -> String {
    let mut out = String::new();
    for gpu in gpus {
        if !out.is_empty() {
            out.push('\n');
        }
        out += &format!("{}  {}\n", paint(STRONG, &format!("GPU {}", gpu.index)), look.clean(product(&gpu.name)));
        for (name, text) in gpu.timeslice.iter().flat_map(|view| facts(view, look)) {
            out += &(look.wrap(&format!("  {}", pad(name, 14)), &text).join("\n") + "\n");
        }
        if gpu.state != GpuState::Ready {
            out += &format!("  ! the GPU has the state `{}`\n", names::state(gpu.state).0);
        }
        for change in &gpu.pending {
            let text = look.clean(&change.describe(gpu.index));
            out += &(look.wrap("  * pending: ", &text).join("\n") + "\n");
        }
        for drift in &gpu.drift {
            out += &(look.wrap("  ! drift: ", &look.clean(drift)).join("\n") + "\n");
        }
        let leases = holders(gpu, look).unwrap_or_else(|| "none".to_owned());
        out += &(look.wrap(&format!("  {}", pad("leases", 14)), &leases).join("\n") + "\n");
        let users = gpu.processes.iter().map(|process| process_names::process(process, look)).collect::<Vec<_>>();
        let users = if users.is_empty() { "none".to_owned() } else { users.join(", ") };
        out += &(look.wrap(&format!("  {}", pad("processes", 14)), &users).join("\n") + "\n");
    }
    if out.is_empty() { "No GPU is time-sliced.\n".to_owned() } else { out }
}

/// Returns the facts about time-slicing for `gpu show`, each with its name.
pub(crate) fn facts(turns: &TimesliceView, look: &Appearance) -> Vec<(&'static str, String)> {
    let replicas = count(turns.replicas as usize, "replica");
    let since = turns.since.map(|since| format!(", first seen {}", look.ago(since))).unwrap_or_default();
    let since = read(turns, look) + &since;
    let state = match (turns.state, turns.level) {
        (TimesliceState::Known, Some(level)) if level == turns.wanted => format!("{level}, as configured{since}"),
        (TimesliceState::Known, Some(level)) => format!("{level}; configured: {}{since}", turns.wanted),
        (TimesliceState::Unsupported, _) => format!("not supported; configured: {}", turns.wanted),
        (TimesliceState::Known | TimesliceState::Unknown, _) => format!("not known; configured: {}", turns.wanted),
    };
    let why = turns.reason.as_ref().map(|why| format!(": {}", look.clean(why))).unwrap_or_default();
    let mut facts = vec![("time-slicing", format!("{replicas}; {LIMITS}")), ("level", format!("{state}{why}"))];
    match turns.state {
        TimesliceState::Known | TimesliceState::Unknown => {
            facts.push(("", "a level applies only to CUDA contexts created after it was set".to_owned()));
        }
        TimesliceState::Unsupported => {}
    }
    facts
}
