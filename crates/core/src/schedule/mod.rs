//! The queue of the scheduler: one order of arrival for the leases and operations that wait for GPUs.
//!
//! ```text
//! push ──► entries in order ──schedule(host)──► Grant      the lease can be granted now
//!                 │                             Ready      the operation may claim its GPUs
//!                 │                             Waits      its reservation, and the earlier entries it waits for
//!                 │                             Never      the host could not fulfil it even if all leases ended
//!                 └──operations()──► for each operation, the earlier entry that it waits for
//! ```
//!
//! Each entry has *needs* on some GPUs. An operation needs the lanes of its GPUs, and exclusive use of what its last plan
//! removes or changes. A lease needs the targets that the last pass reserved for it. Two entries conflict if their needs on a
//! GPU meet one of these conditions:
//!
//! | | lane | part of target T |
//! |---|---|---|
//! | lane | always | if the operation's last plan needs T, or the whole GPU, exclusively |
//! | part of target T | as above | if both need a part of T |
//!
//! An entry is *first* if it conflicts with no earlier entry that is first. Only first entries delay later entries. So
//! if an operation waits for one of its GPUs, it does not block its other GPUs. An entry that is first delays all later
//! entries that conflict with it, even while it cannot begin itself. So no later entry overtakes it. An entry waits only
//! for earlier entries, so no new entry can delay it.
//!
//! A pass ([`Queue::schedule`]) goes through the entries in order, on a copy of the host:
//!
//! - A lease that can be granted occupies its assignment.
//! - A lease that cannot be granted may reserve capacity on GPUs where no earlier entry has a reservation, and never more
//!   than it requested. It reserves where the fewest leases without a known end are in the way, then where the last known
//!   end is earliest.
//! - An operation that is first reserves all targets that its last plan removes or changes.
//! - Later leases are placed on the remaining capacity. So a later, smaller request can be granted at once, but never
//!   delays an earlier lease that reserves, or an earlier operation that is first.
//!
//! Which leases reserve, and who may use the reserved capacity meanwhile:
//!
//! ```text
//! place in the queue   can be granted   reserves                                later requests
//! 1  L7  7g.80gb       no               GPU 0, free at 17:00                    a lease that ends before 17:00 may use GPU 0
//! 2  L8  7g.80gb       no               GPU 1, used by L2 without an end        GPU 1 is closed to them
//! 3  L9  4g.40gb       no               not yet: two requests are ahead of it   each grant that L9 could have used counts
//! 4  L10 1g.10gb       yes: GPU 2                                               L9 was overtaken once more
//! 5  L11 4g.40gb       no               after 16 such grants for each GPU       as for L7
//! ```
//!
//! Further rules:
//!
//! - A gang, or an operation on several GPUs, reserves nothing until it is first on all of its GPUs. So two such entries
//!   cannot wait for each other.
//! - No later lease is placed on a reservation, unless it ends before the reserved capacity is free. So the number of leases
//!   without a known end that an entry waits for never grows, and the time of the last known end never moves back.
//! - A grant that creates instances claims its GPUs. These GPUs accept grants again in the first pass after
//!   this operation has ended.
//! - Between passes, gpushd notes each grant ([`Queue::note_grant`]). A lease that was overtaken often enough reserves, so no
//!   lease waits for ever, even if the first two wait for leases without an end.
//! - The queue itself holds no capacity. The caller reserves the capacity of a granted assignment before the next pass.
//!
//! | file | subject |
//! |---|---|
//! | `waiter` | what waits, and its position |
//! | `need` | what an entry needs, and which needs conflict |
//! | `queue` | the order of arrival |
//! | `pass` | the decision about each entry |
//! | `limits` | which waiting requests reserve |
//! | `reservations` | what is left, and which reservations a short request passes over |

mod limits;
mod need;
mod pass;
mod queue;
mod reservations;
mod waiter;

pub use limits::{ReservationLimits, ScheduleRules};
pub use need::{ClaimedTargets, Need, Needs, reserved_parts};
pub use pass::{Outcome, Schedule};
pub use queue::{Ahead, Queue, QueuedEntry};
pub use reservations::LeaseReservation;
pub use waiter::{Ticket, Waiter};

#[cfg(test)]
mod tests;
