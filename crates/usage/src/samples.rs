//! Samples for tests.

use gpush_api::{LeaseId, LeaseKind};

use crate::{
    input::{Activity, ActivityWindow, GpuProcess, GpuSample, Hold, ProcessOwner, Ratio, Reading, WindowScope},
    moment::Moment,
    share::{GPU_UNITS, Share},
};

/// Interval of the samples in ms.
pub(crate) const INTERVAL_MS: u64 = 15_000;

pub(crate) fn at(ms: u64) -> Moment {
    Moment { boot: 1, monotonic_ms: ms, wall_ms: 1_700_000_000_000 + i64::try_from(ms).unwrap() }
}

/// A sample of an idle H100 without processes.
pub(crate) fn sample(ms: u64) -> GpuSample {
    GpuSample {
        gpu: "GPU-1".into(),
        at: at(ms),
        interval_ms: INTERVAL_MS,
        energy_mj: Reading::Unsupported,
        power_mw: Reading::Value(70_000),
        power_limit_mw: Reading::Value(700_000),
        limits: Reading::Unsupported,
        utilization: Reading::Value(Ratio::ZERO),
        windows: vec![window(WindowScope::Gpu, GPU_UNITS, 0)],
        processes: Reading::Value(Vec::new()),
    }
}

pub(crate) fn window(scope: WindowScope, units: u32, millionths: u32) -> ActivityWindow {
    let ratio = Some(Ratio::from_millionths(millionths));
    let activity = Activity { graphics: ratio, sm: ratio, tensor: None, dram: ratio };
    ActivityWindow { scope, age_ms: 1_000, units, activity: Reading::Value(activity) }
}

pub(crate) fn process(lease: u64, pid: u32) -> GpuProcess {
    GpuProcess {
        pid,
        start: 7,
        owner: ProcessOwner::Lease(LeaseId(lease)),
        instance: None,
        target: None,
        memory_mib: Reading::Value(1_000),
        sm: Reading::Unsupported,
    }
}

/// A sample with a busy process of lease 1.
pub(crate) fn busy(ms: u64) -> GpuSample {
    let mut one = sample(ms);
    one.processes = Reading::Value(vec![process(1, 100)]);
    one.windows = vec![window(WindowScope::Gpu, GPU_UNITS, 500_000)];
    one.power_mw = Reading::Value(400_000);
    one
}

/// A sample with an idle process of lease 1.
pub(crate) fn idle(ms: u64) -> GpuSample {
    GpuSample { windows: sample(ms).windows, power_mw: Reading::Value(100_000), ..busy(ms) }
}

pub(crate) fn hold(kind: LeaseKind, units: u32, instance: Option<u32>) -> Hold {
    Hold {
        gpu: "GPU-1".into(),
        target: instance.map_or("GPU-1".into(), |id| format!("MIG-{id}").into()),
        kind,
        share: Share { units, charged: units },
        instance,
        memory_mib: 81_920,
    }
}

pub(crate) fn whole() -> Hold {
    hold(LeaseKind::Whole, GPU_UNITS, None)
}
