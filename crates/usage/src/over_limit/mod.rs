//! Decides when gpushd tells the holder of a lease that its processes use more memory than its share has, and when the
//! lease ends. It concerns shares whose memory the hardware does not limit: MPS and time-slicing.
//!
//! ```text
//!            3 readings above                    notice recorded, and since then the grace period
//!            the limit in a row                  has passed, every reading above the limit
//!  ┌────────┐ ───────────► ┌───────────────────────┐ ──────────► ┌────────┐
//!  │ Within │              │ Notified(notice sent) │             │ Ending │
//!  └────────┘ ◄─────────── └───────────────────────┘             └────────┘
//!       ▲      within the      │ notice recorded                     │ end refused
//!       │      limit, or       ▼                                     │
//!       │      not known  Notified(recorded)                         │
//!       └────────────────────────────────────────────────────────────┘
//! ```
//!
//! - Each reading is a new sample. A sample that was seen before, or that is older than the last one, counts for nothing.
//! - A process that perhaps belongs to the lease does not count. Without it, the reading is known if it is above the limit.
//! - After one reading within the limit, or one that is not known, the machine begins again, and a notice is withdrawn. So
//!   gpushd never ends a lease for memory that it does not know. If a lease is above its limit on one target, the others
//!   do not matter.
//! - With the action `report`, nothing ends. A notice announces one action and one grace period. Another action, or a longer
//!   grace period, needs a new notice. A shorter one applies to later notices.
//! - For a Slurm job, `end` becomes `report`, unless the config permits `scancel`.

mod machine;
mod observe;
mod policy;

pub use gpush_api::OverLimitAction;
pub use machine::{OverLimitEffect, OverLimitEvent, OverLimitMachine, OverLimitReport, OverLimitStage, READINGS};
pub use observe::{MemoryExcess, MemoryReading};
pub use policy::OverLimitPolicy;

#[cfg(test)]
mod tests;
