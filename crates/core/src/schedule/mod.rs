//! The scheduler's queue: one order of arrival for the leases and operations that wait for GPUs.
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
//! - A lease that cannot be granted reserves capacity on GPUs where no earlier entry has a reservation. It reserves the
//!   assignment for which the fewest occupied shares must become free, and never more than it requested.
//! - An operation that is first reserves all targets that its last plan removes or changes.
//! - Later leases are placed on the remaining capacity. So a later, smaller request can be granted at once, but never
//!   delays an earlier lease, or an earlier operation that is first.
//!
//! Further rules:
//!
//! - A gang, or an operation on several GPUs, reserves nothing until it is first on all of its GPUs. So two such entries
//!   cannot wait for each other.
//! - No later lease is placed on a reservation. So the number of occupied shares that an entry waits for never grows,
//!   and later entries cannot overtake that entry indefinitely.
//! - A grant that creates instances claims its GPUs. These GPUs accept grants again in the first pass after
//!   this operation has ended.
//! - The queue itself holds no capacity. The caller reserves the capacity of a granted assignment before the next pass.
//!
//! | file | subject |
//! |---|---|
//! | `waiter` | what waits, and its position |
//! | `need` | what an entry needs, and which needs conflict |
//! | `queue` | the order of arrival |
//! | `pass` | the decision about each entry |

mod need;
mod pass;
mod queue;
mod waiter;

pub use need::{ClaimedTargets, Need, Needs, reserved_parts};
pub use pass::{Outcome, Schedule};
pub use queue::{Ahead, Queue, QueuedEntry};
pub use waiter::{Ticket, Waiter};

#[cfg(test)]
mod tests;
