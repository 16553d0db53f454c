//! Utilization of a GPU without GPM, and of its processes. The driver refuses both with MIG on.

use gpush_api::SignalSource;
use nvml_wrapper_sys::bindings::{
    nvmlProcessUtilizationSample_t, nvmlSample_t, nvmlSamplingType_enum_NVML_GPU_UTILIZATION_SAMPLES,
    nvmlUtilization_t, nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT,
};

use crate::{
    driver::Gpu,
    error::{DriverError, ErrorKind},
    sample::{Activity, Doubt, Doubts, ProcessSample, Ratio},
};

/// Room for the driver's buffer of samples, which has about 120 entries.
const BUFFER: usize = 256;
/// Room for the processes of a GPU. More processes cost a second call.
const PROCESSES: usize = 64;

/// Utilization of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ProcessUtilization {
    pub(super) pid: u32,
    pub(super) at_us: u64,
    pub(super) busy: Result<Ratio, Doubt>,
    pub(super) dram: Result<Ratio, Doubt>,
}

/// Returns whether the driver says that a call has no data now, or never on this GPU.
fn is_absence(error: &DriverError) -> bool {
    matches!(error.kind, ErrorKind::NotSupported | ErrorKind::MissingSymbol | ErrorKind::NotFound | ErrorKind::NoData)
}

impl Gpu<'_> {
    /// Reads the utilization. The part of busy time is the mean of the driver's buffer since `seen_us`, where the driver
    /// has such a buffer, so that a burst between two samples is not missed. Updates `seen_us`.
    ///
    /// # Errors
    /// Errors of the calls. If the driver has no utilization for the GPU, there are no ratios.
    pub(super) fn utilization_since(&self, seen_us: &mut u64) -> Result<Activity, DriverError> {
        let mut rates = nvmlUtilization_t { gpu: 0, memory: 0 };
        // SAFETY: the call writes one struct.
        match unsafe { nvml!(self.driver, nvmlDeviceGetUtilizationRates(self.device_handle(), &raw mut rates)) } {
            Ok(()) => {}
            Err(error) if is_absence(&error) => return Ok(Activity::default()),
            Err(error) => return Err(error),
        }
        let (busy, dram) = (Ratio::from_percent(rates.gpu.into()), Ratio::from_percent(rates.memory.into()));
        let now = Activity {
            source: SignalSource::Utilization,
            busy: busy.ok(),
            dram: dram.ok(),
            doubt: busy.err().or(dram.err()),
            ..Activity::default()
        };
        let buffer = self.buffer_since(*seen_us)?;
        Ok(match summarize(&buffer, *seen_us) {
            Some(Summary { busy, window_us, newest_us }) => {
                *seen_us = newest_us;
                Activity { busy: busy.ok(), doubt: busy.err().or(now.doubt), window_us: Some(window_us), ..now }
            }
            None if buffer.is_empty() => now,
            // The buffer has only entries that were seen before.
            None => Activity { busy: None, doubt: Some(Doubt::StaleTime), ..now },
        })
    }

    /// Reads the driver's buffer of utilization samples: times in µs, and percentages.
    fn buffer_since(&self, seen_us: u64) -> Result<Vec<(u64, u32)>, DriverError> {
        // SAFETY: a struct of numbers, for which all zeroes are a valid value.
        let mut samples: Vec<nvmlSample_t> = vec![unsafe { std::mem::zeroed() }; BUFFER];
        let (mut kind, mut count) = (0, BUFFER as u32);
        let wanted = nvmlSamplingType_enum_NVML_GPU_UTILIZATION_SAMPLES;
        // SAFETY: the array has `count` entries, and the other pointers refer to one number each.
        let read = unsafe {
            nvml!(
                self.driver,
                nvmlDeviceGetSamples(
                    self.device_handle(),
                    wanted,
                    seen_us,
                    &raw mut kind,
                    &raw mut count,
                    samples.as_mut_ptr()
                )
            )
        };
        match read {
            Ok(()) => {}
            Err(error) if is_absence(&error) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        }
        if kind != nvmlValueType_enum_NVML_VALUE_TYPE_UNSIGNED_INT {
            return Ok(Vec::new());
        }
        let filled = samples.iter().take(count as usize);
        // SAFETY: the value type is an unsigned number, and the array was zeroed.
        Ok(filled.map(|sample| (sample.timeStamp, unsafe { sample.sampleValue.uiVal })).collect())
    }

    /// Reads the utilization of the processes since `seen_us`. Updates `seen_us`. Entries with old times are counted in
    /// `doubts`. `None` if the driver does not report it on this GPU.
    ///
    /// # Errors
    /// Errors of the call.
    pub(super) fn process_utilization(
        &self,
        seen_us: &mut u64,
        doubts: &mut Doubts,
    ) -> Result<Option<Vec<ProcessUtilization>>, DriverError> {
        let mut room = PROCESSES;
        let entries = loop {
            // SAFETY: a struct of numbers, for which all zeroes are a valid value.
            let mut entries: Vec<nvmlProcessUtilizationSample_t> = vec![unsafe { std::mem::zeroed() }; room];
            let mut count = u32::try_from(room).unwrap_or(u32::MAX);
            // SAFETY: the array has `count` entries.
            let read = unsafe {
                nvml!(
                    self.driver,
                    nvmlDeviceGetProcessUtilization(
                        self.device_handle(),
                        entries.as_mut_ptr(),
                        &raw mut count,
                        *seen_us
                    )
                )
            };
            match read {
                Ok(()) => {
                    entries.truncate(count as usize);
                    break entries;
                }
                Err(error) if error.kind == ErrorKind::NotFound => break Vec::new(),
                Err(error) if error.kind == ErrorKind::InsufficientSize && room < PROCESSES << 6 => room *= 8,
                Err(error) if is_absence(&error) => return Ok(None),
                Err(error) => return Err(error),
            }
        };
        let seen = *seen_us;
        let (fresh, stale): (Vec<_>, Vec<_>) = entries.into_iter().partition(|entry| entry.timeStamp > seen);
        stale.iter().for_each(|_| doubts.count(Doubt::StaleTime));
        *seen_us = fresh.iter().map(|entry| entry.timeStamp).fold(seen, u64::max);
        let newest = |entry: &&nvmlProcessUtilizationSample_t| {
            fresh.iter().all(|other| other.pid != entry.pid || other.timeStamp <= entry.timeStamp)
        };
        let read = |entry: &nvmlProcessUtilizationSample_t| ProcessUtilization {
            pid: entry.pid,
            at_us: entry.timeStamp,
            busy: Ratio::from_percent(entry.smUtil.into()),
            dram: Ratio::from_percent(entry.memUtil.into()),
        };
        // The values of a stale entry are not known, so the process must not appear as idle.
        let unknown = stale.iter().map(|entry| ProcessUtilization {
            busy: Err(Doubt::StaleTime),
            dram: Err(Doubt::StaleTime),
            ..read(entry)
        });
        Ok(Some(fresh.iter().filter(newest).map(read).chain(unknown).collect()))
    }
}

/// The mean of a buffer.
#[derive(Debug, PartialEq, Eq)]
struct Summary {
    busy: Result<Ratio, Doubt>,
    window_us: u64,
    newest_us: u64,
}

/// Summarizes the entries of a buffer that are newer than `seen_us`. An entry is the mean over the time since the entry
/// before it.
fn summarize(buffer: &[(u64, u32)], seen_us: u64) -> Option<Summary> {
    let fresh: Vec<(u64, u32)> = buffer.iter().copied().filter(|(at, _)| *at > seen_us).collect();
    let ((first_us, _), (newest_us, _)) = (fresh.first()?, fresh.last()?);
    let window_us = match newest_us.checked_sub(*first_us) {
        // The buffer does not tell the length of the first period, so it counts as the mean of the others.
        Some(spanned) if fresh.len() > 1 => spanned + spanned / (fresh.len() as u64 - 1),
        Some(_) | None => 0,
    };
    let percents: u64 = fresh.iter().map(|(_, percent)| u64::from(*percent)).sum();
    let above = fresh.iter().find_map(|(_, percent)| Ratio::from_percent((*percent).into()).err());
    let busy = match above {
        Some(doubt) => Err(doubt),
        // Each percentage is at most 101, so the result fits.
        None => Ok(Ratio::from_ppm((percents * 10_000 / fresh.len() as u64) as u32)),
    };
    Some(Summary { busy, window_us, newest_us: *newest_us })
}

/// Adds utilization to processes. If `quiet`, a process without an entry did nothing.
pub(super) fn add_utilization(
    processes: &mut [ProcessSample],
    entries: &[ProcessUtilization],
    quiet: bool,
    doubts: &mut Doubts,
) {
    for entry in entries {
        let own = processes.iter_mut().filter(|process| process.pid == entry.pid);
        let mut known = false;
        for process in own {
            (process.busy, process.dram, known) = (entry.busy.ok(), entry.dram.ok(), true);
        }
        match entry.busy.err().or(entry.dram.err()) {
            _ if !known => doubts.count(Doubt::ForeignProcess),
            // The caller has counted stale times already.
            Some(Doubt::StaleTime) | None => {}
            Some(doubt) => doubts.count(doubt),
        }
    }
    for process in processes.iter_mut().filter(|process| entries.iter().all(|entry| entry.pid != process.pid)) {
        (process.busy, process.dram) = if quiet { (Some(Ratio::ZERO), Some(Ratio::ZERO)) } else { (None, None) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffer_is_summarized_without_entries_seen_before() {
        let buffer = [(100, 7), (200, 100), (300, 50), (400, 0)];
        let summary = summarize(&buffer, 100).unwrap();
        assert_eq!(summary, Summary { busy: Ok(Ratio::from_ppm(500_000)), window_us: 300, newest_us: 400 });
        assert_eq!(summarize(&buffer, 400), None);
        assert_eq!(summarize(&[], 0), None);
        let wild = summarize(&[(100, 30), (200, 4000)], 0).unwrap();
        assert_eq!(wild.busy, Err(Doubt::Impossible));
    }
}
