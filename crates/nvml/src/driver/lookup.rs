//! Finds GPUs by index, PCI address and UUID, and reads their identities.
//!
//! An index changes when a GPU is lost. A search by UUID accesses every GPU, including a GPU that
//! hangs. So the lookup first tries the last known index, then the PCI address, and checks the UUID
//! each time. The lookup searches by UUID only if both attempts fail.

use std::ffi::CString;

use gpush_api::{Architecture, GpuIndex, GpuUuid};
use nvml_wrapper::{Device, enum_wrappers::device::GpuVirtualizationMode};
use nvml_wrapper_sys::bindings::{self as sys, nvmlDevice_t};

use super::{Driver, Gpu, wrapped};
use crate::{
    error::{DriverError, ErrorKind},
    proto::GpuRef,
    reading::{Identity, Listed},
};

impl Driver {
    /// Returns the GPU at an index of this session.
    ///
    /// # Errors
    /// Errors of the calls, which name the GPU as `index N`.
    pub fn gpu_by_index(&self, index: GpuIndex) -> Result<Gpu<'_>, DriverError> {
        let mut handle: nvmlDevice_t = std::ptr::null_mut();
        // SAFETY: `handle` outlives the call, which writes one pointer.
        unsafe { nvml!(self, nvmlDeviceGetHandleByIndex_v2(index.0, &raw mut handle)) }
            .and_then(|()| self.gpu(handle, Some(index)))
            .map_err(|e| e.on(format!("index {index}")))
    }

    /// Returns the GPU with this UUID, even if its index has changed.
    ///
    /// # Errors
    /// `GpuNotFound` if this session has no such GPU; otherwise errors of the calls.
    pub fn find(&self, wanted: &GpuRef) -> Result<Gpu<'_>, DriverError> {
        if let Some(index) = wanted.index
            && let Ok(gpu) = self.gpu_by_index(index)
            && gpu.uuid == wanted.uuid
        {
            return Ok(gpu);
        }
        if let Some(pci) = &wanted.pci {
            match self.gpu_by_pci(pci) {
                Ok(gpu) if gpu.uuid == wanted.uuid => return Ok(gpu),
                Err(error) if error.kind == ErrorKind::GpuIsLost => return Err(error.on(&wanted.uuid)),
                Ok(_) | Err(_) => {}
            }
        }
        self.gpu_by_uuid(&wanted.uuid)
    }

    fn gpu_by_pci(&self, pci: &str) -> Result<Gpu<'_>, DriverError> {
        let name = c_string(pci, "nvmlDeviceGetHandleByPciBusId_v2")?;
        let mut handle: nvmlDevice_t = std::ptr::null_mut();
        // SAFETY: `name` is NUL-terminated, `handle` outlives the call.
        unsafe { nvml!(self, nvmlDeviceGetHandleByPciBusId_v2(name.as_ptr(), &raw mut handle)) }
            .and_then(|()| self.gpu(handle, None))
            .map_err(|e| e.on(pci))
    }

    fn gpu_by_uuid(&self, uuid: &GpuUuid) -> Result<Gpu<'_>, DriverError> {
        let name = c_string(uuid.as_str(), "nvmlDeviceGetHandleByUUID")?;
        let mut handle: nvmlDevice_t = std::ptr::null_mut();
        // SAFETY: `name` is NUL-terminated, `handle` outlives the call.
        unsafe { nvml!(self, nvmlDeviceGetHandleByUUID(name.as_ptr(), &raw mut handle)) }
            .and_then(|()| self.gpu(handle, None))
            .map_err(|mut error| {
                if matches!(error.kind, ErrorKind::NotFound | ErrorKind::InvalidArgument) {
                    error.kind = ErrorKind::GpuNotFound;
                }
                error.on(uuid)
            })
    }

    fn gpu(&self, handle: nvmlDevice_t, index: Option<GpuIndex>) -> Result<Gpu<'_>, DriverError> {
        let device = self.device(handle);
        let uuid = device.uuid().map(GpuUuid::from).map_err(wrapped("nvmlDeviceGetUUID"))?;
        let index = match index {
            Some(index) => index,
            None => device.index().map(GpuIndex).map_err(wrapped("nvmlDeviceGetIndex")).map_err(|e| e.on(&uuid))?,
        };
        Ok(Gpu { driver: self, handle, index, uuid })
    }

    /// Returns a handle as nvml-wrapper's type, for the calls that nvml-wrapper supports well.
    pub(super) fn device(&self, handle: nvmlDevice_t) -> Device<'_> {
        // SAFETY: handles are from this session, and the wrapper borrows the session.
        unsafe { Device::new(handle, &self.nvml) }
    }

    /// Lists all GPUs of this session, each with its identity or the reason why it cannot be read. Does not access the
    /// GPUs in `skip`.
    ///
    /// # Errors
    /// The number of GPUs cannot be read.
    pub fn list(&self, skip: &[GpuRef]) -> Result<Vec<Listed>, DriverError> {
        let listed = (0..self.count()?).map(GpuIndex).map(|index| {
            let skipped = skip.iter().find(|gpu| gpu.index == Some(index));
            let identity = match skipped {
                Some(gpu) => Err(DriverError::new(ErrorKind::Unsettled, "listing the GPUs").on(&gpu.uuid)),
                None => self.gpu_by_index(index).and_then(|gpu| gpu.identity()),
            };
            Listed { index, identity }
        });
        Ok(listed.collect())
    }
}

impl Gpu<'_> {
    /// Reads the fixed properties.
    ///
    /// # Errors
    /// Errors of the calls.
    pub fn identity(&self) -> Result<Identity, DriverError> {
        self.identify().map_err(|e| e.on(&self.uuid))
    }

    fn identify(&self) -> Result<Identity, DriverError> {
        let device = self.driver.device(self.handle);
        let pci = device.pci_info().map_err(wrapped("nvmlDeviceGetPciInfo_v3"))?;
        Ok(Identity {
            index: self.index,
            uuid: self.uuid.clone(),
            pci: format!("{:04x}:{:02x}:{:02x}.0", pci.domain, pci.bus, pci.device),
            pci_id: pci.pci_device_id,
            pci_subsystem: pci.pci_sub_system_id,
            minor: device.minor_number().map_err(wrapped("nvmlDeviceGetMinorNumber"))?,
            name: device.name().map_err(wrapped("nvmlDeviceGetName"))?,
            architecture: self.architecture()?,
            passed_through: self.is_passed_through()?,
        })
    }

    /// Returns whether the GPU is passed through to a virtual machine. Returns `false` if the driver does not say it.
    fn is_passed_through(&self) -> Result<bool, DriverError> {
        let mode = self.driver.device(self.handle).virtualization_mode();
        match mode.map_err(wrapped("nvmlDeviceGetVirtualizationMode")) {
            Ok(mode) => Ok(mode == GpuVirtualizationMode::PassThrough),
            Err(error) if matches!(error.kind, ErrorKind::MissingSymbol | ErrorKind::NotSupported) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn architecture(&self) -> Result<Architecture, DriverError> {
        let mut architecture = sys::NVML_DEVICE_ARCH_UNKNOWN;
        // SAFETY: the call writes one integer.
        match unsafe { nvml!(self.driver, nvmlDeviceGetArchitecture(self.handle, &raw mut architecture)) } {
            Ok(()) => {}
            Err(error) if matches!(error.kind, ErrorKind::MissingSymbol | ErrorKind::NotSupported) => {
                return Ok(Architecture::Unknown);
            }
            Err(error) => return Err(error),
        }
        Ok(match architecture {
            ..=sys::NVML_DEVICE_ARCH_PASCAL => Architecture::Legacy,
            sys::NVML_DEVICE_ARCH_VOLTA => Architecture::Volta,
            sys::NVML_DEVICE_ARCH_TURING => Architecture::Turing,
            sys::NVML_DEVICE_ARCH_AMPERE => Architecture::Ampere,
            sys::NVML_DEVICE_ARCH_ADA => Architecture::Ada,
            sys::NVML_DEVICE_ARCH_HOPPER => Architecture::Hopper,
            sys::NVML_DEVICE_ARCH_BLACKWELL => Architecture::Blackwell,
            _ => Architecture::Unknown,
        })
    }
}

fn c_string(text: &str, function: &str) -> Result<CString, DriverError> {
    CString::new(text)
        .map_err(|_| DriverError::new(ErrorKind::InvalidArgument, function).detail("a name contains a NUL byte"))
}
