//! Why a GPU is in its state, as a type. Code uses only the type; the text is for users.

use std::fmt;

use gpush_api::Cordon;
use gpush_nvml::DriverError;

use super::{holder::Holder, words};

/// Why a GPU is in its state.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Reason {
    /// A warning from the last reading.
    Warning(String),
    /// An operation and its rollback failed. The text is the error.
    Degraded(String),
    /// An operation changes the GPU.
    Changing {
        /// The operation that changes the GPU.
        holder: Holder,
    },
    /// A driver call has not returned, and may still change the GPU.
    Unsettled,
    /// The driver does not list the GPU any more.
    NotListed,
    /// The driver could not read the GPU.
    Driver(DriverError),
    /// The driver has not answered yet.
    NotRead,
    /// The host is in maintenance.
    Maintenance(gpush_api::Maintenance),
    /// A cordon prevents new work on the GPU.
    Cordoned(Cordon),
    /// The database was lost. The text says why it was lost.
    Held(String),
    /// gpushd cannot use its config, so it does not know what an earlier config shared.
    RulesUnknown,
}

impl Reason {
    /// Returns the error of the driver, if it is the reason.
    pub(crate) fn driver_error(&self) -> Option<&DriverError> {
        match self {
            Self::Driver(error) => Some(error),
            Self::Warning(_)
            | Self::Degraded(_)
            | Self::Changing { .. }
            | Self::Unsettled
            | Self::NotListed
            | Self::NotRead
            | Self::Maintenance(_)
            | Self::Cordoned(_)
            | Self::Held(_)
            | Self::RulesUnknown => None,
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Warning(text) | Self::Degraded(text) => f.write_str(text),
            Self::Driver(error) => error.fmt(f),
            Self::Changing { holder } => write!(f, "{holder} is changing the GPU"),
            Self::Unsettled => f.write_str("a driver call has not returned and may still take effect"),
            Self::NotListed => f.write_str("the driver does not list the GPU any more"),
            Self::NotRead => f.write_str("the driver has not answered yet"),
            Self::Maintenance(maintenance) => f.write_str(&words::maintenance(maintenance)),
            Self::Cordoned(cordon) => f.write_str(&words::cordon(cordon)),
            Self::RulesUnknown => f.write_str("gpushd can't use its config, so it does not know the rules"),
            Self::Held(cause) => write!(f, "the database was lost ({cause})"),
        }
    }
}
