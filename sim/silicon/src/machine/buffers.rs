//! The driver's buffers: mean activity of processes and of a GPU over complete sampling periods.

use super::sums::{self, Mark, Sums};
use super::{Machine, Pid};
use crate::returns::Return;

/// Mean activity of a process over time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProcessActivity {
    /// The process.
    pub pid: Pid,
    /// End of the time, in ms.
    pub at_ms: u64,
    /// Part of the time in which a kernel of the process ran, in percent.
    pub busy_percent: u32,
    /// Part of the memory bandwidth, in percent.
    pub dram_percent: u32,
}

/// Period of the driver's samples of processes, in ms.
pub const PROCESS_PERIOD_MS: u64 = 1000;
/// Time that the driver's buffer of process samples covers, in ms.
const PROCESS_BUFFER_MS: u64 = 60_000;

/// Number of samples in the driver's buffer.
const SAMPLES: u64 = 120;

/// An entry of the driver's sample buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuSample {
    /// End of the period, in ms.
    pub at_ms: u64,
    /// Part of the time in which a kernel ran, in percent.
    pub busy_percent: u32,
    /// Part of the memory bandwidth, in percent.
    pub dram_percent: u32,
    /// Mean power in mW.
    pub power_mw: u32,
}

fn percent(sum: u64, ms: u64) -> u32 {
    u32::try_from((sum + ms * 5000) / (ms * 10_000)).unwrap_or(u32::MAX)
}

impl Machine {
    /// Returns the mean activity of each process over the driver's complete sampling periods after `since_ms`.
    /// Processes that did nothing are missing, as with the real driver.
    ///
    /// # Errors
    /// `GpuIsLost`, `InvalidArgument`.
    pub fn process_activity(&self, gpu: u32, since_ms: u64, at_ms: u64) -> Result<Vec<ProcessActivity>, Return> {
        let at = self.gpu(gpu)?;
        let end = at_ms - at_ms % PROCESS_PERIOD_MS;
        let begin = since_ms.max(end.saturating_sub(PROCESS_BUFFER_MS)).next_multiple_of(PROCESS_PERIOD_MS);
        let now = self.current_use(at);
        let mut all: Vec<ProcessActivity> = Vec::new();
        for (pid, place, rates) in now.tasks {
            let task = at.usage.tasks.iter().find(|task| task.pid == pid && task.gpu_instance == place);
            let mut past = task.map_or_else(Vec::new, |task| task.past.clone());
            let (busy, dram) = task.map_or((0, 0), |task| (task.busy, task.dram));
            let since = at.usage.since_ms;
            past.push(Mark { at_ms: since, busy, dram, energy_uj: 0 });
            if let Some(ms) = end.checked_sub(since) {
                let sums = Sums { busy, dram, ..Sums::default() }.after(rates, ms);
                past.push(Mark { at_ms: end, busy: sums.busy, dram: sums.dram, energy_uj: 0 });
            }
            if end <= begin {
                continue;
            }
            let (from, to) = (sums::between(&past, begin), sums::between(&past, end));
            let busy_percent = percent(to.busy.saturating_sub(from.busy), end - begin);
            let dram_percent = percent(to.dram.saturating_sub(from.dram), end - begin);
            if busy_percent > 0 || dram_percent > 0 {
                all.push(ProcessActivity { pid, at_ms: end, busy_percent, dram_percent });
            }
        }
        Ok(all)
    }

    /// Returns the values of the driver's sample buffer: the mean of busy and of memory activity in percent, and of
    /// the power in mW, over each complete period after `since_ms`, oldest first.
    ///
    /// # Errors
    /// `GpuIsLost`, `InvalidArgument`.
    pub fn samples(&self, gpu: u32, since_ms: u64, at_ms: u64, period_ms: u64) -> Result<Vec<GpuSample>, Return> {
        let at = self.gpu(gpu)?;
        let period_ms = period_ms.max(1);
        let now = self.current_use(at);
        let usage = &at.usage;
        let mut past = usage.past.clone();
        let last =
            Mark { at_ms: usage.since_ms, busy: usage.whole.busy, dram: usage.whole.dram, energy_uj: usage.energy_uj };
        past.push(last);
        if let Some(ms) = at_ms.checked_sub(usage.since_ms) {
            let sums = usage.whole.after(now.whole, ms);
            let energy_uj = usage.energy_uj.saturating_add(now.power_mw.saturating_mul(ms));
            past.push(Mark { at_ms, busy: sums.busy, dram: sums.dram, energy_uj });
        }
        // Nothing is known before the first mark.
        let known = past.first().map_or(at_ms, |mark| mark.at_ms);
        let (end, buffer) = (at_ms / period_ms, SAMPLES);
        let first = (since_ms.max(known) / period_ms + 1).max(end.saturating_sub(buffer) + 1);
        let sample = |tick: u64| {
            let (from, to) = (sums::between(&past, (tick - 1) * period_ms), sums::between(&past, tick * period_ms));
            let ms = (tick * period_ms).saturating_sub(((tick - 1) * period_ms).max(known)).max(1);
            GpuSample {
                at_ms: tick * period_ms,
                busy_percent: percent(to.busy.saturating_sub(from.busy), ms),
                dram_percent: percent(to.dram.saturating_sub(from.dram), ms),
                power_mw: u32::try_from(to.energy_uj.saturating_sub(from.energy_uj) / ms).unwrap_or(u32::MAX),
            }
        };
        Ok((first..=end).map(sample).collect())
    }
}
