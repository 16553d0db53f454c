//! The choice of targets on one GPU.

use super::{Member, cost::PlacementCost};
use gpush_api::GpuIndex;

/// One choice of targets for some members on one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct GpuChoice {
    pub(super) cost: PlacementCost,
    pub(super) members: Vec<Member>,
    /// Free GPU instances to destroy: GPU index and GPU instance id.
    pub(super) destroys: Vec<(GpuIndex, u32)>,
}
