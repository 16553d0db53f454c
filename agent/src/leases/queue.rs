//! A pass of the queue: decides about all waiting requests.
//!
//! ```text
//! search ─► [placement lock: unchanged? reserve the first grant] ─► no grant ─► note what the others wait for
//!    ▲             │ changed                │ granted
//!    └─────────────┴────────────────────────┘
//! ```

use std::{collections::BTreeMap, convert::Infallible};

use gpush_api::{ApiError, Gpu, LeaseQueuePosition};
use gpush_core::lease::{
    placement::{Assignment, Host, Member, NoAssignment},
    queue::{self as order, Outcome},
    quota::{HeldLease, Size},
};
use gpush_host::accounts::Account;
use tokio::time::Instant;

use super::{
    Leases,
    actor::{self, LeaseCommand},
    capacity::Reserved,
    explain::{Unplaced, explain},
    held::HeldLeases,
    limits, offers,
    placement_snapshot::PlacementSnapshot,
    reserve::{self, NotReserved, ReadHost},
    searches::searched,
    waiting::{PAUSE, Waiting},
};
use crate::{
    caller::Viewer,
    lanes::{Need, Needs, Ticket},
    state::OpenLease,
};

/// Serves the queue until gpushd stops.
pub(super) async fn run(leases: Leases) {
    let mut changes = leases.queue_changed.subscribe();
    let mut room = leases.handles.lanes.room();
    let mut snapshots = leases.handles.state.watch();
    loop {
        let has_restored = leases.has_unresolved();
        let is_empty = leases.waiting().is_empty() && !has_restored;
        if !is_empty {
            room.mark_unchanged();
            snapshots.mark_unchanged();
            let stopping = leases.handles.stopping.clone();
            if stopping.run_until_cancelled(pass(&leases)).await.is_none() {
                break;
            }
        }
        let now = Instant::now();
        let paused = |waiting: &Waiting| waiting.paused_until(now);
        let next = leases.waiting().values().filter_map(paused).min();
        let pause = now + PAUSE;
        let due = next.map_or(pause, |next| next.min(pause));
        tokio::select! {
            () = leases.handles.stopping.cancelled() => break,
            _ = changes.changed() => {}
            changed = room.changed(), if !is_empty => if changed.is_err() { break },
            changed = snapshots.changed(), if !is_empty => if changed.is_err() { break },
            () = tokio::time::sleep_until(due), if !is_empty => {}
        }
    }
}

/// Decides about all waiting requests.
async fn pass(leases: &Leases) {
    // Without a driver gpushd cannot grant anything, so the requests continue to wait.
    let changes = leases.handles.lanes.changes();
    let Ok(seen) = leases.handles.readings.host().await else { return };
    actor::resolve_all(leases, &seen).await;
    let gpus = seen.gpus(Viewer::Log);
    let (deciding, read) = (leases.clone(), ReadHost { host: seen.host, gpus, changes });
    // The searches run on a blocking thread. They are completed even if gpushd stops, because they may reserve capacity.
    leases.handles.tasks.blocking_before_exit(move || decide(&deciding, &read)).await;
}

/// Reserves capacity for each request that can be granted. The task of the lease then records the grant. Notes what the
/// other requests wait for. Searches without the placement lock.
fn decide(leases: &Leases, read: &ReadHost) {
    let gpus = read.gpus.as_slice();
    // Requests that exceed a quota. They reserve nothing, because their holders must first release a lease, or leave the
    // queue with an earlier request.
    let mut denied: BTreeMap<Ticket, String> = BTreeMap::new();
    let snapshot = loop {
        let current = || {
            let now = leases.handles.state.now();
            let held = HeldLeases::of(leases.handles.users.accounts(), &now.leases);
            for (ticket, waiting) in leases.waiting().iter().filter(|(_, waiting)| waiting.needs_capacity(&now.leases))
            {
                if let Err(error) = limits::within_quota(&held, &waiting.resolved) {
                    denied.insert(*ticket, error.message);
                }
            }
            // Also leave out requests that a quota has denied only for their assignment.
            Ok::<_, Infallible>(PlacementSnapshot::current(leases, &read.host, gpus, &now, denied.keys()))
        };
        let Ok((placing, snapshot, ())) = searched(
            || leases.lock_placement(),
            current,
            |snapshot| snapshot.known_schedule().map(drop),
            |snapshot| {
                snapshot.schedule();
            },
        );
        let schedule = snapshot.schedule();
        let beyond = reserve_beyond_quota(leases, gpus, &snapshot);
        if !beyond.is_empty() {
            denied.extend(beyond);
            continue;
        }
        // After a grant, decide again about the other requests, because the grant has taken capacity.
        let grants = schedule.outcomes.iter().filter_map(|(ticket, outcome)| match outcome {
            Outcome::Grant(assignment) => Some((Ticket(ticket.0), assignment)),
            Outcome::Ready | Outcome::Waits { .. } | Outcome::Never(_) => None,
        });
        let is_granted = grants.into_iter().any(|(ticket, assignment)| {
            if is_paused(leases, ticket) {
                // The other requests of this pass do not get this capacity. Operations must not get it either.
                if let Some(waiting) = leases.waiting().get(&ticket) {
                    waiting.place.set_needs(needs(&schedule.host, Some(assignment)));
                }
                return false;
            }
            // While gpushd stops, the first requests leave the queue. Later ones must not get their capacity.
            if leases.handles.stopping.is_cancelled() {
                return false;
            }
            match try_take(leases, read, &snapshot.host, ticket, assignment) {
                Some(Ok(reserved)) => {
                    grant(leases, ticket, reserved);
                    true
                }
                Some(Err(error)) => {
                    denied.insert(ticket, error.message);
                    true
                }
                // An operation has claimed the GPU meanwhile. When the operation ends, it wakes the queue.
                None => false,
            }
        });
        if !is_granted {
            for (ticket, waiting) in leases.waiting().iter_mut() {
                waiting.exceeds_quota = denied.contains_key(ticket);
            }
            drop(placing);
            break snapshot;
        }
    };
    for (ticket, outcome) in &snapshot.schedule().outcomes {
        let ticket = Ticket(ticket.0);
        match outcome {
            Outcome::Never(why) => {
                let Some(waiting) = leases.waiting().remove(&ticket) else { continue };
                let (resolved, viewer, queued) = (&waiting.resolved, waiting.viewer, Some((ticket, None)));
                let error = explain(leases, why, Unplaced { resolved, viewer, snapshot: &snapshot, gpus, queued });
                let _the_lease_may_have_ended = waiting.inbox.send(LeaseCommand::Refused(error));
            }
            Outcome::Waits { reserves, behind, why } => {
                note(leases, &snapshot, ticket, reserves.as_ref(), behind, why.as_ref(), gpus);
            }
            Outcome::Grant(_) | Outcome::Ready => {}
        }
    }
    for (ticket, message) in denied {
        if let Some(waiting) = leases.waiting().get(&ticket) {
            waiting.place.set_needs(Needs::new());
        }
        let position = position(leases, ticket);
        show_position(leases, ticket, LeaseQueuePosition { position, behind: Vec::new(), reasons: vec![message] });
    }
}

/// Returns the waiting requests that would reserve more than a quota allows, each with the reason. The reservations of
/// earlier requests of the same account count like leases. Otherwise a user without leases could reserve all GPUs.
fn reserve_beyond_quota(leases: &Leases, gpus: &[Gpu], snapshot: &PlacementSnapshot) -> Vec<(Ticket, String)> {
    let held = HeldLeases::of(leases.handles.users.accounts(), &leases.handles.state.leases());
    let mut reserved = BTreeMap::<Account, Vec<HeldLease>>::new();
    let mut beyond = Vec::new();
    for (ticket, outcome) in &snapshot.schedule().outcomes {
        let (ticket, Outcome::Waits { reserves: Some(assignment), .. }) = (Ticket(ticket.0), outcome) else { continue };
        let waiting = leases.waiting().get(&ticket).map(|waiting| (waiting.id, waiting.resolved.clone()));
        let Some((id, resolved)) = waiting else { continue };
        // An error means that the MPS target cannot serve the request now, so the size is not known.
        let Ok(members) =
            offers::members(&leases.handles.state.now(), assignment, gpus, &snapshot.host, &resolved.new.request)
        else {
            continue;
        };
        let of_account = reserved.entry(resolved.account).or_default();
        let all: Vec<HeldLease> = held.of_requester(&resolved).into_iter().chain(of_account.iter().copied()).collect();
        let size = Size::of(&members);
        match limits::check_limits(&all, &resolved).and_then(|()| limits::check_size(&all, &resolved, size)) {
            Ok(()) => of_account.push(HeldLease { id, queued: false, size, releasable: false }),
            Err(error) => beyond.push((ticket, error.message)),
        }
    }
    beyond
}

/// Gives the reserved capacity to the task of the lease, which records the grant. The caller must hold the placement
/// lock. If the request has just left the queue, the capacity is free again.
fn grant(leases: &Leases, ticket: Ticket, reserved: Reserved) {
    if let Some(waiting) = leases.waiting().get_mut(&ticket) {
        waiting.taken = Some(reserved.id());
        let _the_lease_may_have_ended = waiting.inbox.send(LeaseCommand::Reserved(reserved));
    }
}

/// Returns whether gpushd must not grant a request yet, because a grant of the request has just failed.
fn is_paused(leases: &Leases, ticket: Ticket) -> bool {
    leases.waiting().get(&ticket).is_some_and(|waiting| waiting.paused_until(Instant::now()).is_some())
}

fn try_take(
    leases: &Leases,
    read: &ReadHost,
    host: &Host,
    ticket: Ticket,
    assignment: &Assignment,
) -> Option<Result<Reserved, ApiError>> {
    let resolved = leases.waiting().get(&ticket).map(|waiting| waiting.resolved.clone())?;
    let held = HeldLeases::of(leases.handles.users.accounts(), &leases.handles.state.leases());
    match reserve::reserve_assignment(leases, read, host, &held, &resolved, assignment) {
        Ok(reserved) => reserved.map(Ok),
        Err(NotReserved::Refused(error)) => Some(Err(error)),
        // The change that made the placement outdated wakes the queue.
        Err(NotReserved::NoRoom { .. } | NotReserved::Outdated) => None,
    }
}

/// Notes what a request reserves, and why it waits.
fn note(
    leases: &Leases,
    snapshot: &PlacementSnapshot,
    ticket: Ticket,
    reserves: Option<&Assignment>,
    behind: &[order::Ticket],
    why: Option<&NoAssignment>,
    gpus: &[Gpu],
) {
    let entries = leases.handles.lanes.entries();
    let name = |ticket: &order::Ticket| {
        let entry = entries.iter().find(|(one, _)| one.0 == ticket.0);
        entry.map(|(_, entry)| entry.waiter.name().to_owned())
    };
    let behind: Vec<String> = behind.iter().filter_map(name).collect();
    let found = leases.waiting().get(&ticket).map(|waiting| {
        waiting.place.set_needs(needs(&snapshot.host, reserves));
        (waiting.resolved.clone(), waiting.viewer)
    });
    let Some((resolved, viewer)) = found else { return };
    // Search without the lock of the waiting requests.
    let unplaced = Unplaced { resolved: &resolved, viewer, snapshot, gpus, queued: Some((ticket, reserves)) };
    let reasons = why.map_or_else(Vec::new, |why| explain(leases, why, unplaced).causes);
    let position = position(leases, ticket);
    show_position(leases, ticket, LeaseQueuePosition { position, behind, reasons });
}

/// Returns the position of a request among the waiting requests and operations. The first position is 1.
fn position(leases: &Leases, ticket: Ticket) -> u32 {
    let entries = leases.handles.lanes.entries();
    let before = entries.iter().filter(|(one, _)| *one <= ticket).count();
    u32::try_from(before).unwrap_or(u32::MAX)
}

fn show_position(leases: &Leases, ticket: Ticket, position: LeaseQueuePosition) {
    let found = leases.waiting().get(&ticket).map(|waiting| (waiting.id, waiting.inbox.clone()));
    let Some((id, inbox)) = found else { return };
    let is_new = |lease: &OpenLease| lease.queue.as_ref() != Some(&position);
    if leases.handles.state.leases().get(id).is_some_and(is_new) {
        let _the_lease_may_have_ended = inbox.send(LeaseCommand::Waits(position));
    }
}

/// Returns the reserved capacity in the form of a queue entry's needs. Later operations must not take this capacity.
fn needs(host: &Host, reserves: Option<&Assignment>) -> Needs {
    let mut needs = Needs::new();
    let Some(assignment) = reserves else { return needs };
    for member in &assignment.members {
        let Some(gpu) = host.gpus.iter().find(|gpu| gpu.index == member.gpu()) else { continue };
        let target = match member {
            Member::Device { uuid, .. } => uuid,
            Member::Mps { target, .. } => target,
            Member::Create { .. } | Member::Timeslice { .. } | Member::Whole { .. } => &gpu.uuid,
        };
        match needs.entry(gpu.uuid.clone()).or_insert_with(|| Need::Parts(Default::default())) {
            Need::Parts(parts) => drop(parts.insert(target.clone())),
            Need::Lane(_) => {}
        }
    }
    needs
}
