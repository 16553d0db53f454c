//! All details of a lease.

use gpush_api::{Gpu, Lease, LeaseBinding, LeaseState, MemberShare, Priority, text::local_time};
use gpush_core::{lease::request, refusal};

use super::{
    device_access, end, enforced_by, idle,
    list::list,
    over_limit, place, queue, reason, share, state, target,
    usage::{self, Surroundings},
    user,
};
use crate::render::{
    Appearance,
    appearance::{BAD, NOTE, QUIET, STRONG, gib, pad, paint},
    listing::Listing,
    mps::memory,
    names,
    table::{Align, Narrow, fitted},
};

/// Width of the column with the names of values, such as `state`.
const NAMES: usize = 12;

/// Number of blanks at the beginning of each line of a table of targets.
const INDENT: usize = 2;

/// Draws `gpushctl lease show`.
pub(crate) fn show(leases: &[Lease], gpus: &[Gpu], surroundings: &Surroundings<'_>, look: &Appearance) -> Listing {
    let drawn: Vec<String> = leases.iter().map(|lease| one(lease, gpus, surroundings, look)).collect();
    list(leases, gpus, look).drawn(drawn.join("\n"))
}

/// Draws all details of a lease.
pub(crate) fn one(lease: &Lease, gpus: &[Gpu], surroundings: &Surroundings<'_>, look: &Appearance) -> String {
    let (word, style) = state(lease.state);
    let (event, at) = match lease.state {
        LeaseState::Queued | LeaseState::Granting => ("requested ", Some(lease.created_at)),
        LeaseState::Active => ("granted ", lease.granted_at),
        LeaseState::Releasing => ("", lease.revocation.as_ref().map(|revocation| revocation.at)),
        LeaseState::Ended => ("", lease.ended_at),
    };
    let since = at.map_or_else(String::new, |at| format!(", {event}{}", look.ago(at)));
    let why = lease.reason.map_or_else(String::new, |why| format!(": {}", reason(why)));
    let mut out = format!("{}  {}{why}{since}\n", paint(STRONG, &lease.id.to_string()), paint(style, word));
    let mut fact = |name: &str, value: &str| out += &self::fact(name, value, look);

    let by = lease.asked_by.as_ref().filter(|by| by.uid != lease.holder.uid);
    let by = by.map_or_else(String::new, |by| format!(", requested by {}", names::actor(by, look)));
    fact("holder", &format!("{}{by}", user(lease, look)));
    fact("share", &share(lease, look));
    fact("enforced by", enforced_by(lease.enforcement));
    if surroundings.has_memory_limits && over_limit::has_soft_limit(lease) {
        fact("", over_limit::DRIVER_CAN_LIMIT);
    }
    if let Some(access) = lease.device_access {
        fact("device access", device_access(access));
    }
    if matches!(lease.state, LeaseState::Queued | LeaseState::Granting | LeaseState::Active) {
        let at = lease.expires_at.map_or_else(String::new, |at| format!(" ({})", local_time(at)));
        fact("ends", &format!("{}{at}", end(lease, look)));
    }
    for (name, value) in usage::facts(lease, surroundings, look) {
        fact(name, &value);
    }
    if let Some(unused) = &lease.idle {
        fact("unused", &idle::outlook(unused, lease, look));
    }
    if let Some(memory) = &lease.over_limit {
        fact("above limit", &over_limit::outlook(memory, look));
    }
    if let Some(kept) = idle::kept(lease, look) {
        fact("kept", &kept);
    }
    let bound = match &lease.binding {
        LeaseBinding::Scope { unit: Some(bound), .. } | LeaseBinding::Cgroup { cgroup: Some(bound), .. } => Some(bound),
        _ => None,
    };
    if let Some(bound) = bound.filter(|_| lease.state != LeaseState::Ended) {
        fact("bound to", &look.clean(bound));
    }
    if let Some(request) = &lease.request {
        let text = request::spec(request);
        fact("request", if text.is_empty() { "any share" } else { &text });
    }
    if let Some(operation) = &lease.operation {
        fact("operation", &format!("{0}; `gpushctl operation show {0}`", look.clean(operation)));
    }
    if let Some(place) = place(lease, look) {
        fact("queue", &place);
        queue::blockers(lease).into_iter().for_each(|text| fact("", &text));
        lease.queue.iter().flat_map(|queue| &queue.reasons).for_each(|why| fact("", &look.clean(why)));
    }
    for (at, what) in lease.waits_for.iter().enumerate() {
        fact(if at == 0 { "waits" } else { "" }, &look.clean(what));
    }
    for change in gpus.iter().flat_map(|gpu| gpu.pending.iter().map(move |change| (gpu.index, change))) {
        if change.1.leases.contains(&lease.id) {
            fact("delays", &look.clean(&change.1.describe(change.0)));
        }
    }
    if let Some(revocation) = &lease.revocation {
        let by = names::actor(&revocation.by, look);
        let why =
            if revocation.reason.is_empty() { String::new() } else { format!(": {}", look.clean(&revocation.reason)) };
        fact("revoked", &format!("by {by} {}{why}", look.ago(revocation.at)));
        // An ended lease has no processes any more.
        if let Some(at) = revocation.processes_end_at.filter(|_| lease.state != LeaseState::Ended) {
            let text = format!("gpushd ends the processes {} ({})", look.ahead(at), local_time(at));
            out += &self::fact("", &text, look).replace(&text, &paint(NOTE, &text));
        }
    }
    if let Some(notice) = &lease.notice {
        let shown = match notice.terminals {
            None => String::new(),
            Some(0) => ", on no terminal".to_owned(),
            Some(1) => ", on 1 terminal".to_owned(),
            Some(number) => format!(", on {number} terminals"),
        };
        out += &self::fact("notice", &format!("{} ({}{shown})", look.clean(&notice.text), look.ago(notice.at)), look);
    }
    let is_here = |target: &str| lease.members.iter().any(|member| member.target == target);
    // The drift of a GPU that is leased as a whole can keep programs from the GPU, for example if MIG mode is on.
    for gpu in gpus.iter().filter(|gpu| lease.state == LeaseState::Active && is_here(gpu.uuid.as_str())) {
        let drift = gpu.drift.iter().map(|drift| look.clean(&format!("GPU {}: {drift}", gpu.index)));
        out.extend(drift.flat_map(|text| look.wrap("  ! ", &text)).map(|line| paint(NOTE, &line) + "\n"));
    }
    let unleased = gpus.iter().flat_map(|gpu| &gpu.unleased).filter(|one| is_here(one.target.as_str()));
    for one in unleased.filter(|_| lease.state != LeaseState::Ended) {
        let text = look.clean(&format!("unleased: {}: {}", refusal::holder(&one.process), one.why));
        out.extend(look.wrap("  ! ", &text).iter().map(|line| paint(BAD, line) + "\n"));
    }
    if !lease.members.is_empty() {
        out += "\n";
        out += &members(lease, gpus, look);
    }
    out
}

/// Draws a name and its value. A long value continues on the next lines, in its column.
fn fact(name: &str, value: &str, look: &Appearance) -> String {
    let first = format!("  {} ", pad(name, NAMES - 1));
    let lines = look.wrap(&first, value).into_iter().map(|line| match line.strip_prefix(&first) {
        Some(rest) => format!("{}{rest}\n", paint(QUIET, &first)),
        None => line + "\n",
    });
    lines.collect()
}

/// Draws a table of a lease's targets with their settings.
fn members(lease: &Lease, gpus: &[Gpu], look: &Appearance) -> String {
    let columns = [("TARGET", Align::Left), ("SHARE", Align::Left), ("GIB", Align::Right), ("UUID", Align::Left)];
    let row = |member: &gpush_api::LeaseMember| {
        let share = match &member.share {
            MemberShare::Mig { profile, .. } => look.clean(profile),
            MemberShare::Mps { percentage, memory_limit_mib, priority } => {
                let limit = memory_limit_mib.map_or_else(String::new, |limit| format!(", {}", memory(Some(limit))));
                let priority = if *priority == Priority::Normal { "" } else { ", below-normal" };
                format!("{percentage}%{limit}{priority}")
            }
            MemberShare::Timeslice { replicas, .. } => format!("1 of {replicas} replicas"),
            MemberShare::Whole => "whole".to_owned(),
        };
        vec![target(member, gpus, look), share, gib(member.memory_mib), look.clean(member.target.as_str())]
    };
    // Never shorten a UUID, because users copy it. If there is no room, draw it on its own line.
    let rows = lease.members.iter().map(row).collect();
    fitted(&columns, rows, Narrow::default().prose(), INDENT, look)
}
