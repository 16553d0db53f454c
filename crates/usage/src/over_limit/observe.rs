//! The memory of a lease, compared with its limits.

use gpush_api::LeaseKind;

use crate::{
    ledger::{LeaseFigures, MemberFigures},
    moment::Moment,
};

/// The memory of a lease on the target that exceeds its limit most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryExcess {
    /// Memory of the processes of the lease, in MiB.
    pub used_mib: u64,
    /// Memory of the share, in MiB.
    pub limit_mib: u64,
}

/// What the last samples say about the memory of a lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemoryReading {
    /// The lease uses at most the memory of its share, on each target.
    Within,
    /// It uses more on at least one target.
    Above {
        /// The memory.
        excess: MemoryExcess,
        /// Time of the sample.
        at: Moment,
    },
    /// The memory on at least one target is not known. The lease is not above its limit on any other target.
    Unknown,
}

impl MemoryReading {
    /// Returns the reading of a lease with these figures; `None` if the hardware limits the memory of all its shares.
    #[must_use]
    pub fn observed(figures: &LeaseFigures) -> Option<Self> {
        let mut members = figures.members.iter().filter(|member| has_soft_limit(member)).peekable();
        members.peek()?;
        let mut reading = Self::Within;
        for member in members {
            reading = reading.worse(Self::of_member(member));
        }
        Some(reading)
    }

    fn of_member(member: &MemberFigures) -> Self {
        let limit_mib = member.totals.hold.memory_mib;
        let Some(at) = member.sampled else { return Self::Unknown };
        // A process that only perhaps belongs to the lease makes its memory unknown, but not smaller.
        match (member.memory_mib.or(member.least_memory_mib), member.memory_mib) {
            (Some(used_mib), _) if used_mib > limit_mib => {
                Self::Above { excess: MemoryExcess { used_mib, limit_mib }, at }
            }
            (_, Some(_)) => Self::Within,
            (_, None) => Self::Unknown,
        }
    }

    /// Returns the reading that counts for a lease with these readings of two targets. Its time is the one of the first
    /// target above its limit, so that a new sample of one target and a new sample of another are one new reading.
    fn worse(self, other: Self) -> Self {
        match (self, other) {
            (Self::Above { excess: one, at }, Self::Above { excess: two, .. }) => {
                let excess = if two.above_mib() > one.above_mib() { two } else { one };
                Self::Above { excess, at }
            }
            (Self::Above { .. }, Self::Within | Self::Unknown) => self,
            (Self::Within | Self::Unknown, Self::Above { .. }) => other,
            (Self::Unknown, _) | (_, Self::Unknown) => Self::Unknown,
            (Self::Within, Self::Within) => Self::Within,
        }
    }
}

impl MemoryExcess {
    /// Returns the memory above the limit, in MiB.
    #[must_use]
    pub fn above_mib(self) -> u64 {
        self.used_mib.saturating_sub(self.limit_mib)
    }
}

/// Returns whether programs can use more memory than the share has.
fn has_soft_limit(member: &MemberFigures) -> bool {
    match member.totals.hold.kind {
        LeaseKind::Mps | LeaseKind::Timeslice => true,
        LeaseKind::Mig | LeaseKind::Whole => false,
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::TargetUuid;

    use super::*;
    use crate::{
        input::Hold,
        judge::{Judgement, UseState},
        ledger::{HoldSums, MemberTotals, StateTimes},
        share::Share,
    };

    fn at(second: u64) -> Moment {
        Moment { boot: 1, monotonic_ms: second * 1000, wall_ms: 0 }
    }

    /// Returns the figures of a member with a limit of 20 MiB.
    fn member(kind: LeaseKind, memory_mib: Option<u64>, second: u64) -> MemberFigures {
        let target = TargetUuid::from("GPU-1");
        let hold = Hold { gpu: "GPU-1".into(), target, kind, share: Share::WHOLE, instance: None, memory_mib: 20 };
        MemberFigures {
            judgement: Judgement::NO_SAMPLE,
            sampled: Some(at(second)),
            memory_mib,
            least_memory_mib: memory_mib,
            sm: None,
            dram: None,
            totals: MemberTotals { hold, sums: HoldSums::default(), memory_p98_mib: None },
        }
    }

    fn read(members: Vec<MemberFigures>) -> Option<MemoryReading> {
        MemoryReading::observed(&LeaseFigures {
            state: UseState::Busy,
            since: at(0),
            unused_since: None,
            quiet_since: None,
            begun: at(0),
            times: StateTimes::default(),
            members,
        })
    }

    #[test]
    fn only_shares_that_programs_can_exceed_are_compared() {
        for kind in [LeaseKind::Mig, LeaseKind::Whole] {
            assert_eq!(read(vec![member(kind, Some(30), 1)]), None);
        }
        for kind in [LeaseKind::Mps, LeaseKind::Timeslice] {
            assert_eq!(read(vec![member(kind, Some(20), 1)]), Some(MemoryReading::Within));
            let excess = MemoryExcess { used_mib: 21, limit_mib: 20 };
            assert_eq!(read(vec![member(kind, Some(21), 1)]), Some(MemoryReading::Above { excess, at: at(1) }));
            assert_eq!(read(vec![member(kind, None, 1)]), Some(MemoryReading::Unknown));
        }
    }

    #[test]
    fn target_that_exceeds_its_limit_most_counts() {
        let of = |memory, second| member(LeaseKind::Mps, memory, second);
        let excess = MemoryExcess { used_mib: 40, limit_mib: 20 };
        let above = |second| Some(MemoryReading::Above { excess, at: at(second) });
        assert_eq!(read(vec![of(Some(30), 1), of(Some(40), 2), of(None, 3)]), above(1));
        assert_eq!(read(vec![of(Some(40), 2), of(Some(30), 1), of(Some(1), 3)]), above(2));
        assert_eq!(read(vec![of(Some(1), 1), of(None, 2)]), Some(MemoryReading::Unknown));
    }

    /// Fault: a tiny process that only perhaps belonged to a lease made its memory unknown, so the lease was never ended.
    #[test]
    fn uncertain_process_does_not_hide_memory_above_the_limit() {
        let of = |least| MemberFigures { least_memory_mib: least, ..member(LeaseKind::Mps, None, 1) };
        let excess = MemoryExcess { used_mib: 30, limit_mib: 20 };
        assert_eq!(read(vec![of(Some(30))]), Some(MemoryReading::Above { excess, at: at(1) }));
        for least in [Some(20), Some(0), None] {
            assert_eq!(read(vec![of(least)]), Some(MemoryReading::Unknown));
        }
    }
}
