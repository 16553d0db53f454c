//! The decisions of gpush as pure functions, without I/O, async code or NVML.

pub mod attribution;
pub mod compute_policy;
pub mod config;
pub mod desired;
pub mod devices;
pub mod diagnostic;
pub mod duration;
pub mod geometry;
pub mod holders;
pub mod isolation;
pub mod layout;
pub mod lease;
pub mod mps;
pub mod nearest;
pub mod parted;
pub mod plan;
pub mod preset;
pub mod quote;
pub mod refusal;
pub mod schedule;
pub mod selector;
pub mod sharing;
pub mod slurm;
pub mod step;
pub mod supervisor;
pub mod timeslice_plan;
