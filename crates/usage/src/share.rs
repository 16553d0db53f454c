//! Shares of a GPU as integers, so that sums of shares and times are exact.
//!
//! | kind | compute part | memory part |
//! |---|---|---|
//! | whole GPU | all | all |
//! | MIG device | compute slices of 7 | memory slices of 8 |
//! | MPS | active thread percentage, of its target | leased memory of the GPU's memory |
//! | time-slice replica | 1 of the replicas | the same |
//!
//! The compute parts of the leases of a GPU never overlap, so they add up to the GPU. A bill charges the larger part,
//! because other leases cannot use either part.

use gpush_api::{LeaseMember, MemberShare};
use serde::{Deserialize, Serialize};

/// Number of units in a GPU, chosen so that sevenths, eighths, twelfths, tenths of a percent of a seventh, and the parts of
/// all replica counts up to 10 are whole numbers.
pub const GPU_UNITS: u32 = 252_000;

/// A part of a whole, such as 2 of 7 slices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Part {
    /// Number of slices.
    pub of: u32,
    /// Number of slices of the whole GPU; 0 counts as a whole GPU.
    pub all: u32,
}

impl Part {
    /// Everything.
    pub const WHOLE: Self = Self { of: 1, all: 1 };

    /// Returns the units of this part of `units`, rounded down. A part is never larger than its whole.
    fn units(self, units: u32) -> u32 {
        if self.all == 0 {
            return units;
        }
        let part = u64::from(units) * u64::from(self.of.min(self.all)) / u64::from(self.all);
        u32::try_from(part).unwrap_or(units)
    }
}

/// The size of a target as a part of its GPU, by the geometry of the GPU model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetSize {
    /// Compute slices of the target and of the GPU.
    pub compute: Part,
    /// Memory slices of the target and of the GPU.
    pub memory: Part,
}

impl TargetSize {
    /// The whole GPU.
    pub const GPU: Self = Self { compute: Part::WHOLE, memory: Part::WHOLE };
}

/// The share of a GPU that a lease holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Share {
    /// Compute part, in units of [`GPU_UNITS`]. These parts add up to the GPU.
    pub units: u32,
    /// Part that a bill charges: the larger one of compute and memory part.
    pub charged: u32,
}

impl Share {
    /// The whole GPU.
    pub const WHOLE: Self = Self { units: GPU_UNITS, charged: GPU_UNITS };

    /// Returns a share with this compute part and this memory part.
    #[must_use]
    pub fn new(compute: Part, memory: Part) -> Self {
        let (units, memory) = (compute.units(GPU_UNITS), memory.units(GPU_UNITS));
        Self { units, charged: units.max(memory) }
    }

    /// Returns the share of a member of a lease. `target` is the size of the member's target: the MIG device, or the GPU.
    #[must_use]
    pub fn of_member(member: &LeaseMember, target: TargetSize) -> Self {
        match &member.share {
            MemberShare::Mig { .. } => Self::new(target.compute, target.memory),
            MemberShare::Mps { percentage, .. } => {
                let percent = Part { of: u32::from(percentage.tenths()), all: 1000 };
                let units = percent.units(target.compute.units(GPU_UNITS));
                let mib = |mib: u64| u32::try_from(mib).unwrap_or(u32::MAX);
                let memory = Part { of: mib(member.memory_mib), all: mib(member.gpu_memory_mib) };
                let memory = if member.gpu_memory_mib == 0 { 0 } else { memory.units(GPU_UNITS) };
                Self { units, charged: units.max(memory) }
            }
            MemberShare::Timeslice { replicas, .. } => {
                let part = Part { of: 1, all: (*replicas).max(1) };
                Self::new(part, part)
            }
            MemberShare::Whole => Self::WHOLE,
        }
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::Priority;

    use super::*;

    fn member(share: MemberShare, memory_mib: u64) -> LeaseMember {
        let (target, gpu_uuid) = ("GPU-1".into(), "GPU-1".into());
        LeaseMember { target, gpu_uuid, share, memory_mib, gpu_memory_mib: 81_920 }
    }

    fn mps(percent: &str) -> MemberShare {
        let percentage = percent.parse().unwrap();
        MemberShare::Mps { percentage, memory_limit_mib: None, priority: Priority::Normal }
    }

    #[test]
    fn usual_shares_are_whole_numbers_of_units() {
        for all in [7, 8, 12, 4, 2, 3, 5, 6, 9, 10] {
            assert_eq!(GPU_UNITS % all, 0, "{all}");
        }
        assert_eq!(GPU_UNITS % (7 * 1000), 0);
    }

    #[test]
    fn share_of_each_kind_follows_the_geometry() {
        let three = TargetSize { compute: Part { of: 3, all: 7 }, memory: Part { of: 4, all: 8 } };
        let mig = MemberShare::Mig { profile: "3g.40gb".to_owned() };
        let half = GPU_UNITS / 2;
        assert_eq!(
            Share::of_member(&member(mig, 40_960), three),
            Share { units: GPU_UNITS / 7 * 3, charged: half },
            "a 3g device is charged by its memory"
        );
        let gpu = TargetSize::GPU;
        assert_eq!(Share::of_member(&member(MemberShare::Whole, 81_920), gpu), Share::WHOLE);
        assert_eq!(Share::of_member(&member(mps("50"), 0), gpu), Share { units: half, charged: half });
        assert_eq!(
            Share::of_member(&member(mps("12.5"), 40_960), gpu),
            Share { units: GPU_UNITS / 8, charged: half },
            "the memory of an MPS lease can be its larger part"
        );
        assert_eq!(Share::of_member(&member(mps("50"), 0), three).units, GPU_UNITS / 14 * 3);
        let replica = MemberShare::Timeslice { replicas: 3, level: None, compute_mode: None };
        assert_eq!(Share::of_member(&member(replica, 0), gpu).units, GPU_UNITS / 3);
    }

    #[test]
    fn part_is_never_larger_than_its_whole() {
        assert_eq!(Share::new(Part { of: 9, all: 7 }, Part { of: 1, all: 0 }), Share::WHOLE);
    }
}
