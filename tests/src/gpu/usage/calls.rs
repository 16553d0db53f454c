//! The time of each driver call of a sample, and of samples as a whole, while a client works.

use std::time::{Duration, Instant};

use gpush_nvml::sample::Wanted;
use nvml_wrapper::{
    Device,
    enum_wrappers::device::{Clock, Sampling, TemperatureSensor},
    enums::gpm::GpmMetricId,
    gpm::gpm_metrics_get,
    structs::device::FieldId,
};
use nvml_wrapper_sys::bindings::field_id;
use serde_json::json;
use tokio::time::sleep;

use super::{Drivers, figures::CallTimes, working};
use crate::gpu::{report::Found, service::Service};

/// Duty of the client.
const DUTY: f64 = 0.5;

/// Number of measurements of each call.
const TIMES: usize = 50;

/// Pause between two calls. Without it, the driver would answer from its caches more often than in gpushd.
const PAUSE: Duration = Duration::from_millis(2);

/// A driver call: its name, and what makes it. The error is the driver's.
type Call<'d> = (&'static str, Box<dyn FnMut() -> Result<(), String> + 'd>);

/// The fields that gpush reads in one call.
const FIELDS: [u32; 7] = [
    field_id::NVML_FI_DEV_TOTAL_ENERGY_CONSUMPTION,
    field_id::NVML_FI_DEV_POWER_INSTANT,
    field_id::NVML_FI_DEV_POWER_AVERAGE,
    field_id::NVML_FI_DEV_POWER_CURRENT_LIMIT,
    field_id::NVML_FI_DEV_MEMORY_TEMP,
    field_id::NVML_FI_DEV_PERF_POLICY_POWER,
    field_id::NVML_FI_DEV_PERF_POLICY_THERMAL,
];

/// Measures all calls.
pub(super) async fn all(service: &mut Service, drivers: &Drivers) -> Result<Found, String> {
    let reader = drivers.reader()?;
    let (mut small, mut full) = (drivers.reader()?, drivers.reader()?);
    let mut calls = of_device(drivers, reader.device());
    calls.push(("a sample of gpushd", Box::new(|| small.sample(Wanted::default()).map(|_| ()))));
    calls.push(("a sample with everything, for top", Box::new(|| full.sample(Wanted::ALL).map(|_| ()))));
    let (client, _) = working(service, DUTY).await?;
    let mut rows = Vec::new();
    let mut whole = String::new();
    for (name, mut call) in calls {
        let row = match times(&mut call).await {
            Ok(Some(times)) => {
                if name == "a sample of gpushd" {
                    whole = format!("{:.0} µs, at most {:.0} µs", times.median_us, times.longest_us);
                }
                json!([name, format!("{:.0}", times.median_us), format!("{:.0}", times.longest_us)])
            }
            Ok(None) => json!([name, "-", "-"]),
            Err(why) => json!([name, why, "-"]),
        };
        rows.push(row);
    }
    client.stop().await?;
    Ok(Found {
        ok: !whole.is_empty(),
        words: format!("a sample: median {whole}; {TIMES} times each"),
        figures: json!({ "columns": ["call", "median µs", "longest µs"], "rows": rows }),
    })
}

/// Measures a call. The first one is not counted, because the driver prepares things at a first call.
async fn times(call: &mut dyn FnMut() -> Result<(), String>) -> Result<Option<CallTimes>, String> {
    call()?;
    let mut times = Vec::with_capacity(TIMES);
    for _ in 0..TIMES {
        sleep(PAUSE).await;
        let began = Instant::now();
        call()?;
        times.push(began.elapsed());
    }
    Ok(CallTimes::of(times))
}

/// Returns the single calls of a sample. A list of processes or entries is read with two calls here: the first one asks for
/// the length.
fn of_device<'d>(drivers: &'d Drivers, device: &'d Device<'d>) -> Vec<Call<'d>> {
    fn call<'d, T, E: std::fmt::Display>(name: &'static str, mut make: impl FnMut() -> Result<T, E> + 'd) -> Call<'d> {
        (name, Box::new(move || make().map(|_| ()).map_err(|error| error.to_string())))
    }
    let fields = FIELDS.map(FieldId);
    let metrics = [
        GpmMetricId::GraphicsUtil,
        GpmMetricId::SmUtil,
        GpmMetricId::SmOccupancy,
        GpmMetricId::AnyTensorUtil,
        GpmMetricId::DramBwUtil,
    ];
    let mut windows = Vec::new();
    vec![
        call("nvmlDeviceGetFieldValues, 7 fields", move || device.field_values_for(&fields)),
        call("nvmlDeviceGetComputeRunningProcesses", || device.running_compute_processes()),
        call("nvmlDeviceGetGraphicsRunningProcesses", || device.running_graphics_processes()),
        call("nvmlDeviceGetProcessUtilization", || device.process_utilization_stats(None)),
        call("nvmlDeviceGetUtilizationRates", || device.utilization_rates()),
        call("nvmlDeviceGetSamples, utilization", || device.samples(Sampling::GpuUtilization, None)),
        call("nvmlDeviceGetMemoryInfo", || device.memory_info()),
        call("nvmlDeviceGetTemperature", || device.temperature(TemperatureSensor::Gpu)),
        call("nvmlDeviceGetClockInfo", || device.clock_info(Clock::SM)),
        call("nvmlDeviceGetCurrentClocksThrottleReasons", || device.current_throttle_reasons()),
        call("nvmlGpmSampleGet", || device.gpm_sample()),
        call("nvmlGpmSampleGet and nvmlGpmMetricsGet", move || {
            let later = device.gpm_sample()?;
            if let Some(earlier) = windows.last() {
                gpm_metrics_get(&drivers.nvml, earlier, &later, &metrics)?;
            }
            windows = vec![later];
            Ok::<_, nvml_wrapper::error::NvmlError>(())
        }),
    ]
}
