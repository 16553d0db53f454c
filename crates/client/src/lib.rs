//! Client of gpushd's API over its Unix socket.
//!
//! It is a separate crate because `gpushctl`, Slurm hooks and tests all connect to gpushd and must explain failures in
//! the same way. A missing socket, a refused connection, missing permission, a gpushd of another version and one that
//! does not answer are five problems with five remedies. [`explain`] distinguishes them.
//!
//! It is deliberately small: one connection, no pool, no thread, no resolver. It runs on any tokio runtime; a
//! current-thread runtime with I/O and time suffices.

mod client;
mod config;
mod error;
mod events;
pub mod explain;
mod leases;
mod mps;
mod operations;
mod slurm;
mod socket;
mod wire;

pub use client::{AuditQuery, Client, DEFAULT_DEADLINE};
pub use error::{Error, Kind};
pub use events::{EventQuery, EventStream, Told};
pub use socket::{ADMIN_SOCKET, DEFAULT_SOCKET, Origin, Socket};

/// API version of this client, as in `/v1/…` and `Version::api`.
pub const API: &str = "v1";
