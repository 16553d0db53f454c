//! Decides when gpushd reports an unused lease, warns its holder and ends it.
//!
//! ```text
//!                    deadline - warn_before             deadline, notice recorded,
//!                                                       longest warning has passed
//!  ┌──────────┐ ───────────► ┌──────────────────────┐ ──────────► ┌────────┐
//!  │ Watching │              │ Warned(notice sent)  │             │ Ending │
//!  └──────────┘ ◄─────────── └──────────────────────┘             └────────┘
//!       ▲      busy, unknown,     │ notice recorded                    │ end refused
//!       │      kept, exempt       ▼                                    │
//!       │                    Warned(recorded)                          │
//!       └──────────────────────────────────────────────────────────────┘
//! ```
//!
//! - Unused time begins with the first idle or empty sample, but not before the end of `start_grace` or of a `keep`. The
//!   deadline is `after` later, or `empty_after` after the lease has become empty, whichever is earlier.
//! - After a busy or unknown sample, the machine begins again. So gpushd never ends a lease whose state is unknown.
//!   Idle by weak evidence counts as unknown: see [`crate::judge::Judgement::is_weak`].
//! - gpushd does not end a lease without an earlier notice to the holder. The notice must be recorded: delivered, or
//!   stored where the holder sees it. After the first notice, the time of the longest warning must pass.
//! - For a Slurm job, `release` and `end` become `report`, unless the config permits `scancel`. `action = "warn"` warns
//!   and reports.

mod exempt;
mod keep;
mod machine;
mod observe;
mod outlook;
mod policy;
mod replay;

pub use exempt::{ExemptSubject, IdleExemptions};
pub use keep::{Keep, KeepError};
pub use machine::{Announced, IdleEffect, IdleEvent, IdleMachine, IdleStage, UnusedReport};
pub use outlook::IdleOutlook;
pub use policy::{IdleAction, IdleDeadline, IdlePolicy, LeaseTerms};
pub use replay::{WouldEnd, replay};

#[cfg(test)]
mod tests;
