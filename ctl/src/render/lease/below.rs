//! The leases of a GPU in `gpushctl status`: one that holds a whole device in the row of the device, others below.

use gpush_api::{Gpu, Lease, LeaseBinding, LeaseKind, LeaseMember, LeaseState, LeaseUsageSummary, MemberShare};

use super::{end, member_share, over_limit, place, share, target, usage, user};
use crate::render::{
    Appearance,
    appearance::{QUIET, gib, pad, paint, width},
};

/// Maximum number of lines with leases below a GPU.
const MOST_LINES: usize = 8;

/// Number of blanks between two cells.
const GAP: usize = 2;

/// The lease that holds a whole device, as cells of the row of the device.
#[derive(Debug, Clone)]
pub(crate) struct Holding {
    /// The uid of the holder.
    pub(crate) uid: u32,
    /// The id and the holder: `L17 alice`.
    holder: String,
    end: String,
    does: String,
}

/// The widths of the cells of a [`Holding`]. They are equal for all rows.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct HoldingWidths {
    holder: usize,
    end: usize,
    does: usize,
}

impl HoldingWidths {
    /// Returns widths that also fit this lease.
    pub(crate) fn with(self, lease: &Holding) -> Self {
        Self {
            holder: self.holder.max(width(&lease.holder)),
            end: self.end.max(width(&lease.end)),
            does: self.does.max(width(&lease.does)),
        }
    }

    /// Returns the number of columns of all cells.
    pub(crate) fn sum(self) -> usize {
        if self.holder == 0 {
            0
        } else {
            self.holder + GAP + self.end + if self.does == 0 { 0 } else { GAP + self.does }
        }
    }
}

impl Holding {
    /// Returns the cells as one text, which ends with a gap.
    pub(crate) fn padded(&self, widths: HoldingWidths, look: &Appearance) -> String {
        let columns = [(&self.holder, widths.holder), (&self.end, widths.end), (&self.does, widths.does)];
        let cells = columns.iter().filter(|(_, columns)| *columns > 0);
        let text: String = cells.map(|(text, columns)| pad(text, columns + GAP)).collect();
        if look.wraps { look.fit(&text, look.width) } else { text }
    }
}

/// Returns the lease that holds all of the device of this GPU with this UUID.
pub(crate) fn holding(gpu: &Gpu, uuid: &str, leases: &[Lease], look: &Appearance) -> Option<Holding> {
    let mut open = leases.iter().filter(|lease| lease.state != LeaseState::Ended);
    let is_here = |member: &LeaseMember| member.gpu_uuid == gpu.uuid && member.target.as_str() == uuid;
    let lease = open.find(|lease| lease.members.iter().any(|one| is_here(one) && is_alone(one)))?;
    Some(Holding {
        uid: lease.holder.uid,
        holder: holder(lease, look),
        end: brief_end(lease, look),
        does: use_of(lease).map_or_else(String::new, usage::brief),
    })
}

/// Returns whether a member holds all of its target.
fn is_alone(member: &LeaseMember) -> bool {
    match member.share {
        MemberShare::Mig { .. } | MemberShare::Whole => true,
        MemberShare::Mps { .. } | MemberShare::Timeslice { .. } => false,
    }
}

/// Returns the id and the holder, which is shortened on a narrow terminal.
fn holder(lease: &Lease, look: &Appearance) -> String {
    let longest = match look.width {
        _ if !look.wraps => usize::MAX,
        0..72 => 8,
        72..100 => 10,
        _ => 16,
    };
    format!("{} {}", lease.id, look.fit(&user(lease, look), longest))
}

/// Returns what an active lease is used for.
fn use_of(lease: &Lease) -> Option<&LeaseUsageSummary> {
    lease.usage.as_ref().filter(|_| lease.state == LeaseState::Active)
}

/// Describes the end of a lease in a few columns. If a lease has an end and is bound to a process, shows the end.
fn brief_end(lease: &Lease, look: &Appearance) -> String {
    match (lease.state, lease.expires_at, &lease.binding) {
        (LeaseState::Releasing, ..) => "releasing".to_owned(),
        (LeaseState::Granting, ..) => "being granted".to_owned(),
        (_, Some(at), _) => look.ahead(at),
        (_, None, LeaseBinding::Job { job, .. }) => format!("job {job}"),
        (LeaseState::Queued | LeaseState::Active | LeaseState::Ended, None, _) => end(lease, look),
    }
}

/// A line for a lease: its holder, its share, its end and its use. A waiting lease has only the first cells.
type Cells = [String; 5];

/// Draws a line for each lease that shares a device of this GPU or waits for the GPU. A lease that holds a whole device
/// is in the row of the device. If there are more than [`MOST_LINES`] leases, the last line has their number.
pub(crate) fn below(gpu: &Gpu, leases: &[Lease], indent: usize, look: &Appearance) -> Vec<String> {
    let open = leases.iter().filter(|lease| lease.state != LeaseState::Ended);
    let rows: Vec<Cells> = open.filter_map(|lease| cells(lease, gpu, look)).collect();
    let shown = if look.wraps && rows.len() > MOST_LINES { MOST_LINES - 1 } else { rows.len() };
    let (rows, more) = rows.split_at(shown);
    let columns = |at: usize| rows.iter().map(|row| width(&row[at])).max().unwrap_or(0);
    let widths: Vec<usize> = (0..5).map(columns).collect();
    let heading = format!("{}leases  ", " ".repeat(indent));
    let room = look.width.saturating_sub(width(&heading));
    let shown = widths.iter().filter(|columns| **columns > 0);
    let is_wide = shown.map(|columns| columns + GAP).sum::<usize>() > room + GAP;
    let gap = if look.wraps && is_wide { 1 } else { GAP };
    let line = |row: &Cells| {
        let cells = row.iter().zip(&widths).filter(|(_, columns)| **columns > 0);
        cells.map(|(cell, columns)| pad(cell, columns + gap)).collect::<String>().trim_end().to_owned()
    };
    let mut lines: Vec<String> = rows.iter().map(line).collect();
    if !more.is_empty() {
        lines.push(format!("{} more: `gpushctl lease list`", more.len()));
    }
    let draw = |(at, line): (usize, String)| {
        let first = if at == 0 { paint(QUIET, &heading) } else { " ".repeat(width(&heading)) };
        first + &if look.wraps { look.fit(&line, room) } else { line }
    };
    lines.into_iter().enumerate().map(draw).collect()
}

/// Returns the cells of a lease below a GPU: id and holder, share, end, use, memory. Returns `None` if a row shows the
/// lease, or if it has nothing to do with the GPU.
fn cells(lease: &Lease, gpu: &Gpu, look: &Appearance) -> Option<Cells> {
    let here: Vec<_> = lease.members.iter().filter(|member| member.gpu_uuid == gpu.uuid).collect();
    if here.is_empty() {
        let share = share(lease, look);
        return waits(lease, gpu, look).map(|waits| [holder(lease, look), share, waits, String::new(), String::new()]);
    }
    let has_no_row = |member: &&&LeaseMember| !(is_alone(member) && has_row(member, gpu));
    let first = here.iter().find(has_no_row)?;
    let share = match device(first, gpu, look) {
        Some(device) if lease.kind == LeaseKind::Mig => device,
        Some(device) => format!("{} of {device}", member_share(first, look)),
        None => member_share(first, look),
    };
    let usage = use_of(lease);
    Some([
        holder(lease, look),
        share,
        brief_end(lease, look),
        usage.map_or_else(String::new, usage::brief),
        usage
            .and_then(|usage| usage.memory_mib)
            .map_or_else(String::new, |memory| format!("{} GiB{}", gib(memory), over_limit::mark(lease))),
    ])
}

/// Returns whether `status` has a row for the target of a member.
fn has_row(member: &LeaseMember, gpu: &Gpu) -> bool {
    match gpu.mig.as_ref().filter(|mig| mig.enabled) {
        None => member.target == gpu.uuid,
        Some(mig) => {
            let mut devices = mig.instances.iter().flat_map(|instance| &instance.compute);
            devices.any(|compute| compute.uuid.as_ref() == Some(&member.target))
        }
    }
}

/// Describes the place of a lease that waits just for this GPU.
fn waits(lease: &Lease, gpu: &Gpu, look: &Appearance) -> Option<String> {
    // A lease without members is still waiting. Show it only if it requests just this GPU.
    let request = lease.request.as_ref()?;
    let waits = lease.state == LeaseState::Queued && request.gpus == [gpu.index.to_string()];
    waits.then(|| format!("waits, {}", place(lease, look).unwrap_or_default()))
}

/// Returns one line for each lease that has a share of this GPU or waits for it.
pub(crate) fn each(gpu: &Gpu, leases: &[Lease], indent: usize, look: &Appearance) -> Vec<String> {
    let open = leases.iter().filter(|lease| lease.state != LeaseState::Ended);
    let indent = " ".repeat(indent);
    open.filter_map(|lease| text(lease, gpu, look)).flat_map(|text| look.wrap(&indent, &text)).collect()
}

/// Describes a lease: `L17 alice mps 25%, in 2h, idle for 10m, 1.2 GiB`. Returns `None` if the lease has no share of this
/// GPU and does not wait for it.
fn text(lease: &Lease, gpu: &Gpu, look: &Appearance) -> Option<String> {
    let here: Vec<_> = lease.members.iter().filter(|member| member.gpu_uuid == gpu.uuid).collect();
    let (id, user) = (lease.id, user(lease, look));
    if here.is_empty() {
        return waits(lease, gpu, look).map(|waits| format!("{id} {user} {} {waits}", share(lease, look)));
    }
    let devices: Vec<String> = here.iter().filter_map(|member| device(member, gpu, look)).collect();
    let what = match (lease.kind, devices.is_empty()) {
        (_, true) => share(lease, look),
        (LeaseKind::Mig, false) => devices.join(" "),
        (_, false) => format!("{} of {}", share(lease, look), devices.join(" ")),
    };
    let ends = match lease.state {
        LeaseState::Releasing => "releasing".to_owned(),
        LeaseState::Granting => "being granted".to_owned(),
        LeaseState::Queued | LeaseState::Active | LeaseState::Ended => end(lease, look),
    };
    let does = lease.usage.as_ref().filter(|_| lease.state == LeaseState::Active).map(usage::now);
    let does = does.filter(|does| !does.is_empty()).map_or_else(String::new, |does| format!(", {does}"));
    Some(format!("{id} {user} {what}, {ends}{does}{}", over_limit::brief(lease, look)))
}

/// Returns the MIG device of a member, such as `1g.10gb@0`; `None` for a whole GPU.
fn device(member: &LeaseMember, gpu: &Gpu, look: &Appearance) -> Option<String> {
    let text = target(member, std::slice::from_ref(gpu), look);
    text.split_once(':').map(|(_, device)| device.to_owned())
}
