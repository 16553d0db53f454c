//! The present figures of leases and GPUs, for answers, metrics and the idle policy.

use gpush_api::{GpuUuid, TargetUuid};

use super::{rows::MemberTotals, sums::GpuSums, times::StateTimes};
use crate::{
    input::Ratio,
    judge::{Judgement, PowerLevels, UseState},
    moment::Moment,
};

/// The present figures of a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseFigures {
    /// State of the lease.
    pub state: UseState,
    /// Start of this state.
    pub since: Moment,
    /// Start of the time in which the lease was idle or empty without interruption. Missing samples are not an interruption
    /// if the next sample follows within three intervals of the last one.
    pub unused_since: Option<Moment>,
    /// Start of the time in which every sample showed by strong evidence that no target worked, also where the device reports
    /// no activity: see [`Judgement::is_still`]. Missing samples and weak evidence are interruptions, unlike in
    /// `unused_since`. `None` if the last sample is missing, or does not show it.
    pub quiet_since: Option<Moment>,
    /// Start of the lease.
    pub begun: Moment,
    /// Time by state, up to now.
    pub times: StateTimes,
    /// The targets.
    pub members: Vec<MemberFigures>,
}

impl LeaseFigures {
    /// Returns whether the lease is idle by weak evidence: see [`Judgement::is_weak`]. Then gpushd must not end it.
    #[must_use]
    pub fn is_weak(&self) -> bool {
        self.state == UseState::Idle && self.members.iter().any(|member| member.judgement.is_weak)
    }
}

/// The present figures of a lease on one target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemberFigures {
    /// State of the lease there, with its source, and the reason if it is unknown.
    pub judgement: Judgement,
    /// Time of the last sample; `None` without a recent one.
    pub sampled: Option<Moment>,
    /// Memory in MiB; `None` if it is not known.
    pub memory_mib: Option<u64>,
    /// Memory of the processes that certainly belong to the lease, in MiB: it uses at least this memory. `None` if its
    /// processes are not known.
    pub least_memory_mib: Option<u64>,
    /// SM activity in the last window. On a device that others use too, it is an estimate from the lease's own processes.
    /// `None` if it is not known, or if the power of the board refutes it.
    pub sm: Option<Ratio>,
    /// Activity of device memory in the last window; `None` if it is not known, if another lease can have caused it, or if
    /// the power of the board refutes it.
    pub dram: Option<Ratio>,
    /// Sums up to the last sample.
    pub totals: MemberTotals,
}

/// The present figures of a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GpuFigures {
    /// GPU.
    pub gpu: GpuUuid,
    /// Whether a recent sample exists.
    pub is_sampled: bool,
    /// Units that are leased.
    pub leased: u32,
    /// Units of leases that are idle or empty; `None` without a recent sample.
    pub unused: Option<u32>,
    /// Units that a lease could have.
    pub free: u32,
    /// Units that no lease can have.
    pub unusable: u32,
    /// Targets that are leased.
    pub targets: Vec<TargetUuid>,
    /// Sums since the GPU was added, up to the last event.
    pub sums: GpuSums,
    /// Levels of power.
    pub levels: PowerLevels,
    /// GPU instances whose activity of 0 is refuted by the power of the board; `None` is the whole GPU.
    pub refuted: Vec<Option<u32>>,
}
