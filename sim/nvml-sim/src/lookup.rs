//! Functions that find GPUs and return their identities.

use std::ffi::c_char;

use gpush_geometry::Architecture;
use nvml_wrapper_sys::bindings::{nvmlPciInfo_t, nvmlPciInfoExt_v1_t};
use silicon::machine::{Board, Handle, Identity};
use silicon::{Machine, Return};

use crate::caller::{Opaque, Outcome, Ptr, text_field, version_word};
use crate::entry::{Device, exports};

/// PCI base class and subclass of a compute accelerator without a display.
const PCI_CLASS: (u32, u32) = (0x03, 0x02);

exports! {
    /// Returns the number of GPUs.
    fn nvmlDeviceGetCount(count: Ptr<u32>) |call| {
        count.put(call.host(|m| Ok(gpu_count(m)))?)
    }

    /// Returns the number of GPUs, including those that the caller may not use.
    fn nvmlDeviceGetCount_v2(count: Ptr<u32>) |call| {
        count.put(call.host(|m| Ok(gpu_count(m)))?)
    }

    /// Returns the GPU at an index.
    fn nvmlDeviceGetHandleByIndex(index: u32, device: Ptr<Opaque>) |call| {
        device.put(call.at(index, |m| gpu_handle(m, index))?)
    }

    /// Returns the GPU at an index.
    fn nvmlDeviceGetHandleByIndex_v2(index: u32, device: Ptr<Opaque>) |call| {
        device.put(call.at(index, |m| gpu_handle(m, index))?)
    }

    /// Returns the GPU at a PCI address.
    fn nvmlDeviceGetHandleByPciBusId(address: Ptr<c_char>, device: Ptr<Opaque>) |call| {
        let wanted = parse_pci(&address.text()?).ok_or(Return::InvalidArgument)?;
        device.put(call.host(|m| handle_where(m, |who| pci_of(who) == wanted))?)
    }

    /// Returns the GPU at a PCI address.
    fn nvmlDeviceGetHandleByPciBusId_v2(address: Ptr<c_char>, device: Ptr<Opaque>) |call| {
        let wanted = parse_pci(&address.text()?).ok_or(Return::InvalidArgument)?;
        device.put(call.host(|m| handle_where(m, |who| pci_of(who) == wanted))?)
    }

    /// Returns the GPU with a serial number.
    fn nvmlDeviceGetHandleBySerial(serial: Ptr<c_char>, device: Ptr<Opaque>) |call| {
        let wanted = serial.text()?;
        device.put(call.host(|m| handle_where(m, |who| who.serial == wanted))?)
    }

    /// Returns the GPU or MIG device with a UUID.
    fn nvmlDeviceGetHandleByUUID(uuid: Ptr<c_char>, device: Ptr<Opaque>) |call| {
        let wanted = uuid.text()?;
        device.put(call.host(|m| match wanted.split_once('-') {
            Some(("GPU", _)) => gpu_handle(m, m.gpu_by_uuid(&wanted)?),
            Some(("MIG", _)) => m.mig_device_by_uuid(&wanted).map(|h| Opaque::of(Handle::MigDevice(h))),
            Some(_) | None => Err(Return::InvalidArgument),
        })?)
    }

    /// Returns the product name. The name of a MIG device includes the profile: `NVIDIA
    /// A100-SXM4-80GB MIG 3g.40gb`.
    fn nvmlDeviceGetName(device: Opaque, name: Ptr<c_char>, length: u32) |call| {
        let text = call.device(device, |m, at| {
            let product = &m.identity(at.gpu())?.name;
            match at {
                Device::Gpu(_) => Ok(product.clone()),
                Device::Mig(ci) => {
                    let part = m.part(ci.gpu)?;
                    let (gi, found) = m.resolve_compute_instance(ci)?;
                    let profile = m.compute_profile(&part, gi, found.profile_id)?;
                    Ok(format!("{product} MIG {}", profile.name))
                }
            }
        })?;
        name.put_text(length, &text)
    }

    /// Returns `GPU-<uuid>` or `MIG-<uuid>`.
    fn nvmlDeviceGetUUID(device: Opaque, uuid: Ptr<c_char>, length: u32) |call| {
        let text = call.device(device, |m, at| match at {
            Device::Gpu(gpu) => Ok(m.identity(gpu)?.uuid.clone()),
            Device::Mig(ci) => m.mig_uuid(ci),
        })?;
        uuid.put_text(length, &text)
    }

    /// Returns the index of a GPU, or the index of a MIG device within its GPU.
    fn nvmlDeviceGetIndex(device: Opaque, index: Ptr<u32>) |call| {
        index.put(call.device(device, |m, at| match at {
            Device::Gpu(gpu) => Ok(gpu),
            Device::Mig(ci) => {
                let same = |d: &silicon::machine::MigDevice| d.generation == ci.generation;
                m.mig_devices(ci.gpu)?.iter().find(|d| same(d)).map(|d| d.index).ok_or(Return::InvalidArgument)
            }
        })?)
    }

    /// Returns `N` of `/dev/nvidiaN`.
    fn nvmlDeviceGetMinorNumber(device: Opaque, minor: Ptr<u32>) |call| {
        minor.put(call.gpu(device, |m, gpu| Ok(m.identity(gpu)?.minor))?)
    }

    /// Returns the serial number of the board.
    fn nvmlDeviceGetSerial(device: Opaque, serial: Ptr<c_char>, length: u32) |call| {
        let text = call.gpu(device, |m, gpu| Ok(m.identity(gpu)?.serial.clone()))?;
        serial.put_text(length, &text)
    }

    /// Returns the PCI address.
    fn nvmlDeviceGetPciInfo(device: Opaque, info: Ptr<nvmlPciInfo_t>) |call| {
        info.put(call.gpu(device, |m, gpu| Ok(pci_info(m.identity(gpu)?)))?)
    }

    /// Returns the PCI address.
    fn nvmlDeviceGetPciInfo_v2(device: Opaque, info: Ptr<nvmlPciInfo_t>) |call| {
        info.put(call.gpu(device, |m, gpu| Ok(pci_info(m.identity(gpu)?)))?)
    }

    /// Returns the PCI address.
    fn nvmlDeviceGetPciInfo_v3(device: Opaque, info: Ptr<nvmlPciInfo_t>) |call| {
        info.put(call.gpu(device, |m, gpu| Ok(pci_info(m.identity(gpu)?)))?)
    }

    /// Returns the PCI address and the PCI class of the device, in a versioned struct.
    fn nvmlDeviceGetPciInfoExt(device: Opaque, info: Ptr<nvmlPciInfoExt_v1_t>) |call| {
        let version = info.cast::<u32>().get()?;
        if version != version_word::<nvmlPciInfoExt_v1_t>(1) {
            return Err(Return::ArgumentVersionMismatch);
        }
        info.put(call.gpu(device, |m, gpu| {
            let who = m.identity(gpu)?;
            Ok(nvmlPciInfoExt_v1_t {
                version,
                domain: who.pci_domain,
                bus: who.pci_bus,
                device: who.pci_device,
                pciDeviceId: who.pci_device_id,
                pciSubSystemId: who.pci_subsystem_id,
                baseClass: PCI_CLASS.0,
                subClass: PCI_CLASS.1,
                busId: text_field(&long_address(who)),
            })
        })?)
    }

    /// Returns the architecture of the chip, as NVML's number.
    fn nvmlDeviceGetArchitecture(device: Opaque, architecture: Ptr<u32>) |call| {
        architecture.put(call.gpu(device, |m, gpu| {
            Ok(match m.model(gpu)?.architecture {
                Architecture::Pascal => 4,
                Architecture::Volta => 5,
                Architecture::Turing => 6,
                Architecture::Ampere => 7,
                Architecture::Ada => 8,
                Architecture::Hopper => 9,
                Architecture::Blackwell => 10,
            })
        })?)
    }

    /// Returns the brand, as NVML's number.
    fn nvmlDeviceGetBrand(device: Opaque, brand: Ptr<u32>) |call| {
        const TESLA: u32 = 2;
        const NVIDIA_RTX: u32 = 13;
        const NVIDIA: u32 = 14;
        brand.put(call.gpu(device, |m, gpu| {
            let name = &m.identity(gpu)?.name;
            Ok(if name.contains("RTX") { NVIDIA_RTX } else if name.contains("T4") { TESLA } else { NVIDIA })
        })?)
    }

    /// Returns the CUDA compute capability.
    fn nvmlDeviceGetCudaComputeCapability(device: Opaque, major: Ptr<i32>, minor: Ptr<i32>) |call| {
        let (high, low) = call.device(device, |m, at| Ok(Board::of(m.model(at.gpu())?).compute_capability))?;
        major.put(i32::try_from(high).map_err(|_| Return::Unknown)?)?;
        minor.put(i32::try_from(low).map_err(|_| Return::Unknown)?)
    }
}

fn gpu_count(m: &Machine) -> u32 {
    u32::try_from(m.gpus().len()).unwrap_or(u32::MAX)
}

fn gpu_handle(m: &Machine, index: u32) -> Outcome<Opaque> {
    m.gpu_handle(index).map(|handle| Opaque::of(Handle::Gpu(handle)))
}

fn handle_where(m: &Machine, wanted: impl Fn(&Identity) -> bool) -> Outcome<Opaque> {
    for index in 0..gpu_count(m) {
        if wanted(m.identity(index)?) {
            return gpu_handle(m, index);
        }
    }
    Err(Return::NotFound)
}

fn pci_of(who: &Identity) -> (u32, u32, u32) {
    (who.pci_domain, who.pci_bus, who.pci_device)
}

/// Parses `[domain:]bus:device[.function]`. All numbers are hexadecimal, with any number of digits,
/// as in NVML.
fn parse_pci(text: &str) -> Option<(u32, u32, u32)> {
    let text = text.split_once('.').map_or(text, |(address, _function)| address);
    let mut parts = text.rsplit(':').map(|part| u32::from_str_radix(part, 16).ok());
    let device = parts.next()??;
    let bus = parts.next()??;
    let domain = parts.next().map_or(Some(0), |part| part)?;
    parts.next().is_none().then_some((domain, bus, device))
}

/// Formats a PCI address as NVML has done since `_v3`: with a domain of eight digits, in upper
/// case.
fn long_address(who: &Identity) -> String {
    format!("{:08X}:{:02X}:{:02X}.0", who.pci_domain, who.pci_bus, who.pci_device)
}

/// Returns the PCI address of an NVSwitch. Its bus has no GPUs.
pub(crate) fn switch_info(number: u32) -> nvmlPciInfo_t {
    const FIRST_BUS: u32 = 0xc5;
    /// Device id of a second-generation NVSwitch.
    const DEVICE: u32 = 0x1af1_10de;
    let bus = FIRST_BUS + number;
    nvmlPciInfo_t {
        busIdLegacy: text_field(&format!("0000:{bus:02X}:00.0")),
        domain: 0,
        bus,
        device: 0,
        pciDeviceId: DEVICE,
        pciSubSystemId: DEVICE,
        busId: text_field(&format!("00000000:{bus:02X}:00.0")),
    }
}

pub(crate) fn pci_info(who: &Identity) -> nvmlPciInfo_t {
    nvmlPciInfo_t {
        busIdLegacy: text_field(&format!("{:04X}:{:02X}:{:02X}.0", who.pci_domain, who.pci_bus, who.pci_device)),
        domain: who.pci_domain,
        bus: who.pci_bus,
        device: who.pci_device,
        pciDeviceId: who.pci_device_id,
        pciSubSystemId: who.pci_subsystem_id,
        busId: text_field(&long_address(who)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_are_read_in_every_usual_form() {
        for text in ["0000:07:00.0", "00000000:07:00.0", "07:00.0", "07:00", "0000:07:00"] {
            assert_eq!(parse_pci(text), Some((0, 7, 0)), "{text}");
        }
        assert_eq!(parse_pci("0001:AF:1f.0"), Some((1, 0xaf, 0x1f)));
        for text in ["", "7", "x:y", "0:0:0:0", "07:00:zz"] {
            assert_eq!(parse_pci(text), None, "{text}");
        }
    }
}
