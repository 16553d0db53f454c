//! What the modes of GPUs need: their steps of an operation, MPS targets, time-slice levels.
//!
//! A kind of step has three functions:
//!
//! | function | where | what it does |
//! |---|---|---|
//! | describe | [`gpush_core::step::describe`] | words for progress and errors |
//! | execute | here | makes the change and waits until it has taken effect |
//! | verify | [`gpush_core::step`], `verify_*` | decides from a reading: done, not done, or may still take effect |
//!
//! | module | subject |
//! |---|---|
//! | `mig` | changes MIG mode, GPU instances and compute instances |
//! | `driver` | the outcome of driver calls that did not return an answer |
//! | `mps` | MPS targets and the supervision of their daemons |
//! | `timeslice` | time-slice levels |
//! | `shared_gpus` | what `mps` and `timeslice` change on a whole GPU, and how it is undone |
//! | `eligibility` | whether a GPU can get new work in its mode |

pub(crate) mod driver;
pub(crate) mod eligibility;
pub(crate) mod mig;
pub(crate) mod mps;
#[cfg(test)]
pub(crate) mod scene;
pub(crate) mod shared_gpus;
pub(crate) mod timeslice;

use gpush_api::{ApiError, GpuUuid};

/// A GPU that steps change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuName {
    /// UUID of the GPU.
    pub(crate) uuid: GpuUuid,
    /// Name of the GPU in messages: `GPU 0 (GPU-…)`.
    pub(crate) label: String,
}

/// Why a step failed.
#[derive(Debug, Clone)]
pub(crate) enum Trouble {
    /// The step had no effect, and cannot take effect any more.
    Failed(ApiError),
    /// The step had no effect: the driver or gpushd refused it, because the GPU or an instance is in use.
    InUse(ApiError),
    /// The driver has lost the GPU. Its instances are gone too.
    Lost(ApiError),
    /// The step may still take effect.
    Unknown(ApiError),
}

impl Trouble {
    /// Returns the reason.
    pub(crate) fn error(&self) -> &ApiError {
        match self {
            Self::Failed(error) | Self::InUse(error) | Self::Lost(error) | Self::Unknown(error) => error,
        }
    }
}
