//! Tests that run the `gpushctl` binary. They check stdout, stderr and the exit status.
//!
//! Helper functions outside of `#[test]` functions may panic too, to make a test fail.
#![allow(clippy::unwrap_used)]

mod advise;
mod agent;
mod config_file;
mod help;
mod hints;
mod lease;
mod metrics;
mod mps;
mod offline;
mod slurm;
mod support;
mod top;
mod unreachable;
