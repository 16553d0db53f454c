//! Whether the driver limits the memory of a cgroup: `nvmlDeviceGetMemoryLimits_v1`, since driver 615.
//!
//! gpushd does not set such limits: no host with this driver has been tested. It only reports whether the driver has
//! them.

use std::ffi::{c_char, c_uint, c_void};

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlReturn_enum_NVML_ERROR_FUNCTION_NOT_FOUND as FUNCTION_NOT_FOUND};

use super::Driver;

/// The function that reads the limits of a cgroup.
const FUNCTION: &[u8] = b"nvmlDeviceGetMemoryLimits_v1\0";

/// `nvmlGetMemoryLimits_v1_t`. Source: NVIDIA's NVML API reference, release 615.
#[repr(C)]
struct MemoryLimits {
    /// Path of the cgroup.
    name_space: *const c_char,
    /// Soft limit in bytes.
    soft_limit: u64,
    /// Hard limit in bytes.
    hard_limit: u64,
    /// Memory in use, in bytes.
    current_used: u64,
}

type GetMemoryLimits = unsafe extern "C" fn(nvmlDevice_t, *mut MemoryLimits) -> c_uint;

impl Driver {
    /// Returns whether the library has the function, and the driver answers it. The call names no GPU, so it accesses
    /// none, and every answer is an error: the function is missing, or the GPU is.
    pub(super) fn has_memory_limits(&self) -> bool {
        // SAFETY: the type is the one of NVIDIA's header. The library stays loaded while `self` exists.
        let Ok(function) = (unsafe { self.nvml.lib().__library.get::<GetMemoryLimits>(FUNCTION) }) else {
            return false;
        };
        let root = c"/sys/fs/cgroup";
        let mut limits = MemoryLimits { name_space: root.as_ptr(), soft_limit: 0, hard_limit: 0, current_used: 0 };
        let no_device: nvmlDevice_t = std::ptr::null_mut::<c_void>().cast();
        // SAFETY: NVML checks the device of each call. The struct lives during the call.
        unsafe { function(no_device, &raw mut limits) != FUNCTION_NOT_FOUND }
    }
}
