//! Steps of mode `mig`: changes of MIG mode, with the resets that Ampere GPUs need, and instances.
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
//! A rollback uses the same steps to set the previous mode.
//!
//! | file | subject |
//! |---|---|
//! | `mode` | steps that change MIG mode |
//! | `mode_change` | a change of MIG mode, and what makes it effective |
//! | `reset` | resets of GPUs |
//! | `preflight` | what blocks a reset, found before the first step |
//! | `holders` | processes and kernel modules that have a GPU open |
//! | `instances` | steps that create and destroy instances |

pub(crate) mod holders;
pub(crate) mod instances;
pub(crate) mod mode;
pub(crate) mod mode_change;
pub(crate) mod preflight;
pub(crate) mod reset;

use std::sync::Arc;

use super::driver::Driver;
use crate::{modes::mps::Mps, state::context::HostContext};

/// Says where the output of a helper unit is. Every user may read an operation, but the output may
/// name processes of any user. So the output is only in the log, which only root may read.
pub(crate) const LOGGED: &str = "its output is in the log of gpushd: `journalctl -u gpushd`";

/// Changes MIG mode, resets GPUs, and reads them.
#[derive(Debug, Clone)]
pub(crate) struct MigMode {
    pub(crate) context: Arc<HostContext>,
    pub(crate) driver: Driver,
    /// Recognizes MPS servers among the holders of a GPU.
    pub(crate) mps: Mps,
}
