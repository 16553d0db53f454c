//! A change of MIG mode, and what makes it effective.

use crate::modes::GpuName;
use gpush_api::GpuUuid;

/// A change of the MIG mode of one GPU.
#[derive(Debug, Clone)]
pub(crate) struct ModeChange {
    /// Position of the GPU in the plans of the operation.
    pub(crate) position: usize,
    pub(crate) gpu: GpuName,
    /// What makes the mode effective.
    pub(crate) completion: Completion,
    /// UUIDs of the GPUs that are reset together with this GPU.
    pub(crate) peers: Vec<GpuUuid>,
}

/// What makes a new MIG mode effective.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Completion {
    /// The driver, at once.
    Driver,
    /// A reset of the GPU.
    Reset,
    /// The next reboot of the host, a virtual machine that cannot reset the GPU.
    Reboot,
}
