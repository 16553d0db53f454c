//! Judges what a lease does on one GPU: busy, idle, empty or unknown.
//!
//! ```text
//!  sample ──► signals ──► observation of a hold ──► decide ──► Judgement
//!               ▲            │ processes, activity, board power
//!  PowerLevels ─┘
//! ```
//!
//! A lease with processes is idle only if two kinds of evidence agree. First, every activity reading of the window is present
//! and zero. Second, no process is new, no memory use has changed, and the board needs no more power than with an idle
//! context. If one reading is missing or disagrees, the state is unknown. Nothing ends a lease whose state is unknown.
//!
//! The power of the board is no evidence while a neighbour works on the same GPU: its work explains any power. Then the
//! activity readings, the processes and their memory decide alone. With MIG, this is common.

mod decide;
mod power;
mod signals;

pub(crate) use decide::decide;
pub use decide::{Judgement, SignalSource, UnknownReason, UseState};
pub use power::PowerLevels;
pub(crate) use signals::{HoldPast, ProcessTrace, Signals};

#[cfg(test)]
mod tests;
