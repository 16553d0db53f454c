//! The cost of a plan, by which plans are compared.
//!
//! The cost counts destroyed instances in classes. One instance of a higher class outweighs any
//! number of instances of the next class. A single integer contains all counts, with the highest
//! class in the highest bits, so that the search adds, subtracts and compares costs in single
//! instructions. If costs are equal, the search compares the remaining room, then the placements.
//!
//! ```text
//! bits 48…59  in use      destroyed instances in use: above zero, the plan is blocked
//! bits 36…47  MPS         destroyed compute instances with an MPS daemon
//! bits 24…35  GPU         destroyed GPU instances
//! bits 12…23  compute     destroyed compute instances in GPU instances that stay
//! bits  0…11  slices      destroyed memory slices
//! ```

use std::ops::{Add, AddAssign, Sub};

const FIELD: u32 = 12;

/// Counts of destroyed objects. For a kept object, the search subtracts the cost of destroying it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Cost(i64);

impl Cost {
    pub(super) const NONE: Self = Self(0);

    fn field(n: usize, number: u32) -> Self {
        // A larger count would overflow into the next field, so the count is limited to the maximum
        // of the field.
        let count = i64::try_from(n).unwrap_or(i64::MAX).min((1 << FIELD) - 1);
        Self(count << (FIELD * number))
    }

    /// Returns the cost of destroying instances in use.
    pub(super) fn in_use(n: usize) -> Self {
        Self::field(n, 4)
    }

    /// Returns the cost of destroying compute instances with an MPS daemon.
    pub(super) fn with_mps_daemon(n: usize) -> Self {
        Self::field(n, 3)
    }

    /// Returns the cost of destroying GPU instances.
    pub(super) fn gpu_instances(n: usize) -> Self {
        Self::field(n, 2)
    }

    /// Returns the cost of destroying compute instances in GPU instances that are kept.
    pub(super) fn compute_instances(n: usize) -> Self {
        Self::field(n, 1)
    }

    /// Returns the cost of destroying memory slices.
    pub(super) fn slices(n: usize) -> Self {
        Self::field(n, 0)
    }

    /// Returns whether the plan destroys instances in use.
    pub(super) fn destroys_in_use(self) -> bool {
        self >= Self::in_use(1)
    }
}

impl Add for Cost {
    type Output = Self;
    fn add(self, other: Self) -> Self {
        Self(self.0 + other.0)
    }
}

impl AddAssign for Cost {
    fn add_assign(&mut self, other: Self) {
        self.0 += other.0;
    }
}

impl Sub for Cost {
    type Output = Self;
    fn sub(self, other: Self) -> Self {
        Self(self.0 - other.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_higher_class_outweighs_all_lower_ones() {
        let most = 64;
        assert!(Cost::in_use(1) > Cost::with_mps_daemon(most) + Cost::gpu_instances(most));
        assert!(Cost::with_mps_daemon(1) > Cost::gpu_instances(most) + Cost::compute_instances(most));
        assert!(Cost::gpu_instances(1) > Cost::compute_instances(most) + Cost::slices(most));
        assert!(Cost::compute_instances(1) > Cost::slices(most));
        assert!(!(Cost::with_mps_daemon(most) + Cost::gpu_instances(most)).destroys_in_use());
    }
}
