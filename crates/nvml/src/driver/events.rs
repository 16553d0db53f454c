//! Driver events: Xid errors and MIG configuration changes. Unlike the wait function of
//! nvml-wrapper, [`EventSet::wait`] reports the instances of an event.

use gpush_api::GpuUuid;
use std::time::Duration;

use nvml_wrapper_sys::bindings::{self as sys, nvmlDevice_t, nvmlEventSet_t};

use super::{Driver, Gpu};
use crate::{
    error::{DriverError, ErrorKind},
    reading::{Event, EventKind},
};

/// The event type for a changed MIG configuration. nvml-wrapper-sys does not define it.
const MIG_CONFIG_CHANGED: u64 = 0x100;

/// A set that receives the events of its registered GPUs. A registered GPU stays open.
#[derive(Debug)]
pub struct EventSet<'d> {
    driver: &'d Driver,
    set: nvmlEventSet_t,
    registered: Vec<(nvmlDevice_t, String)>,
}

// SAFETY: NVML may be called from any thread. `EventSet` is not `Sync`, so one thread uses it at a time.
unsafe impl Send for EventSet<'_> {}

impl Driver {
    /// Creates an empty set.
    ///
    /// # Errors
    /// Errors of the call.
    pub fn event_set(&self) -> Result<EventSet<'_>, DriverError> {
        let mut set: nvmlEventSet_t = std::ptr::null_mut();
        // SAFETY: the call writes one pointer.
        unsafe { nvml!(self, nvmlEventSetCreate(&raw mut set)) }?;
        Ok(EventSet { driver: self, set, registered: Vec::new() })
    }
}

impl<'d> EventSet<'d> {
    /// Registers a GPU for Xid errors and MIG configuration changes, as far as the GPU supports
    /// these events. Returns `false` if the GPU supports neither of the two.
    ///
    /// # Errors
    /// Errors of the calls.
    pub fn register(&mut self, gpu: &Gpu<'d>) -> Result<bool, DriverError> {
        let mut supported = 0;
        // SAFETY: the call writes one integer.
        unsafe { nvml!(self.driver, nvmlDeviceGetSupportedEventTypes(gpu.handle, &raw mut supported)) }
            .map_err(|e| e.on(&gpu.uuid))?;
        let wanted = supported & (u64::from(sys::nvmlEventTypeXidCriticalError) | MIG_CONFIG_CHANGED);
        if wanted == 0 {
            return Ok(false);
        }
        // SAFETY: the set is open until drop.
        unsafe { nvml!(self.driver, nvmlDeviceRegisterEvents(gpu.handle, wanted, self.set)) }
            .map_err(|e| e.on(&gpu.uuid))?;
        self.registered.push((gpu.handle, gpu.uuid.to_string()));
        Ok(true)
    }

    /// Waits for the next event; returns `None` after the timeout.
    ///
    /// # Errors
    /// Errors of the call, except its timeout.
    pub fn wait(&self, timeout: Duration) -> Result<Option<Event>, DriverError> {
        // SAFETY: a struct of integers and a pointer, for which all zeroes are a valid value.
        let mut data: sys::nvmlEventData_t = unsafe { std::mem::zeroed() };
        let milliseconds = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        // SAFETY: the set is open until drop; the call writes one struct.
        match unsafe { nvml!(self.driver, nvmlEventSetWait_v2(self.set, &raw mut data, milliseconds)) } {
            Ok(()) => Ok(Some(self.event(&data))),
            Err(error) if error.kind == ErrorKind::Timeout => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn event(&self, data: &sys::nvmlEventData_t) -> Event {
        let known = self.registered.iter().find(|(handle, _)| *handle == data.device);
        let uuid = match known {
            Some((_, uuid)) => uuid.clone(),
            None => self.driver.device(data.device).uuid().map(GpuUuid::from).unwrap_or_default().to_string(),
        };
        let kind = if data.eventType & u64::from(sys::nvmlEventTypeXidCriticalError) != 0 {
            EventKind::Xid(data.eventData)
        } else if data.eventType & MIG_CONFIG_CHANGED != 0 {
            EventKind::MigConfigChanged
        } else {
            EventKind::Other(data.eventType)
        };
        let id = |id: u32| (id != u32::MAX).then_some(id);
        Event { uuid: uuid.into(), kind, gi: id(data.gpuInstanceId), ci: id(data.computeInstanceId) }
    }
}

impl Drop for EventSet<'_> {
    fn drop(&mut self) {
        // SAFETY: this session created the set and outlives it. The result does not matter, because the set is not used
        // again.
        let _ = unsafe { nvml!(self.driver, nvmlEventSetFree(self.set)) };
    }
}
