//! PCI ids in the notation of NVML and of mig-parted's device filters: `0xDDDDVVVV`, or
//! `0xDDDDVVVV:0xDDDDVVVV` with the subsystem.

use std::{fmt, str::FromStr};

use gpush_api::Gpu;

/// A GPU model, identified by its PCI ids.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeviceId {
    /// Device id in the upper half, vendor id in the lower half, as NVML packs them.
    pub id: u32,
    /// Device id and vendor id of the subsystem, if the filter distinguishes boards.
    pub subsystem: Option<u32>,
}

impl DeviceId {
    /// Returns whether every GPU with the ids `other` also has these ids.
    #[must_use]
    pub fn covers(self, other: Self) -> bool {
        self.id == other.id && (self.subsystem.is_none() || self.subsystem == other.subsystem)
    }

    /// Returns whether a GPU has these ids; `None` if the GPU's ids are unknown.
    #[must_use]
    pub fn matches(self, gpu: &Gpu) -> Option<bool> {
        if packed(gpu.pci_id.as_deref()?)? != self.id {
            return Some(false);
        }
        match self.subsystem {
            None => Some(true),
            Some(subsystem) => Some(packed(gpu.pci_subsystem.as_deref()?)? == subsystem),
        }
    }
}

/// Parses `0x` and up to eight hexadecimal digits.
fn packed(text: &str) -> Option<u32> {
    let digits = text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"))?;
    let well = (1..=8).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
    well.then(|| u32::from_str_radix(digits, 16).ok()).flatten()
}

impl FromStr for DeviceId {
    type Err = String;

    /// The error contains the correct notation.
    fn from_str(text: &str) -> Result<Self, String> {
        let (id, subsystem) = match text.split_once(':') {
            Some((id, subsystem)) => (packed(id), Some(packed(subsystem))),
            None => (packed(text), None),
        };
        match (id, subsystem) {
            (Some(id), None) if id > 0xffff => Ok(Self { id, subsystem: None }),
            (Some(id), Some(Some(subsystem))) if id > 0xffff => Ok(Self { id, subsystem: Some(subsystem) }),
            (Some(_) | None, _) => {
                let bare = text.len() == 8 && packed(&format!("0x{text}")).is_some();
                Err(if bare {
                    format!("write \"0x{text}\"")
                } else {
                    "write PCI device and vendor together, such as \"0x20B210DE\"; `lspci -n -d 10de:` shows them"
                        .to_owned()
                })
            }
        }
    }
}

impl fmt::Display for DeviceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "0x{:08X}", self.id)?;
        match self.subsystem {
            Some(subsystem) => write!(f, ":0x{subsystem:08X}"),
            None => Ok(()),
        }
    }
}
