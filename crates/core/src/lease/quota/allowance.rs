//! What a user may lease in addition to the leases that the user holds. Offers and hints name nothing else.

use gpush_api::LeaseKind;

use super::{Denial, Effective, HeldLease, Size, check_request, check_size};

/// The quota of a user, and the leases that count towards it.
#[derive(Debug, Clone, Copy)]
pub struct Allowance<'a> {
    /// The quota.
    pub effective: &'a Effective,
    /// The leases of the user.
    pub held: &'a [HeldLease],
}

impl Allowance<'_> {
    /// Returns whether the quota allows a further lease of this kind, if its size and its duration are small enough.
    #[must_use]
    pub fn permits_kind(&self, kind: LeaseKind) -> bool {
        let duration_s = self.effective.limits.longest_s.or(Some(0));
        check_request(self.effective, self.held, kind, duration_s).is_ok()
    }

    /// Returns whether the quota allows a further lease of this kind and size, if its duration is short enough.
    #[must_use]
    pub fn permits(&self, kind: LeaseKind, size: Size) -> bool {
        self.denial(kind, size).is_none()
    }

    /// Returns why the quota does not allow a further lease of this kind and size; `None` if it does.
    #[must_use]
    pub fn denial(&self, kind: LeaseKind, size: Size) -> Option<Denial> {
        let duration_s = self.effective.limits.longest_s.or(Some(0));
        let checked = check_request(self.effective, self.held, kind, duration_s);
        checked.and_then(|()| check_size(self.effective, self.held, size)).err()
    }

    /// Returns whether the quota allows a further MIG device with this memory, on a GPU with `gpu_mib` MiB.
    #[must_use]
    pub fn permits_device(&self, memory_mib: u64, gpu_mib: u64) -> bool {
        self.permits(LeaseKind::Mig, Size::of_one(memory_mib, gpu_mib, 0))
    }

    /// Returns the largest MPS percentage up to `most_tenths` that the quota allows on a target, in tenths of a percent;
    /// `None` if the quota allows no percentage. `target_mib` and `gpu_mib` are the memory of the target and of its GPU.
    #[must_use]
    pub fn largest_percentage(&self, most_tenths: u32, target_mib: u64, gpu_mib: u64) -> Option<u32> {
        let permits = |tenths: u32| {
            let memory_mib = target_mib.saturating_mul(tenths.into()).div_ceil(1000);
            self.permits(LeaseKind::Mps, Size::of_one(memory_mib, gpu_mib, tenths))
        };
        // A larger percentage is never allowed if a smaller one is not.
        let (mut allowed, mut denied) = (0, most_tenths.saturating_add(1));
        while denied - allowed > 1 {
            let middle = allowed + (denied - allowed) / 2;
            if permits(middle) { allowed = middle } else { denied = middle }
        }
        (allowed > 0).then_some(allowed)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use gpush_api::LeaseId;

    use super::{
        super::{Limits, MemoryAmount},
        *,
    };

    #[test]
    fn largest_percentage_fits_the_memory_and_the_mps_limit() {
        let largest = |limits: Limits, held: &[HeldLease], most| {
            let effective = Effective::without_quota(limits);
            Allowance { effective: &effective, held }.largest_percentage(most, 80 * 1024, 80 * 1024)
        };
        let memory = |gib: u64| Limits { memory: Some(MemoryAmount::Mib(gib * 1024)), ..Limits::default() };
        assert_eq!(largest(Limits::default(), &[], 1000), Some(1000));
        assert_eq!(largest(memory(40), &[], 1000), Some(500));
        assert_eq!(largest(memory(40), &[], 300), Some(300));
        let size = Size::of_one(20 * 1024, 80 * 1024, 250);
        let held = [HeldLease { id: LeaseId(1), queued: false, size, releasable: true }];
        assert_eq!(largest(memory(40), &held, 1000), Some(250));
        assert_eq!(largest(Limits { mps_tenths: Some(400), ..Limits::default() }, &held, 1000), Some(150));
        assert_eq!(largest(Limits { mps_tenths: Some(250), ..Limits::default() }, &held, 1000), None);
        let kinds = Some(BTreeSet::from([LeaseKind::Mig]));
        assert_eq!(largest(Limits { kinds, ..Limits::default() }, &[], 1000), None);
    }

    #[test]
    fn device_is_permitted_within_the_memory_that_is_left() {
        let memory = Some(MemoryAmount::Mib(40 * 1024));
        let effective = Effective::without_quota(Limits { memory, leases: Some(2), ..Limits::default() });
        let held = |id| {
            let size = Size::of_one(20 * 1024, 80 * 1024, 0);
            HeldLease { id: LeaseId(id), queued: false, size, releasable: true }
        };
        let one = [held(1)];
        let allowance = Allowance { effective: &effective, held: &one };
        assert!(allowance.permits_device(20 * 1024, 80 * 1024) && !allowance.permits_device(40 * 1024, 80 * 1024));
        let two = [held(1), held(2)];
        assert!(!Allowance { held: &two, ..allowance }.permits_device(0, 80 * 1024), "two leases are the maximum");
    }
}
