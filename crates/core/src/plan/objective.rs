//! What a plan costs, so that two plans can be compared.
//!
//! The order of design: what is destroyed comes first, and a single instance of a graver kind
//! outweighs any number of the next. The counts are packed into one integer, gravest in the
//! highest bits, so that adding, subtracting and comparing costs are single instructions in the
//! search. What is left over after equal costs (room, then low placements) is compared there.
//!
//! ```text
//! bits 48…59  in use      instances in use destroyed: above zero, the plan is blocked
//! bits 36…47  held        instances destroyed that hold a lease or an MPS daemon
//! bits 24…35  GPU         GPU instances destroyed
//! bits 12…23  compute     compute instances destroyed in GPU instances that stay
//! bits  0…11  slices      memory slices destroyed
//! ```

use std::ops::{Add, AddAssign, Sub};

const FIELD: u32 = 12;

/// A sum of destroyed things. A saving is a cost too, subtracted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(super) struct Cost(i64);

impl Cost {
    pub(super) const NONE: Self = Self(0);

    fn field(n: usize, number: u32) -> Self {
        // A count past its field would spill into the graver one: it stays at the field's top.
        let count = i64::try_from(n).unwrap_or(i64::MAX).min((1 << FIELD) - 1);
        Self(count << (FIELD * number))
    }

    /// Instances in use.
    pub(super) fn in_use(n: usize) -> Self {
        Self::field(n, 4)
    }

    /// Instances with a lease or an MPS daemon.
    pub(super) fn held(n: usize) -> Self {
        Self::field(n, 3)
    }

    /// GPU instances.
    pub(super) fn gpu_instances(n: usize) -> Self {
        Self::field(n, 2)
    }

    /// Compute instances in GPU instances that stay.
    pub(super) fn compute_instances(n: usize) -> Self {
        Self::field(n, 1)
    }

    /// Memory slices.
    pub(super) fn slices(n: usize) -> Self {
        Self::field(n, 0)
    }

    /// Whether anything in use is destroyed.
    pub(super) fn touches_use(self) -> bool {
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
    fn one_of_a_graver_kind_outweighs_all_of_the_lesser() {
        let most = 64;
        assert!(Cost::in_use(1) > Cost::held(most) + Cost::gpu_instances(most));
        assert!(Cost::held(1) > Cost::gpu_instances(most) + Cost::compute_instances(most));
        assert!(Cost::gpu_instances(1) > Cost::compute_instances(most) + Cost::slices(most));
        assert!(Cost::compute_instances(1) > Cost::slices(most));
        assert!(!(Cost::held(most) + Cost::gpu_instances(most)).touches_use());
    }
}
