//! The leases of a GPU in `gpushctl status`, in one line.

use gpush_api::{Gpu, Lease, LeaseKind, LeaseMember, LeaseState};

use super::{end, place, share, target, usage, user};
use crate::render::{
    Appearance,
    appearance::{QUIET, paint, width},
};

/// Draws in one line the leases that have a share of this GPU or wait for it. If not all fit, the
/// line ends with the number of further leases.
pub(crate) fn below(gpu: &Gpu, leases: &[Lease], indent: usize, look: &Appearance) -> Vec<String> {
    let open = leases.iter().filter(|lease| lease.state != LeaseState::Ended);
    let texts: Vec<String> = open.filter_map(|lease| text(lease, gpu, look)).collect();
    if texts.is_empty() {
        return Vec::new();
    }
    let first = format!("{}leases  ", " ".repeat(indent));
    if !look.wraps {
        return vec![paint(QUIET, &first) + &texts.join("; ")];
    }
    let room = look.width.saturating_sub(width(&first));
    for shown in (1..=texts.len()).rev() {
        let more = texts.len() - shown;
        let mut line = texts[..shown].join("; ");
        if more > 0 {
            line += &format!("; +{more}");
        }
        if width(&line) <= room || shown == 1 {
            return vec![paint(QUIET, &first) + &look.fit(&line, room)];
        }
    }
    Vec::new()
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
        // A lease without members is still waiting. Show it only if it requests just this GPU.
        let request = lease.request.as_ref()?;
        let waits = lease.state == LeaseState::Queued && request.gpus == [gpu.index.to_string()];
        let place = place(lease, look).unwrap_or_default();
        return waits.then(|| format!("{id} {user} {} waits, {place}", share(lease, look)));
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
    Some(format!("{id} {user} {what}, {ends}{does}"))
}

/// Returns the MIG device of a member, such as `1g.10gb@0`; `None` for a whole GPU.
fn device(member: &LeaseMember, gpu: &Gpu, look: &Appearance) -> Option<String> {
    let text = target(member, std::slice::from_ref(gpu), look);
    text.split_once(':').map(|(_, device)| device.to_owned())
}
