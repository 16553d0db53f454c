//! Compute mode: reading it, and setting it with verification.

use gpush_api::ComputeMode;
use nvml_wrapper_sys::bindings as sys;

use super::Gpu;
use crate::error::{DriverError, ErrorKind};

impl Gpu<'_> {
    /// Reads the compute mode; returns `None` if the GPU or the driver does not support compute
    /// modes.
    ///
    /// # Errors
    /// Errors of the call, except `NotSupported`; `Garbled` for an unknown mode.
    pub fn compute_mode(&self) -> Result<Option<ComputeMode>, DriverError> {
        let mut mode = 0;
        // SAFETY: the call writes one integer.
        match unsafe { nvml!(self.driver, nvmlDeviceGetComputeMode(self.handle, &raw mut mode)) } {
            Ok(()) => named(mode).map(Some).map_err(|e| e.on(&self.uuid)),
            Err(error)
                if matches!(
                    error.kind,
                    ErrorKind::NotSupported | ErrorKind::MissingSymbol | ErrorKind::FunctionNotFound
                ) =>
            {
                Ok(None)
            }
            Err(error) => Err(error.on(&self.uuid)),
        }
    }

    /// Sets the compute mode and reads it back.
    ///
    /// # Errors
    /// Errors of the calls; `NotReflected` if the driver reported success but the mode differs.
    pub fn set_compute_mode(&self, wanted: ComputeMode) -> Result<(), DriverError> {
        // SAFETY: the call takes two values.
        unsafe { nvml!(self.driver, nvmlDeviceSetComputeMode(self.handle, number(wanted))) }
            .map_err(|e| e.on(&self.uuid).detail(format!("compute mode {wanted}")))?;
        let now = self.compute_mode()?;
        if now == Some(wanted) {
            return Ok(());
        }
        let now = now.map_or_else(|| "none".to_owned(), |mode| mode.to_string());
        Err(DriverError::new(ErrorKind::NotReflected, "nvmlDeviceSetComputeMode")
            .on(&self.uuid)
            .detail(format!("compute mode {wanted} was set, but the mode is {now}")))
    }
}

fn number(mode: ComputeMode) -> u32 {
    match mode {
        ComputeMode::Default => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_DEFAULT,
        ComputeMode::ExclusiveThread => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_THREAD,
        ComputeMode::Prohibited => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_PROHIBITED,
        ComputeMode::ExclusiveProcess => sys::nvmlComputeMode_enum_NVML_COMPUTEMODE_EXCLUSIVE_PROCESS,
    }
}

fn named(mode: u32) -> Result<ComputeMode, DriverError> {
    ComputeMode::ALL.into_iter().find(|known| number(*known) == mode).ok_or_else(|| {
        DriverError::new(ErrorKind::Garbled, "nvmlDeviceGetComputeMode").detail(format!("compute mode {mode}"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compute_modes_have_the_numbers_of_nvml() {
        for (expected, mode) in (0..).zip(ComputeMode::ALL) {
            assert_eq!(number(mode), expected);
            assert_eq!(named(expected).unwrap(), mode);
        }
        assert_eq!(named(4).unwrap_err().kind, ErrorKind::Garbled);
    }
}
