//! Judges what a lease does on one GPU: busy, idle, empty or unknown.
//!
//! ```text
//!  sample ──► signals ──► observation of a hold ──► decide ──► Judgement
//!               ▲            │ processes, activity, board power
//!  PowerLevels ─┘
//! ```
//!
//! A lease with processes is idle only if two kinds of evidence agree. First, every activity reading of the window is
//! present and zero. Second, no process has started or ended, the memory use has not changed, and the board needs no
//! more power than with an idle context. If one reading is missing or disagrees, the state is unknown. Nothing ends a
//! lease whose state is unknown.
//!
//! While a neighbour works on the same GPU, power could come from its work. With MIG, the measured activities of the
//! neighbours bound this power, and a board that needs more refutes that the lease is idle. Otherwise the activity readings,
//! the processes and their memory decide alone, and the state is weak: see [`Judgement::is_weak`].

mod decide;
mod power;
mod signals;

pub(crate) use decide::decide;
pub use decide::{Judgement, SignalSource, UnknownReason, UseState};
pub use power::PowerLevels;
pub(crate) use signals::{HoldPast, ProcessTrace, Signals};

#[cfg(test)]
mod tests;
