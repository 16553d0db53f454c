//! The driver layer and the simulated library: readings, changes, faults, independent clients,
//! recorded hardware.

mod changes;
mod clients;
mod compute_mode;
mod faults;
mod file_clients;
mod gpu_checks;
mod hardware_fixtures;
mod memory_limits;
mod reading;
mod samples;
mod sigkill;
