//! Where the NVLink ports of a GPU lead: to an NVSwitch, to another GPU, nowhere.
//!
//! Asked of each port by the type of what is at its other end, not by whether the link is up: one that
//! is down joins the GPUs for a reset all the same.

use gpush_api::NvLink;
use nvml_wrapper_sys::bindings as sys;

use super::Gpu;
use crate::error::{DriverError, ErrorKind};

/// Most ports that any part of NVML's present headers has (`NVML_NVLINK_MAX_LINKS`).
const PORTS: u32 = 18;

impl Gpu<'_> {
    /// Where its ports lead; `None` when none leads anywhere, or the driver is too old to tell.
    ///
    /// # Errors
    /// Those of the calls.
    pub fn nvlink(&self) -> Result<Option<NvLink>, DriverError> {
        let mut told = NvLink::default();
        for port in 0..PORTS {
            let mut end = sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
            // SAFETY: the call writes one integer.
            match unsafe { nvml!(self.driver, nvmlDeviceGetNvLinkRemoteDeviceType(self.own(), port, &raw mut end)) } {
                Ok(()) => {}
                // This part has no more ports.
                Err(error) if error.kind == ErrorKind::InvalidArgument => break,
                Err(error) if silent(&error) => continue,
                Err(error) => return Err(error.on(&self.uuid)),
            }
            match end {
                sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH => told.switched = true,
                sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU => {
                    let Some(peer) = self.peer(port)? else { continue };
                    if !told.peers.contains(&peer) {
                        told.peers.push(peer);
                    }
                }
                // A processor's port, or nothing.
                _ => continue,
            }
            told.links += 1;
        }
        told.peers.sort();
        Ok((told.links > 0).then_some(told))
    }

    /// PCI address of the GPU at the other end of a port.
    fn peer(&self, port: u32) -> Result<Option<String>, DriverError> {
        // SAFETY: a struct of integers and bytes, for which zeroes are a value.
        let mut pci: sys::nvmlPciInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: the call fills the struct.
        match unsafe { nvml!(self.driver, nvmlDeviceGetNvLinkRemotePciInfo_v2(self.own(), port, &raw mut pci)) } {
            Ok(()) => Ok(Some(format!("{:04x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device))),
            Err(error) if silent(&error) => Ok(None),
            Err(error) => Err(error.on(&self.uuid)),
        }
    }
}

/// Whether an error only says that there is nothing to be told.
fn silent(error: &DriverError) -> bool {
    matches!(error.kind, ErrorKind::NotSupported | ErrorKind::MissingSymbol | ErrorKind::FunctionNotFound)
}
