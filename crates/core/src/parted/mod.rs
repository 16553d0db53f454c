//! Files of nvidia-mig-parted: read, checked, resolved for a host, and written.
//!
//! ```text
//! bytes ──yaml──► nodes with their places ──read──► File ──select──► Label ──resolve──► a layout for each GPU
//!                                                    │                                      │
//!                                                    └──import──► layouts and rules         └──► PlanRequest
//!                                             GPUs ──export──► text     of our config
//! ```
//!
//! ```yaml
//! version: v1
//! mig-configs:
//!   mixed:                                  # label
//!     - device-filter: ["0x20B210DE"]       # group: PCI device and vendor, one or a list; all without it
//!       devices: all                        # or a list of indexes
//!       mig-enabled: true
//!       mig-devices:                        # how many of each; {} is MIG mode without any instance
//!         "1g.10gb": 2
//!         "3g.40gb": 1
//! ```
//!
//! A file that mig-parted accepts is accepted unchanged, except for parts that mig-parted ignores or carries out
//! in half: indexes of GPUs that the host does not have, filters that are not PCI ids, counts of 0.
//! `docs/migrating-from-mig-parted.md` lists the differences.

use gpush_api::ApiError;

use crate::{diagnostic::FileErrors, layout::Layout, quote::Quoted};

mod device_id;
mod export;
mod import;
mod read;
mod resolve;
mod select;
mod values;
mod yaml;

pub use device_id::DeviceId;
pub use export::{Exported, export};
pub use import::{Imported, import};
pub use resolve::{Resolved, resolve};

/// Largest file that is read, in bytes: fifty times what NVIDIA ships.
pub const MOST_BYTES: usize = 1 << 20;

/// A mig-parted file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// What the file is called in messages.
    pub path: String,
    /// Labels in the order of the file.
    pub labels: Vec<Label>,
}

/// Labels of a file that can't be read beside others that can.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wrong {
    /// Their names; those as well that stand behind too many problems to be looked at.
    pub labels: Vec<String>,
    /// What is wrong with them.
    pub errors: FileErrors,
}

impl From<&Wrong> for ApiError {
    fn from(wrong: &Wrong) -> Self {
        let (label, is) = if wrong.labels.len() == 1 { ("label", "is") } else { ("labels", "are") };
        let names: Vec<String> = wrong.labels.iter().map(|name| Quoted(name).to_string()).collect();
        let whole = Self::from(&wrong.errors);
        let message = format!("{label} {} {is} left out: {}", names.join(", "), whole.message);
        Self { message, ..whole }
    }
}

/// One of `mig-configs`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    /// Its name.
    pub name: String,
    /// Groups in the order of the file; at least one.
    pub groups: Vec<Group>,
}

/// Which GPUs shall be how.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// Line of the file, from 1.
    pub line: usize,
    /// Parts that are meant; every part when empty.
    pub filter: Vec<DeviceId>,
    /// GPUs among them.
    pub devices: Devices,
    /// How they shall be.
    pub want: Want,
}

/// `devices`
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Devices {
    /// `all`
    All,
    /// Indexes, rising.
    Listed(Vec<u32>),
}

/// `mig-enabled` and `mig-devices`
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Want {
    /// MIG mode off.
    Off,
    /// MIG mode on, with these instances; none at all for the empty layout.
    On(Layout),
}

impl File {
    /// Reads a file. `path` is its name, for errors.
    ///
    /// # Errors
    /// Everything that is wrong with it, up to a page.
    pub fn from_bytes(bytes: &[u8], path: &str) -> Result<Self, FileErrors> {
        match Self::salvage(bytes, path)? {
            (file, None) => Ok(file),
            (_, Some(wrong)) => Err(wrong.errors),
        }
    }

    /// Reads those labels of a file that can be read.
    ///
    /// # Errors
    /// As [`File::from_bytes`], when none can be, or when something is wrong that is no label's.
    pub fn salvage(bytes: &[u8], path: &str) -> Result<(Self, Option<Wrong>), FileErrors> {
        read::bytes(bytes, path)
    }
}

#[cfg(test)]
mod tests;
