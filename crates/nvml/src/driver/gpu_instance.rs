//! GPU instances: listing them, creating one at a placement, and destroying one. Each change is read back.
//!
//! NVML lists the instances of one profile at a time. So these lists miss instances of profiles that
//! gpush does not know, and a plan could collide with these instances. Therefore this module also
//! tries all ids. The ids are physical slots, 0 to 14.
//!
//! A session may list handles of instances that other programs have destroyed. This module skips such handles, because
//! every instance that exists is also found by its id. If the driver returns a handle for an id and then refuses this
//! handle, the session is outdated, and the reading fails.

use gpush_api::Placement;
use nvml_wrapper_sys::bindings::{self as sys, nvmlGpuInstance_t};

use super::{Gpu, compute_instance::OpenGpuInstance, profiles::placement};
use crate::error::{DriverError, ErrorKind};

/// Number of ids to try: the largest id in NVIDIA's numbering is 14.
const IDS: u32 = 15;

impl<'d> Gpu<'d> {
    /// Returns all GPU instances sorted by id, including those of unknown profiles. `profile_ids` are the known
    /// profiles.
    ///
    /// # Errors
    /// Errors of the calls.
    pub fn gpu_instances(&self, profile_ids: &[u32]) -> Result<Vec<OpenGpuInstance<'d>>, DriverError> {
        let mut found: Vec<OpenGpuInstance<'d>> = Vec::new();
        for profile_id in profile_ids {
            for handle in self.handles(*profile_id)? {
                match self.open(handle) {
                    Ok(instance) if found.iter().all(|known| known.id != instance.id) => found.push(instance),
                    Ok(_) => {}
                    Err(error) if error.kind.is_stale_handle() => {}
                    Err(error) => return Err(error),
                }
            }
        }
        for id in 0..IDS {
            if found.iter().any(|known| known.id == id) {
                continue;
            }
            // If another program destroyed the instance between the two driver calls, its handle is stale. A second
            // attempt finds no handle.
            match self.seek(id) {
                Err(error) if error.kind.is_stale_handle() => found.extend(self.seek(id)?),
                other => found.extend(other?),
            }
        }
        found.sort_by_key(|instance| instance.id);
        Ok(found)
    }

    fn handles(&self, profile_id: u32) -> Result<Vec<nvmlGpuInstance_t>, DriverError> {
        let mut list: [nvmlGpuInstance_t; 64] = [std::ptr::null_mut(); 64];
        let mut count = 0;
        // SAFETY: the list has room for 64 entries; a GPU has at most 8 instances.
        let result = unsafe {
            nvml!(self.driver, nvmlDeviceGetGpuInstances(self.handle, profile_id, list.as_mut_ptr(), &raw mut count))
        };
        match result {
            Ok(()) => Ok(list.into_iter().take(count as usize).collect()),
            // A driver may describe a profile that the GPU does not have, and then refuse to list
            // its instances.
            Err(error) if matches!(error.kind, ErrorKind::NotSupported | ErrorKind::InvalidArgument) => Ok(Vec::new()),
            Err(error) => Err(error.on(&self.uuid)),
        }
    }

    /// Returns the GPU instance with this id; `None` if there is no such instance.
    ///
    /// # Errors
    /// Errors of the calls, except `NotFound`.
    pub fn find_gpu_instance(&self, id: u32) -> Result<Option<OpenGpuInstance<'d>>, DriverError> {
        match self.seek(id) {
            Err(error) if error.kind.is_stale_handle() => Ok(None),
            other => other,
        }
    }

    /// Finds a GPU instance like `find_gpu_instance`, but returns an error if the driver returns a handle and then
    /// refuses this handle.
    fn seek(&self, id: u32) -> Result<Option<OpenGpuInstance<'d>>, DriverError> {
        let mut handle: nvmlGpuInstance_t = std::ptr::null_mut();
        // SAFETY: the call writes one pointer.
        match unsafe { nvml!(self.driver, nvmlDeviceGetGpuInstanceById(self.handle, id, &raw mut handle)) } {
            Ok(()) => self.open(handle).map(Some).map_err(|e| e.detail(format!("GPU instance {id}"))),
            Err(error) if error.kind.is_stale_handle() => Ok(None),
            Err(error) => Err(error.on(&self.uuid)),
        }
    }

    /// Finds a GPU instance like `find_gpu_instance`, but returns an error if there is no such instance.
    pub(super) fn gpu_instance(&self, id: u32) -> Result<OpenGpuInstance<'d>, DriverError> {
        self.find_gpu_instance(id)?.ok_or_else(|| {
            DriverError::new(ErrorKind::NotFound, "nvmlDeviceGetGpuInstanceById")
                .on(&self.uuid)
                .detail(format!("GPU instance {id}"))
        })
    }

    fn open(&self, handle: nvmlGpuInstance_t) -> Result<OpenGpuInstance<'d>, DriverError> {
        // SAFETY: a struct of integers and a pointer, for which all zeroes are a valid value.
        let mut info: sys::nvmlGpuInstanceInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: `handle` is from this session; the driver refuses stale handles.
        unsafe { nvml!(self.driver, nvmlGpuInstanceGetInfo(handle, &raw mut info)) }.map_err(|e| e.on(&self.uuid))?;
        Ok(OpenGpuInstance {
            gpu: self.clone(),
            handle,
            id: info.id,
            profile_id: info.profileId,
            placement: placement(info.placement.start, info.placement.size),
        })
    }

    /// Creates a GPU instance of a profile at a placement, and reads it back. The profile and the placement must be as
    /// requested, and the driver must find the instance by its id.
    ///
    /// # Errors
    /// Errors of the calls; `NotReflected` if the instance reads back differently.
    pub fn create_gpu_instance(&self, profile_id: u32, at: Placement) -> Result<OpenGpuInstance<'d>, DriverError> {
        let wanted = sys::nvmlGpuInstancePlacement_t { start: at.start.into(), size: at.size.into() };
        let mut handle: nvmlGpuInstance_t = std::ptr::null_mut();
        // SAFETY: the call only reads `wanted` and writes `handle`.
        unsafe {
            nvml!(
                self.driver,
                nvmlDeviceCreateGpuInstanceWithPlacement(self.handle, profile_id, &raw const wanted, &raw mut handle)
            )
        }
        .map_err(|e| e.on(&self.uuid).detail(format!("profile {profile_id} at {}:{}", at.start, at.size)))?;
        let unseen = |what: String| {
            DriverError::new(ErrorKind::NotReflected, "nvmlDeviceCreateGpuInstanceWithPlacement")
                .on(&self.uuid)
                .detail(what)
        };
        let made = self.open(handle).map_err(|e| unseen(e.to_string()))?;
        let instance =
            self.find_gpu_instance(made.id)?.ok_or_else(|| unseen(format!("GPU instance {} is not found", made.id)))?;
        if instance.profile_id == profile_id && instance.placement == at {
            return Ok(instance);
        }
        let (placement, profile) = (instance.placement, instance.profile_id);
        Err(unseen(format!("the GPU has profile {profile} at {}:{} instead", placement.start, placement.size)))
    }

    /// Destroys a compute instance and verifies that it no longer exists.
    ///
    /// # Errors
    /// `NotFound` if either instance does not exist; otherwise errors of [`OpenGpuInstance::destroy_compute_instance`].
    pub fn destroy_compute_instance(&self, gi: u32, ci: u32) -> Result<(), DriverError> {
        self.gpu_instance(gi)?.destroy_compute_instance(ci)
    }

    /// Destroys a GPU instance and verifies that it no longer exists.
    ///
    /// # Errors
    /// Errors of the calls; `NotReflected` if the instance still exists.
    pub fn destroy_gpu_instance(&self, id: u32) -> Result<(), DriverError> {
        let instance = self.gpu_instance(id)?;
        // SAFETY: `handle` is from this session; the driver refuses stale handles.
        unsafe { nvml!(self.driver, nvmlGpuInstanceDestroy(instance.handle)) }
            .map_err(|e| e.on(&self.uuid).detail(format!("GPU instance {id}")))?;
        if self.find_gpu_instance(id)?.is_none() {
            return Ok(());
        }
        Err(DriverError::new(ErrorKind::NotReflected, "nvmlGpuInstanceDestroy")
            .on(&self.uuid)
            .detail(format!("GPU instance {id} still exists")))
    }
}
