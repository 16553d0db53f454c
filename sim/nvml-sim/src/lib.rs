//! `libnvidia-ml.so.1`, simulated at the C ABI on top of [`silicon`].
//!
//! The library has NVIDIA's C ABI, so gpush, monitors and scripts run on it unchanged, and gpush
//! needs no code for simulated hardware. Programs find the simulated host through
//! `$NVML_SIM_STATE`.
//!
//! The library exports the symbols of one real driver, 550.163.01 (`symbols-550.txt`, 350 names),
//! and the symbol `gpush_sim`, which shows that the GPUs are simulated. The module [`stubs`] has
//! the functions that no known client needs. If the description of a host names a newer driver, the
//! results change (profiles, version), but not the set of symbols.
//! - [`entry`]: the code before and after every call.
//! - [`caller`]: the caller's pointers and handles.
//! - [`session`]: from `nvmlInit` to `nvmlShutdown`.
//! - Every other module covers one subject area of NVML.
//!
//! The library has no threads and writes nothing to standard output or error, because it runs
//! inside other programs.

#![allow(unsafe_code)] // exported C functions: `#[unsafe(no_mangle)]`; pointers only in `caller`
#![allow(non_snake_case)] // names of NVML

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
mod memory_limits;
mod mig_mode;
mod nvlink;
mod processes;
mod readings;
mod samples;
mod session;
mod stubs;
mod system;
