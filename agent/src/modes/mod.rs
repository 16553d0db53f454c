//! What each mode of sharing does to a GPU: one folder or file per mode, each with its own steps.
//!
//! A step kind has three functions:
//!
//! | function | where | what it does |
//! |---|---|---|
//! | describe | [`gpush_core::step::describe`] | words for progress and errors |
//! | execute | here, `execute` of the mode | makes the change and waits until it has landed |
//! | verify | [`gpush_core::step`], `verify_*` | done, not done or may still take effect, from a reading alone |
//!
//! | file | mode | steps |
//! |---|---|---|
//! | `mig` | `mig`, and `exclusive`, which needs MIG mode off | MIG mode, GPU instances, compute instances |
//! | `mps` | `mps` | MPS daemons |
//! | `timeslice` | `timeslice` | time-slice levels |
//!
//! `driver` settles what a driver call without an answer came to.

pub(crate) mod driver;
pub(crate) mod mig;
pub(crate) mod mps;
pub(crate) mod timeslice;

use gpush_api::ApiError;

/// A GPU that steps change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuName {
    /// UUID of the GPU.
    pub(crate) uuid: String,
    /// The GPU in messages: `GPU 0 (GPU-…)`.
    pub(crate) label: String,
}

/// Why a step was not executed.
#[derive(Debug, Clone)]
pub(crate) enum Trouble {
    /// The step had no effect, and can have none any more.
    Failed(ApiError),
    /// The GPU is gone, and its instances with it.
    Lost(ApiError),
    /// The step may still take effect.
    Unknown(ApiError),
}

impl Trouble {
    /// Returns the reason.
    pub(crate) fn error(&self) -> &ApiError {
        match self {
            Self::Failed(error) | Self::Lost(error) | Self::Unknown(error) => error,
        }
    }
}
