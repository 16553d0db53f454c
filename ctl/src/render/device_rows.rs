//! The rows of a GPU in `gpushctl status`: the whole GPU, or each GPU instance with its compute instances.
//!
//! ```text
//!   ● 3g.40gb@0  GI 2 CI 0  ━━━━╸───   12.1/ 39.5 GiB  L17 alice  in 2h  busy  pid 4123 python train.py
//! ```
//!
//! A row shows the lease that holds all of its device. Leases that share a device have lines below the rows.

use anstyle::Style;
use gpush_api::{DeviceUse, Gpu, GpuInstance, GpuState, Lease, Memory, MigDevice, MpsDaemon, Process, TargetUuid};

use super::{
    Appearance,
    appearance::{NOTE, PLAIN, QUIET, paint, width},
    bar,
    lease::below::{Holding, HoldingWidths, holding},
    process_names,
    slices::Use,
};

/// Number of blanks at the beginning of each line below a heading.
pub(crate) const INDENT: usize = 2;

/// Maximum width of the column with the profile. If a profile is longer, the rest of its line starts further to the
/// right.
const LONGEST_WHAT: usize = 20;

/// A line for a GPU instance, a compute instance, or the whole GPU.
#[derive(Clone)]
pub(crate) struct Row {
    mark: &'static str,
    style: Style,
    what: String,
    ids: String,
    uuid: String,
    memory: Option<Memory>,
    processes: Vec<Process>,
    /// Text that is shown in place of the memory and the processes.
    remark: &'static str,
    /// Why the instance accepts no new work, if the heading does not show it.
    reason: Option<String>,
    /// The lease that holds the whole device.
    lease: Option<Holding>,
}

impl Row {
    /// Returns the line without its UUID, for a drawing of several GPUs.
    pub(crate) fn without_uuid(&self) -> Self {
        Self { uuid: String::new(), ..self.clone() }
    }
}

/// The columns, which are equal for all GPUs in one output.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Columns {
    what: usize,
    ids: usize,
    memory: bool,
    /// Whether the memory has a bar.
    bar: bool,
    leases: HoldingWidths,
    /// Whether leases are below their rows, because no row has enough room.
    leases_below: bool,
}

/// Width of `139.5/139.5 GiB`.
const FIGURES: usize = 15;

impl Columns {
    /// Returns columns that fit all rows. If there is no room for the leases, leaves out the ids, and then the bars.
    pub(crate) fn of<'a>(rows: impl Iterator<Item = &'a Row>, look: &Appearance) -> Self {
        let whole = rows.fold(Self { bar: true, ..Self::default() }, |columns, row| Self {
            what: columns.what.max(width(&row.what).min(LONGEST_WHAT)),
            ids: columns.ids.max(width(&row.ids)),
            memory: columns.memory || row.memory.is_some(),
            leases: row.lease.as_ref().map_or(columns.leases, |lease| columns.leases.with(lease)),
            ..columns
        });
        if whole.leases.sum() == 0 {
            return whole;
        }
        let without_ids = Self { ids: 0, ..whole };
        let mut fitting = [whole, without_ids, Self { bar: false, ..without_ids }].into_iter();
        let fits = |columns: &Self| !look.wraps || columns.before_leases(look) + columns.leases.sum() <= look.width;
        fitting.find(fits).unwrap_or(Self { leases_below: true, ..whole })
    }

    /// Returns the number of columns before the lease of a row.
    fn before_leases(self, look: &Appearance) -> usize {
        let ids = if self.ids == 0 { 0 } else { self.ids + 2 + uuid_columns(look) };
        let memory = if self.memory { self.bar_columns(look) + FIGURES + 2 } else { 0 };
        INDENT + 2 + self.what + 2 + ids + memory
    }

    /// Returns the width of a memory bar and the blank after it.
    fn bar_columns(self, look: &Appearance) -> usize {
        if self.bar { bar_columns(look) + 1 } else { 0 }
    }
}

/// The MIG devices, MPS daemons and leases on a GPU.
pub(crate) struct Users<'a> {
    /// MIG devices of the GPU.
    pub(crate) devices: Vec<&'a MigDevice>,
    /// MPS daemons of the GPU.
    pub(crate) daemons: Vec<&'a MpsDaemon>,
    /// All leases of the host that have not ended.
    pub(crate) leases: &'a [Lease],
}

/// Returns whether a GPU accepts new work.
pub(super) fn accepts_work(gpu: &Gpu) -> bool {
    gpu.state == GpuState::Ready && gpu.cordons.is_empty()
}

/// Returns the lines of a GPU, in the order of its slices.
pub(crate) fn rows(gpu: &Gpu, users: &Users<'_>, look: &Appearance) -> Vec<Row> {
    let mut rows = Vec::new();
    let mig = gpu.mig.as_ref().filter(|mig| mig.enabled);
    if mig.is_none() || !gpu.processes.is_empty() {
        let usage = Use::of_gpu(gpu, &users.daemons);
        rows.push(Row {
            mark: usage.mark(look),
            style: usage.style(),
            what: "whole GPU".to_owned(),
            ids: String::new(),
            uuid: String::new(),
            memory: Some(gpu.memory).filter(|memory| mig.is_none() && memory.total_mib > 0),
            processes: gpu.processes.clone(),
            remark: "",
            reason: None,
            lease: mig.is_none().then(|| holding(gpu, gpu.uuid.as_str(), users.leases, look)).flatten(),
        });
    }
    for instance in mig.map_or(&[][..], |mig| &mig.instances) {
        rows.extend(instance_rows(gpu, instance, users, look));
    }
    rows
}

/// Returns the lines of a GPU instance. They say why a device is reserved, unless the GPU accepts no new work: then its
/// heading says so.
fn instance_rows(gpu: &Gpu, instance: &GpuInstance, users: &Users<'_>, look: &Appearance) -> Vec<Row> {
    let with_reason = accepts_work(gpu);
    let devices = &users.devices;
    let usage = Use::of(instance, devices);
    let device = |ci: u32| devices.iter().copied().find(|device| (device.gi, device.ci) == (instance.id, Some(ci)));
    let reserved = |ci: u32| device(ci).filter(|device| with_reason && device.usage == DeviceUse::Reserved);
    let reason = |ci: u32| reserved(ci).and_then(|device| device.reason.clone());
    let mut row = Row {
        mark: usage.mark(look),
        style: usage.style(),
        what: format!("{}@{}", look.clean(&instance.profile), instance.placement.start),
        ids: format!("GI {}", instance.id),
        uuid: String::new(),
        memory: instance.memory,
        processes: instance.processes.clone(),
        remark: if usage == Use::Bare { "no compute instance: no program can use it" } else { "" },
        reason: None,
        lease: None,
    };
    let lease = |uuid: &Option<TargetUuid>| holding(gpu, uuid.as_ref()?.as_str(), users.leases, look);
    if let [one] = instance.compute.as_slice()
        && one.profile == instance.profile
    {
        row.ids += &format!(" CI {}", one.id);
        row.uuid = one.uuid.clone().unwrap_or_default().to_string();
        row.processes.extend(one.processes.iter().cloned());
        row.reason = reason(one.id);
        row.lease = lease(&one.uuid);
        return vec![row];
    }
    let mut rows = vec![row];
    for (at, compute) in instance.compute.iter().enumerate() {
        let usage = Use::of_device(device(compute.id));
        let last = at + 1 == instance.compute.len();
        let branch = if last { look.pick("└ ", "`- ") } else { look.pick("├ ", "|- ") };
        rows.push(Row {
            mark: usage.mark(look),
            style: usage.style(),
            what: format!("{branch}{}", look.clean(&compute.profile)),
            ids: format!("GI {} CI {}", instance.id, compute.id),
            uuid: compute.uuid.clone().unwrap_or_default().to_string(),
            memory: None,
            processes: compute.processes.clone(),
            remark: "",
            reason: reason(compute.id),
            lease: lease(&compute.uuid),
        });
    }
    rows
}

/// Returns the width of a memory bar.
fn bar_columns(look: &Appearance) -> usize {
    match look.width {
        0..100 => 8,
        100..140 => 12,
        _ => 20,
    }
}

/// Returns `MIG-` and the first group of a UUID. This is enough to distinguish the devices of a host.
fn short_uuid(uuid: &str) -> &str {
    uuid.char_indices().nth("MIG-00000000".len()).map_or(uuid, |(at, _)| &uuid[..at])
}

/// Returns the width of the column with shortened UUIDs.
fn uuid_columns(look: &Appearance) -> usize {
    if look.width >= 100 { 14 } else { 0 }
}

/// Draws one line with these columns. What does not fit is on a second line: the lease, and then the processes.
pub(crate) fn row(row: &Row, columns: Columns, look: &Appearance) -> Vec<String> {
    let mut out = " ".repeat(INDENT);
    let mut taken = INDENT;
    let push = |text: &str, style: Style, columns: usize, out: &mut String, taken: &mut usize| {
        *taken += width(text).max(columns);
        *out += &paint(style, text);
        *out += &" ".repeat(columns.saturating_sub(width(text)));
    };
    push(row.mark, row.style, 2, &mut out, &mut taken);
    push(&row.what, row.style, columns.what + 2, &mut out, &mut taken);
    if columns.ids > 0 {
        push(&row.ids, QUIET, columns.ids + 2, &mut out, &mut taken);
        if uuid_columns(look) > 0 {
            push(short_uuid(&row.uuid), QUIET, uuid_columns(look), &mut out, &mut taken);
        }
    }
    // If there is a remark, it explains why there is no memory to show, and replaces the bar.
    if columns.memory && row.remark.is_empty() {
        match row.memory {
            Some(memory) => {
                if columns.bar {
                    out += &(bar::line(memory, bar_columns(look), look) + " ");
                }
                let figures = bar::figures(memory);
                taken += columns.bar_columns(look) + width(&figures) + 2;
                out += &format!("{figures}  ");
            }
            None => push("", PLAIN, columns.bar_columns(look) + FIGURES + 2, &mut out, &mut taken),
        }
    }
    let mut below = String::new();
    let mut below_taken = INDENT + 2;
    if let Some(lease) = &row.lease {
        let text = lease.padded(columns.leases, look);
        if columns.leases_below {
            (below_taken, below) = (below_taken + width(&text), text);
        } else {
            push(&text, PLAIN, 0, &mut out, &mut taken);
        }
    }
    let room = look.width.saturating_sub(taken);
    let fits = below.is_empty() && (!look.wraps || remainder_width(row, look) <= room);
    if fits {
        out += &remainder(row, room, look);
    } else {
        below += &remainder(row, look.width.saturating_sub(below_taken), look);
    }
    out.truncate(out.trim_end().len());
    below.truncate(below.trim_end().len());
    let below = (!below.is_empty()).then(|| " ".repeat(INDENT + 2) + &below);
    std::iter::once(out).chain(below).collect()
}

/// Returns the processes of a row, less what its lease says already.
fn processes(row: &Row) -> Vec<Process> {
    let Some(lease) = &row.lease else { return row.processes.clone() };
    let others = row.processes.iter().filter(|process| process.pid.is_some() || process.user.is_some());
    let unnamed = |process: &Process| {
        let is_holder = process.uid == Some(lease.uid) && process.pid.is_some();
        if is_holder { Process { user: None, uid: None, ..process.clone() } } else { process.clone() }
    };
    others.map(unnamed).collect()
}

/// Returns the number of columns that the text at the end of a row needs.
fn remainder_width(row: &Row, look: &Appearance) -> usize {
    let processes = processes(row);
    match &row.reason {
        _ if !row.remark.is_empty() => 0,
        Some(reason) if processes.is_empty() => width(&look.clean(reason)),
        Some(_) | None => process_names::least(&processes.iter().collect::<Vec<_>>(), look),
    }
}

/// Returns the text at the end of a row: its remark, why the device accepts no new work, or its processes.
fn remainder(row: &Row, room: usize, look: &Appearance) -> String {
    let processes = processes(row);
    let fitting = |text: &str| if look.wraps { look.fit(text, room) } else { text.to_owned() };
    match &row.reason {
        _ if !row.remark.is_empty() => paint(NOTE, &look.fit(row.remark, room)),
        Some(reason) if processes.is_empty() => paint(NOTE, &fitting(&look.clean(reason))),
        Some(_) | None => process_names::line(&processes.iter().collect::<Vec<_>>(), room, look),
    }
}
