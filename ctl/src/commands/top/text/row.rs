//! The line of a row.

use anstyle::Style;
use gpush_api::{Gpu, GpuProcess, GpuState, GpuUsage, Lease, LeaseState, MigDevice, UseState};

use super::{ColumnWidths, bars::bars};
use crate::{
    commands::top::{
        activity::{Activity, Unknown, brief_reason},
        history::FigureHistory,
        rows::VisibleRow,
        tree::{Figures, Item, LeaseItem, Node, job_of},
    },
    render::{
        Appearance,
        appearance::{BAD, NOTE, PLAIN, QUIET, STRONG, USED, gib, pad, paint, product, width},
        bar, lease, names, process_names,
        slices::{self, Use},
        status::Status,
    },
};

/// Text for a figure that is not known.
const ABSENT: &str = "-";

/// What the lines of a picture have in common.
#[derive(Debug, Clone, Copy)]
pub(in super::super) struct Drawing<'p> {
    pub(in super::super) status: &'p Status,
    pub(in super::super) history: &'p FigureHistory,
    pub(in super::super) columns: ColumnWidths,
    pub(in super::super) look: &'p Appearance,
}

impl Drawing<'_> {
    fn devices_of(&self, gpu: &Gpu) -> Vec<&MigDevice> {
        self.status.devices.iter().filter(|device| device.gpu_uuid == gpu.uuid).collect()
    }
}

/// The text of a cell, and its style.
struct StyledText(Style, String);

impl StyledText {
    fn none() -> Self {
        Self(PLAIN, String::new())
    }

    fn absent() -> Self {
        Self(QUIET, ABSENT.to_owned())
    }
}

/// Draws a row in one line.
pub(in super::super) fn line(line: &VisibleRow<'_>, drawing: &Drawing<'_>) -> String {
    let Drawing { columns, look, history, .. } = *drawing;
    let node = line.node;
    let left = |StyledText(style, text): &StyledText, columns: usize| {
        let text = look.fit(text, columns);
        format!("{}{}", paint(*style, &text), " ".repeat(columns.saturating_sub(width(&text))))
    };
    let right = |StyledText(style, text): &StyledText, columns: usize| {
        let text = look.fit(text, columns);
        format!("{}{}", " ".repeat(columns.saturating_sub(width(&text))), paint(*style, &text))
    };
    // A process has no device, so its name has more room.
    let mut cells = match &node.item {
        Item::Process(_) if columns.device > 0 => vec![name(line, columns.name + columns.gap + columns.device, look)],
        Item::Gpu { .. } | Item::Instance { .. } | Item::Lease(_) | Item::Waiting(_) if columns.device > 0 => {
            vec![name(line, columns.name, look), device(node, drawing)]
        }
        Item::Process(_) | Item::Gpu { .. } | Item::Instance { .. } | Item::Lease(_) | Item::Waiting(_) => {
            vec![name(line, columns.name, look)]
        }
    };
    cells.push(right(&activity(node.figures.activity, look), columns.activity));
    let mut memory = right(&memory(&node.figures, columns), columns.memory);
    if columns.bar > 0 {
        let bar = match (node.figures.memory_mib, node.figures.memory_total_mib) {
            (Some(used), Some(total)) => bar::part(used, total, columns.bar, look),
            _ => " ".repeat(columns.bar),
        };
        memory = format!("{bar} {memory}");
    }
    cells.push(memory);
    match &node.item {
        Item::Process(process) => {
            let why = process.unleased.as_deref().map_or_else(String::new, |why| look.clean(why));
            let room = if columns.rest == 0 { columns.usage } else { columns.usage + columns.gap + columns.rest };
            cells.push(paint(BAD, &look.fit(&why, room)));
        }
        Item::Gpu { .. } | Item::Instance { .. } | Item::Lease(_) | Item::Waiting(_) => {
            cells.push(left(&usage(node, columns), columns.usage));
            if columns.rest > 0 {
                let StyledText(style, text) = rest(node, history, columns, look);
                cells.push(paint(style, &look.fit(&text, columns.rest)));
            }
        }
    }
    cells.join(&" ".repeat(columns.gap)).trim_end().to_owned()
}

fn name(line: &VisibleRow<'_>, columns: usize, look: &Appearance) -> String {
    let fold = match line.is_folded {
        Some(true) => look.pick("▸ ", "+ "),
        Some(false) => look.pick("▾ ", "- "),
        None => "  ",
    };
    let first = format!("{}{fold}", " ".repeat(line.depth * 2));
    let (style, text) = match &line.node.item {
        Item::Gpu { gpu, .. } => {
            let style = if gpu.state == GpuState::Ready { STRONG } else { names::state(gpu.state).1 };
            (style, format!("{} {}", gpu.index, look.clean(product(&gpu.name))))
        }
        Item::Instance { instance, .. } => {
            (PLAIN, format!("{}@{}", look.clean(&instance.profile), instance.placement.start))
        }
        Item::Lease(LeaseItem { lease, .. }) | Item::Waiting(lease) => (PLAIN, lease_name(lease, look)),
        Item::Process(process) => {
            let style = if process.unleased.is_some() { NOTE } else { QUIET };
            (style, process_name(process, look))
        }
    };
    let text = look.fit(&text, columns.saturating_sub(width(&first)));
    let fill = columns.saturating_sub(width(&first) + width(&text));
    format!("{}{}{}", paint(QUIET, &first), paint(style, &text), " ".repeat(fill))
}

/// Returns `L17 alice job 812`.
fn lease_name(lease: &Lease, look: &Appearance) -> String {
    let job = job_of(lease).map_or_else(String::new, |job| format!(" job {job}"));
    format!("{} {}{job}", lease.id, lease::user(lease, look))
}

/// Returns `! alice 4123 python train.py`. The mark is for an unleased process, or one that perhaps belongs to the lease.
fn process_name(process: &GpuProcess, look: &Appearance) -> String {
    let mark = match (process.unleased.is_some(), process.unattributed) {
        (true, _) => "! ",
        (false, true) => "? ",
        (false, false) => "",
    };
    let text = match &process.serves {
        Some(serves) => look.clean(serves),
        None => process_names::brief(&process.process, look),
    };
    format!("{mark}{text}")
}

/// Draws the slices of a GPU, or names the device and the share of a lease.
fn device(node: &Node<'_>, drawing: &Drawing<'_>) -> String {
    let Drawing { columns, look, .. } = *drawing;
    let (text, style) = match &node.item {
        Item::Gpu { gpu, .. } => return gpu_device(gpu, drawing),
        Item::Instance { instance, gpu } => {
            let usage = Use::of(instance, &drawing.devices_of(gpu));
            (format!("{} {}", usage.mark(look), usage.word()), usage.style())
        }
        Item::Lease(item) => (device_of_lease(item, look), PLAIN),
        Item::Waiting(lease) => (lease::share(lease, look), PLAIN),
        Item::Process(_) => (String::new(), PLAIN),
    };
    let text = look.fit(&text, columns.device);
    format!("{}{}", paint(style, &text), " ".repeat(columns.device.saturating_sub(width(&text))))
}

fn gpu_device(gpu: &Gpu, drawing: &Drawing<'_>) -> String {
    let Drawing { columns, look, .. } = *drawing;
    match gpu.mig.as_ref().filter(|mig| mig.enabled && gpu.state != GpuState::Lost) {
        Some(mig) => {
            let fill = columns.device.saturating_sub(usize::from(mig.memory_slices));
            format!("{}{}", slices::line(mig, &drawing.devices_of(gpu), look), " ".repeat(fill))
        }
        None => {
            let usage = drawing.status.use_of(gpu);
            let is_lost = gpu.state == GpuState::Lost;
            let (mark, style) = if is_lost { (" ", QUIET) } else { (usage.mark(look), usage.style()) };
            let mode = look.fit(gpu.mode.name(), columns.device.saturating_sub(2));
            format!("{} {}", paint(style, mark), pad(&mode, columns.device.saturating_sub(2)))
        }
    }
}

/// Returns `3g.40gb@0`, `mps 25%` or `whole`.
fn device_of_lease(item: &LeaseItem<'_>, look: &Appearance) -> String {
    match &item.device {
        Some(device) if item.lease.kind == gpush_api::LeaseKind::Mig => look.clean(device),
        Some(_) | None => lease::member_share(item.member, look),
    }
}

fn activity(activity: Activity, look: &Appearance) -> StyledText {
    match activity {
        Activity::Known { ratio, is_estimate } => {
            let percent = (ratio.clamp(0.0, 1.0) * 100.0).round();
            let style = if percent > 0.0 { USED } else { PLAIN };
            StyledText(style, format!("{}{percent}%", if is_estimate { "~" } else { "" }))
        }
        Activity::Above => StyledText(QUIET, look.pick("↑", "^").to_owned()),
        Activity::Unknown(Unknown::OfProcess | Unknown::Waits) => StyledText::none(),
        Activity::Unknown(_) => StyledText::absent(),
    }
}

fn memory(figures: &Figures, columns: ColumnWidths) -> StyledText {
    match (figures.memory_mib, figures.memory_total_mib.filter(|_| columns.has_totals())) {
        (None, None) => StyledText::none(),
        (None, Some(total)) => StyledText(PLAIN, format!("{ABSENT}/{}", gib(total))),
        (Some(used), None) => StyledText(PLAIN, gib(used)),
        (Some(used), Some(total)) => StyledText(PLAIN, format!("{}/{}", gib(used), gib(total))),
    }
}

/// Returns the power of a GPU, or what a lease does. Without the last column, returns the state of a GPU that is not ready.
fn usage(node: &Node<'_>, columns: ColumnWidths) -> StyledText {
    match &node.item {
        Item::Gpu { gpu, .. } if columns.rest == 0 && gpu.state != GpuState::Ready => {
            let (word, style) = names::state(gpu.state);
            StyledText(style, word.to_owned())
        }
        Item::Gpu { usage, .. } => power(*usage),
        Item::Instance { .. } | Item::Process(_) => StyledText::none(),
        Item::Waiting(lease) => {
            let (word, style) = lease::state(lease.state);
            StyledText(style, word.to_owned())
        }
        Item::Lease(item) => use_of_lease(item),
    }
}

fn power(usage: Option<&GpuUsage>) -> StyledText {
    let Some(usage) = usage else { return StyledText::absent() };
    let is_limited = usage.limited_by.as_ref().is_some_and(|limits| !limits.is_empty());
    let style = if is_limited { NOTE } else { PLAIN };
    match (usage.power_w, usage.power_limit_w) {
        (None, _) => StyledText::absent(),
        (Some(power), None) => StyledText(style, format!("{power:.0} W")),
        (Some(power), Some(limit)) => StyledText(style, format!("{power:.0}/{limit:.0} W")),
    }
}

fn use_of_lease(item: &LeaseItem<'_>) -> StyledText {
    if item.lease.state != LeaseState::Active {
        let (word, style) = lease::state(item.lease.state);
        return StyledText(style, word.to_owned());
    }
    let Some(usage) = item.usage else { return StyledText::absent() };
    let unused = || usage.unused_s.map_or_else(String::new, gpush_core::duration::rough);
    match usage.state {
        UseState::Busy => StyledText(USED, "busy".to_owned()),
        UseState::Idle => StyledText(NOTE, format!("{} {}", lease::idle(usage.weak), unused())),
        UseState::Empty => StyledText(NOTE, format!("empty {}", unused())),
        UseState::Unknown => StyledText(QUIET, format!("? {}", usage.reason.map_or("unknown", brief_reason))),
    }
}

/// Returns the history of a GPU, the end of a lease, or why a figure is not known.
fn rest(node: &Node<'_>, history: &FigureHistory, columns: ColumnWidths, look: &Appearance) -> StyledText {
    match &node.item {
        Item::Gpu { gpu, usage } => {
            let (word, style) = names::state(gpu.state);
            if gpu.state != GpuState::Ready {
                return StyledText(style, word.to_owned());
            }
            history_or_reason(node, usage.and_then(|usage| usage.power_limit_w), history, columns, look)
        }
        Item::Instance { .. } => history_or_reason(node, None, history, columns, look),
        Item::Lease(item) => StyledText(PLAIN, end(item.lease, columns, look)),
        Item::Waiting(lease) => StyledText(QUIET, lease::place(lease, look).unwrap_or_default()),
        Item::Process(_) => StyledText::none(),
    }
}

/// Draws the past activity. If it was never known, draws the past power, or says why the activity is not known.
fn history_or_reason(
    node: &Node<'_>,
    power_limit_w: Option<f64>,
    history: &FigureHistory,
    columns: ColumnWidths,
    look: &Appearance,
) -> StyledText {
    // A single bar is not a history.
    let has_past = history.of(&node.key).len() > 1;
    if history.of(&node.key).any(|moment| moment.activity.is_some()) {
        let bars = || bars(history.of(&node.key).map(|moment| moment.activity), columns.rest, look);
        return if has_past { StyledText(USED, bars()) } else { StyledText::none() };
    }
    let limit = power_limit_w.filter(|limit| has_past && *limit > 0.0);
    let why = match node.figures.activity {
        Activity::Unknown(why) => Some(why),
        Activity::Known { .. } | Activity::Above => None,
    };
    // With MIG, the driver reports the power of the GPU, although not its activity. Other reasons are about the sample.
    let has_power = matches!(why, None | Some(Unknown::OfInstances | Unknown::MemoryOnly | Unknown::NotReported));
    match (limit.filter(|_| has_power), why) {
        (Some(limit), _) => {
            let past = history.of(&node.key).map(|moment| moment.power_w.map(|power| power / limit));
            StyledText(QUIET, format!("W {}", bars(past, columns.rest.saturating_sub(2), look)))
        }
        (None, None | Some(Unknown::OfInstances)) => StyledText::none(),
        (None, Some(why)) => StyledText(QUIET, why.brief().to_owned()),
    }
}

/// Returns the end of a lease. A narrow terminal has room only for the time.
fn end(lease: &Lease, columns: ColumnWidths, look: &Appearance) -> String {
    let is_narrow = columns.bar == 0;
    match (job_of(lease), lease.expires_at) {
        (_, Some(at)) if is_narrow => look.ahead(at),
        // The name of the lease has the number of the job.
        (Some(_), None) if is_narrow => "with job".to_owned(),
        _ => lease::end(lease, look),
    }
}
