//! The NVIDIA driver as gpush uses it: a safe, complete MIG layer over NVML, and the worker process that uses this
//! layer.
//!
//! `driver` calls the library in the same process. gpushd makes these calls only in a separate
//! process, `gpushd driver-worker`: `worker` implements that process, and `proto` is the protocol.
//! [`Hardware`] is gpushd's side: async, with deadlines, and robust against crashes and hangs of
//! the library. The library can be any `libnvidia-ml.so.1`: that of a real driver, or gpush's
//! simulator. The simulator exports one extra symbol, `gpush_sim`.

pub mod driver;
pub mod error;
pub mod hardware;
pub mod proto;
pub mod reading;
pub mod sample;
pub mod worker;

pub use error::{DriverError, ErrorKind};
pub use hardware::{AbandonedWorker, CallTime, Deadlines, Hardware, Options, SampleError, Settled, Status};
pub use worker::ScriptedDriver;

pub use reading::{Event, EventKind, Identity, Listed, ModeChange, Reading, ReadingPart, RemappedRows, Unread};
