//! Effects of an operation's end on leases: the lease of the operation becomes active or ends, and
//! gpushd updates the record of the instances that gpushd has created.

use std::collections::BTreeSet;

use gpush_api::{EndReason, GpuPlan, GpuUuid, LeaseMember, MemberShare, Mig, OperationState, Placement, TargetUuid};
use gpush_core::{desired::created_after, lease::request::spec};
use gpush_store::{AuditEvent, AuditedDevices, LeaseRecord, LeaseTerms, OperationId, Store, StoreError, Tx};
use jiff::{SignedDuration, Timestamp};

use crate::{
    modes::mig::MigMode,
    state::{LeaseTable, OpenLease, OperationLeaseEffects, State},
};

/// The changes of leases that are recorded with the end of an operation.
#[derive(Debug, Clone, Default)]
pub(super) struct LeaseChanges {
    lease: Option<Granted>,
    /// For each GPU on which the operation created or destroyed instances: the UUID of the GPU, and
    /// the placements of all its instances that gpushd has created.
    created: Vec<(GpuUuid, BTreeSet<Placement>)>,
}

/// The lease for which the operation creates MIG devices.
#[derive(Debug, Clone)]
struct Granted {
    record: LeaseRecord,
    /// The MIG devices of the active lease; `None` if the lease ends.
    members: Option<Vec<LeaseMember>>,
    /// Why the lease ends if it does.
    end: EndReason,
}

/// Returns the reason with which a granting lease ends if its operation does not create its devices. If the holder
/// released the lease, or an administrator revoked it, that is the reason. Otherwise the reason is `Failed`.
fn end_reason(granting: &OpenLease) -> EndReason {
    granting.state.reason().unwrap_or(EndReason::Failed)
}

impl LeaseChanges {
    /// Determines which leases change when `operation` ends in `state`. `plans` are the plans that
    /// the operation began with.
    pub(super) async fn of(mig: &MigMode, operation: OperationId, plans: &[GpuPlan], state: OperationState) -> Self {
        let leases = mig.context.state.leases();
        let is_done = state == OperationState::Done;
        let mut lease = None;
        if let Some(granting) = leases.granting(operation) {
            let record = granting.record.clone();
            let members = if is_done { members(mig, &record, plans).await } else { None };
            lease = Some(Granted { record, members, end: end_reason(granting) });
        }
        Self { lease, created: created(&leases, plans, state) }
    }

    /// Records the changes in the transaction that records the end of the operation.
    pub(super) fn record(&self, tx: &mut Tx<'_>) -> Result<OperationLeaseEffects, StoreError> {
        for (gpu, placements) in &self.created {
            tx.set_created_instances(gpu, placements.clone())?;
        }
        let mut settled = OperationLeaseEffects { lease: None, created: self.created.clone() };
        let Some(Granted { record, members, end }) = &self.lease else { return Ok(settled) };
        let after = match members {
            Some(members) => {
                let terms = LeaseTerms { members: members.clone(), expires_at: expires_at(record) };
                tx.activate_lease(record.id, terms)?
            }
            None => tx.end_lease(record.id, *end)?,
        };
        let (devices, request_spec, holder) =
            (AuditedDevices::of(&after.members), spec(&after.request), after.holder.clone());
        let (event, result) = match members {
            Some(_) => (AuditEvent::LeaseGrant { devices, request_spec, holder }, "granted"),
            None => {
                let (devices, request_spec) = (Some(devices), Some(request_spec));
                (AuditEvent::LeaseEnd { devices, request_spec, holder }, end.name())
            }
        };
        tx.audit(event.record(Some(after.asked_by.clone()), after.id.to_string(), result))?;
        settled.lease = Some(after);
        Ok(settled)
    }
}

/// Ends the lease of an operation whose task has panicked.
pub(super) async fn abandon(state: &State, store: &Store, operation: OperationId) {
    let granting = state.leases().granting(operation).map(|lease| (lease.id(), end_reason(lease)));
    let Some((id, reason)) = granting else { return };
    match store.write_ending(move |tx| tx.end_lease(id, reason)).await {
        Ok(record) => {
            let settled = OperationLeaseEffects { lease: Some(record), created: Vec::new() };
            state.change_leases(|table| table.apply_operation_end(&settled));
        }
        // The lease stays open until gpushd restarts. The next gpushd ends it.
        Err(error) => tracing::error!(lease = %id, "cannot record the end of lease {id}: {error}"),
    }
}

/// Returns the end time of a lease that is granted now.
fn expires_at(record: &LeaseRecord) -> Option<Timestamp> {
    let span = SignedDuration::from_secs(i64::try_from(record.request.duration_s?).ok()?);
    Timestamp::now().checked_add(span).ok()
}

/// Returns the members of a lease, with the UUIDs of the created MIG devices. Returns `None` if a
/// GPU cannot be read or a device is missing.
async fn members(mig: &MigMode, record: &LeaseRecord, plans: &[GpuPlan]) -> Option<Vec<LeaseMember>> {
    let mut members = record.members.clone();
    for plan in plans {
        let reading = match mig.driver.readings.read_now(&plan.gpu_uuid).await {
            Ok(reading) => reading,
            Err(error) => {
                tracing::error!(lease = %record.id, "lease {}: its MIG devices were created, but cannot be read: {error}", record.id);
                return None;
            }
        };
        let created = reading.mig.as_ref().map(|mig| created_devices(mig, plan)).unwrap_or_default();
        assign_devices(&mut members, &plan.gpu_uuid, created)?;
    }
    members.iter().all(|member| !member.target.is_empty()).then_some(members)
}

/// Gives the devices that were created on a GPU to the members that do not have a device yet. Returns `None` if a device
/// is missing.
fn assign_devices(members: &mut [LeaseMember], gpu: &GpuUuid, mut created: Vec<CreatedDevice>) -> Option<()> {
    for member in members.iter_mut().filter(|member| member.gpu_uuid == *gpu && member.target.is_empty()) {
        let MemberShare::Mig { profile } = &member.share else { continue };
        let at = created.iter().position(|device| device.profile == *profile)?;
        let device = created.remove(at);
        (member.target, member.memory_mib) = (device.uuid, device.memory_mib.unwrap_or(member.memory_mib));
    }
    Some(())
}

/// A MIG device that a plan created.
struct CreatedDevice {
    profile: String,
    uuid: TargetUuid,
    memory_mib: Option<u64>,
}

fn created_devices(mig: &Mig, plan: &GpuPlan) -> Vec<CreatedDevice> {
    let placements = created_after(&BTreeSet::new(), plan);
    let new = mig.instances.iter().filter(|instance| placements.contains(&instance.placement));
    let devices = new.flat_map(|instance| {
        let memory_mib = instance.memory.map(|memory| memory.total_mib).filter(|mib| *mib > 0);
        instance.compute.iter().filter_map(move |compute| {
            Some(CreatedDevice { profile: compute.profile.clone(), uuid: compute.uuid.clone()?, memory_mib })
        })
    });
    devices.collect()
}

/// For each GPU on which the operation changed instances, returns the placements of the instances
/// that gpushd has created.
fn created(leases: &LeaseTable, plans: &[GpuPlan], state: OperationState) -> Vec<(GpuUuid, BTreeSet<Placement>)> {
    let after = |plan: &GpuPlan| {
        let before = leases.created.get(&plan.gpu_uuid).cloned().unwrap_or_default();
        let after = match state {
            OperationState::Done => created_after(&before, plan),
            // After a failed rollback, the GPU may have instances of the old and of the new layout.
            // So the set includes the placements of both layouts. The next reading removes the
            // placements without an instance from the set.
            OperationState::Failed => before.union(&created_after(&BTreeSet::new(), plan)).copied().collect(),
            // The set stays the same: nothing was changed, or the rollback created the destroyed
            // instances again at the same placements.
            OperationState::RolledBack
            | OperationState::NotStarted
            | OperationState::Queued
            | OperationState::Waiting
            | OperationState::Running
            | OperationState::Interrupted
            | OperationState::Cancelling => before.clone(),
        };
        (after != before).then(|| (plan.gpu_uuid.clone(), after))
    };
    plans.iter().filter_map(after).collect()
}

#[cfg(test)]
mod tests {
    use gpush_api::LeaseState;
    use gpush_core::lease::machine::{self, Event};

    use super::*;
    use crate::{
        modes::scene::{mig, mig_gpu, mig_member, plan_layout},
        state::leases::tests::record,
    };

    fn device(uuid: &str, profile: &str, memory_mib: Option<u64>) -> CreatedDevice {
        CreatedDevice { profile: profile.to_owned(), uuid: uuid.into(), memory_mib }
    }

    #[test]
    fn members_with_the_same_profile_get_different_devices() {
        let mut members = [
            mig_member("GPU-0", "MIG-9", "1g.10gb"),
            mig_member("GPU-0", "", "1g.10gb"),
            mig_member("GPU-1", "", "1g.10gb"),
            mig_member("GPU-0", "", "1g.10gb"),
            mig_member("GPU-0", "", "2g.20gb"),
        ];
        let created = || {
            vec![
                device("MIG-0", "2g.20gb", None),
                device("MIG-1", "1g.10gb", Some(9728)),
                device("MIG-2", "1g.10gb", Some(9728)),
            ]
        };
        assert_eq!(assign_devices(&mut members, &"GPU-0".into(), created()), Some(()));
        let devices = members.iter().map(|member| (member.target.as_str(), member.memory_mib));
        let expected = [("MIG-9", 1), ("MIG-1", 9728), ("", 1), ("MIG-2", 9728), ("MIG-0", 1)];
        assert_eq!(devices.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn lease_without_one_of_its_devices_is_not_granted() {
        let mut members = [mig_member("GPU-0", "", "1g.10gb"), mig_member("GPU-0", "", "1g.10gb")];
        assert_eq!(assign_devices(&mut members, &"GPU-0".into(), vec![device("MIG-1", "1g.10gb", None)]), None);
    }

    /// The other devices were there before, and other leases may use them.
    #[test]
    fn created_devices_are_those_that_the_plan_created() {
        let gpu = mig_gpu(&["1g.10gb@0"]);
        let plan = plan_layout(&gpu, &["1g.10gb@0", "1g.10gb@3"]);
        let created = created_devices(&mig(&["1g.10gb@0", "1g.10gb@3"]), &plan);
        assert_eq!(created.iter().map(|device| device.uuid.as_str()).collect::<Vec<_>>(), ["MIG-1"]);
    }

    /// gpushd destroys only instances in this record of what it created. The record must not contain an instance of another
    /// program, and must not lose one of gpushd.
    #[test]
    fn created_instances_follow_the_end_of_the_operation() {
        let gpu = mig_gpu(&["1g.10gb@0", "3g.40gb@4"]);
        let plan = plan_layout(&gpu, &["2g.20gb@0", "3g.40gb@4"]);
        let at = |start, size| Placement { start, size };
        let table = |placements: &[Placement]| {
            let created = BTreeSet::from_iter(placements.iter().copied());
            LeaseTable::new(Vec::new(), [("GPU-0".into(), created)].into())
        };
        let after = |before: &[Placement], state| {
            let changed = created(&table(before), std::slice::from_ref(&plan), state);
            changed.into_iter().next().map(|(_, placements)| placements.into_iter().collect::<Vec<_>>())
        };
        let (own, new) = (at(0, 1), at(0, 2));
        assert_eq!(after(&[own], OperationState::Done), Some(vec![new]));
        assert_eq!(after(&[], OperationState::Done), Some(vec![new]), "the destroyed instance was of another program");
        assert_eq!(after(&[own], OperationState::Failed), Some(vec![own, new]), "either may exist");
        assert_eq!(after(&[own], OperationState::RolledBack), None);
        assert_eq!(after(&[own], OperationState::NotStarted), None);
    }

    /// Fault: if a holder released a lease while gpushd granted it, the event said `cancelled`, but the record of the
    /// lease said that the grant failed.
    #[test]
    fn lease_that_ends_while_it_is_granted_keeps_the_reason() {
        let granting = || OpenLease::new(LeaseRecord { state: LeaseState::Granting, ..record(1, 1000, "GPU-0") });
        assert_eq!(end_reason(&granting()), EndReason::Failed);
        for (event, reason) in [(Event::Released, EndReason::Cancelled), (Event::Revoked, EndReason::Revoked)] {
            let mut lease = granting();
            (lease.state, _) = machine::step(lease.state, event, machine::Instant::ZERO);
            assert_eq!(end_reason(&lease), reason);
            // The event of the end has the same reason.
            let (ended, _) = machine::step(lease.state, Event::OperationFailed, machine::Instant::ZERO);
            assert_eq!(ended.reason(), Some(reason));
        }
    }
}
