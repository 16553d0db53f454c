//! `libnvidia-ml.so.1`, simulated at the C ABI over [`silicon`].
//!
//! Why at the ABI: gpush, monitors and scripts then run against a simulated host unchanged, and
//! gpush has one hardware path, not two. Programs find the host by `$NVML_SIM_STATE`.
//!
//! The library exports the symbols of one real driver, 550.163.01 (`symbols-550.txt`, 350 names),
//! and one more, `gpush_sim`, by which a program can tell its users that the GPUs are simulated.
//! Functions that no known client needs are [`stubs`]. A newer driver in a host's description
//! changes what calls answer (profiles, version), not which symbols there are.
//!
//! - [`entry`]: the way into and out of every call. [`caller`]: the caller's pointers and handles.
//! - [`session`]: `nvmlInit` to `nvmlShutdown`.
//! - everything else: one subject of NVML a file.
//!
//! No threads, nothing on standard output or error: the library is a guest in its clients.

#![allow(unsafe_code)] // exported C functions: `#[unsafe(no_mangle)]`; pointers only in `caller`
#![allow(non_snake_case)] // their names are NVML's

mod caller;
mod compute_instance;
mod entry;
mod error_text;
mod events;
mod fields;
mod gpm;
mod gpu_instance;
mod health;
mod lookup;
mod mig_mode;
mod nvlink;
mod processes;
mod readings;
mod session;
mod stubs;
mod system;
