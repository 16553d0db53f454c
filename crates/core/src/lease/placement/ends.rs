//! When the capacity that blocks a request becomes free, as far as gpush knows it.
//!
//! A reservation uses the place that has the fewest leases without a known end in its way. Among such places, it uses the
//! one whose last known end is earliest:
//!
//! ```text
//!            now            17:00         18:00
//! GPU 0      ├── L1 ──────────┤                      chosen: the latest end is 17:00
//! GPU 1      ├── L2 ─────────────────────────┤       later
//! GPU 2      ├── L3 ── …                             last: the end of L3 is not known
//! ```
//!
//! Times are seconds since 1970. A lease that is about to end has the end time 0.

use gpush_api::TargetUuid;

use super::{GpuOffer, Host, Instance, KnownEnd, MpsOffer};

/// What must end before an assignment can be granted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Blocking {
    /// Number of shares in use whose end is not known.
    pub(super) unknown: u32,
    /// The latest known end.
    pub(super) latest: u64,
    /// Number of all shares in use.
    pub(super) shares: u32,
}

impl Blocking {
    /// Returns the blocking of this number of shares whose ends are not known.
    pub(super) fn unknown(shares: u32) -> Self {
        Self { unknown: shares, latest: 0, shares }
    }

    /// Returns the blocking of one share.
    pub(super) fn one(end: KnownEnd) -> Self {
        end.map_or(Self::unknown(1), |latest| Self { unknown: 0, latest, shares: 1 })
    }

    /// Returns what must end if both must end.
    #[must_use]
    pub(super) fn and(self, other: Self) -> Self {
        Self {
            unknown: self.unknown.saturating_add(other.unknown),
            latest: self.latest.max(other.latest),
            shares: self.shares.saturating_add(other.shares),
        }
    }
}

/// A lease that has a target, with its end. Several leases can share an MPS target or a time-slice GPU.
#[derive(Debug, Clone, Copy)]
pub struct LeaseEnd<'a> {
    /// UUID of the GPU or MIG device.
    pub target: &'a TargetUuid,
    /// Share of an MPS target, in tenths of a percent; 0 for other kinds.
    pub tenths: u32,
    /// The end.
    pub end: KnownEnd,
}

impl Host {
    /// Notes when the leases end. Capacity without a note has no known end.
    pub fn set_ends<'a>(&mut self, leases: impl Iterator<Item = LeaseEnd<'a>>) {
        for LeaseEnd { target, tenths, end } in leases {
            for gpu in &mut self.gpus {
                gpu.set_end(target, tenths, end);
            }
        }
    }
}

impl GpuOffer {
    fn set_end(&mut self, target: &TargetUuid, tenths: u32, end: KnownEnd) {
        let devices = self.mig.iter_mut().flat_map(|mig| &mut mig.instances).flat_map(|one| &mut one.devices);
        for device in devices.filter(|device| device.uuid == *target && device.leased) {
            device.end = end;
        }
        for mps in self.mps.iter_mut().filter(|mps| mps.target == *target) {
            mps.ends.push((tenths, end));
        }
        if self.uuid != *target {
            return;
        }
        if let Some(slices) = &mut self.timeslice {
            slices.first_end = [slices.first_end, end].into_iter().flatten().min();
        }
        if let Some(whole) = self.whole.as_mut().filter(|whole| whole.leased) {
            whole.end = end;
        }
    }
}

impl Instance {
    /// Returns what must end before the instance is free. It counts as one share.
    pub(super) fn blocking(&self) -> Blocking {
        let used = self.devices.iter().filter(|device| !device.free);
        let ends: Option<Vec<u64>> = used.map(|device| device.end).collect();
        // Without a lease, there is no latest end: processes can run for any time.
        Blocking::one(ends.and_then(|ends| ends.into_iter().max()))
    }
}

impl MpsOffer {
    /// Returns what must end before this many tenths of a percent are free.
    pub(super) fn blocking_share(&self, tenths: u32) -> Blocking {
        let mut left = self.capacity_tenths.saturating_sub(self.taken_tenths);
        let mut ends: Vec<(u64, u32)> = self.ends.iter().filter_map(|(part, end)| Some(((*end)?, *part))).collect();
        ends.sort_unstable();
        for (end, part) in ends {
            left = left.saturating_add(part);
            if tenths <= left {
                return Blocking::one(Some(end));
            }
        }
        Blocking::unknown(1)
    }

    /// Returns what must end before one more lease is possible.
    pub(super) fn blocking_number(&self) -> Blocking {
        Blocking::one(self.ends.iter().filter_map(|(_, end)| *end).min())
    }

    /// Returns what must end before another user can have the target.
    pub(super) fn blocking_user(&self) -> Blocking {
        let ends: Option<Vec<u64>> = self.ends.iter().map(|(_, end)| *end).collect();
        Blocking::one(ends.and_then(|ends| ends.into_iter().max()))
    }
}
