//! The input from the agent: samples of GPUs, the leases of processes, and the holds of each lease.
//!
//! The agent translates the samples of the driver worker and the answers of `core::attribution` into these types.

mod hold;
mod sample;

pub use hold::{Hold, unique_holds};
pub use sample::{
    Activity, ActivityWindow, ClockLimits, GpuProcess, GpuSample, ProcessOwner, Ratio, Reading, WindowScope,
};
