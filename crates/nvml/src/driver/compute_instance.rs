//! Compute instances of a GPU instance, and their MIG devices.
//!
//! The handle of a MIG device comes from the compute instance's info. Two other ways are worse: a
//! search by UUID took seconds while other calls ran, and a MIG index changes whenever any instance
//! is created or destroyed.

use gpush_api::{ComputeInstance, Memory, Placement, TargetUuid};
use nvml_wrapper_sys::bindings::{self as sys, nvmlComputeInstance_t, nvmlDevice_t, nvmlGpuInstance_t};

use super::{Gpu, profiles::placement, wrapped};
use crate::error::{DriverError, ErrorKind};

/// Number of ids to try. A GPU instance has at most 8 compute instances, and a new compute instance
/// gets the lowest free id.
const IDS: u32 = 8;

/// A GPU instance with its handle.
#[derive(Debug, Clone)]
pub struct OpenGpuInstance<'d> {
    pub(super) gpu: Gpu<'d>,
    pub(super) handle: nvmlGpuInstance_t,
    /// GPU instance id.
    pub id: u32,
    /// Profile id.
    pub profile_id: u32,
    /// Placement in memory slices.
    pub placement: Placement,
}

/// A compute instance with its handle.
#[derive(Debug, Clone)]
pub struct OpenComputeInstance<'d> {
    gpu: Gpu<'d>,
    handle: nvmlComputeInstance_t,
    pub(super) device: nvmlDevice_t,
    gi: u32,
    /// Compute instance id.
    pub id: u32,
    /// Profile id.
    pub profile_id: u32,
    /// Placement in compute slots, if the driver reports it.
    pub placement: Option<Placement>,
}

impl<'d> OpenGpuInstance<'d> {
    /// Returns all compute instances, sorted by id.
    ///
    /// # Errors
    /// Errors of the calls.
    pub fn compute_instances(&self) -> Result<Vec<OpenComputeInstance<'d>>, DriverError> {
        let seek = |id| match self.seek(id) {
            // If another program destroyed the instance between the two driver calls, its handle is
            // stale. A second attempt finds no handle.
            Err(error) if error.kind.is_stale_handle() => self.seek(id),
            other => other,
        };
        (0..IDS).filter_map(|id| seek(id).transpose()).collect()
    }

    /// Returns the compute instance with this id; `None` if there is no such instance.
    ///
    /// # Errors
    /// Errors of the calls, except `NotFound`.
    pub fn find_compute_instance(&self, id: u32) -> Result<Option<OpenComputeInstance<'d>>, DriverError> {
        match self.seek(id) {
            Err(error) if error.kind.is_stale_handle() => Ok(None),
            other => other,
        }
    }

    /// Finds a compute instance like `find_compute_instance`, but returns an error if the driver
    /// returns a handle and then refuses this handle.
    fn seek(&self, id: u32) -> Result<Option<OpenComputeInstance<'d>>, DriverError> {
        let mut handle: nvmlComputeInstance_t = std::ptr::null_mut();
        // SAFETY: the GPU instance's handle is from this session; the call writes one pointer.
        let result =
            unsafe { nvml!(self.gpu.driver, nvmlGpuInstanceGetComputeInstanceById(self.handle, id, &raw mut handle)) };
        match result {
            Ok(()) => self.open(handle).map(Some).map_err(|error| {
                error.on(&self.gpu.uuid).detail(format!("compute instance {id} of GPU instance {}", self.id))
            }),
            Err(error) if error.kind.is_stale_handle() => Ok(None),
            Err(error) => Err(error.on(&self.gpu.uuid)),
        }
    }

    fn open(&self, handle: nvmlComputeInstance_t) -> Result<OpenComputeInstance<'d>, DriverError> {
        // SAFETY: a struct of integers and pointers, for which all zeroes are a valid value.
        let mut info: sys::nvmlComputeInstanceInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: `handle` is from this session; the driver refuses stale handles.
        let reported = match unsafe { nvml!(self.gpu.driver, nvmlComputeInstanceGetInfo_v2(handle, &raw mut info)) } {
            Ok(()) => true,
            Err(error) if error.kind == ErrorKind::MissingSymbol => {
                // SAFETY: the first version of the call writes the same struct, but without the
                // placement.
                unsafe { nvml!(self.gpu.driver, nvmlComputeInstanceGetInfo(handle, &raw mut info)) }?;
                false
            }
            Err(error) => return Err(error),
        };
        Ok(OpenComputeInstance {
            gpu: self.gpu.clone(),
            handle,
            device: info.device,
            gi: self.id,
            id: info.id,
            profile_id: info.profileId,
            placement: reported.then(|| placement(info.placement.start, info.placement.size)),
        })
    }

    /// Creates a compute instance and reads it back. The caller chooses the first slot, but the
    /// driver determines the size. From Hopper on, the driver may reserve more slots than the
    /// profile has slices.
    ///
    /// # Errors
    /// Errors of the calls; `NotReflected` if the instance reads back differently.
    pub fn create_compute_instance(
        &self,
        profile_id: u32,
        at: Option<Placement>,
    ) -> Result<OpenComputeInstance<'d>, DriverError> {
        let at = match at {
            Some(wanted) => Some(self.sized(profile_id, wanted)?),
            None => None,
        };
        let mut handle: nvmlComputeInstance_t = std::ptr::null_mut();
        let (function, result) = if let Some(at) = at {
            let wanted = sys::nvmlComputeInstancePlacement_t { start: at.start.into(), size: at.size.into() };
            // SAFETY: the call only reads `wanted` and writes `handle`.
            let result = unsafe {
                nvml!(
                    self.gpu.driver,
                    nvmlGpuInstanceCreateComputeInstanceWithPlacement(
                        self.handle,
                        profile_id,
                        &raw const wanted,
                        &raw mut handle
                    )
                )
            };
            ("nvmlGpuInstanceCreateComputeInstanceWithPlacement", result)
        } else {
            // SAFETY: the call writes one pointer.
            let result = unsafe {
                nvml!(self.gpu.driver, nvmlGpuInstanceCreateComputeInstance(self.handle, profile_id, &raw mut handle))
            };
            ("nvmlGpuInstanceCreateComputeInstance", result)
        };
        let uuid = &self.gpu.uuid;
        result.map_err(|e| e.on(uuid).detail(format!("profile {profile_id} in GPU instance {}", self.id)))?;
        let unseen = |what: String| DriverError::new(ErrorKind::NotReflected, function).on(uuid).detail(what);
        let made = self.open(handle).map_err(|e| unseen(e.to_string()))?;
        let instance = self
            .find_compute_instance(made.id)?
            .ok_or_else(|| unseen(format!("compute instance {} of GPU instance {} is not found", made.id, self.id)))?;
        let placed = at.is_none_or(|at| instance.placement.is_none_or(|p| p.start == at.start));
        if instance.profile_id == profile_id && placed {
            return Ok(instance);
        }
        Err(unseen(format!("compute instance {} has profile {} instead", instance.id, instance.profile_id)))
    }

    fn sized(&self, profile_id: u32, wanted: Placement) -> Result<Placement, DriverError> {
        let possible = self.compute_placements(profile_id).map_err(|e| e.on(&self.gpu.uuid))?;
        Ok(possible.into_iter().find(|p| p.start == wanted.start).unwrap_or(wanted))
    }

    /// Destroys a compute instance and verifies that it no longer exists.
    ///
    /// # Errors
    /// Errors of the calls; `NotReflected` if the instance still exists.
    pub fn destroy_compute_instance(&self, id: u32) -> Result<(), DriverError> {
        let name = format!("compute instance {id} of GPU instance {}", self.id);
        let uuid = &self.gpu.uuid;
        let instance = self.find_compute_instance(id)?.ok_or_else(|| {
            DriverError::new(ErrorKind::NotFound, "nvmlGpuInstanceGetComputeInstanceById").on(uuid).detail(&name)
        })?;
        // SAFETY: `handle` is from this session; the driver refuses stale handles.
        unsafe { nvml!(self.gpu.driver, nvmlComputeInstanceDestroy(instance.handle)) }
            .map_err(|e| e.on(uuid).detail(&name))?;
        if self.find_compute_instance(id)?.is_none() {
            return Ok(());
        }
        Err(DriverError::new(ErrorKind::NotReflected, "nvmlComputeInstanceDestroy")
            .on(uuid)
            .detail(format!("{name} still exists")))
    }
}

impl OpenComputeInstance<'_> {
    /// Reads the `MIG-<uuid>` of the MIG device; returns `None` if the driver returns no device.
    ///
    /// # Errors
    /// Errors of the call.
    pub fn uuid(&self) -> Result<Option<TargetUuid>, DriverError> {
        if self.device.is_null() {
            return Ok(None);
        }
        self.gpu
            .driver
            .device(self.device)
            .uuid()
            .map(|uuid| Some(uuid.into()))
            .map_err(wrapped("nvmlDeviceGetUUID"))
            .map_err(|e| {
                e.on(&self.gpu.uuid).detail(format!("compute instance {} of GPU instance {}", self.id, self.gi))
            })
    }

    /// Reads the memory of the MIG device, which is the memory of its GPU instance.
    ///
    /// # Errors
    /// Errors of the call.
    pub fn memory(&self) -> Result<Option<Memory>, DriverError> {
        if self.device.is_null() {
            return Ok(None);
        }
        self.gpu.memory_of(self.device).map(Some)
    }

    /// Converts to the API's type. Sets the profile name to `profile`, and lists no processes.
    #[must_use]
    pub fn describe(&self, profile: String, uuid: Option<TargetUuid>) -> ComputeInstance {
        ComputeInstance {
            id: self.id,
            profile_id: self.profile_id,
            profile,
            placement: self.placement,
            uuid,
            processes: Vec::new(),
        }
    }
}
