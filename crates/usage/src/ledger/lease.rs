//! The account of one lease as a whole: its state, the start of the state, and its recent past.

use gpush_api::LeaseId;
use serde::{Deserialize, Serialize};

use super::{
    buckets::Buckets,
    rows::{ClosedRows, MemberTotals, UnusedSpan},
    times::StateTimes,
};
use crate::{judge::UseState, moment::Moment};

/// Shortest unused time that is recorded, in ms.
const SHORTEST_SPAN_MS: u64 = 5 * 60_000;

/// A state, and its effect on the unused time before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entered {
    pub(crate) state: UseState,
    /// Longest time in ms for which an unknown state does not interrupt unused time, if samples or readings are only
    /// missing; `None` for other states.
    pub(crate) silence_ms: Option<u64>,
    /// Whether the state is idle by weak evidence.
    pub(crate) is_weak: bool,
}

impl Entered {
    /// The use is not known from now on.
    pub(crate) const UNKNOWN: Self = Self { state: UseState::Unknown, silence_ms: None, is_weak: false };
}

/// Unused time before a silence. If samples soon show that the lease is still unused, the time goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
struct SilencedTime {
    unused_since: Moment,
    until: Moment,
}

/// The account of one lease.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LeaseAccount {
    pub(crate) lease: LeaseId,
    pub(crate) begun: Moment,
    settled: Moment,
    pub(crate) state: UseState,
    /// Start of the state.
    pub(crate) since: Moment,
    /// Start of the time in which the lease was idle or empty without interruption. A short silence is not an
    /// interruption.
    pub(crate) unused_since: Option<Moment>,
    #[serde(default)]
    silenced: Option<SilencedTime>,
    /// Whether the present state is idle by weak evidence.
    #[serde(default)]
    is_weak: bool,
    /// End of the last time with weak evidence. The present time with such evidence does not count yet.
    #[serde(default)]
    weak_until: Option<Moment>,
    pub(crate) times: StateTimes,
    /// Totals of targets that the lease does not hold any more.
    pub(crate) left: Vec<MemberTotals>,
    #[serde(skip)]
    pub(crate) buckets: Buckets,
}

impl LeaseAccount {
    pub(crate) fn new(lease: LeaseId, now: Moment) -> Self {
        Self {
            lease,
            begun: now,
            settled: now,
            state: UseState::Unknown,
            since: now,
            unused_since: None,
            silenced: None,
            is_weak: false,
            weak_until: None,
            times: StateTimes::default(),
            left: Vec::new(),
            buckets: Buckets::default(),
        }
    }

    /// Accounts the time until a moment. `elapsed` is the state in that time: the present state, or unknown after a
    /// silence.
    pub(crate) fn settle(&mut self, to: Moment, elapsed: Entered, closed: &mut ClosedRows) {
        if self.is_late(to) {
            return;
        }
        self.enter(self.settled, elapsed, closed);
        let ms = to.ms_since(self.settled);
        self.times.add(elapsed.state, ms);
        self.buckets.add_time(self.settled.wall_ms, ms, elapsed.state);
        self.settled = to;
    }

    /// Changes the state, from a moment on.
    pub(crate) fn enter(&mut self, at: Moment, entered: Entered, closed: &mut ClosedRows) {
        let Entered { state, silence_ms, is_weak } = entered;
        if state == UseState::Unknown && silence_ms.is_none() {
            // Something contradicts that the lease is unused, so this is more than a silence.
            self.silenced = None;
        }
        // The GPUs of a lease are sampled one after the other, so the change can be older than what is accounted.
        let at = if self.is_late(at) { self.settled } else { at };
        if is_weak && !self.is_weak && state == self.state {
            closed.spans.extend(self.span(at));
        }
        if self.is_weak {
            self.weak_until = Some(at);
        }
        if state == self.state {
            self.is_weak = is_weak;
            return;
        }
        closed.spans.extend(self.span(at));
        self.is_weak = is_weak;
        self.unused_since = if is_unused(state) {
            let before_silence = self.silenced.take().filter(|silenced| at.is_within(silenced.until));
            self.unused_since.or(before_silence.map(|silenced| silenced.unused_since)).or(Some(at))
        } else {
            let silenced = self.unused_since.zip(silence_ms);
            self.silenced = silenced.map(|(unused_since, ms)| SilencedTime { unused_since, until: at.plus_ms(ms) });
            None
        };
        self.state = state;
        self.since = at;
    }

    /// Returns the unused time from the start of the present state until a moment, if it is long enough. Weak evidence
    /// never ends a lease, so time with such evidence is left out.
    pub(crate) fn span(&self, until: Moment) -> Option<UnusedSpan> {
        let from = self.weak_until.map_or(self.since, |weak| self.since.later(weak));
        let length = until.ms_since(from);
        let (from_ms, until_ms) = (from.wall_ms, from.plus_ms(length).wall_ms);
        let is_recorded = is_unused(self.state) && !self.is_weak && length >= SHORTEST_SPAN_MS;
        is_recorded.then_some(UnusedSpan { lease: self.lease, state: self.state, from_ms, until_ms })
    }

    fn is_late(&self, at: Moment) -> bool {
        self.settled.boot == at.boot && at.monotonic_ms < self.settled.monotonic_ms
    }

    pub(crate) fn settled(&self) -> Moment {
        self.settled
    }
}

fn is_unused(state: UseState) -> bool {
    match state {
        UseState::Idle | UseState::Empty => true,
        UseState::Busy | UseState::Unknown => false,
    }
}
