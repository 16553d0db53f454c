//! Tests that run the `gpushctl` binary. They check stdout, stderr and the exit status.
//!
//! Helpers outside of `#[test]` functions may panic too: a panic is how a test fails.
#![allow(clippy::unwrap_used)]

mod agent;
mod lease;
mod mps;
mod offline;
mod support;
mod unreachable;
