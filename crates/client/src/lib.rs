//! Client of gpushd's API over its Unix socket.
//!
//! This is a separate crate, because `gpushctl`, Slurm hooks and tests all connect to gpushd and
//! must explain failures in the same way. Five problems have different remedies: a missing socket,
//! a refused connection, missing permission, a gpushd of another version, and a gpushd that does
//! not answer. [`explain`] distinguishes them.
//!
//! The crate is deliberately small: one connection, no pool, no thread, no resolver. [`Client`] runs on any tokio
//! runtime. A current-thread runtime with I/O and time suffices. [`BlockingClient`] needs no runtime: Slurm's hooks use
//! it, because they must start quickly.

mod attempts;
mod bill;
mod blocking;
mod client;
mod config;
mod connection;
mod enforcement;
mod error;
mod events;
pub mod explain;
mod failures;
mod leases;
mod metrics;
mod mps;
mod notifications;
mod operations;
mod path_segment;
mod question;
mod slurm;
mod socket;
mod usage;

pub use bill::BillSelection;
pub use blocking::BlockingClient;
pub use client::{AuditQuery, Client, DEFAULT_DEADLINE};
pub use error::{Error, Kind};
pub use events::{EventQuery, EventStream, ReceivedEvent};
pub use leases::{LeaseSelection, QuotaQuery};
pub use metrics::{MetricsText, MetricsView};
pub use socket::{ADMIN_SOCKET, DEFAULT_SOCKET, Origin, Socket};

/// API version of this client, as in `/v1/…` and `Version::api`.
pub const API: &str = "v1";
