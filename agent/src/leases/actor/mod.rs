//! The task of one lease. It owns everything about the lease: the state, the record, the reserved capacity, the waiting
//! client, the scope and the processes. All changes of a lease arrive in its inbox.
//!
//! ```text
//!  commands ──► inbox ─┐
//!  binding ended ──────┤                                      ┌─► state and record ─► published in `state`
//!  times ──────────────┼─► event ─► gpush_core: machine::step ┤
//!  probe finished ─────┤                 ▲                    └─► effects ─► executed here, in order
//!  operation ended ────┘                 └──── outcome of an effect ◄──────────┘
//! ```
//!
//! A new request has no number until it is recorded. Until then, its actor runs in the task of the request. From then on
//! it runs in its own task. If this task panics, gpushd starts another one, which continues with the published state.
//!
//! While an operation creates the devices of a lease, the last commit of the operation decides about the lease. So
//! [`crate::state`] publishes that state together with the end of the operation, and the actor follows it.
//!
//! | file | subject |
//! |---|---|
//! | `inbox` | commands, and the inboxes of all leases |
//! | `input` | waits for the next event |
//! | `effects` | executes the effects of the state machine |
//! | `grant` | records a grant, and answers the client |
//! | `background` | a future that runs together with the inbox |
//! | `change` | release, renewal, revocation |
//! | `end` | waits for the processes of the lease, and ends them |
//! | `binding` | waits until the binding of the lease has ended |
//! | `notice` | tells the holder what happens to the lease |
//! | `queued` | records a request that must wait |
//! | `restored` | requests that were queued when an earlier gpushd ended |

mod background;
mod binding;
mod change;
mod effects;
mod end;
mod grant;
mod inbox;
mod input;
mod notice;
mod queued;
mod restored;

use std::{
    collections::VecDeque,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use gpush_api::{ApiError, EndReason, LeaseId, LeaseState};
use gpush_core::lease::{
    machine::{self, Effect, EndProcesses, Event, ReleaseStep, Releasing, State},
    notice::ExpiryWarnings,
};
use jiff::Timestamp;
use tokio::sync::{OwnedMutexGuard, mpsc, oneshot};

use self::{background::Background, end::EndProgress, inbox::Reply};
pub(super) use self::{
    change::NOTICE,
    grant::{expires_at, grant, wait_until_decided},
    inbox::{ChangeError, ChangeRequest, Inbox, Inboxes, Joined, LeaseCommand, Rejoin, RequestedChange, Warning},
    queued::enter_queue,
    restored::{ending_error, may_be_repeated, rejoin},
};
pub(crate) use self::{
    inbox::{EndCheck, HolderNews, SeenUnused},
    restored::{overtaken_before, restore_places},
};
use super::{Leases, request::Resolved, scope::NotMoved};
use crate::{
    operations::{
        apply::Creation,
        scheduler::{LeasePlace, Reserved},
    },
    requests::{caller::Viewer, idempotency::Key},
    state::{LeaseTable, OpenLease, ReservationId},
    system::tasks::TaskName,
};

/// Returns the current time, in the form that the state machine of leases uses.
fn now() -> machine::Instant {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

/// Pause between two attempts to read a record.
const PAUSE: Duration = Duration::from_secs(1);

/// The client of a lease.
#[derive(Debug)]
enum LeaseClient {
    /// No client waits for an answer.
    None,
    /// A client waits for the lease. The lock of its idempotency key is held meanwhile, so that one key gets only one
    /// lease.
    Waits { reply: Reply, _lock: Option<OwnedMutexGuard<()>> },
    /// The client has disconnected, but it can repeat the request with its idempotency key. So the lease does not end. The
    /// lock of the key is held until the grant is decided.
    MayRepeat { _lock: Option<OwnedMutexGuard<()>> },
    /// The client of an earlier gpushd has not reconnected yet.
    Away { until: tokio::time::Instant },
}

/// The request of a lease that is not granted yet.
#[derive(Debug)]
struct PendingRequest {
    resolved: Resolved,
    /// Determines what the answer shows.
    viewer: Viewer,
    /// The idempotency key that gpushd records with the grant; `None` if there is no key, or it is recorded already.
    key: Option<Key>,
    /// Whether the request has an idempotency key, so that its client can repeat it.
    has_key: bool,
}

/// A lease.
#[derive(Debug)]
pub(super) struct Actor {
    leases: Leases,
    state: State,
    /// The lease as gpushd shows it; `None` until it is recorded.
    lease: Option<OpenLease>,
    /// Effects of the state machine that are not executed yet.
    effects: VecDeque<Effect>,
    /// `None` if an earlier gpushd granted the lease, or queued it and the request is not resolved yet.
    request: Option<PendingRequest>,
    client: LeaseClient,
    /// The place of the request in the queue.
    place: Option<LeasePlace>,
    /// Time at which a waiting request times out; `None` if it waits without a limit.
    wait_until: Option<tokio::time::Instant>,
    reserved: Option<Reserved>,
    /// The operation that creates the devices of the lease, before it is executed.
    creation: Option<Creation>,
    /// Moves the caller into the scope of the lease.
    moving: Background<Result<(), NotMoved>>,
    /// Why the request ends without a grant, or why its grant was postponed.
    refusal: Option<ApiError>,
    /// Who has requested the end of the grant in progress.
    changed_by: Option<gpush_api::Actor>,
    /// Why an effect of a requested change has failed.
    failure: Option<ChangeError>,
    ending: EndProgress,
    /// The warnings before the lease expires.
    warnings: ExpiryWarnings,
    inbox: Inbox,
    commands: mpsc::UnboundedReceiver<LeaseCommand>,
    /// Whether the actor runs in its own task.
    has_task: bool,
    /// Whether a client waits for the lease, and cannot repeat its request. Another task of the lease can read this value
    /// if this one fails.
    is_unanswered: Arc<AtomicBool>,
    /// The failed task that this actor replaces.
    lost: Option<LostTask>,
}

/// A task of a lease that has failed.
#[derive(Debug)]
struct LostTask {
    /// The reservation with which it was recording a grant.
    reservation: Option<ReservationId>,
    /// Whether its client has got an error instead of the lease, and cannot repeat the request.
    is_unanswered: bool,
}

/// Whether a lease goes on after an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Flow {
    Continue,
    /// The actor ends: the lease has ended, or gpushd stops and the next gpushd continues with the lease.
    Stop,
}

impl Actor {
    fn new(leases: &Leases, state: State, lease: Option<OpenLease>) -> Self {
        let (inbox, commands) = Inbox::new();
        Self {
            leases: leases.clone(),
            state,
            lease,
            effects: VecDeque::new(),
            request: None,
            client: LeaseClient::None,
            place: None,
            wait_until: None,
            reserved: None,
            creation: None,
            moving: Background::default(),
            refusal: None,
            changed_by: None,
            failure: None,
            ending: EndProgress::default(),
            warnings: ExpiryWarnings::default(),
            inbox,
            commands,
            has_task: false,
            is_unanswered: Arc::default(),
            lost: None,
        }
    }

    /// Creates the actor of a new request. Returns it with the channel for its answer.
    fn of_request(
        leases: &Leases,
        resolved: Resolved,
        viewer: Viewer,
        key: Option<Key>,
        lock: Option<OwnedMutexGuard<()>>,
    ) -> (Self, oneshot::Receiver<Result<gpush_api::LeaseGrant, ApiError>>) {
        let (reply, answer) = oneshot::channel();
        let mut actor = Self::new(leases, State::Queued { recorded: false }, None);
        let has_key = key.is_some();
        actor.request = Some(PendingRequest { resolved, viewer, key, has_key });
        actor.client = LeaseClient::Waits { reply, _lock: lock };
        (actor, answer)
    }

    /// Creates the actor of an open lease of an earlier gpushd, or of a task that has failed. The effects of the last event
    /// may not have been executed, so repeats those that matter.
    fn of_open_lease(leases: &Leases, lease: OpenLease) -> Self {
        let (state, effects) = match lease.state {
            State::Releasing(releasing) => {
                let state = State::Releasing(Releasing { step: ReleaseStep::Processes, ..releasing });
                (state, vec![Effect::CloseAdmission, Effect::WatchProcesses])
            }
            State::Leaving { reason, .. } => (State::Leaving { reason, retry: false }, vec![Effect::RecordEnd(reason)]),
            state @ (State::Queued { .. }
            | State::Committing { .. }
            | State::Creating { .. }
            | State::Active
            | State::Ended(_)) => (state, Vec::new()),
        };
        let mut lease = lease;
        if lease.notice.is_none() {
            lease.notice = leases.handles.notices.last(lease.id());
        }
        let warnings = lease.notice.as_ref().map(ExpiryWarnings::after).unwrap_or_default();
        let mut actor = Self::new(leases, state, Some(lease));
        (actor.effects, actor.warnings) = (effects.into(), warnings);
        actor
    }

    fn id(&self) -> Option<LeaseId> {
        self.lease.as_ref().map(OpenLease::id)
    }

    /// Starts the task of a recorded lease.
    fn spawn(mut self) {
        let Some(id) = self.id() else { return };
        let leases = self.leases.clone();
        self.has_task = true;
        leases.actors.insert(id, self.inbox.clone());
        let is_unanswered = Arc::clone(&self.is_unanswered);
        is_unanswered.store(matches!(self.client, LeaseClient::Waits { .. }) && !self.has_key(), Ordering::Relaxed);
        let mut first = Some(self);
        leases.handles.context.tasks.clone().spawn_for(TaskName::Lease, format!("lease {id}"), move || {
            let actor =
                first.take().or_else(|| Self::after_failure(&leases, id, is_unanswered.load(Ordering::Relaxed)));
            async move {
                match actor {
                    Some(actor) => actor.run(id).await,
                    None => std::future::ready(()).await,
                }
            }
        });
    }

    /// Creates the actor that replaces one whose task has failed. Returns `None` if the lease has ended.
    fn after_failure(leases: &Leases, id: LeaseId, is_unanswered: bool) -> Option<Self> {
        let Some(lease) = leases.handles.context.state.leases().get(id).cloned() else {
            leases.actors.remove(id);
            return None;
        };
        let mut actor = Self::of_open_lease(leases, lease);
        actor.has_task = true;
        let table = leases.handles.context.state.leases();
        let reservation = table.reserved.iter().find(|(_, one)| one.lease == Some(id)).map(|(number, _)| *number);
        actor.lost = Some(LostTask { reservation, is_unanswered });
        // The waiting client gets an error, because the channel to it was lost. So no client waits for the lease.
        if matches!(actor.state, State::Queued { .. }) {
            actor.apply(Event::Released);
        }
        leases.actors.insert(id, actor.inbox.clone());
        Some(actor)
    }

    async fn run(mut self, id: LeaseId) {
        if let Some(lost) = self.lost.take() {
            self.continue_after(lost, id).await;
        }
        self.cancel_if_abandoned().await;
        loop {
            self.execute_effects().await;
            // Execute the operation only now, after gpushd has published that the lease is granting.
            drop(self.creation.take());
            if let State::Ended(_) = self.state {
                break;
            }
            let input = self.next_input().await;
            if self.handle(input).await == Flow::Stop {
                break;
            }
        }
        self.place = None;
        self.leases.actors.remove(id);
    }

    /// Finds out what the failed task has recorded since it last published the lease.
    async fn continue_after(&mut self, lost: LostTask, id: LeaseId) {
        self.read_record(id).await;
        if lost.is_unanswered {
            self.apply(Event::Released);
        }
        if let Some(reservation) = lost.reservation {
            self.leases.handles.context.state.change_leases(|table| table.reserved.remove(&reservation));
        }
    }

    /// Takes over what the failed task has recorded since it last published the lease.
    async fn read_record(&mut self, id: LeaseId) {
        let mut is_logged = false;
        let record = loop {
            // Read in a job that comes after the writes of the failed task.
            match self.leases.handles.context.store.write_ending(move |tx| tx.lease(id)).await {
                Ok(Some(record)) => break record,
                Ok(None) => return,
                Err(error) => {
                    if !std::mem::replace(&mut is_logged, true) {
                        tracing::warn!(lease = %id, "cannot read the record of lease {id}: {error}");
                    }
                    // Only a grant in progress must know its outcome.
                    if !matches!(self.state, State::Committing { .. })
                        || self.leases.handles.context.stopping.is_cancelled()
                    {
                        return;
                    }
                    tokio::time::sleep(PAUSE).await;
                }
            }
        };
        let (recorded, reason) = (record.state, record.reason);
        self.set_record(record);
        match (self.state, recorded) {
            (State::Committing { .. }, LeaseState::Active) => self.apply(Event::Committed),
            (State::Committing { .. }, LeaseState::Granting) => self.apply(Event::OperationBegun),
            (State::Committing { .. }, LeaseState::Queued | LeaseState::Releasing | LeaseState::Ended) => {
                self.apply(Event::CommitFailed);
            }
            (State::Active, LeaseState::Releasing) => {
                self.apply(release_event(reason));
                self.apply(Event::ReleaseRecorded);
                self.continue_revocation();
            }
            _ => self.publish(),
        }
    }

    /// Applies an event: changes the state, and publishes it together with what depends on it. Notes the effects.
    fn apply(&mut self, event: Event) {
        self.change(Some(event));
    }

    /// Publishes the record and what the lease waits for.
    fn publish(&mut self) {
        self.change(None);
    }

    fn change(&mut self, event: Option<Event>) {
        let state = self.leases.handles.context.state.clone();
        state.change_leases(|table| {
            self.follow(table);
            if let Some(event) = event {
                self.step(event);
            }
            self.put(table);
        });
        if let State::Leaving { .. } | State::Creating { .. } = self.state {
            self.place = None;
        }
        if self.is_granted() {
            // Operations on the GPUs may begin: they see the lease now.
            self.reserved = None;
        }
    }

    /// Returns whether the record of the lease holds its capacity.
    fn is_granted(&self) -> bool {
        self.lease.as_ref().is_some_and(|lease| lease.record.state.holds_capacity())
    }

    fn step(&mut self, event: Event) {
        let (state, effects) = machine::step(self.state, event, now());
        self.state = state;
        self.effects.extend(effects);
    }

    /// If the operation that creates the devices of the lease has ended, takes over its outcome.
    fn follow(&mut self, table: &LeaseTable) {
        let (State::Creating { .. }, Some(id)) = (self.state, self.id()) else { return };
        match table.get(id) {
            // The lease has ended with the operation.
            None => self.step(Event::OperationFailed),
            Some(open) if open.state.name() != LeaseState::Granting => {
                self.step(Event::Committed);
                if let Some(lease) = &mut self.lease {
                    lease.set_record(open.record.clone());
                }
            }
            Some(_) => {}
        }
    }

    /// Puts the lease into the table, or removes it. In the same change, removes the reservation if the record holds the
    /// capacity, or if the lease needs none any more.
    fn put(&mut self, table: &mut LeaseTable) {
        if (self.is_granted() || !self.state.reserves())
            && let Some(reserved) = &mut self.reserved
        {
            reserved.remove(table);
        }
        let Some(lease) = &mut self.lease else { return };
        lease.state = self.state;
        if let State::Ended(_) = self.state {
            lease.queue = None;
            if table.get(lease.id()).is_none() {
                return;
            }
        }
        table.put(lease.clone());
    }

    /// Replaces the record of the lease. Does not publish it.
    fn set_record(&mut self, record: gpush_store::LeaseRecord) {
        if let Some(lease) = &mut self.lease {
            lease.set_record(record);
        }
    }

    /// If the lease was revoked, ends its processes at the time that the record names.
    fn continue_revocation(&mut self) {
        let revocation = self.lease.as_ref().and_then(|lease| lease.record.revocation.as_ref());
        if let Some(at) = revocation.and_then(|revocation| revocation.processes_end_at) {
            let notice = Duration::try_from(at.duration_since(Timestamp::now())).unwrap_or_default();
            self.apply(Event::EndProcesses(EndProcesses { notice, grace: self.leases.grace() }));
        }
    }

    /// Returns whether the request has an idempotency key, so that its client can repeat it.
    fn has_key(&self) -> bool {
        self.request.as_ref().is_some_and(|request| request.has_key)
    }

    /// Applies the event for the end time of the lease.
    fn expire(&mut self) {
        let Some(lease) = &self.lease else { return };
        if self.state == State::Active && lease.has_expired(Timestamp::now(), Instant::now()) {
            tracing::info!(lease = %lease.id(), "lease {} has expired", lease.id());
            self.apply(Event::Expired);
        }
    }
}

/// Returns the event that starts the release of an active lease for this reason.
fn release_event(reason: Option<EndReason>) -> Event {
    match reason {
        Some(EndReason::Revoked) => Event::Revoked,
        Some(EndReason::Expired) => Event::Expired,
        Some(EndReason::GpuLost) => Event::GpuLost,
        Some(
            EndReason::Released | EndReason::Cancelled | EndReason::TimedOut | EndReason::Rebooted | EndReason::Failed,
        )
        | None => Event::Released,
    }
}

/// Takes over the leases of an earlier gpushd that are not queued. The module `restored` takes over the queued ones.
pub(crate) fn take_over(leases: &Leases) {
    let open: Vec<Arc<OpenLease>> = leases.handles.context.state.leases().open.values().cloned().collect();
    for lease in open {
        match lease.state.name() {
            LeaseState::Queued | LeaseState::Ended => {}
            LeaseState::Active | LeaseState::Releasing | LeaseState::Granting => {
                let mut actor = Actor::of_open_lease(leases, OpenLease::clone(&lease));
                actor.continue_revocation();
                actor.spawn();
            }
        }
    }
}
