//! Limits of the memory of a cgroup, which the driver has since 615. The simulated driver reads them, but never has one.

use std::ffi::c_char;

use silicon::Return;

use crate::caller::{Opaque, Ptr};
use crate::entry::exports;

/// First branch of the driver with the limits.
const FIRST_BRANCH: u32 = 615;

/// The hard limit of a cgroup without a limit.
const NO_LIMIT: u64 = u64::MAX;

/// `nvmlGetMemoryLimits_v1_t`. Source: NVIDIA's NVML API reference, release 615.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MemoryLimits {
    name_space: *const c_char,
    soft_limit: u64,
    hard_limit: u64,
    current_used: u64,
}

exports! {
    /// Reads the limits of a cgroup. While the host has an older driver, the function is missing.
    fn nvmlDeviceGetMemoryLimits_v1(device: Opaque, limits: Ptr<MemoryLimits>) |call| {
        let branch = call.host(|m| Ok(m.hardware().driver.branch()))?;
        if branch < FIRST_BRANCH {
            return Err(Return::FunctionNotFound);
        }
        call.gpu(device, |_, _| Ok(()))?;
        let asked = limits.get()?;
        limits.put(MemoryLimits { soft_limit: 0, hard_limit: NO_LIMIT, current_used: 0, ..asked })
    }
}
