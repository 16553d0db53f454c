//! A simulated GPU host: what the silicon and the driver's resource manager do.
//!
//! Why it exists: gpush must be provable on a machine without a GPU. The NVML ABI over it is
//! `sim/nvml-sim`; the program that makes and changes simulated hosts is `sim/gpush-sim`.
//! Nothing that ships depends on this crate.
//!
//! - [`description`]: which host to simulate (a preset or a TOML file).
//! - [`machine`]: the pure state machine. No I/O, no clock, no processes: everything it needs to
//!   know about the world comes in as an argument.
//! - [`host`]: that machine shared by all processes of one simulated host, through a mapped file.
//! - [`fault`]: rules by which calls fail, hang, or kill their caller.
//! - [`latency`]: how long real calls take, when wanted.
//! - [`trace`]: the golden log of mutating calls.

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
