//! The checks of MPS that want a real GPU, `tests/gpu`: a real gpushd, real CUDA programs, and what they came to.
//!
//! ```text
//! bin/gpu_mps ──► ground     is there what it takes? if not: SKIPPED, and why
//!      │
//!      ├────────► service    a gpushd of its own in a scratch directory; gpushctl; the end of all that was started
//!      │             └─────► client    a program that computes, with a share or without
//!      ├────────► checks     one function each, on a service
//!      └────────► report     lines, mps.json, mps.md
//! ```
//!
//! Nothing here changes a setting of a GPU: the rule says `compute_mode = "keep"`, a GPU in MIG mode is left alone,
//! and [`ground::Ground::unchanged`] reads it back. All errors are sentences: they become the line of a check.
//! A test runs all of it on a simulated host (`tests/tests/driver/gpu_checks.rs`).

pub mod checks;
pub mod client;
pub mod ground;
pub mod report;
pub mod service;

use std::time::Duration;

/// How long anything may take before a check gives up: a first start of PyTorch takes a minute.
pub const PATIENCE: Duration = Duration::from_secs(120);

/// Between two questions to gpushd, where nothing tells that something has changed.
pub const LOOK: Duration = Duration::from_millis(10);
