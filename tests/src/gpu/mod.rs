//! Checks on a real GPU (`tests/gpu`), of MPS and of the usage figures. They use a real gpushd and real CUDA programs.
//!
//! ```text
//! bin/gpu_mps, bin/gpu_use
//!      ├────────► command    arguments, exit code, the last check
//!      ├────────► ground     the prerequisites; if one is missing: SKIPPED, and why
//!      ├────────► service    its own gpushd in a scratch directory; gpushctl; cleanup of all processes
//!      │             └─────► client    a program that computes, with a lease or without
//!      ├────────► checks     of MPS: one function each, on a service
//!      ├────────► usage      of figures about use: errors, costs, energy
//!      └────────► report     lines; mps.json and mps.md, or use.json and use.md
//! ```
//!
//! The checks change no setting of a GPU. The rule says `compute_mode = "keep"`, and the checks do
//! not run on a GPU in MIG mode. [`ground::Ground::unchanged`] compares the settings afterwards. An
//! error is a sentence, which the report prints in the line of the check. The test
//! `tests/tests/driver/gpu_checks.rs` runs the checks on a simulated host.

pub mod checks;
pub mod client;
pub mod command;
pub mod ground;
pub mod report;
pub mod service;
pub mod usage;

use std::time::Duration;

/// Time limit of each wait. It is long because the first start of PyTorch takes a minute.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Interval between two polls of gpushd. Polls are for changes about which gpushd sends no event.
pub const LOOK: Duration = Duration::from_millis(10);
