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

use std::collections::BTreeSet;

use gpush_api::GpuIndex;

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
    /// The GPUs of `assignment`.
    pub(super) gpus: BTreeSet<GpuIndex>,
    /// Whether gpushd ends the processes of leases on all these GPUs at the end of the lease.
    pub(super) ends_leases: bool,
}

/// The capacity that is left in a pass.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Capacity {
    /// The host with all grants and reservations of the entries so far.
    pub(super) host: Host,
    /// The host without the reservations of leases.
    unreserved: Host,
    reservations: Vec<LeaseReservation>,
    /// The host as requests see it that pass over these reservations.
    passed: Vec<(PassedOver, Host)>,
}

/// The reservations that a request passes over, by their tickets. Two requests that pass over the same ones see the same
/// capacity.
pub(super) type PassedOver = Vec<Ticket>;

impl Capacity {
    pub(super) fn new(host: &Host) -> Self {
        Self { host: host.clone(), unreserved: host.clone(), reservations: Vec::new(), passed: Vec::new() }
    }

    /// Returns the reservations of leases, in order.
    pub(super) fn reservations(&self) -> &[LeaseReservation] {
        &self.reservations
    }

    /// Occupies the capacity of a grant, or of an operation.
    pub(super) fn occupy(&mut self, change: impl Fn(&mut Host)) {
        self.passed.clear();
        change(&mut self.host);
        change(&mut self.unreserved);
    }

    /// Reserves capacity for the lease `ticket` of the user `holder`. `free_at` is the time at which it is free.
    pub(super) fn reserve(&mut self, ticket: Ticket, assignment: Assignment, holder: u32, free_at: KnownEnd) {
        let gpus = assignment.gpus();
        let ends_leases = self.host.gpus.iter().filter(|gpu| gpus.contains(&gpu.index)).all(|gpu| gpu.ends_leases);
        let reservation = LeaseReservation { ticket, assignment, holder, free_at, gpus, ends_leases };
        self.passed.clear();
        self.host.reserve(&reservation.assignment, reservation.holder);
        self.reservations.push(reservation);
    }

    /// Returns the reservations that a request passes over. `lasts` is the longest time in seconds for which the request
    /// occupies its capacity.
    pub(super) fn passed_over(&self, lasts: Option<u64>, rules: ScheduleRules) -> PassedOver {
        let Some(end) = lasts.map(|lasts| rules.now.saturating_add(lasts)) else { return PassedOver::new() };
        let is_passed = |one: &&LeaseReservation| one.ends_leases && one.free_at.is_some_and(|free_at| end <= free_at);
        self.reservations.iter().filter(is_passed).map(|one| one.ticket).collect()
    }

    /// Returns the times in seconds until reservations that a request can pass over are free, the longest first.
    pub(super) fn lengths(&self, rules: ScheduleRules) -> Vec<u64> {
        let passable = self.reservations.iter().filter(|one| one.ends_leases);
        let lengths: BTreeSet<u64> = passable.filter_map(|one| one.free_at?.checked_sub(rules.now)).collect();
        lengths.into_iter().rev().collect()
    }

    /// Returns the capacity that a request sees if it passes over these reservations. Keeps it for other requests.
    pub(super) fn seen(&mut self, passed_over: &PassedOver) -> &Host {
        if passed_over.is_empty() {
            return &self.host;
        }
        let at = self.passed.iter().position(|(passed, _)| passed == passed_over).unwrap_or_else(|| {
            let host = self.without(passed_over);
            self.passed.push((passed_over.clone(), host));
            self.passed.len() - 1
        });
        &self.passed[at].1
    }

    /// Returns the capacity without these reservations.
    pub(super) fn without(&self, passed_over: &[Ticket]) -> Host {
        self.with(|one| !passed_over.contains(&one.ticket))
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
