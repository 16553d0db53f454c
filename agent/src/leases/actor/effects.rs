//! Executes the effects of the state machine, in order. If an effect has an outcome, the outcome is the next event.

use std::time::Duration;

use gpush_api::{EndReason, LeaseMember, LeaseState};
use gpush_core::lease::machine::{Effect, Event};
use gpush_store::{AuditEvent, LeaseRecord, StoreError};
use nix::sys::signal::Signal;
use tokio::time::Instant;

use super::{Actor, ChangeError, LeaseClient};
use crate::{
    leases::{log, scope_devices},
    modes::mps,
};

/// Pause between two attempts to record the end of a lease.
const RETRY: Duration = Duration::from_secs(1);

impl Actor {
    /// Executes all noted effects, and the effects that follow from their outcomes. Before the lease is recorded, stops as
    /// soon as it is recorded: the task of the lease continues.
    pub(super) async fn execute_effects(&mut self) {
        // gpushd does not exit while an effect is being executed.
        let _unfinished = self.leases.handles.context.tasks.unfinished();
        while let Some(effect) = self.effects.pop_front() {
            let outcome = self.execute(effect).await;
            if let Some(event) = outcome {
                self.apply(event);
            }
            if !self.has_task && self.lease.is_some() {
                return;
            }
        }
    }

    async fn execute(&mut self, effect: Effect) -> Option<Event> {
        match effect {
            Effect::CommitGrant => self.commit_grant().await,
            Effect::CancelOperation => {
                self.cancel_operation().await;
                None
            }
            Effect::WaitAgain => {
                self.wait_again();
                None
            }
            // The scope of the lease does not exist yet: it is created with its devices.
            Effect::OpenAdmission => {
                mps::admit(&self.leases.handles.mps, self.members()).await;
                None
            }
            Effect::CloseAdmission => {
                mps::admit(&self.leases.handles.mps, self.members()).await;
                if let Some(lease) = &self.lease {
                    scope_devices::close(&self.leases, &lease.record).await;
                }
                None
            }
            Effect::RecordReleasing(reason) => self.record_releasing(reason).await,
            Effect::WatchProcesses => {
                self.start_probe();
                None
            }
            Effect::TellEnd(reason) => {
                self.tell_end(reason).await;
                None
            }
            Effect::Notify(at) => {
                if let Some(lease) = &self.lease {
                    let left = at.saturating_sub(super::now()).as_secs();
                    let what = format!("ends: its processes get SIGTERM in {left} s");
                    log::change(&self.leases.handles.context.state, &lease.record, what);
                }
                self.tell_revocation().await;
                None
            }
            Effect::Terminate => {
                self.signal(Signal::SIGTERM).await;
                None
            }
            Effect::Kill => {
                self.signal(Signal::SIGKILL).await;
                None
            }
            Effect::RecordEnd(reason) => Some(self.record_end(reason).await),
            Effect::FreeCapacity => {
                self.free_capacity().await;
                None
            }
            Effect::ReportGrant => {
                self.report_grant().await;
                None
            }
            Effect::ReportEnd(reason) => {
                self.report_end(reason).await;
                None
            }
        }
    }

    /// Returns the targets of the lease.
    fn members(&self) -> &[LeaseMember] {
        self.lease.as_ref().map_or(&[], |lease| &lease.record.members)
    }

    /// Records that the lease is releasing. Until this is recorded, the lease is active after a restart of gpushd. gpushd
    /// then ends it again if its binding has ended, it has expired or its GPU is lost, but not if only its client has
    /// disconnected.
    async fn record_releasing(&mut self, reason: EndReason) -> Option<Event> {
        let id = self.id()?;
        let written = self.leases.handles.context.store.write_ending(move |tx| {
            let record = tx.release_lease(id, reason)?;
            let event = AuditEvent::LeaseRelease { holder: record.holder.clone() };
            tx.audit(event.record(None, id.to_string(), reason.name()))?;
            Ok(record)
        });
        match written.await {
            Ok(record) => {
                self.set_record(record);
                Some(Event::ReleaseRecorded)
            }
            // The release is recorded already: the task that recorded it has failed.
            Err(StoreError::LeaseTransition { from: LeaseState::Releasing, .. }) => Some(Event::ReleaseRecorded),
            Err(error) => {
                if !std::mem::replace(&mut self.ending.logged.releasing, true) {
                    tracing::error!(
                        "cannot record that lease {id} is releasing; gpushd tries again until it succeeds: {error}"
                    );
                }
                None
            }
        }
    }

    async fn record_end(&mut self, reason: EndReason) -> Event {
        let Some(lease) = &self.lease else { return Event::EndRecorded };
        let id = lease.id();
        let written = self.leases.handles.context.store.write_ending(move |tx| {
            let record = tx.end_lease(id, reason)?;
            tx.audit(ended_by_gpushd(&record).record(None, id.to_string(), reason.name())).map(|_| ())
        });
        match written.await {
            Ok(()) => {
                log::change(&self.leases.handles.context.state, &lease.record, format!("ended: {reason}"));
                Event::EndRecorded
            }
            // The end is recorded already: the task that recorded it has failed.
            Err(StoreError::NoSuchLease(_) | StoreError::LeaseTransition { from: LeaseState::Ended, .. }) => {
                Event::EndRecorded
            }
            Err(error) => {
                if !std::mem::replace(&mut self.ending.logged.end, true) {
                    tracing::error!(
                        "cannot record the end of lease {id}; gpushd tries again until it succeeds: {error}"
                    );
                }
                self.failure = Some(ChangeError::Unrecorded(error));
                self.ending.retry = Some(Instant::now() + RETRY);
                Event::EndNotRecorded
            }
        }
    }

    /// Makes the capacity available. The table has not contained it since the event that caused this effect.
    async fn free_capacity(&mut self) {
        // An operation on the GPU must be able to begin before the queue is served again, so drop the guards first.
        let members = self.reserved.take().map(|reserved| reserved.members.clone());
        let members = members.as_deref().unwrap_or_else(|| self.members());
        mps::admit(&self.leases.handles.mps, members).await;
        self.leases.handles.scheduler.capacity_freed();
    }

    /// Logs why the grant of the request was postponed. The request is still in the queue.
    fn wait_again(&mut self) {
        let error = self.refusal.take();
        if let (Some(id), Some(error)) = (self.id(), error) {
            // The GPU has changed since the placement, or gpushd cannot read it at the moment.
            tracing::info!(lease = %id, "lease {id} is queued again: {error}");
        }
    }

    /// Counts a request that ended in the queue. Requests that are refused at once are counted where they arrive.
    fn count_as_refused(&self) {
        if let Some(lease) = &self.lease {
            let (uid, kind) = (lease.record.holder.uid, lease.record.request.share.kind());
            self.leases.handles.context.refused.note(uid, kind);
        }
    }

    async fn report_end(&mut self, reason: EndReason) {
        self.place = None;
        if let Some(id) = self.id() {
            self.leases.handles.notices.close(id);
            scope_devices::forget(&self.leases, id);
        }
        self.moving.stop();
        let client = std::mem::replace(&mut self.client, LeaseClient::None);
        if let LeaseClient::Waits { reply, .. } = client {
            let error = match self.refusal.take() {
                Some(error) => error,
                None => match self.operation_error().await {
                    Some(error) => error,
                    None => {
                        self.count_as_refused();
                        self.end_error(reason)
                    }
                },
            };
            let _the_client_may_be_gone = reply.send(Err(error));
        }
        self.leases.handles.scheduler.capacity_freed();
    }
}

fn ended_by_gpushd(record: &LeaseRecord) -> AuditEvent {
    AuditEvent::LeaseEnd { devices: None, request_spec: None, holder: record.holder.clone() }
}
