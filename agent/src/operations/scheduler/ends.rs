//! When leases end, as far as gpushd knows it. The queue uses this to choose reservations, and to let short leases use
//! reserved capacity.

use gpush_api::{AtLeaseEnd, LeaseMember, LeaseState, MemberShare};
use gpush_core::lease::{
    machine::{ProcessEnding, State},
    placement::{Host, KnownEnd, LeaseEnd},
};
use jiff::Timestamp;

use super::demand::LeaseDemand;
use crate::state::{HostState, LeaseTable, OpenLease};

/// Time from the end time of a lease to the last probe for its processes, in addition to the grace period, in seconds.
const PROBES_S: u64 = 10;

/// The clock of the queue has steps of this many seconds, so that passes within one step have equal results.
const CLOCK_STEP_S: u64 = 10;

/// About to end: the end time has passed.
const NOW: KnownEnd = Some(0);

/// Notes in the offers when the leases end, and on which GPUs gpushd ends the processes of expired leases. `read` has the
/// rules of the GPUs.
pub(super) fn note_ends(host: &mut Host, read: &HostState, table: &LeaseTable) {
    for gpu in &mut host.gpus {
        let rule = read.gpu(&gpu.uuid).and_then(|known| read.config.rules.get(known.rule?));
        gpu.ends_leases = rule.and_then(|rule| rule.lease).is_some_and(|terms| terms.at_end == AtLeaseEnd::End);
    }
    let open = table.holding().flat_map(|lease| members(&lease.record.members, end_of(lease)));
    let recorded = table.reserved.values().flat_map(|one| members(&one.members, one.end));
    let ends: Vec<LeaseEnd<'_>> = open.chain(recorded).collect();
    host.set_ends(ends.into_iter());
}

fn members(members: &[LeaseMember], end: KnownEnd) -> impl Iterator<Item = LeaseEnd<'_>> {
    members.iter().map(move |member| {
        let tenths = match &member.share {
            MemberShare::Mps { percentage, .. } => u32::from(percentage.tenths()),
            MemberShare::Mig { .. } | MemberShare::Timeslice { .. } | MemberShare::Whole => 0,
        };
        LeaseEnd { target: &member.target, tenths, end }
    })
}

/// Returns the known end of a lease.
pub(super) fn end_of(lease: &OpenLease) -> KnownEnd {
    match lease.state.name() {
        LeaseState::Active => lease.record.expires_at.map(seconds),
        // Most releases end at once. Until the first probe has found a process, the lease counts as about to end, so that a
        // reservation does not move to another GPU for this short time.
        LeaseState::Releasing if lease.waits_for.is_empty() => NOW,
        LeaseState::Releasing if ends_processes(lease) => NOW,
        LeaseState::Releasing | LeaseState::Granting | LeaseState::Queued | LeaseState::Ended => None,
    }
}

/// Returns whether gpushd is ending the processes of a releasing lease.
fn ends_processes(lease: &OpenLease) -> bool {
    matches!(lease.state, State::Releasing(releasing) if releasing.ending != ProcessEnding::No)
}

/// Returns the end of a lease that is granted now.
pub(super) fn end_of_grant(demand: &LeaseDemand) -> KnownEnd {
    demand.new.request.duration_s.map(|duration| seconds(Timestamp::now()).saturating_add(duration))
}

/// Returns the longest time in seconds for which a request occupies its capacity, if gpushd ends its processes; `None` if the
/// request has no end.
pub(super) fn longest(demand: &LeaseDemand) -> Option<u64> {
    demand.new.request.duration_s.map(|duration| duration.saturating_add(after_the_end(demand)))
}

/// Returns the longest time in seconds from the end time of a lease to the end of its processes.
pub(super) fn after_the_end(demand: &LeaseDemand) -> u64 {
    demand.config.processes.grace.as_secs().saturating_add(PROBES_S)
}

/// Returns the time of the queue: the present time, rounded up.
pub(super) fn clock() -> u64 {
    seconds(Timestamp::now()).saturating_add(CLOCK_STEP_S) / CLOCK_STEP_S * CLOCK_STEP_S
}

/// Returns a time of the queue as a timestamp.
pub(super) fn timestamp(seconds: u64) -> Option<Timestamp> {
    Timestamp::from_second(i64::try_from(seconds).ok()?).ok()
}

fn seconds(at: Timestamp) -> u64 {
    u64::try_from(at.as_second()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use gpush_api::EndReason;
    use gpush_core::lease::machine::{EndProcesses, Event, step};

    use super::*;
    use crate::state::leases::tests::record;

    #[test]
    fn known_end_depends_on_the_state_of_the_lease() {
        let mut active = record(1, 1000, "GPU-0");
        assert_eq!(end_of(&OpenLease::new(active.clone())), None, "a lease without an end time");
        active.expires_at = Timestamp::from_second(4_000_000_000).ok();
        let mut lease = OpenLease::new(active);
        assert_eq!(end_of(&lease), Some(4_000_000_000));
        let at = std::time::Duration::ZERO;
        (lease.state, _) = step(State::Active, Event::Expired, at);
        assert_eq!(lease.state.reason(), Some(EndReason::Expired));
        assert_eq!(end_of(&lease), NOW, "no process is known");
        lease.waits_for = vec!["process 7".to_owned()];
        assert_eq!(end_of(&lease), None, "its processes may run on");
        let end = EndProcesses { notice: at, grace: at };
        (lease.state, _) = step(lease.state, Event::EndProcesses(end), at);
        assert_eq!(end_of(&lease), NOW, "gpushd ends its processes");
    }
}
