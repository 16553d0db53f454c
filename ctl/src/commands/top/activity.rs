//! The activity of a row, or why it is not known.

use gpush_api::{Gpu, GpuUsage, InstanceUsage, LeaseUsage, SignalSource, TargetUsage, UnknownReason};

use crate::render::lease;

/// Activity in the last window.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Activity {
    /// From 0 to 1.
    Known { ratio: f64, is_estimate: bool },
    /// The row above shows it: that of the GPU instance, or of the whole GPU.
    Above,
    /// It is not known. It is never shown as 0.
    Unknown(Unknown),
}

/// Why the activity is not known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Unknown {
    /// gpushd has no recent sample.
    NoSample,
    /// The last sample failed.
    Failed,
    /// The driver reports no activity in this mode of the GPU, only memory and processes.
    MemoryOnly,
    /// With MIG, the driver reports the activity of GPU instances, not of the GPU.
    OfInstances,
    /// The driver does not report it.
    NotReported,
    /// The caller may not see the use of the lease.
    Hidden,
    /// gpushd gives a reason for the state of the lease.
    Lease(UnknownReason),
    /// gpushd reports no activity of single processes.
    OfProcess,
    /// The lease waits.
    Waits,
}

impl Unknown {
    /// Returns the reason in one or two words.
    pub(super) fn brief(self) -> &'static str {
        match self {
            Self::NoSample => "no sample",
            Self::Failed => "no reading",
            Self::MemoryOnly => "no signal",
            Self::OfInstances => "see instances",
            Self::NotReported => "no signal",
            Self::Hidden => "not visible",
            Self::Lease(reason) => brief_reason(reason),
            Self::OfProcess | Self::Waits => "",
        }
    }

    /// Returns the reason as a sentence.
    pub(super) fn sentence(self) -> &'static str {
        match self {
            Self::NoSample => "gpushd has no recent sample",
            Self::Failed => "the last sample failed",
            Self::MemoryOnly => "the GPU reports only memory and processes in its present mode",
            Self::OfInstances => "with MIG, the driver reports the activity of GPU instances",
            Self::NotReported => "the driver does not report it",
            Self::Hidden => "only the holder and administrators see the use of a lease",
            Self::Lease(reason) => lease::unknown(reason),
            Self::OfProcess => "gpushd does not report the activity of single processes",
            Self::Waits => "the lease waits",
        }
    }
}

/// Returns why the state of a lease is unknown, in one or two words.
pub(super) fn brief_reason(reason: UnknownReason) -> &'static str {
    match reason {
        UnknownReason::NoSample => "no sample",
        UnknownReason::SourceFailed => "failed",
        UnknownReason::MemoryOnly => "no signal",
        UnknownReason::PowerDisagrees => "power",
        UnknownReason::NoPowerLevel => "power",
        UnknownReason::MemoryChanged => "memory",
        UnknownReason::ProcessesChanged => "processes",
        UnknownReason::UncertainProcess => "process",
        UnknownReason::SharedDevice => "shared",
    }
}

impl Activity {
    /// Returns the activity from 0 to 1, if it is known.
    pub(super) fn ratio(self) -> Option<f64> {
        match self {
            Self::Known { ratio, .. } => Some(ratio),
            Self::Above | Self::Unknown(_) => None,
        }
    }

    fn exact(ratio: f64) -> Self {
        Self::Known { ratio, is_estimate: false }
    }

    /// Returns the activity of a whole GPU: of its streaming multiprocessors, or else its utilization.
    pub(super) fn of_gpu(gpu: &Gpu, usage: Option<&GpuUsage>) -> Self {
        let Some(usage) = usage else { return Self::Unknown(Unknown::NoSample) };
        if let Some(ratio) = usage.activity.sm_activity.or(usage.activity.busy) {
            return Self::exact(ratio);
        }
        let has_mig = gpu.mig.as_ref().is_some_and(|mig| mig.enabled);
        match Self::without_figure(usage) {
            Unknown::NotReported if has_mig => Self::Unknown(Unknown::OfInstances),
            why => Self::Unknown(why),
        }
    }

    /// Returns the activity of a GPU instance.
    pub(super) fn of_instance(usage: Option<&GpuUsage>, sampled: Option<&InstanceUsage>) -> Self {
        let Some(usage) = usage else { return Self::Unknown(Unknown::NoSample) };
        match sampled.and_then(|one| one.activity.sm_activity.or(one.activity.busy)) {
            Some(ratio) => Self::exact(ratio),
            None => Self::Unknown(Self::without_figure(usage)),
        }
    }

    /// Returns why a GPU has no figure.
    fn without_figure(usage: &GpuUsage) -> Unknown {
        match (usage.failure.is_some(), usage.sampled_at, usage.source) {
            (true, _, _) => Unknown::Failed,
            (false, None, _) => Unknown::NoSample,
            (false, Some(_), SignalSource::MemoryOnly) => Unknown::MemoryOnly,
            (false, Some(_), SignalSource::None) => Unknown::NoSample,
            (false, Some(_), SignalSource::Gpm | SignalSource::Utilization | SignalSource::Processes) => {
                Unknown::NotReported
            }
        }
    }

    /// Returns the activity of a lease on one target.
    pub(super) fn of_target(target: Option<&TargetUsage>, lease: Option<&LeaseUsage>) -> Self {
        let Some(lease) = lease else { return Self::Unknown(Unknown::Hidden) };
        match target.and_then(|target| Some((target.sm_activity?, target.estimate))) {
            Some((ratio, is_estimate)) => Self::Known { ratio, is_estimate },
            None => Self::Unknown(lease.reason.map_or(Unknown::NotReported, Unknown::Lease)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::top::samples;

    #[test]
    fn figure_that_is_not_reported_has_a_reason() {
        let answers = samples::host();
        let a100 = &answers.status.gpus[0];
        let usage = |change: fn(&mut GpuUsage)| {
            let mut usage = answers.usage.gpu_usage[0].clone();
            usage.activity = gpush_api::DeviceActivity::default();
            change(&mut usage);
            Activity::of_gpu(a100, Some(&usage))
        };
        assert_eq!(Activity::of_gpu(a100, None), Activity::Unknown(Unknown::NoSample));
        assert_eq!(usage(|usage| usage.sampled_at = None), Activity::Unknown(Unknown::NoSample));
        assert_eq!(usage(|usage| usage.failure = Some("x".to_owned())), Activity::Unknown(Unknown::Failed));
        let memory_only = usage(|usage| usage.source = SignalSource::MemoryOnly);
        assert_eq!(memory_only, Activity::Unknown(Unknown::MemoryOnly));
        assert_eq!(usage(|usage| usage.source = SignalSource::Gpm), Activity::Unknown(Unknown::OfInstances));
        assert_eq!(Activity::of_target(None, None), Activity::Unknown(Unknown::Hidden));
    }
}
