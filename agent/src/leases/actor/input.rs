//! Waits for the next event of a lease, and handles it.

use std::time::Duration;

use gpush_api::{ApiError, EndReason, LeaseState};
use gpush_core::lease::machine::{Event, State};
use jiff::Timestamp;
use tokio::time::Instant;

use super::{Actor, Flow, LeaseClient, LeaseCommand, end::Probe, now};
use crate::{
    leases::scope::NotMoved,
    operations::scheduler::{LeaseAnswer, Reserved},
    state::OpenLease,
};

/// Interval at which gpushd reads the clock. If the clock is set forward past the end time of a
/// lease, the lease ends at most this much later.
const CLOCK: Duration = Duration::from_secs(30);

/// What an actor must react to.
#[derive(Debug)]
pub(super) enum Input {
    Command(LeaseCommand),
    /// The process, scope or cgroup that the lease is bound to has ended.
    BindingEnded,
    /// The operation that creates the devices of the lease has ended.
    OperationEnded,
    /// systemd has moved the caller into the scope of the lease, or has failed.
    Moved(Result<(), NotMoved>),
    /// A probe for the processes of the lease has finished.
    Probed(Probe),
    /// A process that the lease waits for has ended.
    ProcessEnded,
    /// One of the times of the lease has come.
    Timer,
    /// gpushd is stopping.
    Stopping,
}

impl Actor {
    /// Waits for the next input.
    pub(super) async fn next_input(&mut self) -> Input {
        let is_active = self.state == State::Active && !self.moving.is_running();
        let is_creating = matches!(self.state, State::Creating { .. });
        let is_queued = matches!(self.state, State::Queued { .. });
        let timer = self.next_time();
        let stopping = self.leases.handles.context.stopping.clone();
        let Self { leases, lease, commands, moving, ending, .. } = self;
        let lease = lease.as_ref();
        let bound = async {
            match lease {
                Some(lease) if is_active => super::binding::ended(lease).await,
                _ => std::future::pending().await,
            }
        };
        let operation = async {
            match lease {
                Some(lease) if is_creating => super::grant::wait_until_decided(leases, lease.id()).await,
                _ => std::future::pending().await,
            }
        };
        let timer = async {
            match timer {
                Some(at) => tokio::time::sleep_until(at).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            // The actor has a sender itself, so the channel never closes.
            Some(command) = commands.recv() => Input::Command(command),
            () = bound => Input::BindingEnded,
            () = operation => Input::OperationEnded,
            result = moving.finished() => Input::Moved(result),
            probe = ending.probe.finished() => Input::Probed(probe),
            () = ending.process_end.finished() => Input::ProcessEnded,
            () = timer => Input::Timer,
            () = stopping.cancelled(), if is_queued => Input::Stopping,
        }
    }

    /// Returns the next time at which the actor must react; `None` if there is none.
    fn next_time(&self) -> Option<Instant> {
        let away = match self.client {
            LeaseClient::Away { until } => Some(until),
            LeaseClient::None | LeaseClient::Waits { .. } | LeaseClient::MayRepeat { .. } => None,
        };
        let retry = self.ending.retry.filter(|_| self.state.needs_retry());
        let own = match self.state {
            State::Queued { .. } => self.wait_until,
            State::Active => self.lease.as_ref().and_then(|lease| {
                lease.record.expires_at?;
                let left = lease.deadline.map_or(CLOCK, |end| end.saturating_duration_since(std::time::Instant::now()));
                let end = Instant::now() + left.min(CLOCK);
                Some(self.next_warning().map_or(end, |warning| warning.min(end)))
            }),
            State::Releasing(_) if self.state.needs_retry() => None,
            State::Releasing(_) => self.ending.next_probe(self.state.due().map(|due| due.saturating_sub(now()))),
            State::Committing { .. } | State::Creating { .. } | State::Leaving { .. } | State::Ended(_) => None,
        };
        [away, retry, own].into_iter().flatten().min()
    }

    /// Handles an input.
    pub(super) async fn handle(&mut self, input: Input) -> Flow {
        match input {
            Input::Command(command) => return self.obey(command).await,
            Input::BindingEnded => {
                if let Some(id) = self.id() {
                    tracing::info!(lease = %id, "lease {id}: the process that it is bound to has ended, or its cgroup \
                        is empty");
                }
                self.apply(Event::BindingEnded);
            }
            Input::OperationEnded => self.publish(),
            Input::Moved(result) => self.scope_moved(result).await,
            Input::Probed(probe) => self.probed(probe),
            Input::ProcessEnded => self.probe_soon(),
            Input::Timer => {
                self.time_has_come();
                self.warn_of_expiry().await;
            }
            // The request stays recorded as queued, and the next gpushd takes it over. Dropping the channel answers the
            // client with an error.
            Input::Stopping => return Flow::Stop,
        }
        Flow::Continue
    }

    fn time_has_come(&mut self) {
        let now = Instant::now();
        if let LeaseClient::Away { until } = self.client
            && until <= now
        {
            if let Some(id) = self.id() {
                tracing::info!("lease {id} is cancelled: its client has not reconnected");
            }
            self.client_gone();
        }
        match self.state {
            State::Queued { .. } if self.wait_until.is_some_and(|until| until <= now) => {
                self.apply(Event::WaitTimedOut);
            }
            State::Active => self.expire(),
            State::Releasing(_) if !self.state.needs_retry() => {
                if self.ending.is_due(self.state.due().is_some_and(|due| due <= super::now())) {
                    self.start_probe();
                }
            }
            State::Releasing(_) | State::Leaving { .. } => {
                if self.ending.retry.is_some_and(|at| at <= now) {
                    self.apply(Event::Tick);
                }
            }
            State::Queued { .. } | State::Committing { .. } | State::Creating { .. } | State::Ended(_) => {}
        }
    }

    async fn obey(&mut self, command: LeaseCommand) -> Flow {
        match command {
            LeaseCommand::Change(request) => self.change_for_user(request).await,
            LeaseCommand::ClientGone => {
                // If gpushd is stopping, the request keeps its place, and its client can reconnect to the next gpushd.
                if matches!(self.state, State::Queued { .. }) && self.leases.handles.context.stopping.is_cancelled() {
                    return Flow::Stop;
                }
                let may_repeat = self.has_key() && !matches!(self.state, State::Queued { .. });
                match std::mem::replace(&mut self.client, LeaseClient::None) {
                    LeaseClient::Waits { _lock, .. } if may_repeat => self.client = LeaseClient::MayRepeat { _lock },
                    // The client disconnected while it was being answered.
                    _ if may_repeat => {}
                    _ => self.client_gone(),
                }
            }
            LeaseCommand::GpuLost => {
                if let (State::Active, Some(id)) = (self.state, self.id()) {
                    tracing::warn!(lease = %id, "lease {id} ends: its GPU or MIG device does not exist any more");
                }
                self.apply(Event::GpuLost);
            }
            LeaseCommand::Warn(warning) => self.warn(warning).await,
            LeaseCommand::SendPolicyNotice { news, reply } => {
                let _the_policy_task_may_be_gone = reply.send(self.tell_policy(news).await);
            }
            LeaseCommand::Scheduled(answer) => self.follow_scheduler(answer).await,
            LeaseCommand::Rejoin(rejoin) => self.rejoin(*rejoin).await,
        }
        Flow::Continue
    }

    async fn follow_scheduler(&mut self, answer: LeaseAnswer) {
        match answer {
            LeaseAnswer::Grant(reserved) => self.use_capacity(reserved),
            LeaseAnswer::Waits(position) => {
                if let (State::Queued { .. }, Some(lease)) = (self.state, &mut self.lease) {
                    lease.queue = Some(position);
                    self.publish();
                }
            }
            LeaseAnswer::Never(error) => {
                if matches!(self.state, State::Queued { .. }) {
                    self.refusal = Some(error);
                    self.apply(Event::Refused);
                }
            }
            LeaseAnswer::Resolve(seen, done) => {
                self.resolve(&seen).await;
                drop(done);
            }
        }
    }

    /// Ends the lease, because its client does not wait any more. An operation continues: the lease ends when the grant
    /// cannot be answered.
    fn client_gone(&mut self) {
        self.client = LeaseClient::None;
        if !matches!(self.state, State::Creating { .. }) {
            self.apply(Event::Released);
        }
    }

    /// Records the grant with this capacity, if the request still waits.
    pub(super) fn use_capacity(&mut self, reserved: Reserved) {
        // Otherwise the capacity is freed when `reserved` is dropped.
        if matches!(self.state, State::Queued { .. }) {
            self.reserved = Some(reserved);
            self.apply(Event::Reserved);
        }
    }

    /// Returns the error for a client whose request ends for this reason.
    pub(super) fn end_error(&self, reason: EndReason) -> ApiError {
        use gpush_api::Code;
        let Some(lease) = &self.lease else {
            return ApiError::new(Code::Cancelled, "the request was cancelled before it was granted");
        };
        let id = lease.id();
        match reason {
            EndReason::TimedOut => {
                let mut error =
                    ApiError::new(Code::TimedOut, format!("lease {id} was not granted in time")).retryable();
                error.causes = lease.queue.as_ref().map(|queue| queue.reasons.clone()).unwrap_or_default();
                error.hint("request it again with a longer `--wait`")
            }
            EndReason::Revoked => ApiError::new(Code::Cancelled, format!("an administrator revoked lease {id}")),
            EndReason::Released
            | EndReason::Expired
            | EndReason::Cancelled
            | EndReason::Rebooted
            | EndReason::GpuLost
            | EndReason::Failed => {
                ApiError::new(Code::Cancelled, format!("lease {id} was cancelled before it was granted"))
            }
        }
    }
}

/// Returns the time at which a queued request times out; `None` if it has no limit.
pub(super) fn wait_until(lease: &OpenLease) -> Option<Instant> {
    match lease.record.request.wait {
        gpush_api::LeaseWait::Seconds(seconds) if lease.state.name() == LeaseState::Queued => {
            let spent = Timestamp::now().duration_since(lease.record.created_at);
            let left = Duration::from_secs(seconds).saturating_sub(Duration::try_from(spent).unwrap_or_default());
            Instant::now().checked_add(left)
        }
        gpush_api::LeaseWait::Seconds(_) | gpush_api::LeaseWait::No | gpush_api::LeaseWait::Unlimited => None,
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::LeaseWait;
    use jiff::SignedDuration;

    use super::*;
    use crate::state::leases::tests::record;

    /// Fault: a restart of gpushd gave a waiting request its whole time again.
    #[tokio::test(start_paused = true)]
    async fn restored_request_waits_only_for_the_rest_of_its_time() {
        let lease = |wait, state, age: i64| {
            let mut record = record(1, 1000, "GPU-0");
            (record.request.wait, record.state) = (wait, state);
            record.created_at = Timestamp::now() - SignedDuration::from_secs(age);
            OpenLease::new(record)
        };
        let left = |wait, state, age| wait_until(&lease(wait, state, age)).map(|until| until - Instant::now());
        let minute = LeaseWait::Seconds(60);
        let rest = left(minute, LeaseState::Queued, 40).unwrap();
        assert!(rest <= Duration::from_secs(20) && rest > Duration::ZERO, "{rest:?}");
        assert_eq!(left(minute, LeaseState::Queued, 3600), Some(Duration::ZERO), "gpushd was down for longer");
        assert_eq!(left(LeaseWait::Unlimited, LeaseState::Queued, 3600), None);
        assert_eq!(left(minute, LeaseState::Active, 3600), None, "only queued requests time out");
    }
}
