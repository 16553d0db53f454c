//! The checks of MPS on a real GPU, `tests/gpu`: a real gpushd, real CUDA programs, and their results.
//!
//! ```text
//! bin/gpu_mps ──► ground     the prerequisites; if one is missing: SKIPPED, and why
//!      │
//!      ├────────► service    its own gpushd in a scratch directory; gpushctl; cleanup of all processes
//!      │             └─────► client    a program that computes, with a share or without
//!      ├────────► checks     one function each, on a service
//!      └────────► report     lines, mps.json, mps.md
//! ```
//!
//! Nothing here changes a setting of a GPU: the rule says `compute_mode = "keep"`, the checks do not run on a GPU in
//! MIG mode, and [`ground::Ground::unchanged`] reads the settings back. Errors are sentences: they become the line
//! of a check. A test runs the checks on a simulated host (`tests/tests/driver/gpu_checks.rs`).

pub mod checks;
pub mod client;
pub mod ground;
pub mod report;
pub mod service;

use std::time::Duration;

/// Time limit of each wait: a first start of PyTorch takes a minute.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Interval between two polls of gpushd, where no event announces a change.
pub const LOOK: Duration = Duration::from_millis(10);
