//! A simulated GPU host: the behaviour of the hardware and the driver's resource manager.
//!
//! It makes gpush testable on a machine without a GPU. `sim/nvml-sim` provides the NVML ABI on top of it. The program
//! `sim/gpush-sim` creates and changes simulated hosts. No program that ships depends on this crate.
//!
//! - [`description`]: the host to simulate (a preset or a TOML file).
//! - [`machine`]: the pure state machine, without I/O, clock or processes; all external data are arguments.
//! - [`host`]: that machine in a mapped file, shared by all processes of one simulated host.
//! - [`fault`]: rules that make calls fail, hang, or kill their caller.
//! - [`latency`]: durations of real calls, on request.
//! - [`trace`]: a log of the mutating calls.

pub mod description;
pub mod fault;
pub mod host;
pub mod latency;
pub mod machine;
pub mod returns;
pub mod spelling;
pub mod trace;

pub use description::Description;
pub use fault::{Call, Decision};
pub use host::{Host, HostError};
pub use machine::Machine;
pub use returns::Return;
