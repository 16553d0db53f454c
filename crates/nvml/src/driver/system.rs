//! Properties of the driver.

use super::{Driver, wrapped};
use crate::error::DriverError;

impl Driver {
    /// Reads the versions of the driver, NVML and CUDA, the path of the library, and whether the
    /// library is the simulator.
    ///
    /// # Errors
    /// Errors of the three version calls.
    pub fn info(&self) -> Result<gpush_api::Driver, DriverError> {
        let version = self.nvml.sys_driver_version().map_err(wrapped("nvmlSystemGetDriverVersion"))?;
        let nvml = self.nvml.sys_nvml_version().map_err(wrapped("nvmlSystemGetNVMLVersion"))?;
        let cuda = self.nvml.sys_cuda_driver_version().map_err(wrapped("nvmlSystemGetCudaDriverVersion_v2"))?;
        Ok(gpush_api::Driver {
            version,
            nvml,
            cuda: format!("{}.{}", cuda / 1000, cuda % 1000 / 10),
            library: self.library.clone(),
            simulated: self.simulated,
            memory_limits: self.has_memory_limits(),
        })
    }

    /// Reads the number of GPUs, including those that cannot be opened.
    ///
    /// # Errors
    /// Errors of the call.
    pub fn count(&self) -> Result<u32, DriverError> {
        self.nvml.device_count().map_err(wrapped("nvmlDeviceGetCount_v2"))
    }
}
