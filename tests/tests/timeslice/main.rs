//! Time-slicing through the real gpushd: time-slice levels, compute modes, mode changes.

mod compute_policy;
mod levels;
mod mode_changes;
