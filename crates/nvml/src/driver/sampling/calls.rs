//! Single driver calls of a sample that need no state.

use std::collections::BTreeMap;

use gpush_api::ProcessKind;
use nvml_wrapper_sys::bindings::{self as sys, nvmlDevice_t};

use crate::{
    driver::{Gpu, processes::Entry},
    error::{DriverError, ErrorKind},
};

impl Gpu<'_> {
    /// Lists the compute processes, which include MPS clients, and the graphics processes. With MIG on, no list has graphics
    /// processes, so the second call is left out.
    pub(super) fn running_processes(&self, is_mig: bool, room: usize) -> Result<Vec<Entry>, DriverError> {
        let list = |kind| self.driver.process_list(self.device_handle(), kind, room);
        let compute = list(ProcessKind::Compute)?;
        if is_mig {
            return Ok(compute);
        }
        match list(ProcessKind::Graphics) {
            Ok(graphics) => Ok(with_graphics(compute, &graphics)),
            Err(error) if matches!(error.kind, ErrorKind::NotSupported | ErrorKind::MissingSymbol) => Ok(compute),
            Err(error) => Err(error),
        }
    }

    pub(super) fn clock(&self, domain: sys::nvmlClockType_t) -> Result<u32, DriverError> {
        let mut megahertz = 0;
        // SAFETY: the call takes a value and writes one number.
        unsafe { nvml!(self.driver, nvmlDeviceGetClockInfo(self.device_handle(), domain, &raw mut megahertz)) }?;
        Ok(megahertz)
    }

    pub(super) fn event_reasons(&self) -> Result<u64, DriverError> {
        let mut reasons = 0;
        // SAFETY: the call writes one number.
        let newest = unsafe {
            nvml!(self.driver, nvmlDeviceGetCurrentClocksEventReasons(self.device_handle(), &raw mut reasons))
        };
        match newest {
            Err(error) if error.kind == ErrorKind::MissingSymbol => {
                // SAFETY: the old name of the same call.
                unsafe {
                    nvml!(
                        self.driver,
                        nvmlDeviceGetCurrentClocksThrottleReasons(self.device_handle(), &raw mut reasons)
                    )
                }?;
            }
            other => other?,
        }
        Ok(reasons)
    }

    /// Returns a MIG device in each GPU instance that has one. The memory belongs to the GPU instance, so any of its
    /// devices will do.
    pub(super) fn mig_device_of_each_instance(&self) -> Result<BTreeMap<u32, nvmlDevice_t>, DriverError> {
        let mut most = 0;
        // SAFETY: the call writes one number.
        unsafe { nvml!(self.driver, nvmlDeviceGetMaxMigDeviceCount(self.device_handle(), &raw mut most)) }?;
        let mut devices = BTreeMap::new();
        for index in 0..most {
            let (mut device, mut gi): (nvmlDevice_t, u32) = (std::ptr::null_mut(), 0);
            // SAFETY: the call writes one handle.
            let found = unsafe {
                nvml!(self.driver, nvmlDeviceGetMigDeviceHandleByIndex(self.device_handle(), index, &raw mut device))
            };
            match found {
                Ok(()) => {}
                // The indexes have no gaps.
                Err(error) if error.kind == ErrorKind::NotFound => break,
                Err(error) => return Err(error),
            }
            // SAFETY: the call writes one number.
            unsafe { nvml!(self.driver, nvmlDeviceGetGpuInstanceId(device, &raw mut gi)) }?;
            devices.entry(gi).or_insert(device);
        }
        Ok(devices)
    }
}

/// Adds the graphics processes to the compute processes. A process of both kinds has one entry, because both lists report
/// all of its memory.
fn with_graphics(compute: Vec<Entry>, graphics: &[Entry]) -> Vec<Entry> {
    let is_new = |entry: &&Entry| compute.iter().all(|other| other.pid != entry.pid);
    let added: Vec<Entry> = graphics.iter().filter(is_new).copied().collect();
    compute.into_iter().chain(added).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Fault: only compute processes were listed, so a GPU with a renderer looked empty.
    #[test]
    fn process_of_both_kinds_is_listed_once() {
        let entry = |pid, kind| Entry { pid, kind, memory: Some(1), gi: None, ci: None };
        let (compute, graphics) = (ProcessKind::Compute, ProcessKind::Graphics);
        let listed = with_graphics(vec![entry(1, compute)], &[entry(1, graphics), entry(2, graphics)]);
        assert_eq!(listed, [entry(1, compute), entry(2, graphics)]);
    }
}
