//! Placements of MIG instances.

use serde::{Deserialize, Serialize};

/// A range of slices: memory slices for a GPU instance, compute slots for a compute instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Placement {
    /// First slice.
    pub start: u8,
    /// Number of slices.
    pub size: u8,
}

impl Placement {
    /// Returns whether the two ranges share a slice.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.start < other.start + other.size && other.start < self.start + self.size
    }
}
