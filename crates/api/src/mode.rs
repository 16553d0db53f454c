//! How GPUs are shared.

use serde::{Deserialize, Serialize};

/// How a GPU is shared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum Mode {
    /// No rule of the config claims the GPU. gpushd shows the GPU, but changes it only on request. A rule cannot have
    /// this mode.
    #[default]
    NoRule,
    /// A rule says that gpushd must not change the GPU, not even on request.
    Unmanaged,
    /// Used as a whole, by one lease holder at a time.
    Exclusive,
    /// Partitioned into MIG instances.
    Mig,
    /// Shared as a whole through MPS.
    Mps,
    /// Shared as a whole by time-slicing.
    Timeslice,
}

impl Mode {
    /// Returns the name for texts: the name in the config, or `no rule`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::NoRule => "no rule",
            Self::Unmanaged => "unmanaged",
            Self::Exclusive => "exclusive",
            Self::Mig => "mig",
            Self::Mps => "mps",
            Self::Timeslice => "timeslice",
        }
    }

    /// Returns whether gpushd brings a GPU with this mode to its desired state.
    #[must_use]
    pub fn is_managed(self) -> bool {
        match self {
            Self::NoRule | Self::Unmanaged => false,
            Self::Exclusive | Self::Mig | Self::Mps | Self::Timeslice => true,
        }
    }

    /// Returns whether GPUs of this mode are used as a whole, with MIG mode off.
    #[must_use]
    pub fn needs_whole_gpu(self) -> bool {
        match self {
            Self::Exclusive | Self::Mps | Self::Timeslice => true,
            Self::NoRule | Self::Unmanaged | Self::Mig => false,
        }
    }

    /// Returns what MPS can share on GPUs of this mode.
    #[must_use]
    pub fn mps_scope(self) -> MpsScope {
        match self {
            Self::Mps => MpsScope::WholeGpu,
            Self::Mig => MpsScope::MigDevices,
            Self::NoRule | Self::Unmanaged | Self::Exclusive | Self::Timeslice => MpsScope::Nothing,
        }
    }
}

/// What MPS can share on a GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MpsScope {
    /// Nothing.
    Nothing,
    /// The whole GPU.
    WholeGpu,
    /// The MIG devices that the layout shares.
    MigDevices,
}
