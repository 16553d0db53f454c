//! The instances of a GPU, as the state contains them.

use serde::{Deserialize, Serialize};

use super::Placement;

/// A GPU instance.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GpuInstance {
    /// Id: the number of the physical slot. It can differ from the placement.
    pub id: u32,
    /// Profile id.
    pub profile_id: u32,
    /// Placement in memory slices.
    pub placement: Placement,
    /// Generation: a number that no other instance of this host has or had.
    pub generation: u64,
    /// Compute instances, by id.
    pub instances: Vec<ComputeInstance>,
}

impl GpuInstance {
    /// Returns the compute instance with this id.
    #[must_use]
    pub fn compute(&self, id: u32) -> Option<&ComputeInstance> {
        self.instances.iter().find(|instance| instance.id == id)
    }
}

/// A compute instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ComputeInstance {
    /// Id within its GPU instance.
    pub id: u32,
    /// Profile id.
    pub profile_id: u32,
    /// Placement in compute slots.
    pub placement: Placement,
    /// Generation: a number that no other instance of this host has or had.
    pub generation: u64,
}
