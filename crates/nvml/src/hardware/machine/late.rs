//! Calls that pass their deadline. The machine abandons the worker of such a call, and the GPU of
//! the call is unsettled until the outcome is known.

use gpush_api::GpuUuid;
use std::{
    collections::{BTreeSet, VecDeque},
    time::{Duration, Instant},
};

use super::{Abandoned, Ask, BACKOFF, DYING, Effect, Machine, Pending, Service, Ticket, WorkerId, doubled, target};
use crate::{
    error::{DriverError, ErrorKind},
    hardware::Settled,
    proto::Request,
};

impl Machine {
    pub(super) fn settle(&mut self, ticket: Ticket, uuid: GpuUuid) {
        if self.is_unsettled(&Some(uuid.clone())) {
            self.settling.push((ticket, uuid));
        } else {
            self.effects.push(Effect::Settled { ticket, settled: Settled::Nothing });
        }
    }

    pub(super) fn is_unsettled(&self, target_of: &Option<GpuUuid>) -> bool {
        self.flights.values().any(|f| f.late.is_some() && target(&f.request) == *target_of)
    }

    pub(super) fn release_settled(&mut self, request: &Request, settled: &Settled) {
        let Some(uuid) = target(request) else { return };
        if self.is_unsettled(&Some(uuid.clone())) {
            return;
        }
        for (ticket, _) in self.settling.extract_if(.., |(_, waiting)| *waiting == uuid) {
            self.effects.push(Effect::Settled { ticket, settled: settled.clone() });
        }
    }

    pub(super) fn abandon(&mut self, now: Instant, worker: WorkerId, calls: Vec<String>) {
        self.abandoned.insert(worker, Abandoned { since: now, calls, killed: None, stuck: false });
        self.service = Service::Idle;
    }

    pub(super) fn keep_time(&mut self, now: Instant) {
        if let Service::Starting { worker, deadline } = self.service
            && now >= deadline
        {
            self.failures += 1;
            self.abandon(now, worker, vec!["initialising the driver".to_owned()]);
            let detail = format!("initialising the driver did not return within {:?}", self.limits.start);
            let error = DriverError::new(ErrorKind::WorkerUnavailable, "nvmlInit_v2").detail(detail);
            self.fail(error, now + doubled(BACKOFF, self.failures));
        }
        self.find_late(now);
        let (due, waiting): (VecDeque<_>, _) =
            std::mem::take(&mut self.queue).into_iter().partition(|p| !self.paused && now >= p.until);
        self.queue = waiting;
        for pending in due {
            let name = match &pending.ask {
                Ask::Driver => "querying the driver",
                Ask::Request(request) => request.name(),
            };
            let error = DriverError::new(ErrorKind::Deadline { may_land: false }, name).detail(
                "the call was not \
                started",
            );
            self.effects.push(Effect::Answer { ticket: pending.ticket, result: Err(error) });
        }
        let due: Vec<_> =
            self.abandoned.keys().copied().filter(|w| self.kill_due(*w).is_some_and(|t| now >= t)).collect();
        for worker in due {
            if let Some(abandoned) = self.abandoned.get_mut(&worker) {
                abandoned.killed = Some(now);
                self.effects.push(Effect::Kill(worker));
            }
        }
        for abandoned in self.abandoned.values_mut() {
            abandoned.stuck = abandoned.killed.is_some_and(|killed| now >= killed + DYING);
        }
        self.release_ended();
    }

    /// Finds calls that have passed their deadline. Answers the callers, and abandons the workers
    /// of these calls.
    pub(super) fn find_late(&mut self, now: Instant) {
        let late: Vec<_> = self
            .flights
            .iter_mut()
            .filter(|(_, flight)| flight.late.is_none() && now >= flight.deadline)
            .map(|(ticket, flight)| {
                flight.late = Some(now);
                let kind = ErrorKind::Deadline { may_land: flight.request.is_mutation() };
                let waited = flight.deadline - flight.sent;
                let error = DriverError::new(kind, flight.request.name()).detail(format!("{waited:?} have passed"));
                let error = match target(&flight.request) {
                    Some(uuid) => error.on(uuid),
                    None => error,
                };
                (*ticket, flight.worker, error)
            })
            .collect();
        for (ticket, worker, error) in late {
            let what =
                error.gpu.as_ref().map_or_else(|| error.function.clone(), |gpu| format!("{} {gpu}", error.function));
            match self.abandoned.get_mut(&worker) {
                Some(abandoned) => abandoned.calls.push(what),
                None => self.abandon(now, worker, vec![what]),
            }
            self.effects.push(Effect::Answer { ticket, result: Err(error) });
        }
    }

    /// Refuses queued calls to a GPU with a late call, because they would have to wait without
    /// limit.
    pub(super) fn refuse_unsettled(&mut self) {
        let late: BTreeSet<_> =
            self.flights.values().filter(|f| f.late.is_some()).map(|f| target(&f.request)).collect();
        let refused = |pending: &Pending| match &pending.ask {
            Ask::Driver => false,
            Ask::Request(request) => late.contains(&target(request)),
        };
        let (refused, waiting): (VecDeque<_>, _) = std::mem::take(&mut self.queue).into_iter().partition(refused);
        self.queue = waiting;
        for pending in refused {
            let Ask::Request(request) = &pending.ask else { continue };
            let error = DriverError::new(ErrorKind::Unsettled, request.name());
            let error = match target(request) {
                Some(uuid) => error.on(uuid),
                None => error,
            };
            self.effects.push(Effect::Answer { ticket: pending.ticket, result: Err(error) });
        }
    }

    /// Returns when to kill an abandoned worker: all its calls must be late, and the grace time of
    /// its late mutations must be over. If there are no mutations, the worker can be killed
    /// immediately.
    pub(super) fn kill_due(&self, worker: WorkerId) -> Option<Instant> {
        let abandoned = self.abandoned.get(&worker).filter(|a| a.killed.is_none())?;
        let mut due = abandoned.since;
        for flight in self.flights.values().filter(|f| f.worker == worker) {
            let grace = if flight.request.is_mutation() { self.limits.grace } else { Duration::ZERO };
            due = due.max(flight.late? + grace);
        }
        Some(due)
    }

    /// Returns the GPUs with a late call.
    pub(in crate::hardware) fn unsettled(&self) -> Vec<GpuUuid> {
        let late = self.flights.values().filter(|f| f.late.is_some());
        late.filter_map(|f| target(&f.request)).collect::<BTreeSet<_>>().into_iter().collect()
    }
}
