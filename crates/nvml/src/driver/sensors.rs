//! Sensors and error counters: utilization, temperature, power, ECC errors.

use gpush_api::Sensors;
use nvml_wrapper_sys::bindings as sys;

use super::Gpu;
use crate::error::DriverError;

impl Gpu<'_> {
    /// Reads the sensors. A value that the driver does not report is absent. No decision depends on
    /// sensors, so a failure is not an error.
    pub(super) fn sensors(&self) -> Sensors {
        let utilization = self.utilization().ok();
        Sensors {
            utilization_percent: utilization.map(|rates| rates.gpu),
            memory_utilization_percent: utilization.map(|rates| rates.memory),
            temperature_c: self.temperature().ok(),
            power_mw: self.power().ok(),
            power_limit_mw: self.power_limit().ok(),
            ecc_corrected: self.ecc_errors(sys::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_CORRECTED).ok(),
            ecc_uncorrected: self.ecc_errors(sys::nvmlMemoryErrorType_enum_NVML_MEMORY_ERROR_TYPE_UNCORRECTED).ok(),
        }
    }

    fn utilization(&self) -> Result<sys::nvmlUtilization_t, DriverError> {
        let mut rates = sys::nvmlUtilization_t { gpu: 0, memory: 0 };
        // SAFETY: the call writes one structure.
        unsafe { nvml!(self.driver, nvmlDeviceGetUtilizationRates(self.handle, &raw mut rates)) }?;
        Ok(rates)
    }

    /// Returns the temperature of the GPU core in °C.
    pub(super) fn temperature(&self) -> Result<u32, DriverError> {
        let mut celsius = 0;
        let sensor = sys::nvmlTemperatureSensors_enum_NVML_TEMPERATURE_GPU;
        // SAFETY: the call takes a value and writes one integer.
        unsafe { nvml!(self.driver, nvmlDeviceGetTemperature(self.handle, sensor, &raw mut celsius)) }?;
        Ok(celsius)
    }

    /// Returns the power draw in mW.
    fn power(&self) -> Result<u32, DriverError> {
        let mut milliwatts = 0;
        // SAFETY: the call writes one integer.
        unsafe { nvml!(self.driver, nvmlDeviceGetPowerUsage(self.handle, &raw mut milliwatts)) }?;
        Ok(milliwatts)
    }

    /// Returns the enforced power limit in mW.
    fn power_limit(&self) -> Result<u32, DriverError> {
        let mut milliwatts = 0;
        // SAFETY: the call writes one integer.
        unsafe { nvml!(self.driver, nvmlDeviceGetEnforcedPowerLimit(self.handle, &raw mut milliwatts)) }?;
        Ok(milliwatts)
    }

    /// Returns the number of ECC errors of one kind since the driver was loaded.
    fn ecc_errors(&self, kind: sys::nvmlMemoryErrorType_t) -> Result<u64, DriverError> {
        let mut count = 0;
        let since_load = sys::nvmlEccCounterType_enum_NVML_VOLATILE_ECC;
        // SAFETY: the call takes two values and writes one integer.
        unsafe { nvml!(self.driver, nvmlDeviceGetTotalEccErrors(self.handle, kind, since_load, &raw mut count)) }?;
        Ok(count)
    }
}
