//! Reads the signals of a GPU in windows, as gpushd does. In addition, reads the utilization of the GPU also where gpushd
//! uses GPU performance monitoring (GPM) instead.

use std::{collections::BTreeMap, time::Duration};

use gpush_api::SignalSource;
use gpush_nvml::{
    driver::{Driver, Sampling},
    proto::GpuRef,
    sample::{Ratio, Sample, Wanted},
};
use nvml_wrapper::{Device, Nvml, enum_wrappers::device::Sampling as SampleKind, enums::device::SampleValue};
use tokio::time::sleep;

/// Length of a window in seconds. It is the same as that of `gpushctl top`.
const WINDOW: f64 = 1.0;

/// The signals of one window, as parts of the time from 0 to 1.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct SignalWindow {
    /// GPM: the graphics engine.
    pub(super) gpm_engine: Option<f64>,
    /// GPM: the streaming multiprocessors.
    pub(super) gpm_sm: Option<f64>,
    /// Mean of the driver's buffer of the utilization.
    pub(super) utilization: Option<f64>,
    /// Utilization of each process that the driver lists.
    pub(super) processes: BTreeMap<u32, Option<f64>>,
    /// Power in W.
    pub(super) power_w: Option<f64>,
    /// Time of gpush's sample in µs.
    pub(super) took_us: u64,
}

/// Reads one window after the other.
#[derive(Debug)]
pub(super) struct UseReader<'d> {
    driver: &'d Driver,
    gpu: GpuRef,
    kept: Sampling<'d>,
    device: Device<'d>,
    /// Time of the newest entry of the driver's buffer that was read.
    seen_us: u64,
}

impl<'d> UseReader<'d> {
    pub(super) fn new(driver: &'d Driver, nvml: &'d Nvml, uuid: &str) -> Result<Self, String> {
        let device = nvml.device_by_uuid(uuid).map_err(|error| error.to_string())?;
        let gpu = GpuRef::new(&uuid.into());
        Ok(Self { driver, gpu, kept: Sampling::default(), device, seen_us: 0 })
    }

    /// Returns the device, for single calls.
    pub(super) fn device(&self) -> &Device<'d> {
        &self.device
    }

    /// Takes a sample as gpushd does.
    ///
    /// # Errors
    /// If the GPU cannot be sampled.
    pub(super) fn sample(&mut self, wanted: Wanted) -> Result<Sample, String> {
        let sampled = self.kept.sample(self.driver, &self.gpu, None, wanted);
        sampled.map_err(|error| error.to_string())
    }

    /// Ends a window, and begins the next one. The first window has no mean.
    ///
    /// # Errors
    /// If the GPU cannot be sampled.
    pub(super) fn read(&mut self) -> Result<SignalWindow, String> {
        let sample = self.sample(Wanted::ALL)?;
        let ratio = |ratio: Option<Ratio>| ratio.map(Ratio::get);
        let is_gpm = sample.activity.source == SignalSource::Gpm;
        let processes = sample.processes.iter().flatten().map(|process| (process.pid, ratio(process.busy)));
        Ok(SignalWindow {
            gpm_engine: ratio(sample.activity.busy).filter(|_| is_gpm),
            gpm_sm: ratio(sample.activity.sm).filter(|_| is_gpm),
            utilization: self.utilization(),
            processes: processes.collect(),
            power_w: sample.power_mw.map(|power| f64::from(power) / 1e3),
            took_us: sample.took_us,
        })
    }

    /// Returns the mean of the new entries of the driver's buffer; `None` if there are none.
    fn utilization(&mut self) -> Option<f64> {
        let entries = self.device.samples(SampleKind::GpuUtilization, self.seen_us).ok()?;
        let fresh = entries.iter().filter(|entry| entry.timestamp > self.seen_us);
        let values: Vec<f64> = fresh.filter_map(|entry| percentage(&entry.value)).collect();
        self.seen_us = entries.iter().map(|entry| entry.timestamp).fold(self.seen_us, u64::max);
        super::figures::mean(&values).map(|percent| percent / 100.0)
    }

    /// Reads windows for a time, which begins when the clients have worked for a while.
    ///
    /// # Errors
    /// If the GPU cannot be sampled.
    pub(super) async fn windows(&mut self, seconds: f64) -> Result<Vec<SignalWindow>, String> {
        let count = (seconds / WINDOW).round().max(1.0);
        self.read()?;
        super::settle(seconds).await;
        self.read()?;
        let mut windows = Vec::new();
        for _ in 0..count as u32 {
            sleep(Duration::from_secs_f64(seconds / count)).await;
            windows.push(self.read()?);
        }
        Ok(windows)
    }
}

fn percentage(value: &SampleValue) -> Option<f64> {
    match value {
        SampleValue::U32(percent) => Some(f64::from(*percent)),
        _ => None,
    }
}
