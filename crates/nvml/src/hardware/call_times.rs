//! How many calls the driver workers have answered, and how long the calls took.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use gpush_locked::Locked;

use super::machine::{Ticket, WorkerId};
use crate::proto::Request;

/// Calls of one kind that a worker has answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CallTime {
    /// Number of calls.
    pub count: u64,
    /// Time from sending the calls to a worker until their answers.
    pub time: Duration,
}

/// The times of calls by kind, of all workers. A handle, cheap to clone.
#[derive(Debug, Clone, Default)]
pub(super) struct CallTimes(Arc<Locked<BTreeMap<&'static str, CallTime>>>);

impl CallTimes {
    /// Returns the times by kind of call.
    pub(super) fn list(&self) -> BTreeMap<&'static str, CallTime> {
        self.0.lock().clone()
    }
}

/// Measures the calls of one supervisor.
#[derive(Debug)]
pub(super) struct CallTimer {
    times: CallTimes,
    sent: BTreeMap<(WorkerId, Ticket), (&'static str, Instant)>,
}

impl CallTimer {
    /// Creates a timer that adds to these times.
    pub(super) fn new(times: CallTimes) -> Self {
        Self { times, sent: BTreeMap::new() }
    }

    /// Notes that a call was sent to a worker.
    pub(super) fn sent(&mut self, worker: WorkerId, ticket: Ticket, request: &Request, now: Instant) {
        self.sent.insert((worker, ticket), (request.kind(), now));
    }

    /// Notes that a worker has answered a call.
    pub(super) fn answered(&mut self, worker: WorkerId, ticket: Ticket, now: Instant) {
        let Some((kind, sent)) = self.sent.remove(&(worker, ticket)) else { return };
        let mut times = self.times.0.lock();
        let all = times.entry(kind).or_default();
        all.count += 1;
        all.time += now.saturating_duration_since(sent);
    }

    /// Forgets the calls of a worker that has ended.
    pub(super) fn ended(&mut self, worker: WorkerId) {
        self.sent.retain(|(of, _), _| *of != worker);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answered_calls_are_counted_by_kind_and_lost_ones_are_not() {
        let times = CallTimes::default();
        let mut timer = CallTimer::new(times.clone());
        let (list, now) = (Request::List { skip: Vec::new() }, Instant::now());
        for ticket in 1..=3 {
            timer.sent(1, ticket, &list, now);
        }
        timer.answered(1, 1, now + Duration::from_millis(20));
        timer.answered(2, 2, now + Duration::from_millis(500));
        timer.ended(1);
        timer.answered(1, 3, now + Duration::from_millis(500));
        timer.sent(2, 4, &list, now);
        timer.answered(2, 4, now + Duration::from_millis(5));
        assert_eq!(times.list(), [("list", CallTime { count: 2, time: Duration::from_millis(25) })].into());
    }
}
