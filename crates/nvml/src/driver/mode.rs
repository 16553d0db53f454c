//! MIG mode: reading it, and changing it with verification.

use nvml_wrapper_sys::bindings as sys;

use super::Gpu;
use crate::{
    error::{DriverError, ErrorKind},
    reading::ModeChange,
};

/// MIG mode of a GPU that supports MIG.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MigMode {
    /// Current mode.
    pub enabled: bool,
    /// Mode after the next reset.
    pub pending: bool,
}

impl Gpu<'_> {
    /// Reads the MIG mode; returns `None` if the GPU or the driver does not support MIG.
    ///
    /// # Errors
    /// Errors of the call, except `NotSupported`.
    pub fn mig_mode(&self) -> Result<Option<MigMode>, DriverError> {
        let (mut current, mut pending) = (0, 0);
        // SAFETY: the call writes two integers.
        let result =
            unsafe { nvml!(self.driver, nvmlDeviceGetMigMode(self.handle, &raw mut current, &raw mut pending)) };
        match result {
            Ok(()) => Ok(Some(MigMode {
                enabled: current == sys::NVML_DEVICE_MIG_ENABLE,
                pending: pending == sys::NVML_DEVICE_MIG_ENABLE,
            })),
            Err(error) if matches!(error.kind, ErrorKind::NotSupported | ErrorKind::MissingSymbol) => Ok(None),
            Err(error) => Err(error.on(&self.uuid)),
        }
    }

    /// Changes MIG mode and reads it back. If the call succeeds without effect, the activation
    /// status of the call contains the reason.
    ///
    /// # Errors
    /// Errors of the calls.
    pub fn set_mig_mode(&self, enabled: bool) -> Result<ModeChange, DriverError> {
        let wanted = if enabled { sys::NVML_DEVICE_MIG_ENABLE } else { sys::NVML_DEVICE_MIG_DISABLE };
        let mut status = 0;
        // SAFETY: the call writes one return code.
        unsafe { nvml!(self.driver, nvmlDeviceSetMigMode(self.handle, wanted, &raw mut status)) }
            .map_err(|e| e.on(&self.uuid))?;
        let activation = (status != 0).then(|| {
            DriverError::new(ErrorKind::from_code(status), "nvmlDeviceSetMigMode")
                .on(&self.uuid)
                .detail("activation status")
        });
        let mode = self.mig_mode()?.ok_or_else(|| {
            DriverError::new(ErrorKind::Garbled, "nvmlDeviceGetMigMode")
                .on(&self.uuid)
                .detail("MIG mode was set, but now the driver reports no MIG mode")
        })?;
        Ok(ModeChange { enabled: mode.enabled, pending: mode.pending, activation })
    }
}
