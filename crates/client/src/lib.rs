//! Client of gpushd's API over its Unix socket.
//!
//! Why it is a crate: `gpushctl`, Slurm hooks and tests all talk to the agent, and each owes its
//! user the same answer when that fails: a missing socket, a refused connection, a closed door, an
//! agent of another version and an agent that says nothing are five different troubles with five
//! different ways out. [`explain`] tells them apart.
//!
//! It is lean on purpose: one connection, no pool, no thread, no resolver. It runs on whatever tokio
//! runtime the caller has; a current-thread one with I/O and time is enough.

mod client;
mod error;
mod events;
pub mod explain;
mod leases;
mod mps;
mod socket;
mod wire;

pub use client::{AuditQuery, Client, DEFAULT_DEADLINE};
pub use error::{Error, Kind};
pub use events::{EventQuery, EventStream, Told};
pub use socket::{ADMIN_SOCKET, DEFAULT_SOCKET, Origin, Socket};

/// API version that this client speaks, as in `/v1/…` and `Version::api`.
pub const API: &str = "v1";
