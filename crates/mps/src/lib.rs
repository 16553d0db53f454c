//! MPS control daemons on this host: their protocol and their supervision.
//!
//! | module | subject |
//! |---|---|
//! | [`protocol`] | the commands of `nvidia-cuda-mps-control`, its socket, its lock, its versions |
//! | [`daemon`] | one supervised daemon for each target: its directory, its process, its health, its logs |
//!
//! [`protocol`] never starts a daemon, and ends a daemon only with `quit`. [`daemon`] starts,
//! adopts, probes and ends daemons. [`daemon`] makes no decisions about the host: the caller passes
//! the desired state of each daemon, and [`daemon::Sources`] for facts about the host.

#![cfg_attr(test, allow(clippy::disallowed_methods, reason = "tests start their own tasks"))]

pub mod daemon;
pub mod protocol;

/// Directory of the system service's MPS daemons. Units of `gpushd-mps@.service` use no other directory.
pub const SYSTEM_DIRECTORY: &str = "/run/gpush-mps";
