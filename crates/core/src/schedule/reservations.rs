//! The reservations of a pass, and which of them a short request may pass over.
//!
//! ```text
//!   GPU 0, reserved for L7 (7g.80gb)
//!            now                      17:00
//!   L1       ├────────────────────────┤        in the way of L7, ends last
//!   L2       ├───────────┤                     in the way of L7
//!   L9                    ├──────────┤         ends before 17:00: may use the slices that are free until then
//!   L10                   ├─────────────────┤  ends later: must not use them
//!   L11                   ├──── …              without an end: must not use them
//! ```
//!
//! A reservation is passed over only if all leases in its way have known ends, and only on GPUs where gpushd ends the
//! processes of a lease at the end of the lease. So the reserved place is free at the same time as without the short
//! request.

use std::borrow::Cow;

use crate::lease::placement::{Assignment, Host, KnownEnd};

use super::{limits::ScheduleRules, waiter::Ticket};

/// Capacity that is kept for a waiting request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseReservation {
    /// The request.
    pub ticket: Ticket,
    /// The capacity.
    pub assignment: Assignment,
    /// User id of the holder.
    pub holder: u32,
    /// When the last lease in the way ends; `None` if this is not known.
    pub free_at: KnownEnd,
}

/// The capacity that is left in a pass.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Capacity {
    /// The host with all grants and reservations of the entries so far.
    pub(super) host: Host,
    /// The host without the reservations of leases.
    unreserved: Host,
    reservations: Vec<LeaseReservation>,
}

/// The reservations that a request passes over, by their tickets. Two requests that pass over the same ones see the same
/// capacity.
pub(super) type PassedOver = Vec<Ticket>;

impl Capacity {
    pub(super) fn new(host: &Host) -> Self {
        Self { host: host.clone(), unreserved: host.clone(), reservations: Vec::new() }
    }

    /// Returns the reservations of leases, in order.
    pub(super) fn reservations(&self) -> &[LeaseReservation] {
        &self.reservations
    }

    /// Occupies the capacity of a grant, or of an operation.
    pub(super) fn occupy(&mut self, change: impl Fn(&mut Host)) {
        change(&mut self.host);
        change(&mut self.unreserved);
    }

    /// Reserves capacity for a lease.
    pub(super) fn reserve(&mut self, reservation: LeaseReservation) {
        self.host.reserve(&reservation.assignment, reservation.holder);
        self.reservations.push(reservation);
    }

    /// Returns the reservations that a request passes over. `lasts` is the longest time in seconds for which the request
    /// occupies its capacity.
    pub(super) fn passed_over(&self, lasts: Option<u64>, rules: ScheduleRules) -> PassedOver {
        let Some(end) = lasts.map(|lasts| rules.now.saturating_add(lasts)) else { return PassedOver::new() };
        let ends_leases = |one: &LeaseReservation| {
            let mut gpus = self.host.gpus.iter().filter(|gpu| one.assignment.gpus().contains(&gpu.index));
            gpus.all(|gpu| gpu.ends_leases)
        };
        let passed = self.reservations.iter().filter(|one| one.free_at.is_some_and(|free_at| end <= free_at));
        passed.filter(|one| ends_leases(one)).map(|one| one.ticket).collect()
    }

    /// Returns the capacity that a request sees if it passes over these reservations.
    pub(super) fn without(&self, passed_over: &[Ticket]) -> Cow<'_, Host> {
        match passed_over {
            [] => Cow::Borrowed(&self.host),
            [..] => Cow::Owned(self.with(|one| !passed_over.contains(&one.ticket))),
        }
    }

    /// Returns the capacity that a waiting request sees: without its own reservation and those of later requests.
    pub(super) fn ahead_of(&self, ticket: Ticket, passed_over: &[Ticket]) -> Host {
        self.with(|one| one.ticket < ticket && !passed_over.contains(&one.ticket))
    }

    fn with(&self, is_kept: impl Fn(&LeaseReservation) -> bool) -> Host {
        let mut host = self.unreserved.clone();
        for one in self.reservations.iter().filter(|one| is_kept(one)) {
            host.reserve(&one.assignment, one.holder);
        }
        host
    }
}
