//! Processes on a GPU: the driver's three lists, for the whole GPU and for its MIG devices.
//!
//! On a GPU with MIG enabled, the lists of the whole GPU contain each process's GPU and compute
//! instance, but only if the caller has permission. The lists of a single MIG device need no
//! permission. gpush reads both kinds of lists and merges them. Some drivers do not report the
//! memory of a process; the value is then absent, not zero.

use gpush_api::{Process, ProcessKind};
use nvml_wrapper_sys::bindings::{self as sys, nvmlDevice_t, nvmlProcessInfo_v1_t, nvmlProcessInfo_v2_t};

use super::{Driver, Gpu};
use crate::error::{DriverError, ErrorKind};

/// The driver's value for an unknown amount of memory.
const NO_MEMORY: u64 = u64::MAX;

/// The driver's instance id for a process that is not in an instance.
const NO_INSTANCE: u32 = u32::MAX;

/// Maximum length of a ps. A GPU has at most a few thousand processes, so a larger number from the driver is
/// an error.
const MOST_ENTRIES: usize = 1 << 16;

/// Maximum number of attempts with a larger buffer. Processes may start between the attempts.
const ROUNDS: u32 = 8;

/// Name of this action in errors.
const LISTING: &str = "listing processes";

/// An entry of a ps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) pid: u32,
    /// Kind of the list that contained the entry.
    pub(super) kind: ProcessKind,
    /// Bytes in use, if the driver reports them.
    pub(super) memory: Option<u64>,
    /// GPU instance, if any.
    pub(super) gi: Option<u32>,
    /// Compute instance, if any.
    pub(super) ci: Option<u32>,
}

impl Entry {
    /// Converts to the API's type. gpushd adds user and command.
    pub(super) fn describe(&self) -> Process {
        Process {
            pid: Some(self.pid),
            uid: None,
            user: None,
            command: None,
            kind: self.kind,
            memory_mib: self.memory.map(|bytes| bytes >> 20),
            unidentified: false,
        }
    }
}

impl Gpu<'_> {
    /// Reads the process lists of the GPU, or of one of its MIG devices.
    ///
    /// # Errors
    /// Errors of the calls. The list of compute processes is essential. Any other list is treated
    /// as empty if the library or the GPU does not support it.
    pub(super) fn processes(&self, of: nvmlDevice_t) -> Result<Vec<Entry>, DriverError> {
        let mut all = Vec::new();
        for kind in [ProcessKind::Compute, ProcessKind::Graphics, ProcessKind::MpsClient] {
            match self.driver.process_list(of, kind, 0) {
                Ok(entries) => all.extend(entries),
                Err(error)
                    if kind != ProcessKind::Compute
                        && matches!(error.kind, ErrorKind::NotSupported | ErrorKind::MissingSymbol) => {}
                Err(error) => return Err(error.on(&self.uuid)),
            }
        }
        Ok(all)
    }

    /// Returns the GPU's own handle, for [`Self::processes`].
    pub(super) fn device_handle(&self) -> nvmlDevice_t {
        self.handle
    }
}

impl Driver {
    /// Reads a list of processes. The first call has room for `room` entries. Without room, it only asks for the length.
    pub(super) fn process_list(
        &self,
        of: nvmlDevice_t,
        kind: ProcessKind,
        room: usize,
    ) -> Result<Vec<Entry>, DriverError> {
        let newest = grow(room, |count, buffer: *mut nvmlProcessInfo_v2_t| {
            // SAFETY: the buffer has room for `count` entries of this version's struct.
            unsafe {
                match kind {
                    ProcessKind::Compute => nvml!(self, nvmlDeviceGetComputeRunningProcesses_v3(of, count, buffer)),
                    ProcessKind::Graphics => nvml!(self, nvmlDeviceGetGraphicsRunningProcesses_v3(of, count, buffer)),
                    ProcessKind::MpsClient => {
                        nvml!(self, nvmlDeviceGetMPSComputeRunningProcesses_v3(of, count, buffer))
                    }
                }
            }
        });
        let second = match newest {
            Err(error) if error.kind == ErrorKind::MissingSymbol => {
                grow(room, |count, buffer: *mut nvmlProcessInfo_v2_t| {
                    // SAFETY: the buffer has room for `count` entries. The second version of the call uses the same struct.
                    unsafe {
                        match kind {
                            ProcessKind::Compute => {
                                nvml!(self, nvmlDeviceGetComputeRunningProcesses_v2(of, count, buffer))
                            }
                            ProcessKind::Graphics => {
                                nvml!(self, nvmlDeviceGetGraphicsRunningProcesses_v2(of, count, buffer))
                            }
                            ProcessKind::MpsClient => {
                                nvml!(self, nvmlDeviceGetMPSComputeRunningProcesses_v2(of, count, buffer))
                            }
                        }
                    }
                })
            }
            other => other,
        };
        match second {
            Ok(list) => Ok(list.iter().map(|info| placed(info, kind)).collect()),
            Err(error) if error.kind == ErrorKind::MissingSymbol => {
                let list = grow(room, |count, buffer: *mut nvmlProcessInfo_v1_t| {
                    // SAFETY: the functions without a version write the 16-byte struct of the first version. The
                    // bindings declare another pointer type.
                    unsafe {
                        match kind {
                            ProcessKind::Compute => {
                                nvml!(self, nvmlDeviceGetComputeRunningProcesses(of, count, buffer))
                            }
                            ProcessKind::Graphics => {
                                nvml!(self, nvmlDeviceGetGraphicsRunningProcesses(of, count, buffer))
                            }
                            ProcessKind::MpsClient => {
                                nvml!(self, nvmlDeviceGetMPSComputeRunningProcesses(of, count, buffer))
                            }
                        }
                    }
                })?;
                Ok(list.iter().map(|info| unplaced(info, kind)).collect())
            }
            Err(error) => Err(error),
        }
    }
}

/// Reads a list whose length the driver reports. The first call passes a buffer of `room` entries. The next
/// calls pass a buffer of the reported size plus a reserve, until the list fits.
///
/// # Errors
/// Errors of `ask`; `Garbled` for an impossible length.
fn grow<T: Clone + Blank>(
    room: usize,
    mut ask: impl FnMut(*mut u32, *mut T) -> Result<(), DriverError>,
) -> Result<Vec<T>, DriverError> {
    let mut buffer: Vec<T> = vec![T::blank(); room];
    let mut last = None;
    for _ in 0..ROUNDS {
        let mut count = u32::try_from(buffer.len()).unwrap_or(u32::MAX);
        let pointer = if buffer.is_empty() { std::ptr::null_mut() } else { buffer.as_mut_ptr() };
        match ask(&raw mut count, pointer) {
            // The driver reports more entries than the buffer can contain.
            Ok(()) if count as usize > buffer.len() => return Err(garbled(count)),
            Ok(()) => {
                buffer.truncate(count as usize);
                return Ok(buffer);
            }
            Err(error) if error.kind == ErrorKind::InsufficientSize => {
                if count as usize > MOST_ENTRIES {
                    return Err(garbled(count));
                }
                let room = (count as usize).max(buffer.len()) + 8;
                buffer = vec![T::blank(); room];
                last = Some(error);
            }
            Err(error) => return Err(error),
        }
    }
    Err(last.unwrap_or_else(|| DriverError::new(ErrorKind::InsufficientSize, LISTING)))
}

fn garbled(count: u32) -> DriverError {
    DriverError::new(ErrorKind::Garbled, LISTING).detail(format!("a list of {count} entries"))
}

/// A list entry that can be created without data.
trait Blank {
    fn blank() -> Self;
}

impl Blank for nvmlProcessInfo_v1_t {
    fn blank() -> Self {
        Self { pid: 0, usedGpuMemory: 0 }
    }
}

impl Blank for nvmlProcessInfo_v2_t {
    fn blank() -> Self {
        Self { pid: 0, usedGpuMemory: 0, gpuInstanceId: 0, computeInstanceId: 0 }
    }
}

fn placed(info: &sys::nvmlProcessInfo_v2_t, kind: ProcessKind) -> Entry {
    let id = |id: u32| (id != NO_INSTANCE).then_some(id);
    let memory = (info.usedGpuMemory != NO_MEMORY).then_some(info.usedGpuMemory);
    Entry { pid: info.pid, kind, memory, gi: id(info.gpuInstanceId), ci: id(info.computeInstanceId) }
}

fn unplaced(info: &sys::nvmlProcessInfo_v1_t, kind: ProcessKind) -> Entry {
    let memory = (info.usedGpuMemory != NO_MEMORY).then_some(info.usedGpuMemory);
    Entry { pid: info.pid, kind, memory, gi: None, ci: None }
}

/// Merges lists so that each process appears once for each instance and kind. A compute process
/// that is also an MPS client appears only as a client. A process that is listed in an instance
/// does not also appear outside of it.
pub(super) fn merge(entries: &[Entry]) -> Vec<Entry> {
    let mut merged: Vec<Entry> = Vec::new();
    for entry in entries {
        let same = |other: &Entry| (other.pid, other.gi, other.ci) == (entry.pid, entry.gi, entry.ci);
        let known = merged.iter().any(|other| same(other) && other.kind == entry.kind);
        let client = entry.kind == ProcessKind::Compute
            && entries.iter().any(|other| same(other) && other.kind == ProcessKind::MpsClient);
        let elsewhere = entry.gi.is_none() && entries.iter().any(|other| other.pid == entry.pid && other.gi.is_some());
        // Omit the entry of a GPU instance if the process is listed in one of its compute instances.
        let within = entry.gi.is_some()
            && entry.ci.is_none()
            && entries.iter().any(|other| (other.pid, other.gi) == (entry.pid, entry.gi) && other.ci.is_some());
        if !known && !client && !elsewhere && !within {
            merged.push(*entry);
        }
    }
    merged.sort_by_key(|entry| (entry.gi, entry.ci, entry.pid, entry.kind));
    merged
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(pid: u32, kind: ProcessKind, gi: Option<u32>) -> Entry {
        Entry { pid, kind, memory: Some(3 << 20), gi, ci: gi.map(|_| 0) }
    }

    #[test]
    fn process_of_a_ci_is_not_listed_for_its_gpu_instance() {
        let within = entry(7, ProcessKind::Compute, Some(1));
        let charged = Entry { ci: None, ..within };
        assert_eq!(merge(&[charged, within]), [within]);
        assert_eq!(merge(&[charged]), [charged]);
    }

    #[test]
    fn process_in_two_lists_is_merged() {
        let merged = merge(&[
            entry(7, ProcessKind::Compute, Some(1)),
            entry(7, ProcessKind::Compute, Some(1)),
            entry(7, ProcessKind::Compute, None),
            entry(8, ProcessKind::Compute, Some(1)),
            entry(8, ProcessKind::MpsClient, Some(1)),
            entry(8, ProcessKind::Compute, Some(2)),
            entry(9, ProcessKind::Graphics, None),
        ]);
        let short: Vec<_> = merged.iter().map(|e| (e.pid, e.kind, e.gi)).collect();
        assert_eq!(
            short,
            [
                (9, ProcessKind::Graphics, None),
                (7, ProcessKind::Compute, Some(1)),
                (8, ProcessKind::MpsClient, Some(1)),
                (8, ProcessKind::Compute, Some(2)),
            ]
        );
    }

    #[test]
    fn absent_figures_stay_absent() {
        let info = nvmlProcessInfo_v2_t {
            pid: 5,
            usedGpuMemory: u64::MAX,
            gpuInstanceId: u32::MAX,
            computeInstanceId: u32::MAX,
        };
        let entry = placed(&info, ProcessKind::Compute);
        assert_eq!((entry.memory, entry.gi, entry.ci), (None, None, None));
        assert_eq!(entry.describe().memory_mib, None);
    }

    #[test]
    fn list_that_grows_during_a_read_is_read_completely() {
        let mut population = 3_u32;
        let mut births = 2;
        let list = grow(0, |count, buffer: *mut nvmlProcessInfo_v1_t| {
            // SAFETY: `grow` passes either a pointer to `*count` entries, or null and zero.
            let room = unsafe { *count };
            // SAFETY: `count` belongs to `grow`.
            unsafe { *count = population };
            if room < population {
                if births > 0 {
                    births -= 1;
                    population *= 5;
                }
                return Err(DriverError::new(ErrorKind::InsufficientSize, "x"));
            }
            for pid in 0..population {
                // SAFETY: `pid` is below `room`.
                unsafe { (*buffer.add(pid as usize)).pid = pid + 1 };
            }
            Ok(())
        });
        let pids: Vec<_> = list.unwrap().iter().map(|info| info.pid).collect();
        assert_eq!(pids, (1..=75).collect::<Vec<_>>());
    }

    #[test]
    fn impossible_list_length_is_refused_without_allocating() {
        for count in [u32::MAX, 1 << 31, (1 << 16) + 1] {
            let mut calls = 0;
            let result = grow(0, |wanted, _: *mut nvmlProcessInfo_v2_t| {
                calls += 1;
                // SAFETY: `wanted` belongs to `grow`.
                unsafe { *wanted = count };
                Err(DriverError::new(ErrorKind::InsufficientSize, "x"))
            });
            let error = result.map(|list| list.len()).unwrap_err();
            assert_eq!((&error.kind, calls), (&ErrorKind::Garbled, 1), "{count}: {error}");
        }
        // The call succeeds, but reports more entries than the buffer can hold.
        let result = grow(0, |wanted, _: *mut nvmlProcessInfo_v2_t| {
            // SAFETY: `wanted` belongs to `grow`.
            unsafe { *wanted = 5 };
            Ok(())
        });
        assert_eq!(result.map(|list| list.len()).unwrap_err().kind, ErrorKind::Garbled);
    }

    #[test]
    fn list_that_never_fits_is_an_error() {
        let result = grow(0, |count, _: *mut nvmlProcessInfo_v1_t| {
            // SAFETY: `count` belongs to `grow`.
            unsafe { *count += 100 };
            Err(DriverError::new(ErrorKind::InsufficientSize, "x"))
        });
        assert_eq!(result.map(|l| l.len()).unwrap_err().kind, ErrorKind::InsufficientSize);
    }
}
