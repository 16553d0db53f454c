//! A pass: decides about all waiting requests.
//!
//! ```text
//! leases now ─► search ─► reserve the first grant ─► no grant ─► note and show what the others wait for
//!     ▲                             │ granted, or another request got capacity
//!     └─────────────────────────────┘
//! ```

use std::{collections::BTreeMap, sync::Arc};

use gpush_api::{ApiError, Gpu, LeaseQueuePosition, LeaseQueueReservation};
use gpush_core::{
    lease::{
        placement::{Assignment, GpuOffer, NoAssignment},
        quota::{HeldLease, Size},
    },
    schedule::{Needs, Outcome, Schedule, Ticket, reserved_parts},
};
use gpush_host::accounts::Account;
use tokio::time::Instant;

use super::{
    Scheduler,
    answer::LeaseAnswer,
    ends,
    explain::{Unplaced, explain},
    held::HeldLeases,
    limits, offers,
    placement_snapshot::PlacementSnapshot,
    reserve::{MOST_OVERTAKEN, NotTaken, Placed, ReadHost, reserve_assignment},
    restriction::{Restriction, Restrictions},
};
use crate::state::{HostState, LeaseTable, OpenLease};

/// Reserves capacity for each request that can be granted. The task of the lease then records the grant. Notes and shows
/// what the other requests wait for. Returns whether the next reading may make a grant possible, without an event in
/// gpushd.
pub(super) fn decide(scheduler: &Scheduler, read: &ReadHost) -> bool {
    let (mut denied, mut overtaken) = (Restrictions::new(), 0);
    let (snapshot, held) = loop {
        let turn = (overtaken >= MOST_OVERTAKEN).then(|| scheduler.turn.lock());
        let now = scheduler.handles.context.state.now();
        let held = HeldLeases::of(scheduler.handles.context.users.accounts(), &now.leases);
        deny_beyond_quota(scheduler, &now.leases, &held, &mut denied);
        let snapshot = PlacementSnapshot::current(scheduler, &read.host, &read.gpus, &now, &denied);
        // First the requests that wait for their own leases: what they do not reserve does not count for their quotas.
        let mut found = blocked_by_own_leases(scheduler, &snapshot, &held);
        if found.is_empty() {
            found = reserve_beyond_quota(scheduler, read, &snapshot, (&now, &held));
        }
        if !found.is_empty() {
            denied.extend(found);
            continue;
        }
        let _turn = turn.unwrap_or_else(|| scheduler.turn.lock());
        match grant_first(scheduler, read, &snapshot, (&now, &held), &mut denied) {
            GrantAttempt::Nothing => break (snapshot, held),
            // Decide again about the other requests, because the grant has taken capacity.
            GrantAttempt::One => overtaken = 0,
            GrantAttempt::Overtaken => overtaken += 1,
        }
    };
    note_needs(scheduler, snapshot.schedule(), &denied);
    show(scheduler, &snapshot, &held, &read.gpus, &denied);
    snapshot.host.gpus.iter().any(GpuOffer::may_improve_with_a_reading)
}

/// Adds the requests that exceed a quota, wherever they are placed.
fn deny_beyond_quota(scheduler: &Scheduler, table: &LeaseTable, held: &HeldLeases, denied: &mut Restrictions) {
    for (ticket, demand) in scheduler.entries().needing_capacity(table) {
        if let Err(denial) = limits::within_quota(held, demand) {
            denied.insert(ticket, Restriction::beyond_quota(denial.to_string()));
        }
    }
}

/// Returns the waiting requests that would reserve more than a quota allows, each with the reason. The reservations of
/// earlier requests of the same account count like leases. Otherwise a user without leases could reserve all GPUs.
fn reserve_beyond_quota(
    scheduler: &Scheduler,
    read: &ReadHost,
    snapshot: &PlacementSnapshot,
    (now, held): (&Arc<HostState>, &HeldLeases),
) -> Vec<(Ticket, Restriction)> {
    let mut reserved = BTreeMap::<Account, Vec<HeldLease>>::new();
    let mut beyond = Vec::new();
    for (ticket, outcome) in &snapshot.schedule().outcomes {
        let Outcome::Waits { reserves: Some(assignment), .. } = outcome else { continue };
        let found = scheduler.entries().lease(*ticket).and_then(|lease| Some((lease.id, lease.demand.clone()?.0)));
        let Some((id, demand)) = found else { continue };
        // An error means that the MPS target cannot serve the request now, so the size is not known.
        let Ok(members) = offers::members(now, assignment, &read.gpus, &snapshot.host, &demand.new.request) else {
            continue;
        };
        let of_account = reserved.entry(demand.account).or_default();
        let all: Vec<HeldLease> = held.of_requester(&demand).into_iter().chain(of_account.iter().copied()).collect();
        let size = Size::of(&members);
        match limits::check_limits(&all, &demand).and_then(|()| limits::check_size(&all, &demand, size)) {
            Ok(()) => of_account.push(HeldLease { id, queued: false, size, releasable: false }),
            Err(denial) => beyond.push((*ticket, Restriction::beyond_quota(denial.to_string()))),
        }
    }
    beyond
}

/// Returns the waiting requests whose reservation only leases of their own account block. Otherwise a user could keep
/// capacity that the user does not use: a request for a device that the user already holds would reserve the others. If
/// leases of other users block the request on other GPUs, the request reserves there. Requests of root, also those of
/// Slurm's hooks, keep their reservations.
fn blocked_by_own_leases(
    scheduler: &Scheduler,
    snapshot: &PlacementSnapshot,
    held: &HeldLeases,
) -> Vec<(Ticket, Restriction)> {
    let blocked = snapshot.schedule().outcomes.iter().filter_map(|(ticket, outcome)| {
        let Outcome::Waits { reserves: Some(assignment), .. } = outcome else { return None };
        let demand = scheduler.entries().lease(*ticket)?.demand.clone()?.0;
        if demand.new.asked_by.uid == 0 {
            return None;
        }
        let own = held.ids_of(demand.account);
        let blocking = snapshot.blockers(&demand.wanted, Some(assignment));
        let is_own = !blocking.leases.is_empty() && blocking.leases.iter().all(|id| own.contains(id));
        if !is_own || !blocking.in_use.is_empty() {
            return None;
        }
        let elsewhere = snapshot.reservation_without(&demand.wanted, &own);
        Some((*ticket, Restriction::blocked_by_own(blocking.leases, blocking.together, elsewhere)))
    });
    blocked.collect()
}

/// The result of an attempt to grant a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GrantAttempt {
    /// No request can be granted.
    Nothing,
    /// One request was granted, or denied for its assignment.
    One,
    /// Another grant has got capacity since the decision.
    Overtaken,
}

/// Reserves the capacity of the first grant that is possible, and gives it to the task of the lease. If a quota does not
/// allow the assignment, denies the request instead.
fn grant_first(
    scheduler: &Scheduler,
    read: &ReadHost,
    snapshot: &PlacementSnapshot,
    (now, held): (&Arc<HostState>, &HeldLeases),
    denied: &mut Restrictions,
) -> GrantAttempt {
    let attempt = |(ticket, outcome): &(Ticket, Outcome)| {
        let Outcome::Grant(assignment) = outcome else { return None };
        // While gpushd stops, the first requests leave the queue. Later ones must not get their capacity.
        if scheduler.handles.context.stopping.is_cancelled() {
            return None;
        }
        let found = {
            let entries = scheduler.entries();
            // The other requests of this pass do not get the capacity of a request that is paused.
            let lease = entries.lease(*ticket).filter(|lease| lease.paused_until(Instant::now()).is_none());
            lease.and_then(|lease| Some((lease.id, Arc::clone(&lease.inbox), lease.demand.clone()?.0)))
        };
        let (id, inbox, demand) = found?;
        let placed = Placed { read, host: &snapshot.host, now, held, assignment };
        match reserve_assignment(scheduler, placed, &demand, Some((*ticket, id))) {
            Ok(reserved) => {
                let needs = reserved_parts(&snapshot.host, assignment);
                scheduler.change_entries(|entries| entries.set_needs(*ticket, needs));
                inbox.answer(LeaseAnswer::Grant(reserved));
            }
            Err(NotTaken::Refused(error)) => drop(denied.insert(*ticket, Restriction::beyond_quota(error.message))),
            Err(NotTaken::Denied(denial, _)) => {
                denied.insert(*ticket, Restriction::beyond_quota(denial.to_string()));
            }
            Err(NotTaken::Overtaken) => return Some(GrantAttempt::Overtaken),
            // An operation has claimed the GPU, or the readings are outdated. This change wakes the scheduler.
            Err(NotTaken::Claimed | NotTaken::Outdated) => return None,
        }
        Some(GrantAttempt::One)
    };
    snapshot.schedule().outcomes.iter().find_map(attempt).unwrap_or(GrantAttempt::Nothing)
}

/// Notes in the queue what each request needs: operations that arrive later must not take it. A request whose grant is
/// paused needs its assignment.
fn note_needs(scheduler: &Scheduler, schedule: &Schedule, denied: &Restrictions) {
    scheduler.change_entries(|entries| {
        for (ticket, outcome) in &schedule.outcomes {
            if entries.lease(*ticket).is_none() {
                continue;
            }
            let needs = match outcome {
                Outcome::Grant(assignment) | Outcome::Waits { reserves: Some(assignment), .. } => {
                    reserved_parts(schedule.host(), assignment)
                }
                Outcome::Ready | Outcome::Waits { reserves: None, .. } | Outcome::Never(_) => Needs::new(),
            };
            entries.set_needs(*ticket, needs);
        }
        for (ticket, _) in denied.iter().filter(|(_, one)| one.only_on.is_none()) {
            entries.set_needs(*ticket, Needs::new());
        }
        entries.set_restrictions(denied);
    });
}

/// Shows each waiting request what it waits for, and refuses the requests that can never be granted.
fn show(scheduler: &Scheduler, snapshot: &PlacementSnapshot, held: &HeldLeases, gpus: &[Gpu], denied: &Restrictions) {
    for (ticket, outcome) in &snapshot.schedule().outcomes {
        match outcome {
            Outcome::Never(why) => {
                let Some(error) = explained(scheduler, (snapshot, held), *ticket, None, why, gpus) else { continue };
                let inbox = scheduler.entries().lease(*ticket).map(|lease| Arc::clone(&lease.inbox));
                if let Some(inbox) = inbox {
                    inbox.answer(LeaseAnswer::Never(error));
                }
            }
            Outcome::Waits { reserves, behind, has_reason } => {
                let why = has_reason.then(|| snapshot.why(*ticket)).flatten();
                let explained = |why| explained(scheduler, (snapshot, held), *ticket, reserves.as_ref(), why, gpus);
                let reasons = why.as_ref().and_then(explained).map_or_else(Vec::new, |error| error.causes);
                show_position(scheduler, *ticket, behind, reasons, shown_reservation(snapshot, *ticket));
            }
            Outcome::Grant(_) | Outcome::Ready => {}
        }
    }
    for (ticket, restriction) in denied.iter().filter(|(_, one)| one.only_on.is_none()) {
        show_position(scheduler, *ticket, &[], vec![restriction.why.clone()], None);
    }
}

/// Explains why a waiting request has no assignment. Returns `None` for an operation, and for a request that has left the
/// queue.
fn explained(
    scheduler: &Scheduler,
    (snapshot, held): (&PlacementSnapshot, &HeldLeases),
    ticket: Ticket,
    reserves: Option<&Assignment>,
    why: &NoAssignment,
    gpus: &[Gpu],
) -> Option<ApiError> {
    let (demand, viewer) = scheduler.entries().lease(ticket)?.demand.clone()?;
    let unplaced = Unplaced { demand: &demand, viewer, snapshot, held, gpus, queued: Some((ticket, reserves)) };
    Some(explain(scheduler, why, unplaced))
}

/// Returns what a waiting request reserves, for clients.
fn shown_reservation(snapshot: &PlacementSnapshot, ticket: Ticket) -> Option<LeaseQueueReservation> {
    let reservation = snapshot.schedule().reservation(ticket)?;
    let in_the_way = snapshot.in_the_way(&reservation.assignment);
    Some(LeaseQueueReservation {
        gpus: reservation.assignment.gpus().into_iter().collect(),
        // 0 stands for leases that are about to end.
        free_at: reservation.free_at.filter(|at| *at > 0).and_then(ends::timestamp),
        blocking_leases: in_the_way.iter().map(|(id, _)| *id).collect(),
        without_end: in_the_way.iter().filter(|(_, end)| end.is_none()).map(|(id, _)| *id).collect(),
    })
}

fn show_position(
    scheduler: &Scheduler,
    ticket: Ticket,
    behind: &[Ticket],
    reasons: Vec<String>,
    reserves: Option<LeaseQueueReservation>,
) {
    let found = {
        let entries = scheduler.entries();
        entries.lease(ticket).map(|lease| {
            let name = |ticket: &Ticket| Some(entries.queue().get(*ticket)?.waiter.name().to_owned());
            let position = u32::try_from(entries.queue().position(ticket).unwrap_or(0)).unwrap_or(u32::MAX);
            let behind = behind.iter().filter_map(name).collect();
            let position = LeaseQueuePosition { position, behind, reasons, reserves };
            (lease.id, Arc::clone(&lease.inbox), position)
        })
    };
    let Some((id, inbox, position)) = found else { return };
    let is_new = |lease: &OpenLease| lease.queue.as_ref() != Some(&position);
    if scheduler.handles.context.state.leases().get(id).is_some_and(is_new) {
        inbox.answer(LeaseAnswer::Waits(position));
    }
}
