//! The decisions of gpush, pure: no I/O, no async, no NVML.

pub mod layout;
