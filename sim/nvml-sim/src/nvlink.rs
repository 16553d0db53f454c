//! NVLink ports: their states and peers.

use nvml_wrapper_sys::bindings::nvmlPciInfo_t;
use silicon::Return;
use silicon::machine::End;

use crate::caller::{Opaque, Outcome, Ptr};
use crate::entry::{Call, exports};
use crate::lookup::{pci_info, switch_info};

/// Maximum number of ports in the 550 driver.
const MOST_PORTS: u32 = 18;

/// Kinds of peers of an NVLink link, by NVML's numbers.
const GPU: u32 = 0;
const SWITCH: u32 = 2;

exports! {
    /// Returns whether a link is up.
    fn nvmlDeviceGetNvLinkState(device: Opaque, link: u32, active: Ptr<u32>) |call| {
        active.put(end(call, device, link)?.is_some().into())
    }

    /// Returns the kind of a link's peer.
    fn nvmlDeviceGetNvLinkRemoteDeviceType(device: Opaque, link: u32, kind: Ptr<u32>) |call| {
        kind.put(match end(call, device, link)? {
            None => return Err(Return::NotSupported),
            Some(End::Gpu(_)) => GPU,
            Some(End::Switch(_)) => SWITCH,
        })
    }

    /// Returns the PCI address of a link's peer.
    fn nvmlDeviceGetNvLinkRemotePciInfo(device: Opaque, link: u32, info: Ptr<nvmlPciInfo_t>) |call| {
        info.put(remote(call, device, link)?)
    }

    /// Returns the PCI address of a link's peer.
    fn nvmlDeviceGetNvLinkRemotePciInfo_v2(device: Opaque, link: u32, info: Ptr<nvmlPciInfo_t>) |call| {
        info.put(remote(call, device, link)?)
    }
}

fn end(call: &Call, device: Opaque, link: u32) -> Outcome<Option<End>> {
    if link >= MOST_PORTS {
        call.gpu(device, |m, gpu| m.gpu(gpu).map(|_| ()))?;
        return Err(Return::InvalidArgument);
    }
    call.gpu(device, |m, gpu| m.link(gpu, link))
}

fn remote(call: &Call, device: Opaque, link: u32) -> Outcome<nvmlPciInfo_t> {
    match end(call, device, link)? {
        None => Err(Return::NotSupported),
        Some(End::Gpu(peer)) => call.gpu(device, |m, _| Ok(pci_info(m.identity(peer)?))),
        Some(End::Switch(number)) => Ok(switch_info(number)),
    }
}
