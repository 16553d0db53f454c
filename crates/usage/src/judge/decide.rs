//! The decision about one hold, from the observation in one window.

pub use gpush_api::{SignalSource, UnknownReason, UseState};
use serde::{Deserialize, Serialize};

use super::power::BoardPower;

/// A state, with its source and its reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Judgement {
    /// The state.
    pub state: UseState,
    /// Why the state is unknown; `None` for other states.
    pub reason: Option<UnknownReason>,
    /// The source.
    pub source: SignalSource,
    /// Whether the figures of single processes are only estimates, because processes share the device.
    pub is_estimate: bool,
    /// Whether an idle state rests on the activity readings alone, because the work of neighbours hides the power of the
    /// lease. Such evidence is reported, but must never end a lease.
    #[serde(default)]
    pub is_weak: bool,
    /// Whether the device reports no activity, and neither the processes nor their memory have changed since the last sample.
    /// The state is unknown. A rule can say that such a lease counts as unused.
    #[serde(default)]
    pub is_still: bool,
}

impl Judgement {
    /// There is no sample.
    pub const NO_SAMPLE: Self = Self::unknown(UnknownReason::NoSample, SignalSource::None);

    pub(super) const fn unknown(reason: UnknownReason, source: SignalSource) -> Self {
        Self {
            state: UseState::Unknown,
            reason: Some(reason),
            source,
            is_estimate: false,
            is_weak: false,
            is_still: false,
        }
    }

    const fn known(state: UseState, source: SignalSource, is_estimate: bool) -> Self {
        Self { state, reason: None, source, is_estimate, is_weak: false, is_still: false }
    }

    /// Returns whether the power of the board refutes the activity readings, so that their zeros are wrong.
    pub(crate) fn is_refuted(&self) -> bool {
        self.reason == Some(UnknownReason::PowerDisagrees)
    }
}

/// The activity that the driver reports for a hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum MeasuredActivity {
    /// There was work.
    Active {
        source: SignalSource,
        is_estimate: bool,
        /// Whether only this lease can have done the work.
        is_own: bool,
    },
    /// Every wanted reading is present and zero.
    Zero { source: SignalSource, is_estimate: bool },
    /// The device was active, but several leases use it, and there are no readings of single processes.
    Ambiguous,
    /// The device was active, but the lease is younger than the reading, and there are no readings of its processes.
    Unexplained,
    /// The GPU does not report activity in its mode.
    Unsupported,
    /// A wanted reading has failed.
    Failed,
}

/// The processes of a hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ObservedProcesses {
    /// The list could not be read.
    Failed,
    /// Only processes that may belong to other leases.
    Uncertain,
    /// The complete list has no process of the lease.
    None,
    /// The lease has processes.
    Some {
        /// Whether a process has started or ended since the last sample, or no sample precedes this one.
        is_changed: bool,
        /// Whether their memory differs from the last sample; `None` if the memory could not be read.
        is_memory_changed: Option<bool>,
    },
}

/// The observation of a hold in one window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Observation {
    pub(crate) activity: MeasuredActivity,
    pub(crate) processes: ObservedProcesses,
    pub(crate) board: BoardPower,
    /// Whether other processes are on the GPU, whose work needs power too.
    pub(crate) has_neighbours: bool,
}

/// Decides the state of a hold.
pub(crate) fn decide(observation: Observation) -> Judgement {
    let Observation { activity, processes, board, has_neighbours } = observation;
    let unknown = |reason, source| Judgement::unknown(reason, source);
    let empty = |source| Judgement::known(UseState::Empty, source, false);
    match (activity, processes) {
        (MeasuredActivity::Active { source, is_estimate, is_own: true }, _)
        | (MeasuredActivity::Active { source, is_estimate, is_own: false }, ObservedProcesses::Some { .. }) => {
            Judgement::known(UseState::Busy, source, is_estimate)
        }
        (_, ObservedProcesses::Failed) | (MeasuredActivity::Failed, _) => {
            unknown(UnknownReason::SourceFailed, SignalSource::None)
        }
        (_, ObservedProcesses::Uncertain) => unknown(UnknownReason::UncertainProcess, SignalSource::None),
        (MeasuredActivity::Zero { source, .. }, ObservedProcesses::None) => empty(source),
        // A neighbour has a process, and can have done the work.
        (MeasuredActivity::Ambiguous | MeasuredActivity::Unsupported, ObservedProcesses::None) => {
            empty(SignalSource::MemoryOnly)
        }
        // No process is listed, so the list lacks the process that did the work.
        (MeasuredActivity::Active { source, is_own: false, .. }, ObservedProcesses::None) => {
            unknown(UnknownReason::SharedDevice, source)
        }
        (MeasuredActivity::Unexplained, ObservedProcesses::None | ObservedProcesses::Some { .. }) => {
            unknown(UnknownReason::SharedDevice, SignalSource::MemoryOnly)
        }
        (MeasuredActivity::Ambiguous, ObservedProcesses::Some { .. }) => {
            unknown(UnknownReason::SharedDevice, SignalSource::MemoryOnly)
        }
        (MeasuredActivity::Unsupported, ObservedProcesses::Some { is_changed, is_memory_changed }) => {
            let is_refuted = board == BoardPower::Above && !has_neighbours;
            let is_still = !is_changed && is_memory_changed == Some(false) && !is_refuted;
            Judgement { is_still, ..unknown(UnknownReason::MemoryOnly, SignalSource::MemoryOnly) }
        }
        (MeasuredActivity::Zero { source, is_estimate }, ObservedProcesses::Some { is_changed, is_memory_changed }) => {
            let reason = match (is_changed, is_memory_changed, board) {
                (true, _, _) => UnknownReason::ProcessesChanged,
                (false, None, _) => UnknownReason::SourceFailed,
                (false, Some(true), _) => UnknownReason::MemoryChanged,
                (false, Some(false), BoardPower::Above) => UnknownReason::PowerDisagrees,
                (false, Some(false), BoardPower::NotKnown) => UnknownReason::NoPowerLevel,
                (false, Some(false), BoardPower::Idle | BoardPower::Explained) => {
                    let is_weak = board == BoardPower::Explained;
                    return Judgement { is_weak, ..Judgement::known(UseState::Idle, source, is_estimate) };
                }
            };
            Judgement { is_estimate, ..unknown(reason, source) }
        }
    }
}
