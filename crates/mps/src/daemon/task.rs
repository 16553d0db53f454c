//! The supervisor task of one daemon. The task passes events to the state machine in
//! [`gpush_core::supervisor`], and executes the effects that the machine returns. One task per
//! target does all of this, one step at a time.
//!
//! ```text
//! request ───────┐                       ┌─► Start   directory prepared, program started, pidfd opened
//! process ended ─┼─► supervisor ─ effects┼─► Quit    ends the clients' work, then the daemon
//! timer fired ───┤       │               └─► Kill    the daemon and everything that it started
//! probe finished ┘       └─ state ─► access to the pipe directory: granted while it serves, else revoked
//!   reply, silence, servers, clients
//! ```
//!
//! Admission means access to the pipe directory. While a daemon does not serve, no user can reach
//! its sockets. The only exception: users of an adopted daemon keep the access that they had
//! before. A hung daemon does not block this task, because probes and `quit` run in separate tasks.

use std::{
    collections::BTreeSet,
    convert::Infallible,
    mem::{Discriminant, discriminant},
    sync::Arc,
    time::Duration,
};

use gpush_api::{ApiError, Code, MpsSettings, TargetUuid};
use gpush_core::supervisor::{
    KillReason, Supervisor, SupervisorEffect, SupervisorEvent, SupervisorPolicy, SupervisorState,
};
use gpush_host::{proc, subtask};
use jiff::Timestamp;
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep_until},
};
use tokio_util::task::AbortOnDropHandle;

use super::{
    DaemonRequest, Desired, QueuedRequest, ReceiveReport, Reply, Report, Sources,
    health::Health,
    launcher::{DaemonProcess, Launcher},
    log::LogRotation,
    probe_task::{Probe, ProbeResult, finished},
    request_error::RequestError,
    server_record::ServerRecord,
    target_dir::{Spec, TargetDir},
};
use crate::protocol::control::{Control, ControlError, Protocol};

/// Deadline of one command to a daemon.
pub(super) const DEADLINE: Duration = Duration::from_secs(2);

/// Interval between probes of a daemon that is starting: the first interval, which doubles each
/// time, and the maximum.
pub(super) const START_INTERVAL: (Duration, Duration) = (Duration::from_millis(1), Duration::from_millis(10));

/// Interval between checks whether the clients of a draining daemon are alive.
const DRAINING: Duration = Duration::from_millis(250);

/// Maximum time between probes of a draining daemon whose clients are alive. The probes are
/// necessary because a client may disconnect without ending.
const DRAIN_PROBE: Duration = Duration::from_secs(15);

/// The state of a supervisor task.
pub(super) struct SupervisorTask {
    /// Short name of the target.
    pub(super) target: String,
    pub(super) uuid: TargetUuid,
    pub(super) dir: TargetDir,
    pub(super) launcher: Launcher,
    pub(super) supervisor: Supervisor,
    /// The start of the supervisor's clock.
    pub(super) started_at: Instant,
    pub(super) desired: Option<Box<Desired>>,
    /// The parameters that the daemon was started with.
    pub(super) spec: Option<Spec>,
    pub(super) process: Option<DaemonProcess>,
    /// Servers that were children of a daemon of this target.
    pub(super) server_record: ServerRecord,
    pub(super) control: Option<Arc<Control>>,
    pub(super) sources: Sources,
    /// Users with a lease. They have access while the daemon serves.
    pub(super) users: BTreeSet<u32>,
    /// User of the next pipe directory, if it differs from the user of the current one.
    pub(super) next_user: Option<u32>,
    /// The settings of the daemon, as read back.
    pub(super) effective: Option<MpsSettings>,
    pub(super) health: Health,
    /// The probe in progress.
    pub(super) probe: Option<Probe>,
    /// Callers that wait for a probe that has not begun.
    pub(super) waiters: Vec<Reply>,
    /// The pipe directory and the users with access to it. `None` if access was not set yet, or
    /// setting it failed.
    pub(super) access: Option<(u32, BTreeSet<u32>)>,
    /// Whether users of an adopted daemon keep the access that they had before.
    pub(super) keeps_found_access: bool,
    /// Whether access is revoked although the daemon serves, because the daemon is about to be
    /// ended.
    pub(super) admission_closed: bool,
    /// Time at which the next probe is due.
    pub(super) next_probe: Option<Instant>,
    /// Interval until the next probe of a daemon that is starting.
    pub(super) start_interval: Duration,
    /// Problems, one sentence each.
    pub(super) problems: Vec<String>,
    pub(super) last_reply: Option<Instant>,
    /// Pids of the processes that hold the control connection; empty if the daemon answers.
    pub(super) connection_holders: BTreeSet<i32>,
    /// The protocol in use and the driver version, with a description of both.
    pub(super) protocol: Option<((Protocol, Option<String>), String)>,
    /// The last change of the daemon's settings by another program.
    pub(super) drift: Option<String>,
    pub(super) log_rotation: LogRotation,
    /// Leftovers of a daemon that is no longer desired.
    pub(super) leftovers: Option<Leftovers>,
    /// A fact about the servers for the next report.
    pub(super) news: Option<String>,
    /// Why gpushd has killed the daemon, until the daemon has ended.
    pub(super) kill_reason: Option<KillReason>,
    /// Why gpushd has killed the daemon or its leftovers, until the next report.
    pub(super) new_kill: Option<KillReason>,
    /// The task that sends `quit` until the daemon has ended.
    pub(super) stop_task: Option<AbortOnDropHandle<()>>,
    /// Since when the daemon has been in its current state.
    pub(super) since: Timestamp,
    /// State, pid and presence of leftovers, as last published.
    pub(super) last_published: (Discriminant<SupervisorState>, Option<i32>, bool),
}

/// Leftovers of a daemon that is no longer desired. Such leftovers drain: their clients may finish,
/// and no new client can connect.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Leftovers {
    /// Time at which gpushd kills the leftovers with their clients; `None` for no deadline.
    pub(super) until: Option<Instant>,
}

/// Continues the panic of a task that does not return. Never returns if the task does not panic.
async fn panicked(task: Option<&mut AbortOnDropHandle<()>>) -> Infallible {
    if let Some(task) = task {
        subtask::output(task.await);
    }
    std::future::pending().await
}

/// The event that woke the task.
enum Wakeup {
    ProcessExited,
    ProbeFinished(Box<Result<ProbeResult, ControlError>>),
    TimerFired,
    ProbeDue,
}

impl SupervisorTask {
    pub(super) fn new(target: &str, uuid: &TargetUuid, dir: TargetDir, launcher: Launcher, sources: Sources) -> Self {
        let supervisor = Supervisor::new(SupervisorPolicy::default());
        Self {
            target: target.to_owned(),
            uuid: uuid.clone(),
            spec: dir.known_spec().filter(|spec| spec.uuid == *uuid),
            server_record: ServerRecord::read(dir.dir()),
            dir,
            launcher,
            last_published: (discriminant(supervisor.state()), None, false),
            supervisor,
            started_at: Instant::now(),
            desired: None,
            process: None,
            control: None,
            sources,
            users: BTreeSet::new(),
            next_user: None,
            effective: None,
            health: Health::default(),
            probe: None,
            waiters: Vec::new(),
            access: None,
            keeps_found_access: false,
            admission_closed: false,
            next_probe: None,
            start_interval: START_INTERVAL.0,
            problems: Vec::new(),
            last_reply: None,
            connection_holders: BTreeSet::new(),
            protocol: None,
            drift: None,
            log_rotation: LogRotation::default(),
            leftovers: None,
            news: None,
            kill_reason: None,
            new_kill: None,
            stop_task: None,
            since: Timestamp::now(),
        }
    }

    /// Runs until all handles of the daemon are dropped. The daemon itself continues to run.
    pub(super) async fn run(
        mut self,
        requests: &mut mpsc::Receiver<QueuedRequest>,
        reports: &watch::Sender<Report>,
        receive: &ReceiveReport,
    ) {
        self.adopt().await;
        self.update_access();
        self.publish(reports, receive);
        loop {
            let mut answered = None;
            tokio::select! {
                biased;
                wakeup = self.next_wakeup() => {
                    answered = self.handle_wakeup(wakeup).await.map(|callers| (callers, Ok(())));
                }
                request = requests.recv() => match request {
                    Some(QueuedRequest { what: DaemonRequest::Probe, done }) => self.probe_now(Some(done)),
                    Some(QueuedRequest { what: DaemonRequest::SetDesired(desired), done }) => {
                        if self.set_desired(desired).await {
                            self.probe_now(Some(done));
                        } else {
                            answered = Some((vec![done], Ok(())));
                        }
                    }
                    Some(request) => {
                        answered = Some((vec![request.done], self.handle_request(request.what).await));
                    }
                    None => return,
                },
            }
            // Publish the report before the answer: a caller that gets its answer must find the result in the report.
            self.publish(reports, receive);
            let Some((callers, answer)) = answered else { continue };
            for caller in callers {
                let _caller_left = caller.send(answer.clone());
            }
        }
    }

    /// Waits for the next event. If the wait is cancelled, no event is lost.
    async fn next_wakeup(&mut self) -> Wakeup {
        let due = self.supervisor.due().map(|at| self.started_at + at);
        let probe = self.next_probe.filter(|_| self.probe.is_none());
        tokio::select! {
            biased;
            () = ended(self.process.as_ref()) => Wakeup::ProcessExited,
            result = finished(self.probe.as_mut()) => Wakeup::ProbeFinished(Box::new(result)),
            () = at(due) => Wakeup::TimerFired,
            () = at(probe) => Wakeup::ProbeDue,
            never = panicked(self.stop_task.as_mut()) => match never {},
        }
    }

    /// Handles an event. If the event ends a probe, returns the callers that waited for the probe.
    async fn handle_wakeup(&mut self, wakeup: Wakeup) -> Option<Vec<Reply>> {
        match wakeup {
            Wakeup::ProcessExited => {
                let deadline = self.drain_deadline();
                self.handle_exit().await;
                // The clients of a draining daemon may run until the drain deadline, even if the
                // daemon ends earlier.
                if let Some(until) = deadline {
                    self.drain_leftovers(until).await;
                }
                Some(self.cancel_probes())
            }
            Wakeup::ProbeFinished(result) => {
                let callers = self.probe.take().map(Probe::callers).unwrap_or_default();
                self.handle_probe(*result).await;
                if !self.waiters.is_empty() {
                    self.probe_now(None);
                }
                Some(callers)
            }
            Wakeup::TimerFired => {
                self.step(SupervisorEvent::Tick).await;
                None
            }
            Wakeup::ProbeDue => {
                if self.leftovers.is_some() {
                    self.next_probe = None;
                    self.clear_leftovers().await;
                } else if self.waits_for_living_clients() {
                    self.next_probe = Some(Instant::now() + DRAINING);
                } else {
                    self.probe_now(None);
                }
                None
            }
        }
    }

    /// Returns whether the daemon drains and needs no probe, because its clients are alive or it
    /// waits for leases. A probe would report little that is new, and would write lines into the
    /// daemon's log.
    fn waits_for_living_clients(&self) -> bool {
        let clients = self.health.clients.iter().map(|(_, client)| *client);
        let mut clients = clients.chain(self.health.pending()).peekable();
        matches!(self.supervisor.state(), SupervisorState::Draining { .. })
            && self.last_reply.is_some_and(|reply| reply.elapsed() < self.probe_interval().min(DRAIN_PROBE))
            && (clients.peek().is_some() || self.supervisor.serves_leases())
            && clients.all(proc::is_alive)
    }

    /// Handles events until `is_over` returns true. Returns false if the deadline came first.
    pub(super) async fn run_until(&mut self, deadline: Instant, is_over: impl Fn(&Self) -> bool) -> bool {
        while !is_over(self) {
            let wakeup = tokio::select! {
                wakeup = self.next_wakeup() => wakeup,
                () = sleep_until(deadline) => return false,
            };
            for caller in self.handle_wakeup(wakeup).await.unwrap_or_default() {
                let _caller_left = caller.send(Ok(()));
            }
        }
        true
    }

    /// Sets the desired state of the daemon; `None` for no daemon. Returns whether the change takes
    /// effect only with the next probe.
    async fn set_desired(&mut self, desired: Option<Box<Desired>>) -> bool {
        if let Some(desired) = &desired {
            self.supervisor.set_policy(desired.supervision.clone());
        }
        let is_desired = desired.is_some();
        let changed = is_desired && self.desired != desired;
        if is_desired {
            self.desired = desired;
        }
        if self.supervisor.is_desired_known() && is_desired == self.supervisor.is_desired() {
            if !is_desired {
                self.clear_leftovers().await;
            }
            self.change_users_if_idle().await;
            return changed && self.supervisor.pid().is_some();
        }
        // Clients may have connected since the last probe, or before this gpushd started. They may
        // finish their work.
        if !is_desired && self.supervisor.pid().is_some() {
            self.close_and_check_empty().await;
        }
        self.check_leases().await;
        self.step(SupervisorEvent::Wanted(is_desired)).await;
        self.reopen_admission();
        self.supervisor.pid().is_some()
    }

    async fn handle_request(&mut self, request: DaemonRequest) -> Result<(), RequestError> {
        match request {
            DaemonRequest::Start => {
                self.step(SupervisorEvent::ForceStart).await;
                self.start_result()?;
            }
            DaemonRequest::CloseAdmission => self.close_unless_used().await?,
            DaemonRequest::OpenAdmission => self.reopen_admission(),
            DaemonRequest::Stop { unless_used } => {
                if unless_used {
                    self.close_unless_used().await?;
                }
                self.kill_leftovers(KillReason::Requested).await;
                self.step(SupervisorEvent::Leave(Some(Duration::ZERO))).await;
                self.clear_leftovers().await;
                self.reopen_admission();
            }
            DaemonRequest::Drain(within) => {
                self.close_and_check_empty().await;
                self.check_leases().await;
                self.step(SupervisorEvent::Leave(within)).await;
                self.drain_leftovers(within.map(|within| Instant::now() + within)).await;
                self.reopen_admission();
            }
            DaemonRequest::Restart { unless_used } => {
                if unless_used {
                    self.close_unless_used().await?;
                }
                self.kill_leftovers(KillReason::Requested).await;
                self.step(SupervisorEvent::Restart).await;
                self.reopen_admission();
            }
            DaemonRequest::Users(users) => {
                self.set_users(users).await?;
                self.change_users_if_idle().await;
            }
            DaemonRequest::Terminate(client) => self.terminate_client(client).await,
            // The function `run` already handles these two requests.
            DaemonRequest::Probe | DaemonRequest::SetDesired(_) => {}
        }
        Ok(())
    }

    /// Returns an error if a start failed immediately.
    fn start_result(&self) -> Result<(), RequestError> {
        if !self.supervisor.state().is_down() {
            return Ok(());
        }
        let mut error = ApiError::new(Code::Unavailable, format!("the MPS daemon of {} can't be started", self.target));
        error.causes.clone_from(&self.problems);
        let hint = format!("run `gpushctl mps logs {}` (administrator) to see the log of the daemon", self.target);
        Err(RequestError::NotYet(error.hint(hint).retryable()))
    }

    /// Returns the time since the task was created, which is the supervisor's clock.
    pub(super) fn now(&self) -> Duration {
        self.started_at.elapsed()
    }

    /// Passes an event to the supervisor and executes its effects, which may cause another event.
    pub(super) async fn step(&mut self, event: SupervisorEvent) {
        let mut next = Some(event);
        while let Some(event) = next.take() {
            let effects = self.supervisor.step(&event, self.now());
            // Revoke access before executing the effects.
            self.update_access();
            for effect in effects {
                match effect {
                    SupervisorEffect::Start => next = self.start().await.err(),
                    SupervisorEffect::Quit => self.begin_stop(),
                    SupervisorEffect::Kill(why) => match &self.process {
                        Some(process) => {
                            tracing::warn!(mps = self.target, "gpushd kills the MPS daemon: {why}");
                            (self.kill_reason, self.new_kill) = (Some(why), Some(why));
                            self.launcher.kill(&self.dir, Some(process)).await;
                        }
                        None => next = Some(SupervisorEvent::Ended),
                    },
                    SupervisorEffect::ReportGivenUp => {
                        tracing::error!(
                            mps = self.target,
                            "gpushd no longer restarts the MPS daemon: it failed {} times",
                            self.supervisor.failures()
                        );
                    }
                    SupervisorEffect::ReportHung => tracing::error!(
                        mps = self.target,
                        "the MPS daemon hangs and has {}, so gpushd does not restart it",
                        match self.supervisor.clients() {
                            Some(clients) => format!("{clients} clients"),
                            None => "clients that cannot be listed".to_owned(),
                        }
                    ),
                }
            }
        }
        self.next_probe = match self.supervisor.state() {
            SupervisorState::Starting { .. } | SupervisorState::Found { .. } => {
                self.next_probe.or_else(|| Some(Instant::now()))
            }
            SupervisorState::Ready { .. } | SupervisorState::Hung { .. } | SupervisorState::Fault { .. } => {
                self.next_probe.or_else(|| Some(Instant::now() + self.probe_interval()))
            }
            SupervisorState::Draining { .. } => Some(Instant::now() + DRAINING),
            SupervisorState::Stopped if self.leftovers.is_some() => self.next_probe,
            SupervisorState::Stopped
            | SupervisorState::BackingOff { .. }
            | SupervisorState::GivenUp
            | SupervisorState::Stopping { .. } => None,
        };
    }

    /// Returns the interval between two probes of a daemon that serves.
    pub(super) fn probe_interval(&self) -> Duration {
        self.desired.as_ref().map_or(Duration::from_secs(15), |desired| desired.health)
    }
}

/// Waits until the process has ended. Never returns if there is no process.
async fn ended(process: Option<&DaemonProcess>) {
    match process {
        Some(process) => process.ended().await,
        None => std::future::pending().await,
    }
}

/// Waits until an instant. Never returns if there is none.
async fn at(instant: Option<Instant>) {
    match instant {
        Some(instant) => sleep_until(instant).await,
        None => std::future::pending().await,
    }
}
