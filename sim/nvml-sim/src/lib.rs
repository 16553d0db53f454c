//! `libnvidia-ml.so.1`, simulated at the C ABI over [`silicon`].
//!
//! It is simulated at the ABI so that gpush, monitors and scripts run unchanged, and gpush has only one
//! hardware path. Programs find the host through `$NVML_SIM_STATE`.
//!
//! The library exports the symbols of one real driver, 550.163.01 (`symbols-550.txt`, 350 names), and
//! `gpush_sim`, by which a program can tell its users that the GPUs are simulated. Functions that no known
//! client needs are [`stubs`]. A newer driver in a host's description changes the answers (profiles, version),
//! but not the set of symbols.
//!
//! - [`entry`]: the frame around every call. [`caller`]: the caller's pointers and handles.
//! - [`session`]: `nvmlInit` to `nvmlShutdown`.
//! - the others: one subject of NVML per file.
//!
//! It has no threads and writes nothing to standard output or error, because it runs inside other programs.

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
