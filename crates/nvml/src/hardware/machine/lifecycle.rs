//! Start and end of workers. A worker is started on demand, ended on request, and replaced when it dies.

use std::time::Instant;

use gpush_api::Driver;

use super::{
    Ask, BACKOFF, Effect, Flight, MOST_ABANDONED, Machine, Pending, QUARANTINE, Service, Strike, Ticket, WorkerId,
    doubled, target,
};
use crate::{
    error::{DriverError, ErrorKind},
    hardware::Settled,
};

impl Machine {
    pub(super) fn start_result(&mut self, now: Instant, worker: WorkerId, result: Result<Driver, DriverError>) {
        match self.service {
            Service::Starting { worker: starting, .. } if starting == worker => {}
            Service::Idle
            | Service::Starting { .. }
            | Service::Serving { .. }
            | Service::Ending { .. }
            | Service::Failed { .. } => return,
        }
        match result {
            Ok(driver) => {
                self.driver = Some(driver);
                self.service = Service::Serving { worker };
            }
            Err(error) => {
                self.driver = None;
                self.abandon(now, worker, Vec::new());
                self.fail(error, now + self.limits.retry);
            }
        }
    }

    pub(super) fn fail(&mut self, error: DriverError, until: Instant) {
        self.fail_queue(&error);
        self.service = Service::Failed { error, until };
    }

    pub(super) fn worker_ended(&mut self, now: Instant, worker: WorkerId, how: &str) {
        let flights: Vec<_> = self.flights.extract_if(.., |_, flight| flight.worker == worker).collect();
        let (late, lost): (Vec<_>, Vec<_>) = flights.into_iter().partition(|(_, flight)| flight.late.is_some());
        for (_, flight) in late {
            self.release_settled(&flight.request, &Settled::Gone);
        }
        self.handle_lost_calls(now, lost, how);
        self.abandoned.remove(&worker);
        match &self.service {
            Service::Starting { worker: starting, .. } if *starting == worker => {
                self.crashed += 1;
                self.failures += 1;
                let wait = doubled(BACKOFF, self.failures - 1);
                let error =
                    DriverError::new(ErrorKind::WorkerUnavailable, "starting gpushd's driver worker").detail(how);
                self.fail(error, now + wait);
            }
            Service::Serving { worker: serving } if *serving == worker => {
                self.crashed += 1;
                self.failures += 1;
                self.not_before = (self.failures > 1).then(|| now + doubled(BACKOFF, self.failures - 2));
                self.service = Service::Idle;
            }
            Service::Ending { worker: ending, .. } if *ending == worker => self.service = Service::Idle,
            Service::Idle
            | Service::Starting { .. }
            | Service::Serving { .. }
            | Service::Ending { .. }
            | Service::Failed { .. } => {}
        }
        self.release_ended();
    }

    /// Handles the calls that a dead worker had in flight.
    pub(super) fn handle_lost_calls(&mut self, now: Instant, lost: Vec<(Ticket, Flight)>, how: &str) {
        let alone = lost.len() == 1;
        for (ticket, flight) in lost.into_iter().rev() {
            let mutation = flight.request.is_mutation();
            if !mutation && !flight.suspect {
                let until = now + self.limits.queue;
                let ask = Ask::Request(flight.request);
                self.queue.push_front(Pending { ticket, ask, until, suspect: true });
                continue;
            }
            let kind = ErrorKind::WorkerDied { may_have_landed: mutation };
            let mut error = DriverError::new(kind, flight.request.name()).detail(how);
            if let Some(uuid) = target(&flight.request) {
                if alone && !mutation {
                    let strike = self.strikes.entry(uuid.clone()).or_insert(Strike { count: 0, until: now });
                    strike.until = now + doubled(QUARANTINE, strike.count);
                    strike.count += 1;
                }
                error = error.on(uuid);
            }
            self.effects.push(Effect::Answer { ticket, result: Err(error) });
        }
    }

    pub(super) fn end(&mut self, ticket: Ticket) {
        self.ending.push(ticket);
        match self.service {
            Service::Starting { worker, .. } | Service::Serving { worker } => {
                self.service = Service::Ending { worker, kill_at: None };
            }
            Service::Failed { .. } => self.service = Service::Idle,
            Service::Idle | Service::Ending { .. } => {}
        }
        self.not_before = None;
        self.release_ended();
    }

    pub(super) fn advance_ending(&mut self, now: Instant) {
        let Service::Ending { worker, kill_at } = self.service else { return };
        match kill_at {
            None if self.flights.values().all(|f| f.worker != worker) => {
                self.effects.push(Effect::Close(worker));
                self.service = Service::Ending { worker, kill_at: Some(now + self.limits.grace) };
            }
            Some(kill_at) if now >= kill_at => {
                // From now on, handle this worker like any abandoned worker.
                self.abandon(now, worker, Vec::new());
                if let Some(abandoned) = self.abandoned.get_mut(&worker) {
                    abandoned.killed = Some(now);
                }
                self.effects.push(Effect::Kill(worker));
            }
            None | Some(_) => {}
        }
    }

    /// Answers the callers that wait for the end of all workers. The callers get an error if a
    /// worker cannot be ended.
    pub(super) fn release_ended(&mut self) {
        let running = match self.service {
            Service::Starting { .. } | Service::Serving { .. } | Service::Ending { .. } => true,
            Service::Idle | Service::Failed { .. } => false,
        };
        let stuck = self.abandoned.values().find(|a| a.stuck);
        if running || stuck.is_none() && !self.abandoned.is_empty() {
            return;
        }
        let result = match stuck {
            None => Ok(()),
            Some(abandoned) => {
                Err(DriverError::new(ErrorKind::Unsettled, "ending gpushd's driver worker").detail(format!(
                    "the worker was killed but still exists, because it hangs in the kernel in: {}",
                    abandoned.calls.join(", ")
                )))
            }
        };
        for ticket in self.ending.drain(..) {
            self.effects.push(Effect::Ended { ticket, result: result.clone() });
        }
    }

    pub(super) fn spawn(&mut self, now: Instant) {
        // Do not start a worker while a caller waits for the end of all workers. That caller must
        // get its answer first.
        if self.queue.is_empty() || self.paused || !self.ending.is_empty() || self.not_before.is_some_and(|t| now < t) {
            return;
        }
        if self.abandoned.len() >= MOST_ABANDONED {
            let detail =
                format!("{} driver workers of gpushd hang in the driver and can't be ended", self.abandoned.len());
            let error =
                DriverError::new(ErrorKind::WorkerUnavailable, "starting gpushd's driver worker").detail(detail);
            self.fail(error, now + self.limits.retry);
            return;
        }
        self.started += 1;
        self.service = Service::Starting { worker: self.started, deadline: now + self.limits.start };
        self.effects.push(Effect::Spawn(self.started));
    }
}
