//! The supervisor of the driver worker as a pure state machine: [`Machine::step`] takes an event
//! and the time, and returns effects. The machine does not start processes, does not wait, and does
//! not read a clock.
//!
//! ```text
//!              call                   ready
//!   ┌───► idle ─────► starting ───────────────► serving ──────────┐
//!   │      ▲  ▲          │  │ no driver            │  │ │         │ restart, stop:
//!   │      │  │  too slow│  ▼                      │  │ │ crash   │ flights first
//!   │      │  │          │ failed ──(retry is due)─┼──┼─┼────┐    ▼
//!   │      │  └──────────┼──────────────────────◄──┼──┼─┘    │  ending ──gone──┐
//!   │      │             ▼                         │  │      │                 │
//!   │      │        abandoned ◄── a call too late ─┘  │      │                 │
//!   │      │             │ its other flights done,    │      │                 │
//!   │      │             │ grace over: killed         │      │                 │
//!   │      │             ▼                            │      │                 │
//!   │      │           gone: the late call is settled │      │                 │
//!   │      └──────────────────────────────────────────┴──────┘                 │
//!   └──────────────────────────────────────────────────────────────────────────┘
//! ```
//!
//! At most one worker serves. Over all workers, each GPU has at most one call in flight. At most
//! one call about the host, such as a list, is in flight. If a call passes its deadline, the
//! machine answers the caller, but the call stays in flight as *late*. The GPU of a late call is
//! unsettled, and gets no further call until the late reply arrives or the abandoned worker has
//! ended.
//!
//! When a worker dies, the mutations in flight fail, and the reads are repeated once, one at a
//! time. If a repeated read kills the worker again, the GPU of that read is the cause. The machine
//! then skips that GPU for a time that doubles with each failure, so that the other GPUs are not
//! affected.

mod dispatch;
mod late;
mod lifecycle;
#[cfg(test)]
mod tests;

use std::{
    collections::{BTreeMap, VecDeque},
    time::{Duration, Instant},
};

use gpush_api::{Driver, GpuUuid};

use super::{Deadlines, Settled};
use crate::{
    error::{DriverError, ErrorKind},
    proto::{Answer, GpuRef, Request},
};

/// Number of a worker process, unique within this run of gpushd.
pub(super) type WorkerId = u64;

/// Number of a request from the handle, such as a driver call or a restart. The answer has the same
/// number.
pub(super) type Ticket = u64;

/// Maximum number of abandoned workers. At this number, the machine starts no more workers.
const MOST_ABANDONED: usize = 4;

/// Time after which a killed worker that has not ended is considered stuck.
const DYING: Duration = Duration::from_secs(5);

/// First and longest delay before the restart of a worker that fails repeatedly.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(30));

/// First and longest time for which a GPU is skipped after its reading killed the worker.
const QUARANTINE: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// A request from the handle.
#[derive(Debug, Clone)]
pub(super) enum Ask {
    /// Asks for the versions and the library of the worker's driver.
    Driver,
    /// A call.
    Request(Request),
}

#[derive(Debug)]
pub(super) enum Event {
    Call { ticket: Ticket, ask: Ask },
    Settle { ticket: Ticket, uuid: GpuUuid },
    Restart { ticket: Ticket },
    Stop { ticket: Ticket },
    Resume,
    Pause { ticket: Ticket },
    Unpause,
    Started { worker: WorkerId, result: Result<Driver, DriverError> },
    Reply { worker: WorkerId, ticket: Ticket, result: Result<Answer, DriverError> },
    Gone { worker: WorkerId, how: String },
    Tick,
}

/// An action that the caller must execute.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Effect {
    Spawn(WorkerId),
    Send { worker: WorkerId, ticket: Ticket, request: Request },
    Close(WorkerId),
    Kill(WorkerId),
    Answer { ticket: Ticket, result: Result<Answered, DriverError> },
    Settled { ticket: Ticket, settled: Settled },
    Ended { ticket: Ticket, result: Result<(), DriverError> },
}

/// The result of an [`Ask`].
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Answered {
    Driver(Driver),
    Call(Answer),
}

/// The worker that serves, or why there is none.
#[derive(Debug)]
enum Service {
    Idle,
    Starting {
        worker: WorkerId,
        deadline: Instant,
    },
    Serving {
        worker: WorkerId,
    },
    /// `kill_at` is set when the worker's calls have finished and its socket has been closed.
    Ending {
        worker: WorkerId,
        kill_at: Option<Instant>,
    },
    Failed {
        error: DriverError,
        until: Instant,
    },
}

/// A queued call.
#[derive(Debug)]
struct Pending {
    ticket: Ticket,
    ask: Ask,
    until: Instant,
    /// Whether the call was in flight when a worker died. The next attempt of such a call runs
    /// alone.
    suspect: bool,
}

/// A call in flight in a worker.
#[derive(Debug)]
struct Flight {
    request: Request,
    worker: WorkerId,
    sent: Instant,
    deadline: Instant,
    late: Option<Instant>,
    suspect: bool,
}

/// An abandoned worker.
#[derive(Debug)]
pub(super) struct Abandoned {
    pub(super) since: Instant,
    pub(super) calls: Vec<String>,
    pub(super) killed: Option<Instant>,
    pub(super) stuck: bool,
}

#[derive(Debug)]
struct Strike {
    count: u32,
    until: Instant,
}

/// The supervisor's state.
#[derive(Debug)]
pub(super) struct Machine {
    limits: Deadlines,
    service: Service,
    stopped: bool,
    /// Whether starts of workers are paused. Calls wait until the pause ends.
    paused: bool,
    failures: u32,
    not_before: Option<Instant>,
    queue: VecDeque<Pending>,
    flights: BTreeMap<Ticket, Flight>,
    abandoned: BTreeMap<WorkerId, Abandoned>,
    known: BTreeMap<GpuUuid, GpuRef>,
    strikes: BTreeMap<GpuUuid, Strike>,
    settling: Vec<(Ticket, GpuUuid)>,
    ending: Vec<Ticket>,
    driver: Option<Driver>,
    started: u64,
    crashed: u64,
    effects: Vec<Effect>,
}

fn doubled((first, longest): (Duration, Duration), times: u32) -> Duration {
    first.saturating_mul(1_u32.checked_shl(times.min(16)).unwrap_or(u32::MAX)).min(longest)
}

fn target(request: &Request) -> Option<GpuUuid> {
    request.gpu().map(|gpu| gpu.uuid.clone())
}

impl Machine {
    pub(super) fn new(limits: Deadlines) -> Self {
        Self {
            limits,
            service: Service::Idle,
            stopped: false,
            paused: false,
            failures: 0,
            not_before: None,
            queue: VecDeque::new(),
            flights: BTreeMap::new(),
            abandoned: BTreeMap::new(),
            known: BTreeMap::new(),
            strikes: BTreeMap::new(),
            settling: Vec::new(),
            ending: Vec::new(),
            driver: None,
            started: 0,
            crashed: 0,
            effects: Vec::new(),
        }
    }

    /// Processes an event; returns the effects in order.
    pub(super) fn step(&mut self, now: Instant, event: Event) -> Vec<Effect> {
        match event {
            Event::Call { ticket, ask } => self.call(now, ticket, ask),
            Event::Settle { ticket, uuid } => self.settle(ticket, uuid),
            Event::Restart { ticket } => self.end(ticket),
            Event::Stop { ticket } => {
                self.stopped = true;
                self.fail_queue(&DriverError::new(ErrorKind::Stopped, "calling the driver"));
                self.end(ticket);
            }
            Event::Resume => self.stopped = false,
            Event::Pause { ticket } => {
                self.paused = true;
                self.end(ticket);
            }
            Event::Unpause => {
                self.paused = false;
                // The time limit of a queued call includes the start of a worker. No worker starts during a pause, so
                // the limit of each queued call begins again after the pause.
                self.queue.iter_mut().for_each(|pending| pending.until = now + self.limits.queue);
            }
            Event::Started { worker, result } => self.start_result(now, worker, result),
            Event::Reply { worker, ticket, result } => self.reply(worker, ticket, result),
            Event::Gone { worker, how } => self.worker_ended(now, worker, &how),
            Event::Tick => {}
        }
        self.keep_time(now);
        self.refuse_unsettled();
        self.advance_ending(now);
        self.dispatch(now);
        std::mem::take(&mut self.effects)
    }

    /// Returns when [`Event::Tick`] is due.
    pub(super) fn next_tick(&self) -> Option<Instant> {
        let service = match &self.service {
            Service::Idle => self.not_before.filter(|_| !self.queue.is_empty() && !self.paused),
            Service::Starting { deadline, .. } => Some(*deadline),
            Service::Ending { kill_at, .. } => *kill_at,
            Service::Failed { until, .. } => Some(*until).filter(|_| !self.queue.is_empty()),
            Service::Serving { .. } => None,
        };
        let flights = self.flights.values().filter(|f| f.late.is_none()).map(|f| f.deadline);
        let queue = self.queue.iter().filter(|_| !self.paused).map(|p| p.until);
        let abandoned = self.abandoned.iter().filter_map(|(worker, a)| match a.killed {
            Some(killed) => (!a.stuck).then_some(killed + DYING),
            None => self.kill_due(*worker),
        });
        service.into_iter().chain(flights).chain(queue).chain(abandoned).min()
    }

    fn call(&mut self, now: Instant, ticket: Ticket, ask: Ask) {
        if let Some(error) = self.refuse(now, &ask) {
            self.effects.push(Effect::Answer { ticket, result: Err(error) });
            return;
        }
        self.queue.push_back(Pending { ticket, ask, until: now + self.limits.queue, suspect: false });
    }

    /// Returns why a call is refused immediately; `None` if the call is accepted.
    fn refuse(&self, now: Instant, ask: &Ask) -> Option<DriverError> {
        let (name, gpu) = match ask {
            Ask::Driver => ("querying the driver", None),
            Ask::Request(request) => (request.name(), request.gpu()),
        };
        let about = |error: DriverError| match gpu {
            Some(gpu) => error.on(&gpu.uuid),
            None => error,
        };
        if self.stopped {
            return Some(about(DriverError::new(ErrorKind::Stopped, name)));
        }
        if let Service::Failed { error, until } = &self.service
            && now < *until
        {
            return Some(error.clone());
        }
        let Ask::Request(request) = ask else { return None };
        if self.is_unsettled(&target(request)) {
            return Some(about(DriverError::new(ErrorKind::Unsettled, name)));
        }
        let strike = gpu.and_then(|gpu| self.strikes.get(&gpu.uuid));
        if let Some(strike) = strike
            && now < strike.until
            && !request.is_mutation()
        {
            let seconds = (strike.until - now).as_secs() + 1;
            let detail = format!("reading it ended the worker {} times; next try in {seconds}s", strike.count);
            return Some(about(DriverError::new(ErrorKind::WorkerUnavailable, name).detail(detail)));
        }
        None
    }

    fn fail_queue(&mut self, error: &DriverError) {
        for pending in self.queue.drain(..) {
            self.effects.push(Effect::Answer { ticket: pending.ticket, result: Err(error.clone()) });
        }
    }

    fn reply(&mut self, worker: WorkerId, ticket: Ticket, result: Result<Answer, DriverError>) {
        if self.flights.get(&ticket).is_none_or(|flight| flight.worker != worker) {
            return;
        }
        let Some(flight) = self.flights.remove(&ticket) else { return };
        self.failures = 0;
        self.not_before = None;
        if let Some(uuid) = target(&flight.request) {
            self.strikes.remove(&uuid);
        }
        if let Ok(answer) = &result {
            self.learn(answer);
        }
        if flight.late.is_some() {
            self.release_settled(&flight.request, &Settled::Late(result.map(|_| ())));
        } else {
            self.effects.push(Effect::Answer { ticket, result: result.map(Answered::Call) });
        }
    }

    /// Stores the last index and PCI address of each GPU. With these values, the worker needs no
    /// search.
    fn learn(&mut self, answer: &Answer) {
        use Answer::{ComputeInstance, ComputeModeSet, Destroyed, GpuInstance, Listed, Mode, Reading, Sample};
        let identities: Vec<_> = match answer {
            Listed(list) => list.iter().filter_map(|listed| listed.identity.as_ref().ok()).collect(),
            Reading(reading) => vec![&reading.identity],
            Sample(_) | GpuInstance(_) | ComputeInstance(_) | Destroyed | Mode(_) | ComputeModeSet => Vec::new(),
        };
        for identity in identities {
            let (index, pci) = (Some(identity.index), Some(identity.pci.clone()));
            let gpu = GpuRef { uuid: identity.uuid.clone(), index, pci };
            self.known.insert(identity.uuid.clone(), gpu);
        }
    }

    /// Returns the calls in flight in a worker that must not end now. If such a worker ends, its
    /// end counts as a crash. Returns `None` for any other worker.
    pub(super) fn calls_of_required_worker(&self, worker: WorkerId) -> Option<Vec<&Request>> {
        let wanted = match self.service {
            Service::Starting { worker, .. }
            | Service::Serving { worker }
            | Service::Ending { worker, kill_at: None } => Some(worker),
            Service::Idle | Service::Ending { kill_at: Some(_), .. } | Service::Failed { .. } => None,
        };
        let calls = self.flights.values().filter(|flight| flight.worker == worker).map(|flight| &flight.request);
        (wanted == Some(worker)).then(|| calls.collect())
    }

    /// Returns the worker that is starting, serving or ending.
    pub(super) fn worker(&self) -> Option<WorkerId> {
        match self.service {
            Service::Starting { worker, .. } | Service::Serving { worker } | Service::Ending { worker, .. } => {
                Some(worker)
            }
            Service::Idle | Service::Failed { .. } => None,
        }
    }

    /// Returns the failure that prevents every worker from serving; `None` if there is no failure.
    pub(super) fn failure(&self) -> Option<&DriverError> {
        match &self.service {
            Service::Failed { error, .. } => Some(error),
            Service::Idle | Service::Starting { .. } | Service::Serving { .. } | Service::Ending { .. } => None,
        }
    }

    pub(super) fn driver(&self) -> Option<&Driver> {
        self.driver.as_ref()
    }

    pub(super) fn abandoned(&self) -> &BTreeMap<WorkerId, Abandoned> {
        &self.abandoned
    }

    /// Returns the number of workers started, and the number of workers that crashed.
    pub(super) fn counts(&self) -> (u64, u64) {
        (self.started, self.crashed)
    }
}
