//! Steps of mode `mig`: MIG mode with the resets that it needs on Ampere, and instances.
//!
//! ```text
//! set the mode on all GPUs ─┬─ effective on all ──────────────► done
//!                           └─ waits for a reset
//!                                 │ one at a time on this host
//!                                 ▼
//!          the driver worker is ended and gone
//!                                 ▼
//!          which processes have the GPUs open? ── any ──► failed, named
//!                                 │ none
//!                                 ▼
//!          reset of these GPUs alone, as a helper unit
//!                                 ▼
//!          a new worker ─► each GPU by its UUID ─► effective, read back
//! ```
//!
//! A rollback takes the same path to the mode from before.
//!
//! | file | subject |
//! |---|---|
//! | `mode` | steps that change MIG mode |
//! | `reset` | resets of GPUs |
//! | `preflight` | what blocks a reset, found before the first step |
//! | `holders` | processes that have a GPU open |
//! | `instances` | steps that create and destroy instances |

mod holders;
pub(crate) mod instances;
pub(crate) mod mode;
pub(crate) mod preflight;
pub(crate) mod reset;

use std::sync::Arc;

use gpush_host::identity::Users;

use super::driver::Driver;
use crate::{outside::Outside, state::State};

/// Where the output of a helper unit is. It may name any user's processes, so it goes to the log, which only root
/// reads, and not into the operation, which everybody reads.
pub(crate) const LOGGED: &str = "gpushd's log has its output: `journalctl -u gpushd`";

/// Changes and resets MIG mode: the driver, the helper units for resets, and the names of the processes in the way.
#[derive(Debug, Clone)]
pub(crate) struct MigMode {
    pub(crate) driver: Driver,
    pub(crate) outside: Arc<Outside>,
    pub(crate) users: Users,
    pub(crate) state: State,
}
