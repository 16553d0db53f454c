//! The reference method for comparisons: permute and retry.
//!
//! Earlier tools, such as mig-parted, use this method. Such a tool destroys every instance, creates
//! the requested instances in some order, and lets the driver choose each placement. If an instance
//! does not fit, the tool destroys the new instances and tries the next order. This module does the
//! same, as a separate process on the same simulated driver.

#![allow(unsafe_code)] // Calls NVML's C functions for instances: no safe crate creates them without a placement.

use std::{ffi::c_uint, path::Path, ptr};

use nvml_wrapper_sys::bindings::{NvmlLib, nvmlComputeInstance_t, nvmlDevice_t, nvmlGpuInstance_t, nvmlReturn_t};

/// The reason why the method failed.
#[derive(Debug)]
pub(crate) struct Stuck(pub(crate) String);

/// A requested GPU instance with one compute instance, which occupies the whole GPU instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Wanted {
    /// Position of the first instance with this profile in the request. The method first tries the
    /// instances in the order of the request.
    pub(crate) rank: usize,
    /// GPU instance profile id.
    pub(crate) gpu_profile: c_uint,
    /// Compute instance profile id.
    pub(crate) compute_profile: c_uint,
}

/// Creates the requested instances on GPU `index`, in the first order that the driver accepts.
///
/// # Errors
/// If an instance cannot be destroyed, or no order works.
pub(crate) fn apply(library: &Path, index: c_uint, known: &[Wanted], wanted: &[Wanted]) -> Result<(), Stuck> {
    let nvml = Nvml::open(library, index)?;
    nvml.clear(known)?;
    let mut order = wanted.to_vec();
    order.sort_unstable();
    loop {
        if nvml.create_all(&order).is_ok() {
            return Ok(());
        }
        nvml.clear(known)?;
        if !next_permutation(&mut order) {
            return Err(Stuck("no order of the instances works".into()));
        }
    }
}

/// Changes `order` to the next different permutation. Returns false if `order` was the last one.
fn next_permutation(order: &mut [Wanted]) -> bool {
    let Some(i) = (1..order.len()).rev().find(|&i| order[i - 1] < order[i]) else { return false };
    let Some(j) = (i..order.len()).rev().find(|&j| order[j] > order[i - 1]) else { return false };
    order.swap(i - 1, j);
    order[i..].reverse();
    true
}

/// The NVML library and one GPU.
struct Nvml {
    lib: NvmlLib,
    device: nvmlDevice_t,
}

impl Nvml {
    fn open(library: &Path, index: c_uint) -> Result<Self, Stuck> {
        // SAFETY: the simulated library's initialisers take no arguments and access no memory of
        // this program.
        let lib = unsafe { NvmlLib::new(library) }.map_err(|error| Stuck(error.to_string()))?;
        let mut device = ptr::null_mut();
        // SAFETY: the library is loaded; `device` outlives the call, which writes one handle.
        unsafe {
            check("nvmlInit_v2", lib.nvmlInit_v2())?;
            check("nvmlDeviceGetHandleByIndex_v2", lib.nvmlDeviceGetHandleByIndex_v2(index, &raw mut device))?;
        }
        Ok(Self { lib, device })
    }

    fn create_all(&self, order: &[Wanted]) -> Result<(), Stuck> {
        for wanted in order {
            let (mut instance, mut compute) = (ptr::null_mut(), ptr::null_mut());
            // SAFETY: the device handle comes from the library, and both out-pointers outlive their
            // call. The instance handle is used only after the call that wrote it succeeded.
            unsafe {
                let made = self.lib.nvmlDeviceCreateGpuInstance(self.device, wanted.gpu_profile, &raw mut instance);
                check("nvmlDeviceCreateGpuInstance", made)?;
                let made =
                    self.lib.nvmlGpuInstanceCreateComputeInstance(instance, wanted.compute_profile, &raw mut compute);
                check("nvmlGpuInstanceCreateComputeInstance", made)?;
            }
        }
        Ok(())
    }

    /// Destroys every instance of the known profiles.
    fn clear(&self, known: &[Wanted]) -> Result<(), Stuck> {
        for profile in known {
            for instance in self.gpu_instances(profile.gpu_profile)? {
                for compute in self.compute_instances(instance, profile.compute_profile)? {
                    // SAFETY: the library has just listed this handle.
                    check("nvmlComputeInstanceDestroy", unsafe { self.lib.nvmlComputeInstanceDestroy(compute) })?;
                }
                // SAFETY: the library has just listed this handle.
                check("nvmlGpuInstanceDestroy", unsafe { self.lib.nvmlGpuInstanceDestroy(instance) })?;
            }
        }
        Ok(())
    }

    fn gpu_instances(&self, profile: c_uint) -> Result<Vec<nvmlGpuInstance_t>, Stuck> {
        let mut found = vec![ptr::null_mut(); MOST];
        let mut count = 0;
        // SAFETY: `found` has room for as many handles as a GPU can have instances.
        let listed =
            unsafe { self.lib.nvmlDeviceGetGpuInstances(self.device, profile, found.as_mut_ptr(), &raw mut count) };
        check("nvmlDeviceGetGpuInstances", listed)?;
        found.truncate(count as usize);
        Ok(found)
    }

    fn compute_instances(
        &self,
        instance: nvmlGpuInstance_t,
        profile: c_uint,
    ) -> Result<Vec<nvmlComputeInstance_t>, Stuck> {
        let mut found = vec![ptr::null_mut(); MOST];
        let mut count = 0;
        // SAFETY: `found` has room for as many handles as a GPU instance can have compute
        // instances.
        let listed = unsafe {
            self.lib.nvmlGpuInstanceGetComputeInstances(instance, profile, found.as_mut_ptr(), &raw mut count)
        };
        check("nvmlGpuInstanceGetComputeInstances", listed)?;
        found.truncate(count as usize);
        Ok(found)
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        // SAFETY: this call matches the `nvmlInit_v2` in `open`. Its result does not matter,
        // because no NVML call follows.
        let _ = unsafe { self.lib.nvmlShutdown() };
    }
}

/// Maximum number of instances of one kind on one GPU or in one GPU instance.
const MOST: usize = 16;

fn check(what: &str, code: nvmlReturn_t) -> Result<(), Stuck> {
    if code == 0 { Ok(()) } else { Err(Stuck(format!("{what}: NVML return code {code}"))) }
}
