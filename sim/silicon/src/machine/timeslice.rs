//! Time-slice levels.

use serde::{Deserialize, Serialize};

/// The time-slice level of `nvidia-smi compute-policy --set-timeslice`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Timeslice {
    /// The driver chooses the level.
    #[default]
    Default,
    /// Short time slices.
    Short,
    /// Medium time slices.
    Medium,
    /// Long time slices.
    Long,
}

impl Timeslice {
    /// All levels, in the order of nvidia-smi's numbers.
    pub const ALL: [Self; 4] = [Self::Default, Self::Short, Self::Medium, Self::Long];

    /// Returns the name as nvidia-smi prints it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Default => "Default",
            Self::Short => "Short",
            Self::Medium => "Medium",
            Self::Long => "Long",
        }
    }
}
