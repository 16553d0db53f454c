//! The decisions of gpush, pure: no I/O, no async, no NVML.

pub mod geometry;
pub mod layout;
pub mod plan;
pub mod refusal;
