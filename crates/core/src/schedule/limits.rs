//! Which waiting requests reserve capacity.

use std::collections::BTreeSet;

use gpush_api::GpuIndex;

use crate::lease::placement::{GpuOffer, Host, PlacementPolicy, PlacementRequest};

/// The rules of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScheduleRules {
    /// Which place a request gets if several are possible.
    pub policy: PlacementPolicy,
    /// Which waiting requests reserve.
    pub limits: ReservationLimits,
    /// Present time, in seconds since 1970. A time that is a little late is safe: a request then counts as ending later
    /// than it does.
    pub now: u64,
}

impl ScheduleRules {
    /// Returns gpushd's rules.
    #[must_use]
    pub fn new(policy: PlacementPolicy, now: u64) -> Self {
        Self { policy, limits: ReservationLimits::DEFAULT, now }
    }
}

/// Which waiting requests reserve capacity. Each reservation keeps free capacity unused until the rest of it is free, so
/// a long queue must not reserve the whole host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReservationLimits {
    /// A request reserves if fewer requests than this have a reservation on the GPUs that the request can use.
    pub most: usize,
    /// A request also reserves after later requests got capacity on these GPUs this many times for each of these GPUs. So
    /// no request is overtaken for ever.
    pub overtaken_per_gpu: u32,
}

impl ReservationLimits {
    /// The limits of gpushd. `placement_bench --queue` has measured them: see docs/benchmarks.md.
    pub const DEFAULT: Self = Self { most: 2, overtaken_per_gpu: 16 };

    /// Returns whether a request reserves. `ahead` requests have reservations on the `gpus` GPUs that it can use, and later
    /// requests have overtaken it `overtaken` times.
    pub(super) fn permit(self, ahead: usize, overtaken: u32, gpus: usize) -> bool {
        let bound = self.overtaken_per_gpu.saturating_mul(u32::try_from(gpus).unwrap_or(u32::MAX));
        ahead < self.most || overtaken >= bound
    }
}

/// Returns whether a request can use a GPU, also if it is in use now.
pub(super) fn can_use(gpu: &GpuOffer, wanted: &PlacementRequest) -> bool {
    let kind = wanted.share.kind();
    wanted.gpus.as_ref().is_none_or(|gpus| gpus.contains(&gpu.index)) && gpu.kinds().any(|offered| offered == kind)
}

/// Returns whether a request can use one of these GPUs.
pub(super) fn can_use_one(host: &Host, gpus: &BTreeSet<GpuIndex>, wanted: &PlacementRequest) -> bool {
    host.gpus.iter().any(|gpu| gpus.contains(&gpu.index) && can_use(gpu, wanted))
}
