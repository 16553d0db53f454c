//! The NVIDIA driver as gpush uses it: a safe, complete MIG layer over NVML, and the worker process that
//! executes it.
//!
//! `driver` calls the library in its own process. `worker` is the agent's process for that (`gpushd
//! driver-worker`), and `proto` their protocol. [`Hardware`] is the agent's side: async, with deadlines, and
//! robust against crashes and hangs of the library. The library is any `libnvidia-ml.so.1`: a real driver's, or
//! gpush's simulator, which exports one extra symbol, `gpush_sim`.

pub mod driver;
pub mod error;
pub mod hardware;
pub mod proto;
pub mod reading;
pub mod worker;

pub use error::{DriverError, ErrorKind};
pub use hardware::{AbandonedWorker, Deadlines, Hardware, Options, Settled, Status};
pub use reading::{Event, EventKind, Identity, Listed, ModeChange, Reading, ReadingPart, RemappedRows, Unread};
