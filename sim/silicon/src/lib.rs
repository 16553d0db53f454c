//! A simulated GPU host: the behaviour of the hardware and of the driver's resource manager.
//!
//! With this crate, gpush is tested on a machine without a GPU. `sim/nvml-sim` provides the C ABI
//! of NVML on top of it. The program `sim/gpush-sim` creates and changes simulated hosts. No
//! program that ships depends on this crate.
//! - [`description`]: the host to simulate (a preset or a TOML file).
//! - [`machine`]: the pure state machine. It has no I/O, no clock and no processes; callers pass
//!   all external data as arguments.
//! - [`host`]: the state machine in a mapped file, which all processes of one simulated host share.
//! - [`fault`]: rules that make calls fail or hang, or that kill the caller.
//! - [`latency`]: durations of calls as on real hardware, if requested.
//! - [`trace`]: a log of the calls that change the state.

pub mod description;
pub mod fault;
mod fingerprint;
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
