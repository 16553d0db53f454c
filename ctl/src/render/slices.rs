//! Draws a GPU as its memory slices, to scale.
//!
//! ```text
//! ╭───────────────────────────────────┬─────────────────┬────────┬╌╌╌╌╌╌╌╌╮
//! │● 3g.40gb                          │○ 2g.20gb        │○1g.10gb│free    ╎
//! ╰0──────────────────────────────────┴4────────────────┴6───────┴7╌╌╌╌╌╌╌╯
//! ```
//!
//! The numbers in the lower edge are start slices, as in a layout: `2g.20gb@4`.

use anstyle::Style;
use gpush_api::{DeviceUse, Gpu, GpuInstance, GpuState, Mig, MigDevice, Mode, MpsDaemon, MpsState, Placement};

use super::{
    Appearance, Charset,
    appearance::{IDLE, NOTE, QUIET, USED, pad, paint, width},
    names::state,
};

/// A number of columns that is divisible by 4, 8 and 12, the numbers of slices of all known GPU models.
const GRAIN: usize = 24;

/// Maximum width of a drawing, in columns. On a wider terminal, the other columns are for text.
const WIDEST: usize = 96;

/// Returns the last column for text next to a drawing. On a wide terminal, this is not the last column of the terminal:
/// a number there would be too far away from the drawing.
pub(crate) fn edge(indent: usize, look: &Appearance) -> usize {
    look.width.min(indent + WIDEST + 1)
}

/// A range of slices that is drawn as one box.
#[derive(Debug, Clone)]
pub(crate) struct Cell {
    /// The slices that the cell covers.
    pub(crate) placement: Placement,
    /// Labels of the box, longest first. The first one that fits is drawn.
    pub(crate) labels: Vec<String>,
    /// Style of the label.
    pub(crate) style: Style,
}

impl Cell {
    /// Creates the box of a GPU instance. Its labels have a mark, the profile, and the compute instances `inside` if
    /// there is room.
    pub(crate) fn of(profile: &str, placement: Placement, mark: &str, inside: Option<&str>, style: Style) -> Self {
        let mut labels = Vec::new();
        if let Some(inside) = inside {
            labels.push(format!("{mark} {profile}: {inside}"));
        }
        labels.push(format!("{mark} {profile}"));
        labels.push(format!("{mark}{profile}"));
        let short = short(profile);
        labels.push(format!("{mark} {short}"));
        labels.push(format!("{mark}{short}"));
        // There is no room for the attribute, so only show that there is one: `1g+` for `1g.10gb+me`.
        if let Some((slices, _)) = short.split_once('+') {
            labels.push(format!("{mark}{slices}+"));
        }
        labels.push(mark.to_owned());
        Self { placement, labels, style }
    }
}

/// Returns a profile without its memory size: `1g+me` for `1g.10gb+me`.
fn short(profile: &str) -> String {
    let (slices, rest) = profile.split_once('.').unwrap_or((profile, ""));
    let attribute = rest.find('+').map_or("", |at| &rest[at..]);
    format!("{slices}{attribute}")
}

/// How an instance or a whole GPU is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// The instance has processes.
    Busy,
    /// The instance has no process, but leases occupy all of it.
    Granted,
    /// The instance has no process, and accepts no new work.
    Reserved,
    /// The instance has no process and no lease.
    Idle,
    /// The instance has no compute instance, so no program can use it.
    Bare,
}

impl Use {
    /// Returns how a GPU instance is used. `devices` are the MIG devices of its GPU.
    pub(crate) fn of(instance: &GpuInstance, devices: &[&MigDevice]) -> Self {
        let inside = devices.iter().filter(|device| device.gi == instance.id);
        let uses: Vec<Self> = inside.map(|device| Self::of_device(Some(device))).collect();
        if !instance.processes.is_empty() || uses.contains(&Self::Busy) {
            Self::Busy
        } else if instance.compute.is_empty() {
            Self::Bare
        } else if uses.contains(&Self::Idle) {
            Self::Idle
        } else if uses.contains(&Self::Reserved) {
            Self::Reserved
        } else if uses.contains(&Self::Granted) {
            Self::Granted
        } else {
            Self::Idle
        }
    }

    /// Returns how a MIG device is used. A device that gpushd does not list counts as idle.
    pub(crate) fn of_device(device: Option<&MigDevice>) -> Self {
        match device.map(|device| (device.usage, device.ci)) {
            Some((DeviceUse::InUse, _)) => Self::Busy,
            Some((DeviceUse::Granted, _)) => Self::Granted,
            Some((DeviceUse::Reserved, Some(_))) => Self::Reserved,
            Some((DeviceUse::Reserved, None)) => Self::Bare,
            Some((DeviceUse::Free, _)) | None => Self::Idle,
        }
    }

    /// Returns how a whole GPU is used, apart from its MIG instances. `daemons` are the MPS daemons of the GPU.
    pub(crate) fn of_gpu(gpu: &Gpu, daemons: &[&MpsDaemon]) -> Self {
        if !gpu.processes.is_empty() {
            Self::Busy
        } else if gpu.state != GpuState::Ready || !gpu.cordons.is_empty() || !is_usable_whole(gpu, daemons) {
            Self::Reserved
        } else if gpu.leases.is_empty() {
            Self::Idle
        } else {
            Self::Granted
        }
    }

    pub(crate) fn mark(self, look: &Appearance) -> &'static str {
        look.pick(self.symbol(), self.letter())
    }

    /// Returns the mark in UTF-8.
    pub(crate) fn symbol(self) -> &'static str {
        match self {
            Self::Busy => "●",
            Self::Granted => "◐",
            Self::Reserved => "⊘",
            Self::Idle => "○",
            Self::Bare => "!",
        }
    }

    /// Returns the mark in ASCII.
    fn letter(self) -> &'static str {
        match self {
            Self::Busy => "*",
            Self::Granted => "%",
            Self::Reserved => "x",
            Self::Idle => "o",
            Self::Bare => "!",
        }
    }

    /// Returns the use as text.
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Busy => "in use",
            Self::Granted => "granted",
            Self::Reserved => "reserved",
            Self::Idle => "idle",
            Self::Bare => "no compute instance",
        }
    }

    pub(crate) fn style(self) -> Style {
        match self {
            Self::Busy => USED,
            Self::Granted | Self::Reserved => QUIET,
            Self::Idle => IDLE,
            Self::Bare => NOTE,
        }
    }
}

/// Returns whether programs can use the whole GPU: with a lease, or directly if gpushd grants no leases on the GPU.
/// `daemons` are the MPS daemons of the GPU.
fn is_usable_whole(gpu: &Gpu, daemons: &[&MpsDaemon]) -> bool {
    let is_off = gpu.mig.as_ref().is_none_or(Mig::is_off);
    match gpu.mode {
        // gpushd grants leases only on MIG devices, so programs cannot use the whole GPU.
        Mode::Mig => false,
        Mode::Mps => daemons.iter().any(|daemon| daemon.device.is_none() && admits_leases(daemon)),
        Mode::Timeslice | Mode::Exclusive => is_off,
        Mode::NoRule | Mode::Unmanaged => gpu.mig.as_ref().is_none_or(|mig| !mig.enabled),
    }
}

/// Returns whether the daemon's state allows leases on its target. Does not check for room.
pub(crate) fn admits_leases(daemon: &MpsDaemon) -> bool {
    daemon.state == MpsState::Ready && daemon.ends.is_none()
}

/// Returns the compute instances of a split GPU instance, such as `1c 2c`. `None` if one compute instance uses all of
/// it.
pub(crate) fn inside(instance: &GpuInstance) -> Option<String> {
    if let [one] = instance.compute.as_slice()
        && one.profile == instance.profile
    {
        return None;
    }
    let parts: Vec<_> = instance.compute.iter().map(|c| c.profile.split('.').next().unwrap_or("?")).collect();
    Some(if parts.is_empty() { "no compute instance".to_owned() } else { parts.join(" ") })
}

/// Draws the current instances of a GPU. `devices` are its MIG devices. If the GPU takes no new work, its free slices
/// are labelled with its state.
pub(crate) fn of(gpu: &Gpu, mig: &Mig, devices: &[&MigDevice], indent: usize, look: &Appearance) -> Vec<String> {
    let free = match gpu.state {
        GpuState::Ready | GpuState::Changing if gpu.cordons.is_empty() => FREE,
        GpuState::Ready | GpuState::Changing => state(GpuState::Cordoned).0,
        other => state(other).0,
    };
    let cells = mig.instances.iter().map(|instance| {
        let usage = Use::of(instance, devices);
        Cell::of(&instance.profile, instance.placement, usage.mark(look), inside(instance).as_deref(), usage.style())
    });
    draw(cells.collect(), mig.memory_slices, free, indent, look)
}

/// Draws the current instances of a GPU in one line, with one column for each memory slice: `●───○─◐·`. `devices` are its
/// MIG devices.
pub(crate) fn line(mig: &Mig, devices: &[&MigDevice], look: &Appearance) -> String {
    let cells = mig.instances.iter().map(|instance| {
        let usage = Use::of(instance, devices);
        Cell { placement: instance.placement, labels: vec![usage.mark(look).to_owned()], style: usage.style() }
    });
    let mut cells: Vec<Cell> = cells.collect();
    cells.sort_by_key(|cell| cell.placement);
    let drawn = with_free(cells, mig.memory_slices).into_iter().map(|slot| match slot {
        Slot::Taken(Cell { placement, labels, style }) => {
            let rest = look.pick("─", "-").repeat(usize::from(placement.size).saturating_sub(1));
            paint(style, &format!("{}{rest}", labels.concat()))
        }
        Slot::Free { .. } => paint(QUIET, look.pick("·", ".")),
    });
    drawn.collect()
}

/// Label of free slices.
pub(crate) const FREE: &str = "free";

/// Draws boxes and the slices between them, labelled with `free`, in three lines. Returns no lines if the GPU has no
/// slices.
pub(crate) fn draw(mut cells: Vec<Cell>, slices: u8, free: &str, indent: usize, look: &Appearance) -> Vec<String> {
    if slices == 0 {
        return Vec::new();
    }
    cells.sort_by_key(|cell| cell.placement);
    let room = look.width.saturating_sub(indent + 1).clamp(GRAIN, WIDEST);
    let unit = (room / GRAIN * GRAIN / usize::from(slices)).max(1);
    let glyphs = Glyphs::of(look);
    let margin = " ".repeat(indent);
    let (mut top, mut middle, mut bottom) = (margin.clone(), margin.clone(), margin);
    let mut was_free = false;
    for (at, cell) in with_free(cells, slices).into_iter().enumerate() {
        let (placement, is_free) = match &cell {
            Slot::Taken(cell) => (cell.placement, false),
            Slot::Free { placement, .. } => (*placement, true),
        };
        let inner = usize::from(placement.size) * unit - 1;
        let run = if is_free { glyphs.dashes } else { glyphs.line };
        let number = placement.start.to_string();
        let number = if width(&number) <= inner { number } else { String::new() };
        let (label, style) = match cell {
            Slot::Taken(cell) => {
                let label = cell.labels.iter().map(|l| look.clean(l)).find(|l| width(l) <= inner);
                (label.unwrap_or_default(), cell.style)
            }
            Slot::Free { first, .. } if first && inner >= width(free) => (free.to_owned(), QUIET),
            Slot::Free { .. } => (String::new(), QUIET),
        };
        let edge = if at == 0 { 0 } else { 1 };
        let side = if is_free && (was_free || at == 0) { glyphs.dashed_side } else { glyphs.side };
        top += &paint(QUIET, &format!("{}{}", glyphs.top[edge], run.repeat(inner)));
        middle += &format!("{}{}", paint(QUIET, side), paint(style, &pad(&label, inner)));
        let rest = inner - number.len();
        bottom += &format!("{}{number}{}", paint(QUIET, glyphs.bottom[edge]), paint(QUIET, &run.repeat(rest)));
        was_free = is_free;
    }
    top += &paint(QUIET, glyphs.top[2]);
    middle += &paint(QUIET, if was_free { glyphs.dashed_side } else { glyphs.side });
    bottom += &paint(QUIET, glyphs.bottom[2]);
    vec![top, middle, bottom]
}

enum Slot {
    Taken(Cell),
    /// One free slice. `first` is true if it is the first slice of a free range.
    Free {
        placement: Placement,
        first: bool,
    },
}

/// Adds the free slices between the boxes. Leaves out boxes that overlap or exceed the slices: a driver should not
/// report such instances, and the list below the drawing still shows them.
fn with_free(cells: Vec<Cell>, slices: u8) -> Vec<Slot> {
    let mut out = Vec::new();
    let mut next = 0;
    let free = |from: u8, to: u8, out: &mut Vec<Slot>| {
        out.extend(
            (from..to).map(|start| Slot::Free { placement: Placement { start, size: 1 }, first: start == from }),
        );
    };
    for cell in cells {
        let Placement { start, size } = cell.placement;
        let Some(end) = start.checked_add(size).filter(|end| size > 0 && start >= next && *end <= slices) else {
            continue;
        };
        free(next, start, &mut out);
        next = end;
        out.push(Slot::Taken(cell));
    }
    free(next, slices, &mut out);
    out
}

/// The characters of an edge: at the left, between boxes, at the right.
struct Glyphs {
    line: &'static str,
    dashes: &'static str,
    side: &'static str,
    dashed_side: &'static str,
    top: [&'static str; 3],
    bottom: [&'static str; 3],
}

impl Glyphs {
    fn of(look: &Appearance) -> Self {
        match look.charset {
            Charset::Utf8 => Self {
                line: "─",
                dashes: "╌",
                side: "│",
                dashed_side: "╎",
                top: ["╭", "┬", "╮"],
                bottom: ["╰", "┴", "╯"],
            },
            Charset::Ascii => {
                Self { line: "-", dashes: ".", side: "|", dashed_side: ":", top: ["+"; 3], bottom: ["+"; 3] }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::render::fixtures;

    /// Fault: the slices of a cordoned GPU were labelled `free`.
    #[test]
    fn slices_of_a_gpu_without_new_work_are_not_free() {
        let mut gpu = gpush_core::preset::gpus("dgx-a100").unwrap().swap_remove(0);
        gpu.mig.as_mut().unwrap().set_mode(true, true);
        let drawn = |state| {
            let gpu = Gpu { state, ..gpu.clone() };
            of(&gpu, gpu.mig.as_ref().unwrap(), &[], 2, &fixtures::look(80, Charset::Ascii)).join("\n")
        };
        assert!(drawn(GpuState::Ready).contains("free"));
        for state in [GpuState::Cordoned, GpuState::Lost, GpuState::Maintenance] {
            assert!(!drawn(state).contains("free"), "{state:?}");
        }
        assert!(drawn(GpuState::Cordoned).contains("cordoned"));
    }
}
