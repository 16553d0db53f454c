//! MPS control daemons on this host: their protocol, and their supervision.
//!
//! | module | subject |
//! |---|---|
//! | [`protocol`] | the commands of `nvidia-cuda-mps-control`, its socket, its lock, its versions |
//! | [`daemon`] | one supervised daemon for each target: its directory, its process, its health, its logs |
//!
//! [`protocol`] never starts a daemon, and ends one only with `quit`. [`daemon`] starts, adopts, probes and ends daemons.
//! It decides nothing about the host: the caller says how each daemon should be, and injects what else a daemon's task
//! needs to know ([`daemon::Sources`]).

pub mod daemon;
pub mod protocol;

/// Directory of the MPS daemons of the system's service. Units of `gpushd-mps@.service` use no other.
pub const SYSTEM_DIRECTORY: &str = "/run/gpush-mps";
