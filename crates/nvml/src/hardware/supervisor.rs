//! The task behind [`super::Hardware`]: executes the decisions of [`super::machine`].

use std::{
    collections::BTreeMap,
    future,
    time::{Instant, SystemTime},
};

use tokio::{
    sync::{broadcast, mpsc, watch},
    time,
};

use super::{
    AbandonedWorker, Message, Options, Sender, Settled, Status,
    call_times::{CallTimer, CallTimes},
    keeper::{Report, WorkerSocket},
    machine::{Answered, Ask, Effect, Event, Machine, Ticket, WorkerId},
};
use crate::{
    error::{DriverError, ErrorKind},
    proto::{Answer, Request, ToParent, ToWorker},
    reading,
};

/// The caller that waits for the answer to a request.
enum Waiting {
    Driver(Sender<Result<gpush_api::Driver, DriverError>>),
    Call(Sender<Result<Answer, DriverError>>),
    Settle(Sender<Settled>),
    End(Sender<Result<(), DriverError>>),
}

struct Supervisor {
    options: Options,
    machine: Machine,
    lines: BTreeMap<WorkerId, WorkerSocket>,
    waiting: BTreeMap<Ticket, Waiting>,
    next: Ticket,
    reports: mpsc::UnboundedSender<(WorkerId, Report)>,
    events: broadcast::Sender<reading::Event>,
    timer: CallTimer,
    /// Time when the supervisor started, on both clocks. Used to convert instants to system time.
    epoch: (Instant, SystemTime),
}

/// Runs until the last handle is dropped and the worker has ended. Calls in flight finish first.
pub(super) async fn run(
    options: Options,
    mut messages: mpsc::UnboundedReceiver<Message>,
    status: watch::Sender<Status>,
    events: broadcast::Sender<reading::Event>,
    times: CallTimes,
) {
    let (reports, mut reported) = mpsc::unbounded_channel();
    let mut supervisor = Supervisor {
        machine: Machine::new(options.deadlines),
        options,
        lines: BTreeMap::new(),
        waiting: BTreeMap::new(),
        next: 0,
        reports,
        events,
        timer: CallTimer::new(times),
        epoch: (Instant::now(), SystemTime::now()),
    };
    let mut ending = false;
    while !ending || supervisor.machine.worker().is_some() {
        let tick = async {
            match supervisor.machine.next_tick() {
                Some(at) => time::sleep_until(at.into()).await,
                None => future::pending().await,
            }
        };
        let event = tokio::select! {
            message = messages.recv(), if !ending => match message {
                Some(message) => Some(supervisor.register(message)),
                None => {
                    ending = true;
                    Some(Event::Stop { ticket: 0 })
                }
            },
            Some((worker, report)) = reported.recv() => supervisor.handle_report(worker, report),
            () = tick => Some(Event::Tick),
        };
        if let Some(event) = event {
            supervisor.step(event);
        }
        let now = supervisor.status();
        status.send_if_modified(|old| {
            let changed = *old != now;
            *old = now;
            changed
        });
    }
}

/// Logs an unexpected end of a worker, with its calls and the consequence for their callers.
fn log_worker_death(pid: Option<u32>, how: &str, calls: &[&Request]) {
    let during = |request: &&Request| match request.gpu() {
        Some(gpu) => format!("{} ({})", request.name(), gpu.uuid),
        None => request.name().to_owned(),
    };
    let during: Vec<String> = calls.iter().map(during).collect();
    let (during, next) = match (calls.is_empty(), calls.iter().any(|request| request.is_mutation())) {
        (true, _) => (String::new(), "gpushd starts a new worker for the next call"),
        (false, false) => (format!(" during {}", during.join(", ")), "gpushd starts a new worker and repeats the call"),
        (false, true) => (
            format!(" during {}", during.join(", ")),
            "gpushd starts a new worker and reads from the hardware whether the change was made",
        ),
    };
    tracing::warn!(pid, "gpushd's driver worker died{during}: {how}; {next}");
}

impl Supervisor {
    /// Stores the caller of a message, and converts the message to an event.
    fn register(&mut self, message: Message) -> Event {
        self.next += 1;
        let ticket = self.next;
        let (waiting, event) = match message {
            Message::Driver(to) => (Waiting::Driver(to), Event::Call { ticket, ask: Ask::Driver }),
            Message::Call(request, to) => (Waiting::Call(to), Event::Call { ticket, ask: Ask::Request(request) }),
            Message::Settle(uuid, to) => (Waiting::Settle(to), Event::Settle { ticket, uuid }),
            Message::Restart(to) => (Waiting::End(to), Event::Restart { ticket }),
            Message::Stop(to) => (Waiting::End(to), Event::Stop { ticket }),
            Message::Pause(to) => (Waiting::End(to), Event::Pause { ticket }),
            Message::Unpause => return Event::Unpause,
            Message::Resume => return Event::Resume,
        };
        self.waiting.insert(ticket, waiting);
        event
    }

    fn handle_report(&mut self, worker: WorkerId, report: Report) -> Option<Event> {
        match report {
            Report::Spawned { pid } => {
                if let Some(line) = self.lines.get_mut(&worker) {
                    line.pid = Some(pid);
                }
                tracing::debug!(worker, pid, "gpushd's driver worker has started");
                None
            }
            Report::Printed(ToParent::Ready(result)) => Some(Event::Started { worker, result }),
            Report::Printed(ToParent::Reply { id, result }) => {
                self.timer.answered(worker, id, Instant::now());
                Some(Event::Reply { worker, ticket: id, result })
            }
            Report::Printed(ToParent::Event(event)) => {
                // If there is no receiver, `send` fails. This is not an error.
                let _ = self.events.send(event);
                None
            }
            Report::Gone { how } => {
                self.timer.ended(worker);
                let line = self.lines.remove(&worker);
                match self.machine.calls_of_required_worker(worker) {
                    Some(calls) => log_worker_death(line.and_then(|line| line.pid), &how, &calls),
                    None => tracing::debug!(worker, how, "gpushd's driver worker has ended"),
                }
                Some(Event::Gone { worker, how })
            }
        }
    }

    fn step(&mut self, event: Event) {
        let mut events = vec![event];
        while let Some(event) = events.pop() {
            for effect in self.machine.step(Instant::now(), event) {
                events.extend(self.execute(effect));
            }
        }
    }

    /// Executes an effect. If the effect fails immediately, returns the event for the failure.
    fn execute(&mut self, effect: Effect) -> Option<Event> {
        match effect {
            Effect::Spawn(worker) => match WorkerSocket::open(worker, &self.options, self.reports.clone()) {
                Ok(line) => {
                    self.lines.insert(worker, line);
                }
                Err(error) => return Some(Event::Gone { worker, how: error.to_string() }),
            },
            Effect::Send { worker, ticket, request } => {
                self.timer.sent(worker, ticket, &request, Instant::now());
                let line = self.lines.get(&worker);
                if let Some(line) = line
                    && let Err(error) = line.say(&ToWorker::Call { id: ticket, request })
                {
                    tracing::warn!(worker, %error, "gpushd's driver worker accepts no calls");
                    line.kill();
                }
            }
            Effect::Close(worker) => {
                if let Some(line) = self.lines.get(&worker) {
                    line.close();
                }
            }
            Effect::Kill(worker) => {
                if let Some(line) = self.lines.get(&worker) {
                    let calls = self.machine.abandoned().get(&worker).map(|abandoned| abandoned.calls.join(", "));
                    match calls.filter(|calls| !calls.is_empty()) {
                        Some(calls) => {
                            tracing::warn!(pid = line.pid, "gpushd kills its driver worker, which hangs in {calls}");
                        }
                        // No call hangs in this worker, so do not warn. For example, a worker that
                        // found no driver ends by itself anyway.
                        None => tracing::debug!(worker, pid = line.pid, "gpushd ends its driver worker"),
                    }
                    line.kill();
                }
            }
            Effect::Answer { ticket, result } => self.answer(ticket, result),
            Effect::Settled { ticket, settled } => {
                if let Some(Waiting::Settle(to)) = self.waiting.remove(&ticket) {
                    let _ = to.send(settled);
                }
            }
            Effect::Ended { ticket, result } => {
                if let Some(Waiting::End(to)) = self.waiting.remove(&ticket) {
                    let _ = to.send(result);
                }
            }
        }
        None
    }

    fn answer(&mut self, ticket: Ticket, result: Result<Answered, DriverError>) {
        let mixed_up = || DriverError::new(ErrorKind::Garbled, "calling gpushd's driver worker");
        match self.waiting.remove(&ticket) {
            Some(Waiting::Driver(to)) => {
                let result = result.and_then(|answered| match answered {
                    Answered::Driver(driver) => Ok(driver),
                    Answered::Call(_) => Err(mixed_up()),
                });
                let _ = to.send(result);
            }
            Some(Waiting::Call(to)) => {
                let result = result.and_then(|answered| match answered {
                    Answered::Call(answer) => Ok(answer),
                    Answered::Driver(_) => Err(mixed_up()),
                });
                let _ = to.send(result);
            }
            Some(Waiting::Settle(_) | Waiting::End(_)) | None => {}
        }
    }

    fn status(&self) -> Status {
        let pid = |worker: &WorkerId| self.lines.get(worker).and_then(|line| line.pid);
        let (started, crashed) = self.machine.counts();
        let abandoned = self.machine.abandoned().iter().filter(|(_, a)| !a.calls.is_empty()).map(|(worker, a)| {
            let since = self.epoch.1 + a.since.saturating_duration_since(self.epoch.0);
            AbandonedWorker { pid: pid(worker), calls: a.calls.clone(), since, stuck: a.stuck }
        });
        Status {
            worker: self.machine.worker().as_ref().and_then(pid),
            driver: self.machine.driver().cloned(),
            failure: self.machine.failure().cloned(),
            started,
            crashed,
            abandoned: abandoned.collect(),
            unsettled: self.machine.unsettled(),
        }
    }
}
