//! Tests that run the `gpushctl` binary. They check stdout, stderr and the exit status.
//!
//! Helpers outside of `#[test]` functions may also panic to fail a test.
#![allow(clippy::unwrap_used)]

mod agent;
mod lease;
mod mps;
mod offline;
mod support;
mod unreachable;
