//! `gpushctl` as a process: everything that it says, with stderr and exit status.
//!
//! Helpers outside `#[test]` functions may panic too: that is how a test fails.
#![allow(clippy::unwrap_used)]

mod agent;
mod lease;
mod mps;
mod offline;
mod support;
mod unreachable;
