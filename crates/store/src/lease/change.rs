//! Changes of leases. Each change writes one record. The caller puts the change into one
//! transaction with the other changes that belong to it. The state machine of leases says which changes of the recorded
//! state are legal ([`may_record`]).

use gpush_api::{EndReason, LeaseBinding, LeaseId, LeaseMember, LeaseRevocation, LeaseState};
use gpush_core::lease::machine::may_record;
use jiff::Timestamp;

use super::{LeaseRecord, LeaseSource, LeaseTerms, NewLease};
use crate::{
    error::StoreError,
    fact::{Fact, LAST_LEASE},
    operation::OperationId,
    record,
    tx::Tx,
};

impl Tx<'_> {
    /// Returns a lease, with the changes of earlier transactions and of this one.
    ///
    /// # Errors
    /// If the store cannot be read.
    pub fn lease(&self, id: LeaseId) -> Result<Option<LeaseRecord>, StoreError> {
        self.view().lease(id)
    }

    /// Records a lease that waits for capacity. Lease numbers give the order of arrival.
    ///
    /// # Errors
    /// Fails if the store cannot write the record.
    pub fn queue_lease(&mut self, new: NewLease) -> Result<LeaseRecord, StoreError> {
        let lease = self.new_lease(new)?;
        self.put_lease(lease)
    }

    /// Records a lease as active. All targets of the lease already exist, so no operation has to create them first.
    ///
    /// # Errors
    /// Fails if the lease has left the queue, or if the store cannot write the record.
    pub fn grant_lease(&mut self, source: LeaseSource, terms: LeaseTerms) -> Result<LeaseRecord, StoreError> {
        let lease = self.granted(source, LeaseState::Active)?;
        let (members, expires_at, granted_at) = (terms.members, terms.expires_at, Some(self.now));
        self.put_lease(LeaseRecord { state: LeaseState::Active, members, expires_at, granted_at, ..lease })
    }

    /// Records a lease as granting, in the transaction that begins `operation`.
    ///
    /// # Errors
    /// Fails if the lease has left the queue, or if the store cannot write the record.
    pub fn begin_lease(
        &mut self,
        source: LeaseSource,
        members: Vec<LeaseMember>,
        operation: OperationId,
    ) -> Result<LeaseRecord, StoreError> {
        let lease = self.granted(source, LeaseState::Granting)?;
        self.put_lease(LeaseRecord { state: LeaseState::Granting, members, operation: Some(operation), ..lease })
    }

    /// Records a granting lease as active, in the transaction that ends its operation. The members
    /// are the instances that the operation created, as read back from the driver.
    ///
    /// # Errors
    /// Fails if the lease is not granting, or if the store cannot write the record.
    pub fn activate_lease(&mut self, id: LeaseId, terms: LeaseTerms) -> Result<LeaseRecord, StoreError> {
        let lease = self.lease_before(id, LeaseState::Active)?;
        if lease.state != LeaseState::Granting {
            return Err(StoreError::LeaseTransition { lease: id, from: lease.state, to: LeaseState::Active });
        }
        let (members, expires_at, granted_at) = (terms.members, terms.expires_at, Some(self.now));
        self.put_lease(LeaseRecord { state: LeaseState::Active, members, expires_at, granted_at, ..lease })
    }

    /// Sets the process, scope or job that a lease is bound to. The lease ends when that process,
    /// scope or job ends. Call this in the transaction that records the lease.
    ///
    /// # Errors
    /// Fails if the lease has ended, or if the store cannot write the record.
    pub fn bind_lease(&mut self, id: LeaseId, binding: LeaseBinding) -> Result<LeaseRecord, StoreError> {
        let lease = self.view().lease(id)?.ok_or(StoreError::NoSuchLease(id))?;
        if lease.state == LeaseState::Ended {
            return Err(StoreError::LeaseTransition { lease: id, from: lease.state, to: lease.state });
        }
        self.put_lease(LeaseRecord { binding, ..lease })
    }

    /// Sets a new end time.
    ///
    /// # Errors
    /// Fails if the lease is not active, or if the store cannot write the record.
    pub fn renew_lease(&mut self, id: LeaseId, expires_at: Option<Timestamp>) -> Result<LeaseRecord, StoreError> {
        let lease = self.view().lease(id)?.ok_or(StoreError::NoSuchLease(id))?;
        if lease.state != LeaseState::Active {
            return Err(StoreError::LeaseTransition { lease: id, from: lease.state, to: LeaseState::Active });
        }
        self.put_lease(LeaseRecord { expires_at, ..lease })
    }

    /// Changes an active lease to the state `releasing`. Send this change through [`crate::Store::write_ending`].
    ///
    /// # Errors
    /// Fails if the lease is not active, or if the store cannot write the record.
    pub fn release_lease(&mut self, id: LeaseId, reason: EndReason) -> Result<LeaseRecord, StoreError> {
        let lease = self.lease_before(id, LeaseState::Releasing)?;
        self.put_lease(LeaseRecord { state: LeaseState::Releasing, reason: Some(reason), ..lease })
    }

    /// Records a revocation. An active lease becomes releasing; a releasing lease keeps its reason. Send this change
    /// through [`crate::Store::write_ending`].
    ///
    /// # Errors
    /// Fails if the lease is neither active nor releasing, or if the store cannot write the record.
    pub fn revoke_lease(&mut self, id: LeaseId, revocation: LeaseRevocation) -> Result<LeaseRecord, StoreError> {
        let lease = self.view().lease(id)?.ok_or(StoreError::NoSuchLease(id))?;
        if lease.state != LeaseState::Releasing && !may_record(lease.state, LeaseState::Releasing) {
            return Err(StoreError::LeaseTransition { lease: id, from: lease.state, to: LeaseState::Releasing });
        }
        // Keep the time that the first revocation announced to the holder.
        let first = lease.revocation.as_ref().and_then(|revocation| revocation.processes_end_at);
        let processes_end_at = first.or(revocation.processes_end_at);
        let revocation = Some(LeaseRevocation { processes_end_at, ..revocation });
        let reason = lease.reason.or(Some(EndReason::Revoked));
        self.put_lease(LeaseRecord { state: LeaseState::Releasing, reason, revocation, ..lease })
    }

    /// Records that a lease ended. A releasing lease keeps its reason. Send this change through
    /// [`crate::Store::write_ending`].
    ///
    /// # Errors
    /// Fails if the lease has ended, or if the store cannot write the record.
    pub fn end_lease(&mut self, id: LeaseId, reason: EndReason) -> Result<LeaseRecord, StoreError> {
        let lease = self.lease_before(id, LeaseState::Ended)?;
        let (reason, ended_at) = (lease.reason.or(Some(reason)), Some(self.now));
        self.put_lease(LeaseRecord { state: LeaseState::Ended, reason, ended_at, ..lease })
    }

    /// Ends the leases of earlier boots with the reason `Rebooted`, and returns these leases. Send this change through
    /// [`crate::Store::write_ending`].
    ///
    /// # Errors
    /// Fails if the store cannot write the record.
    pub fn end_leases_of_other_boots(&mut self) -> Result<Vec<LeaseRecord>, StoreError> {
        let open = self.view().open_leases()?;
        let other = open.into_iter().filter(|lease| lease.boot_id != self.boot_id);
        let other: Vec<LeaseId> = other.map(|lease| lease.id).collect();
        other.into_iter().map(|id| self.end_lease(id, EndReason::Rebooted)).collect()
    }

    fn granted(&mut self, source: LeaseSource, to: LeaseState) -> Result<LeaseRecord, StoreError> {
        match source {
            LeaseSource::New(new) => self.new_lease(*new),
            LeaseSource::Queued(id) => {
                let lease = self.lease_before(id, to)?;
                // Only the operation of a granting lease makes it active.
                if lease.state == LeaseState::Queued {
                    Ok(lease)
                } else {
                    Err(StoreError::LeaseTransition { lease: id, from: lease.state, to })
                }
            }
        }
    }

    /// Creates a queued lease with the next number, but does not write the record.
    fn new_lease(&mut self, new: NewLease) -> Result<LeaseRecord, StoreError> {
        let id = LeaseId(self.view().last_lease()?.0 + 1);
        record::put(self.connection, &Fact { name: LAST_LEASE.to_owned(), value: id.0.to_string() })?;
        Ok(LeaseRecord {
            id,
            sequence: self.head.sequence,
            holder: new.holder,
            asked_by: new.asked_by,
            kind: new.kind,
            state: LeaseState::Queued,
            reason: None,
            request: new.request,
            members: Vec::new(),
            binding: new.binding,
            operation: None,
            created_at: self.now,
            granted_at: None,
            expires_at: None,
            ended_at: None,
            revocation: None,
            boot_id: self.boot_id.to_owned(),
        })
    }

    /// Returns a lease whose recorded state may change to `to`.
    fn lease_before(&self, id: LeaseId, to: LeaseState) -> Result<LeaseRecord, StoreError> {
        let lease = self.view().lease(id)?.ok_or(StoreError::NoSuchLease(id))?;
        if may_record(lease.state, to) {
            Ok(lease)
        } else {
            Err(StoreError::LeaseTransition { lease: id, from: lease.state, to })
        }
    }

    fn put_lease(&mut self, lease: LeaseRecord) -> Result<LeaseRecord, StoreError> {
        let lease = LeaseRecord { sequence: self.next_sequence(), ..lease };
        record::put(self.connection, &lease)?;
        Ok(lease)
    }
}
