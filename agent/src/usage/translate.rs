//! A sample of the driver as input of the ledger.

use std::collections::BTreeMap;

use gpush_api::{Gpu, SignalSource};
use gpush_nvml::sample::{self, Activity, Doubt, InstanceSample, LimitedTime, Sample};
use gpush_usage::{
    input::{
        Activity as WindowActivity, ActivityWindow, ClockLimits, GpuProcess, GpuSample, Ratio, Reading, WindowScope,
    },
    moment::Moment,
    share::GPU_UNITS,
};

use super::holds;

/// Translates a sample. `earlier` is the limited time of the sample before it, and `kept` has the age in ms of each window
/// that is kept from there.
pub(super) fn translated(
    gpu: &Gpu,
    sample: &Sample,
    earlier: Option<&LimitedTime>,
    kept: &BTreeMap<WindowScope, u64>,
    processes: Reading<Vec<GpuProcess>>,
    at: Moment,
    interval_ms: u64,
) -> GpuSample {
    let mig = gpu.mig.as_ref().filter(|mig| mig.enabled);
    let windows = match mig {
        None => whole_gpu(&sample.activity).into_iter().collect(),
        Some(mig) => {
            let of_instance = |one: &InstanceSample| {
                let instance = mig.instances.iter().find(|instance| instance.id == one.instance.gi)?;
                let scope = WindowScope::Instance(instance.id);
                let activity = window(&one.activity)?;
                let age_ms = kept.get(&scope).copied().unwrap_or_else(|| age_ms(&one.activity));
                Some(ActivityWindow { scope, age_ms, units: holds::units_of_instance(mig, instance), activity })
            };
            sample.instances.iter().filter_map(of_instance).collect()
        }
    };
    let optional = |value: Option<u64>| value.map_or(Reading::Unsupported, Reading::Value);
    GpuSample {
        gpu: sample.uuid.clone(),
        at,
        interval_ms,
        energy_mj: optional(sample.energy_mj),
        power_mw: optional(sample.power_mw.map(u64::from)),
        power_limit_mw: optional(sample.power_limit_mw.map(u64::from)),
        limits: limits(&sample.limited, earlier),
        utilization: match (sample.activity.source, sample.activity.busy) {
            (SignalSource::Utilization, Some(busy)) => Reading::Value(Ratio::from_millionths(busy.ppm())),
            (SignalSource::Utilization, None) => Reading::Failed,
            (SignalSource::Gpm | SignalSource::Processes | SignalSource::MemoryOnly | SignalSource::None, _) => {
                Reading::Unsupported
            }
        },
        windows,
        processes,
    }
}

/// Returns the limits of the clocks since the sample before. The driver counts the time of each limit.
fn limits(now: &LimitedTime, earlier: Option<&LimitedTime>) -> Reading<ClockLimits> {
    let has_grown = |time: fn(&LimitedTime) -> Option<u64>| Some(time(now)? > time(earlier?)?);
    match (has_grown(|limited| limited.power_ns), has_grown(|limited| limited.thermal_ns)) {
        (None, None) => Reading::Unsupported,
        (power, thermal) => {
            Reading::Value(ClockLimits { power: power.unwrap_or(false), thermal: thermal.unwrap_or(false) })
        }
    }
}

/// Returns the window of a whole GPU; `None` if the GPU has no performance monitoring.
fn whole_gpu(activity: &Activity) -> Option<ActivityWindow> {
    let (scope, age_ms) = (WindowScope::Gpu, age_ms(activity));
    Some(ActivityWindow { scope, age_ms, units: GPU_UNITS, activity: window(activity)? })
}

/// Returns the age of a window that ends with this sample. If the clock was set back, the age is not known, so every lease
/// counts as younger than the window.
fn age_ms(activity: &Activity) -> u64 {
    activity.window_us.map_or(u64::MAX, |length| length.div_ceil(1000))
}

/// Returns the activity of a window; `None` if the device has no performance monitoring.
fn window(activity: &Activity) -> Option<Reading<WindowActivity>> {
    match (activity.source, activity.doubt) {
        (SignalSource::Gpm, None) => {
            let ratio = |ratio: sample::Ratio| Ratio::from_millionths(ratio.ppm());
            Some(Reading::Value(WindowActivity {
                graphics: activity.busy.map(ratio),
                sm: activity.sm.map(ratio),
                tensor: activity.tensor.map(ratio),
                dram: activity.dram.map(ratio),
            }))
        }
        // Without a compute instance, no process can use the GPU instance.
        (SignalSource::Gpm, Some(Doubt::NoData)) => Some(Reading::Unsupported),
        (
            SignalSource::Gpm,
            Some(
                Doubt::NotANumber
                | Doubt::Impossible
                | Doubt::ForeignProcess
                | Doubt::StaleTime
                | Doubt::FirstSample
                | Doubt::Skipped
                | Doubt::Failed,
            ),
        ) => Some(Reading::Failed),
        (SignalSource::Utilization | SignalSource::Processes | SignalSource::MemoryOnly | SignalSource::None, _) => {
            None
        }
    }
}
