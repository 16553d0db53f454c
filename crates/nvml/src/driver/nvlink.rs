//! Peers of a GPU's NVLink ports: an NVSwitch, another GPU, or none.
//!
//! The query returns the type of the peer even if the link is down. This is necessary because GPUs
//! whose link is down must still be reset together.

use gpush_api::NvLink;
use nvml_wrapper_sys::bindings as sys;

use super::Gpu;
use crate::error::{DriverError, ErrorKind};

/// Maximum number of ports in NVML's current headers (`NVML_NVLINK_MAX_LINKS`).
const PORTS: u32 = 18;

impl Gpu<'_> {
    /// Reads the peers of the GPU's ports. Returns `None` if no port has a peer, or if the driver
    /// is too old.
    ///
    /// # Errors
    /// Errors of the calls.
    pub fn nvlink(&self) -> Result<Option<NvLink>, DriverError> {
        let mut reported = NvLink::default();
        for port in 0..PORTS {
            let mut end = sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_UNKNOWN;
            // SAFETY: the call writes one integer.
            match unsafe {
                nvml!(self.driver, nvmlDeviceGetNvLinkRemoteDeviceType(self.device_handle(), port, &raw mut end))
            } {
                Ok(()) => {}
                // This GPU has no more ports.
                Err(error) if error.kind == ErrorKind::InvalidArgument => break,
                Err(error) if is_nothing_reported(&error) => continue,
                Err(error) => return Err(error.on(&self.uuid)),
            }
            match end {
                sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_SWITCH => reported.switched = true,
                sys::nvmlIntNvLinkDeviceType_enum_NVML_NVLINK_DEVICE_TYPE_GPU => {
                    let Some(peer) = self.peer(port)? else { continue };
                    if !reported.peers.contains(&peer) {
                        reported.peers.push(peer);
                    }
                }
                // The peer is a CPU, or there is no peer.
                _ => continue,
            }
            reported.links += 1;
        }
        reported.peers.sort();
        Ok((reported.links > 0).then_some(reported))
    }

    /// Reads the PCI address of the GPU at the other end of a port.
    fn peer(&self, port: u32) -> Result<Option<String>, DriverError> {
        // SAFETY: a struct of integers and bytes, for which all zeroes are a valid value.
        let mut pci: sys::nvmlPciInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: the call fills the struct.
        match unsafe {
            nvml!(self.driver, nvmlDeviceGetNvLinkRemotePciInfo_v2(self.device_handle(), port, &raw mut pci))
        } {
            Ok(()) => Ok(Some(format!("{:04x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device))),
            Err(error) if is_nothing_reported(&error) => Ok(None),
            Err(error) => Err(error.on(&self.uuid)),
        }
    }
}

/// Returns whether an error only means that there is nothing to report.
fn is_nothing_reported(error: &DriverError) -> bool {
    matches!(error.kind, ErrorKind::NotSupported | ErrorKind::MissingSymbol | ErrorKind::FunctionNotFound)
}
