//! Windows of GPU performance monitoring (GPM): two samples of the driver, and the mean activity between them.

use gpush_api::SignalSource;
use nvml_wrapper_sys::bindings::{self as sys, nvmlGpmMetricsGet_t, nvmlGpmSample_t, nvmlGpmSupport_t};

use crate::{
    driver::{Driver, Gpu},
    error::{DriverError, ErrorKind},
    sample::{Activity, Doubt, Ratio},
};

/// Version word of the structs of GPM: a plain number.
const VERSION: u32 = 1;

/// The metrics that a window reads.
const METRICS: [u32; 5] = [
    sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_GRAPHICS_UTIL,
    sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_SM_UTIL,
    sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_SM_OCCUPANCY,
    sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    sys::nvmlGpmMetricId_t_NVML_GPM_METRIC_DRAM_BW_UTIL,
];

/// Number of values in a row that are not numbers, after which a window begins again. A window that is too short
/// becomes long enough if it continues.
const MOST_BLANK: u32 = 3;

/// A sample buffer of the driver, which is freed on drop.
#[derive(Debug)]
struct GpmSample<'d> {
    driver: &'d Driver,
    raw: nvmlGpmSample_t,
}

impl<'d> GpmSample<'d> {
    fn allocate(driver: &'d Driver) -> Result<Self, DriverError> {
        let mut raw: nvmlGpmSample_t = std::ptr::null_mut();
        // SAFETY: the call writes one pointer.
        unsafe { nvml!(driver, nvmlGpmSampleAlloc(&raw mut raw)) }?;
        Ok(Self { driver, raw })
    }

    /// Measures a GPU, or one of its GPU instances.
    fn measure(&self, gpu: &Gpu<'_>, gi: Option<u32>) -> Result<(), DriverError> {
        let driver = self.driver;
        // SAFETY: both handles are from this session, and the buffer stays allocated until the drop.
        unsafe {
            match gi {
                Some(gi) => nvml!(driver, nvmlGpmMigSampleGet(gpu.device_handle(), gi, self.raw)),
                None => nvml!(driver, nvmlGpmSampleGet(gpu.device_handle(), self.raw)),
            }
        }
    }
}

impl Drop for GpmSample<'_> {
    fn drop(&mut self) {
        let driver = self.driver;
        // SAFETY: the buffer was allocated in this session and is not used after this. An error leaves it allocated
        // until the session ends.
        let _leaked = unsafe { nvml!(driver, nvmlGpmSampleFree(self.raw)) };
    }
}

/// The arguments of `nvmlGpmMetricsGet`. The struct has 8 KiB, so each GPU uses one again and again.
#[derive(Debug)]
pub(super) struct MetricsRequest(Box<nvmlGpmMetricsGet_t>);

impl Default for MetricsRequest {
    fn default() -> Self {
        // SAFETY: a struct of numbers and pointers, for which all zeroes are a valid value.
        Self(Box::new(unsafe { std::mem::zeroed() }))
    }
}

impl MetricsRequest {
    fn ask(&mut self, earlier: &GpmSample<'_>, later: &GpmSample<'_>) -> Result<Activity, DriverError> {
        let (driver, request) = (later.driver, &mut *self.0);
        (request.version, request.numMetrics) = (VERSION, METRICS.len() as u32);
        (request.sample1, request.sample2) = (earlier.raw, later.raw);
        METRICS.iter().zip(&mut request.metrics).for_each(|(id, metric)| metric.metricId = *id);
        // SAFETY: the struct has room for more metrics than `numMetrics`, and both samples are allocated.
        unsafe { nvml!(driver, nvmlGpmMetricsGet(std::ptr::from_mut(request))) }?;
        let mut activity = Activity { source: SignalSource::Gpm, ..Activity::default() };
        let mut read = |index: usize| {
            let metric = &request.metrics[index];
            let value = match metric.nvmlReturn {
                0 => Ratio::from_percent(metric.value),
                code if ErrorKind::from_code(code) == ErrorKind::NoData => Err(Doubt::NoData),
                // The GPU does not have this metric.
                _ => return None,
            };
            value.map_err(|doubt| activity.doubt = activity.doubt.or(Some(doubt))).ok()
        };
        let [busy, sm, occupancy, tensor, dram] = [read(0), read(1), read(2), read(3), read(4)];
        Ok(Activity { busy, sm, occupancy, tensor, dram, ..activity })
    }
}

/// An open window: the driver's sample at its begin, and a buffer for the sample at its end.
#[derive(Debug)]
pub(super) struct Window<'d> {
    /// The caller's generation of the GPU instance; 0 for a whole GPU.
    pub(super) generation: u64,
    /// Number of the round in which the window began.
    pub(super) round: u64,
    begun_us: u64,
    blank: u32,
    earlier: GpmSample<'d>,
    later: GpmSample<'d>,
}

impl<'d> Window<'d> {
    /// Begins a window.
    pub(super) fn begin(
        gpu: &Gpu<'d>,
        gi: Option<u32>,
        generation: u64,
        round: u64,
        now_us: u64,
    ) -> Result<Self, DriverError> {
        let (earlier, later) = (GpmSample::allocate(gpu.driver)?, GpmSample::allocate(gpu.driver)?);
        earlier.measure(gpu, gi)?;
        Ok(Self { generation, round, begun_us: now_us, blank: 0, earlier, later })
    }

    /// Ends the window and begins the next one at the same moment, so that no time is lost. If the window is too short,
    /// it continues instead.
    pub(super) fn turn(
        &mut self,
        gpu: &Gpu<'d>,
        gi: Option<u32>,
        round: u64,
        now_us: u64,
        request: &mut MetricsRequest,
    ) -> Result<Activity, DriverError> {
        self.round = round;
        self.later.measure(gpu, gi)?;
        let activity = request.ask(&self.earlier, &self.later)?;
        let window_us = now_us.checked_sub(self.begun_us).filter(|us| *us > 0);
        if activity.doubt == Some(Doubt::NotANumber) && self.blank < MOST_BLANK {
            self.blank += 1;
        } else {
            std::mem::swap(&mut self.earlier, &mut self.later);
            (self.begun_us, self.blank) = (now_us, 0);
        }
        Ok(Activity { window_us, ..activity })
    }
}

impl Gpu<'_> {
    /// Returns whether the GPU has performance monitoring.
    pub(super) fn has_gpm(&self) -> Result<bool, DriverError> {
        let mut support = nvmlGpmSupport_t { version: VERSION, isSupportedDevice: 0 };
        // SAFETY: the version word tells the driver which struct the pointer refers to.
        match unsafe { nvml!(self.driver, nvmlGpmQueryDeviceSupport(self.device_handle(), &raw mut support)) } {
            Ok(()) => Ok(support.isSupportedDevice != 0),
            Err(error) if matches!(error.kind, ErrorKind::MissingSymbol | ErrorKind::NotSupported) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
