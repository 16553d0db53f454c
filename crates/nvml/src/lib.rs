//! The NVIDIA driver as gpush uses it: a safe, complete MIG layer over NVML, and the worker
//! process that runs it.
//!
//! `driver` calls the library in the process that it is in. `worker` is the process that the
//! agent keeps for that (`gpushd driver-worker`), `proto` what the two say to each other, and
//! [`Hardware`] the agent's side: async, with deadlines, outliving crashes and hangs of the
//! library. The library is whatever `libnvidia-ml.so.1` is given: a real driver's, or gpush's
//! simulator, which is told apart by one extra exported symbol, `gpush_sim`.

pub mod driver;
pub mod error;
pub mod hardware;
pub mod proto;
pub mod reading;
pub mod worker;

pub use error::{DriverError, ErrorKind};
pub use hardware::{AbandonedWorker, Deadlines, Hardware, Options, Settled, Status};
pub use reading::{Event, EventKind, Identity, Listed, ModeChange, Reading, ReadingPart, RemappedRows, Unread};
