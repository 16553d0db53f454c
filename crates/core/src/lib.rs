//! The decisions of gpush, pure: no I/O, no async, no NVML.

pub mod layout;
pub mod nearest;
pub mod preset;
pub mod quote;
pub mod selector;
