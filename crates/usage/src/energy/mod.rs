//! Attributes the energy of a board to leases.
//!
//! ```text
//! counter difference ──┬── one lease on the whole GPU: all of it                                        board
//!                      └── idle energy: least power × time ──► by shares; the free part: unattributed
//!                          active energy ──► GPU instances by activity × share ──► one lease            gpm
//!                                            several leases: by the use of their processes              process
//!                                            or by the shares of the leases with a process              slices
//! ```
//!
//! The parts of the leases and the unattributed part always add up to the counter difference, in whole millijoules.

mod attribute;
mod counter;
mod split;

pub(crate) use attribute::{EnergyWindow, HeldInWindow, InstanceActivity, OtherProcesses, attribute};
pub(crate) use counter::EnergyCounter;
pub use split::split;

use serde::{Deserialize, Serialize};

/// How the energy of a lease was found. A later method is less exact.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum EnergyMethod {
    /// There is no energy.
    #[default]
    None,
    /// The lease had the whole GPU, so the counter of the board is the energy of the lease.
    Board,
    /// By the activity of the GPU instance.
    Gpm,
    /// By the use of the processes. Under MPS, these figures are estimates.
    Process,
    /// By the shares of the leases that had a process.
    Slices,
}

impl EnergyMethod {
    /// Returns the name in JSON, labels and columns.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Board => "board",
            Self::Gpm => "gpm",
            Self::Process => "process",
            Self::Slices => "slices",
        }
    }
}

#[cfg(test)]
mod tests;
