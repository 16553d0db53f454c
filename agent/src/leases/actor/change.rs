//! Changes that users request. For an active lease, gpushd records the change with its audit record and idempotency key
//! before it applies the event. Policies end leases in the same way. If a request is
//! cancelled, gpushd records its end afterwards. gpushd replies only after it has recorded the change, or the end.

use std::time::Duration;

use gpush_api::{EndReason, LeaseId, LeaseKeep, LeaseRevocation};
use gpush_core::lease::machine::{EndProcesses, Event, State};
use gpush_host::proc;
use gpush_store::{AuditEvent, DONE, LeaseRecord, StoreError, Tx};
use jiff::{SignedDuration, Timestamp};

use super::{Actor, ChangeError, ChangeRequest, EndCheck, RequestedChange, SeenUnused};
use crate::{leases::processes, requests::idempotency::Key};

impl Actor {
    /// Makes a change for a user, and replies.
    pub(super) async fn change_for_user(&mut self, request: ChangeRequest) {
        let ChangeRequest { change, by, key, reply } = request;
        self.failure = None;
        if self.state.needs_retry() {
            // The reply says whether the end is recorded, so try again now.
            self.apply(Event::Tick);
        }
        let writes = Writes { by, key };
        let changed = match change {
            RequestedChange::Release { end } => self.release(writes, end).await,
            RequestedChange::Revoke { reason, end } => self.revoke(writes, reason, end).await,
            RequestedChange::Renew { expires_at } => self.renew(writes, expires_at).await,
            RequestedChange::Keep(keep) => self.keep(writes, keep).await,
            RequestedChange::EndByPolicy { reason, ends_processes, check } => {
                self.end_by_policy(writes, reason, ends_processes, check).await
            }
            RequestedChange::CheckEnd(check) => self.check_end(check).await,
        };
        // Cancelling a grant or a request has further effects, such as the record of its end. The reply comes after them.
        self.execute_effects().await;
        // It is unknown whether the grant is on disk, so the lease may be active after a restart.
        let unknown =
            || self.leases.handles.context.store.refusal().filter(|_| matches!(self.state, State::Committing { .. }));
        let failure = self.failure.take().or_else(|| unknown().map(ChangeError::Unrecorded));
        let changed = failure.map_or(changed, Err);
        let _the_client_may_be_gone = reply.send(changed);
    }

    async fn release(&mut self, writes: Writes, end: Option<EndProcesses>) -> Result<(), ChangeError> {
        match self.state {
            State::Queued { .. } | State::Committing { .. } | State::Creating { .. } => {
                self.changed_by = writes.by;
                self.apply(Event::Released);
            }
            State::Active => {
                self.record(move |tx, id| {
                    let record = tx.release_lease(id, EndReason::Released)?;
                    writes.write(tx, id, &AuditEvent::LeaseRelease { holder: record.holder.clone() })?;
                    Ok(record)
                })
                .await?;
                self.apply(Event::Released);
                self.apply(Event::ReleaseRecorded);
            }
            State::Releasing(_) | State::Leaving { .. } | State::Ended(_) => {}
        }
        self.end_processes(end);
        Ok(())
    }

    async fn revoke(&mut self, writes: Writes, reason: String, end: Option<EndProcesses>) -> Result<(), ChangeError> {
        match self.state {
            State::Queued { .. } | State::Committing { .. } | State::Creating { .. } => {
                self.changed_by = writes.by;
                self.apply(Event::Revoked);
                return Ok(());
            }
            State::Active | State::Releasing(_) => {}
            State::Leaving { .. } | State::Ended(_) => return Ok(()),
        }
        let end = end.or_else(|| {
            let record = &self.lease.as_ref()?.record;
            let ends = self.leases.rule_ends_processes(record);
            ends.then(|| EndProcesses { notice: NOTICE, grace: self.leases.grace() })
        });
        let at = Timestamp::now();
        let processes_end_at = end.and_then(|end| at.checked_add(SignedDuration::try_from(end.notice).ok()?).ok());
        let event = AuditEvent::LeaseRevoke { reason: Some(reason.clone()), end: end.is_some(), processes_end_at };
        let by = writes.by.clone().unwrap_or_else(gpushd);
        let revocation = LeaseRevocation { by, reason, at, processes_end_at };
        self.record(move |tx, id| {
            let record = tx.revoke_lease(id, revocation.clone())?;
            writes.write(tx, id, &event)?;
            Ok(record)
        })
        .await?;
        let is_repeated = matches!(self.state, State::Releasing(_));
        self.apply(Event::Revoked);
        self.apply(Event::ReleaseRecorded);
        self.end_processes(end);
        if is_repeated {
            // The machine tells the holder only once, but the reason is new.
            self.tell_revocation().await;
        }
        Ok(())
    }

    async fn renew(&mut self, writes: Writes, expires_at: Option<Timestamp>) -> Result<(), ChangeError> {
        if self.state != State::Active {
            return Err(ChangeError::Inactive);
        }
        let event = AuditEvent::LeaseRenew { expires_at };
        let Some(id) = self.id() else { return Err(ChangeError::Inactive) };
        let written = self.leases.handles.context.store.write(move |tx| {
            let record = tx.renew_lease(id, expires_at)?;
            writes.write(tx, id, &event)?;
            Ok(record)
        });
        self.set_record(written.await.map_err(ChangeError::Unrecorded)?);
        self.warnings.renewed(Timestamp::now());
        self.publish();
        Ok(())
    }

    async fn keep(&mut self, writes: Writes, keep: LeaseKeep) -> Result<(), ChangeError> {
        let (State::Active, Some(id)) = (self.state, self.id()) else { return Err(ChangeError::Inactive) };
        let event = AuditEvent::LeaseKeep { reason: keep.reason.clone(), until: Some(keep.until) };
        let recorded = keep.clone();
        let written = self.leases.handles.context.store.write(move |tx| {
            tx.keep_lease(id, recorded.clone())?;
            writes.write(tx, id, &event)
        });
        written.await.map_err(ChangeError::Unrecorded)?;
        if let Some(lease) = &mut self.lease {
            lease.keep = Some(keep);
        }
        self.publish();
        Ok(())
    }

    async fn end_by_policy(
        &mut self,
        writes: Writes,
        reason: String,
        ends_processes: bool,
        check: EndCheck,
    ) -> Result<(), ChangeError> {
        self.check_end(check).await?;
        let end = ends_processes.then(|| EndProcesses { notice: NOTICE, grace: self.leases.grace() });
        self.revoke(writes, reason, end).await
    }

    /// Checks that a policy may end the lease.
    async fn check_end(&self, check: EndCheck) -> Result<(), ChangeError> {
        match (check, self.state) {
            (EndCheck::Unused(seen), _) => self.check_unused(seen).await,
            (EndCheck::Active, State::Active) => Ok(()),
            (EndCheck::Active, _) => Err(ChangeError::Inactive),
        }
    }

    /// Checks that the lease is active and not kept, and that each of its processes was seen. The last sample can be some
    /// seconds old, and the holder may have begun to work since.
    async fn check_unused(&self, seen: SeenUnused) -> Result<(), ChangeError> {
        let (State::Active, Some(lease)) = (self.state, &self.lease) else { return Err(ChangeError::Inactive) };
        if lease.keep.as_ref().is_some_and(|keep| keep.until > Timestamp::now()) {
            return Err(ChangeError::Kept);
        }
        let left = processes::remaining_processes(&self.leases, lease, false).await;
        let uses_targets = left.remaining.driver != Some(0) || left.remaining.daemon != Some(0);
        let is_new = |pid: u32| proc::start(pid).is_some_and(|start| start > seen.sampled_at);
        if (seen.is_empty && uses_targets) || left.pids().any(is_new) {
            return Err(ChangeError::MayBeUsed);
        }
        Ok(())
    }

    fn end_processes(&mut self, end: Option<EndProcesses>) {
        if let Some(end) = end {
            self.apply(Event::EndProcesses(end));
            self.start_probe();
        }
    }

    /// Records that the lease is releasing, together with the other writes of the change.
    async fn record(
        &mut self,
        mut write: impl FnMut(&mut Tx<'_>, LeaseId) -> Result<LeaseRecord, StoreError> + Send + 'static,
    ) -> Result<(), ChangeError> {
        let Some(id) = self.id() else { return Ok(()) };
        let written = self.leases.handles.context.store.write_ending(move |tx| write(tx, id)).await;
        self.set_record(written.map_err(ChangeError::Unrecorded)?);
        Ok(())
    }
}

/// Returns gpushd as the author of a revocation.
fn gpushd() -> gpush_api::Actor {
    gpush_api::Actor { uid: nix::unistd::geteuid().as_raw(), user: Some("gpushd".to_owned()), pid: None }
}

/// Time from a revocation to SIGTERM, if the request does not set this time.
pub(in crate::leases) const NOTICE: Duration = Duration::from_secs(60);

/// What gpushd records with a change: the idempotency key of the request, and an audit record.
#[derive(Debug, Clone)]
struct Writes {
    /// The user; `None` for gpushd itself.
    by: Option<gpush_api::Actor>,
    key: Option<Key>,
}

impl Writes {
    fn write(&self, tx: &mut Tx<'_>, id: LeaseId, event: &AuditEvent) -> Result<(), StoreError> {
        if let Some(key) = &self.key {
            key.record_done(tx)?;
        }
        tx.audit(event.record(self.by.clone(), id.to_string(), DONE)).map(|_| ())
    }
}
