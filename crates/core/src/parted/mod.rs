//! Files of nvidia-mig-parted: parses, checks, resolves and exports them.
//!
//! ```text
//! bytes ──yaml──► nodes with their places ──read──► File ──select──► Label ──resolve──► a layout for each GPU
//!                                                    │                                      │
//!                                                    └──import──► layouts and rules         └──► PlanRequest
//!                                             GPUs ──export──► text     for gpush's config
//! ```
//!
//! ```yaml
//! version: v1
//! mig-configs:
//!   mixed:                                  # label
//!     - device-filter: ["0x20B210DE"]       # group: PCI ids, one or a list; default: all GPUs
//!       devices: all                        # or a list of indexes
//!       mig-enabled: true
//!       mig-devices:                        # count of each profile; {}: MIG mode on, no instance
//!         "1g.10gb": 2
//!         "3g.40gb": 1
//! ```
//!
//! gpush accepts every file that mig-parted accepts, unless the file contains entries that
//! mig-parted ignores or executes only in part. Such entries are indexes of GPUs that the host does
//! not have, filters that are not PCI ids, and counts of zero. `docs/migrating-from-mig-parted.md`
//! lists the differences.

use gpush_api::{ApiError, GpuIndex};

use crate::{diagnostic::FileErrors, layout::Layout, quote::Quoted, selector::DeviceId};

mod double_memory;
mod export;
mod import;
mod read;
mod resolve;
mod select;
mod values;

pub use export::{Exported, export};
pub use import::{Imported, import};
pub use resolve::{Resolved, resolve};

/// Maximum size of a file in bytes. NVIDIA's own file is fifty times smaller.
pub const MOST_BYTES: usize = 1 << 20;

/// A mig-parted file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Name of the file, for messages.
    pub path: String,
    /// Labels, in the order of the file.
    pub labels: Vec<Label>,
}

/// The invalid labels of a file that also has valid labels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InvalidLabels {
    /// Names of all invalid labels, including labels that were not parsed because the file has too
    /// many problems.
    pub labels: Vec<String>,
    /// The problems.
    pub errors: FileErrors,
}

impl From<&InvalidLabels> for ApiError {
    fn from(wrong: &InvalidLabels) -> Self {
        let (label, is) = if wrong.labels.len() == 1 { ("label", "is") } else { ("labels", "are") };
        let names: Vec<String> = wrong.labels.iter().map(|name| Quoted(name).to_string()).collect();
        let whole = Self::from(&wrong.errors);
        let message = format!("{label} {} {is} left out: {}", names.join(", "), whole.message);
        Self { message, ..whole }
    }
}

/// An entry of `mig-configs`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    /// Name of the label.
    pub name: String,
    /// Groups, in the order of the file; at least one.
    pub groups: Vec<Group>,
}

/// The desired state of some GPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Line in the file; the first line is 1.
    pub line: usize,
    /// GPU models that the group applies to; empty for all models.
    pub filter: Vec<DeviceId>,
    /// Which of the GPUs of these models the group applies to.
    pub devices: Devices,
    /// The desired state.
    pub want: DesiredMode,
}

/// `devices`
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Devices {
    /// `all`
    All,
    /// Indexes in ascending order.
    Listed(Vec<GpuIndex>),
}

/// `mig-enabled` and `mig-devices`
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DesiredMode {
    /// MIG mode off.
    Off,
    /// MIG mode on, with the instances of this layout, which may be empty.
    On(Layout),
}

impl File {
    /// Parses a file. Errors refer to the file as `path`.
    ///
    /// # Errors
    /// All problems of the file, up to a maximum number.
    pub fn from_bytes(bytes: &[u8], path: &str) -> Result<Self, FileErrors> {
        match Self::from_bytes_lenient(bytes, path)? {
            (file, None) => Ok(file),
            (_, Some(wrong)) => Err(wrong.errors),
        }
    }

    /// Parses the valid labels of a file, and returns the problems of the invalid ones.
    ///
    /// # Errors
    /// The same as for [`File::from_bytes`], but only if no label is valid or a problem is outside
    /// all labels.
    pub fn from_bytes_lenient(bytes: &[u8], path: &str) -> Result<(Self, Option<InvalidLabels>), FileErrors> {
        read::bytes(bytes, path)
    }
}

#[cfg(test)]
mod tests;
