//! Leases that have not ended, and grants that are being recorded.
//!
//! ```text
//! reserve ──► reservation ──committed──► open lease ──ended──► gone: history is in the store
//!                 └── commit failed ──► gone
//! ```
//!
//! A reservation occupies capacity as soon as the request is placed, so no two grants get the same share. The
//! reservation has no lease id until the commit assigns an id. The module `leases` makes all decisions. Other modules
//! read this data, or report here how an operation has ended.

mod attribution;

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use gpush_api::{
    Gpu, GpuUuid, Lease, LeaseBinding, LeaseChange, LeaseHolder, LeaseId, LeaseKeep, LeaseMember, LeaseNotice,
    LeaseQueuePosition, LeaseState, LeaseUse, MemberShare, Placement, Process, ProcessKind, TargetUuid,
    text::local_time, whole_second,
};
use gpush_core::lease::{machine, placement::KnownEnd};
use gpush_host::{cgroup, proc};
use gpush_store::{CreatedInstances, LeaseRecord, OperationId};
use jiff::Timestamp;

use crate::requests::caller::Viewer;

/// A lease that has not ended.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OpenLease {
    /// The record as last written to the store.
    pub(crate) record: LeaseRecord,
    /// The state of the lease in this process.
    pub(crate) state: machine::State,
    /// Time at which the lease expires, by the monotonic clock of this process.
    pub(crate) deadline: Option<Instant>,
    /// Position in the queue.
    pub(crate) queue: Option<LeaseQueuePosition>,
    /// What a releasing lease waits for, one sentence each.
    pub(crate) waits_for: Vec<String>,
    /// Processes that still ran when gpushd last checked the releasing lease.
    pub(crate) left: Vec<u32>,
    /// Whether the lease of a Slurm job waits only for something outside the job. The job's user can cause such a wait.
    pub(crate) unattributed: bool,
    /// The last notice to the holder.
    pub(crate) notice: Option<LeaseNotice>,
    /// The last request to keep the lease although it is unused.
    pub(crate) keep: Option<LeaseKeep>,
}

impl OpenLease {
    /// Creates a lease from its record.
    pub(crate) fn new(record: LeaseRecord) -> Self {
        let state = machine::State::restored(record.state, record.reason);
        let deadline = deadline(record.expires_at);
        Self {
            record,
            state,
            deadline,
            queue: None,
            waits_for: Vec::new(),
            left: Vec::new(),
            unattributed: false,
            notice: None,
            keep: None,
        }
    }

    /// Returns the id.
    pub(crate) fn id(&self) -> LeaseId {
        self.record.id
    }

    /// Returns what [`LeaseTable::uses_on`] shows of the lease.
    fn use_fields(&self) -> (bool, &[LeaseMember], &LeaseHolder, Option<Timestamp>) {
        let record = &self.record;
        (self.state.name().holds_capacity(), &record.members, &record.holder, record.expires_at)
    }

    /// Replaces the record, and with it the end time. The state does not change. A record that is
    /// older than the present record is ignored, because changes may arrive in an order that
    /// differs from the order in which they were recorded.
    pub(crate) fn set_record(&mut self, record: LeaseRecord) {
        if record.sequence < self.record.sequence {
            return;
        }
        self.deadline = deadline(record.expires_at);
        self.record = record;
    }

    /// Returns whether the lease has expired, by the wall clock or by the monotonic clock. So a lease does not last
    /// longer if the wall clock is set back.
    pub(crate) fn has_expired(&self, now: Timestamp, at: Instant) -> bool {
        self.record.expires_at.is_some_and(|expires| expires <= now) || self.deadline.is_some_and(|end| end <= at)
    }

    /// Returns whether all known processes that the lease waits for have ended, or were killed and are about to end.
    /// Reads processes and cgroups, so call this function on a blocking thread.
    pub(crate) fn ends_now(&self) -> bool {
        match (self.state.name(), &self.record.binding) {
            // Without a known process, but with something to wait for, the end time is unknown.
            (LeaseState::Releasing, _) if self.left.is_empty() => self.waits_for.is_empty(),
            (LeaseState::Releasing, _) => self.left.iter().all(|pid| proc::is_ending(*pid)),
            (LeaseState::Active, LeaseBinding::Process { pid: Some(pid), start }) => {
                proc::try_start(*pid).is_ok_and(|found| found != *start) || proc::is_ending(*pid)
            }
            (LeaseState::Active, LeaseBinding::Scope { cgroup: Some(path), .. }) => {
                // A missing scope does not count as ended: a new scope does not exist yet when its lease is granted.
                cgroup::processes(path).is_some_and(|found| found.is_empty())
            }
            (LeaseState::Queued | LeaseState::Granting | LeaseState::Active | LeaseState::Ended, _) => false,
        }
    }

    /// Describes the lease for an error, with its holder and its end:
    /// `lease L17 of alice until 2026-01-02 03:04:05 CET`.
    pub(crate) fn describe(&self) -> String {
        let holder = self.record.holder.user.clone().unwrap_or_else(|| format!("uid {}", self.record.holder.uid));
        let end = match (self.state.name(), self.record.expires_at) {
            (LeaseState::Releasing, _) if self.unattributed && !self.left.is_empty() => {
                " (releasing: its user keeps the GPU in use outside the job)".to_owned()
            }
            (LeaseState::Releasing, _) => " (releasing)".to_owned(),
            (_, Some(at)) => format!(" until {}", local_time(at)),
            (_, None) => String::new(),
        };
        format!("lease {} of {holder}{end}", self.id())
    }

    /// Returns the lease for a response. Leaves out what `viewer` may not see.
    pub(crate) fn to_api(&self, viewer: Viewer) -> Lease {
        let mut lease = full(&self.record);
        (lease.state, lease.reason) = (self.state.name(), self.state.reason());
        lease.queue.clone_from(&self.queue);
        lease.waits_for.clone_from(&self.waits_for);
        lease.notice.clone_from(&self.notice);
        lease.keep.clone_from(&self.keep);
        redact_lease(lease, viewer)
    }

    /// Returns the event that reports a change of the lease. Its times have whole seconds, as in the response, so that
    /// two events that look the same are equal. The record of a grant has a more exact time than the same record after
    /// it was read from the store.
    pub(super) fn event(&self) -> LeaseChange {
        let record = &self.record;
        let uuids: BTreeSet<GpuUuid> = record.members.iter().map(|member| member.gpu_uuid.clone()).collect();
        let processes_end_at = record.revocation.as_ref().and_then(|revocation| revocation.processes_end_at);
        LeaseChange {
            lease_id: record.id,
            holder: record.holder.clone(),
            share: record.kind,
            state: self.state.name(),
            reason: self.state.reason(),
            targets: record.members.iter().map(|member| member.target.clone()).collect(),
            gpu_uuids: uuids.into_iter().collect(),
            expires_at: record.expires_at.map(whole_second),
            processes_end_at: processes_end_at.map(whole_second),
        }
    }
}

/// Returns a recorded lease for a response. Leaves out what `viewer` may not see.
pub(crate) fn to_api(record: &LeaseRecord, viewer: Viewer) -> Lease {
    redact_lease(full(record), viewer)
}

fn redact_lease(mut lease: Lease, viewer: Viewer) -> Lease {
    if !viewer.may_see(Some(lease.holder.uid)) {
        lease.redact();
    }
    lease
}

/// Returns a recorded lease with all fields, as an administrator sees it.
fn full(record: &LeaseRecord) -> Lease {
    Lease {
        id: record.id,
        holder: record.holder.clone(),
        account: None,
        asked_by: Some(record.asked_by.clone()),
        kind: record.kind,
        enforcement: record.kind.enforcement(),
        device_access: None,
        state: record.state,
        reason: record.reason,
        request: Some(record.request.clone()),
        members: record.members.clone(),
        binding: record.binding.clone(),
        operation: record.operation.map(|operation| operation.to_string()),
        created_at: record.created_at,
        granted_at: record.granted_at,
        expires_at: record.expires_at,
        ended_at: record.ended_at,
        queue: None,
        waits_for: Vec::new(),
        revocation: record.revocation.clone(),
        notice: None,
        usage: None,
        keep: None,
        idle: None,
        over_limit: None,
    }
}

/// Returns whether a member of a lease is a device that only one lease can have.
fn is_exclusive(member: &LeaseMember) -> bool {
    match member.share {
        MemberShare::Mig { .. } | MemberShare::Whole => true,
        MemberShare::Mps { .. } | MemberShare::Timeslice { .. } => false,
    }
}

/// Returns the time at which a lease expires, by the monotonic clock of this process.
fn deadline(expires_at: Option<Timestamp>) -> Option<Instant> {
    let left = Duration::try_from(expires_at?.duration_since(Timestamp::now())).unwrap_or_default();
    Instant::now().checked_add(left)
}

/// The id of a grant that is being recorded, in the leases of a GPU. No lease has this id.
pub(super) const UNRECORDED: LeaseId = LeaseId(0);

/// A grant that is being recorded.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Reservation {
    /// Uid of the user who gets the share.
    pub(crate) holder: u32,
    /// The targets, and the share of each target that the grant occupies.
    pub(crate) members: Vec<LeaseMember>,
    /// The lease, if its request was in the queue. A new request has no id yet.
    pub(crate) lease: Option<LeaseId>,
    /// The known end of the lease.
    pub(crate) end: KnownEnd,
}

/// How the end of an operation has changed leases, and the record of created instances.
#[derive(Debug, Clone, Default)]
pub(crate) struct OperationLeaseEffects {
    /// The lease for which the operation created MIG devices. It is now active, or has ended.
    pub(crate) lease: Option<LeaseRecord>,
    /// For each GPU on which the operation created or destroyed instances: the UUID of the GPU, and the placements of
    /// all its instances that gpushd has created.
    pub(crate) created: Vec<(GpuUuid, BTreeSet<Placement>)>,
}

/// Number of a [`Reservation`], unique until gpushd restarts.
pub(crate) type ReservationId = u64;

/// All leases that have not ended.
#[derive(Debug, Clone, Default)]
pub(crate) struct LeaseTable {
    /// The leases by id, which is also their order of arrival. Each lease is in an `Arc`, so a change of the table
    /// copies only the changed leases.
    pub(crate) open: BTreeMap<LeaseId, Arc<OpenLease>>,
    /// Grants that are being recorded.
    pub(crate) reserved: BTreeMap<ReservationId, Reservation>,
    /// The instances that gpushd has created. To grant a lease, gpushd may destroy only these instances.
    pub(crate) created: CreatedInstances,
    /// Requests that are being recorded as queued: the uid of each holder.
    pub(crate) entering: BTreeMap<ReservationId, u32>,
    /// Number of reservations that were ever made.
    grants: u64,
    next: ReservationId,
}

impl LeaseTable {
    /// Creates the table from the records of an earlier gpushd.
    pub(crate) fn new(recorded: Vec<LeaseRecord>, created: CreatedInstances) -> Self {
        let open = recorded.into_iter().map(|record| (record.id, Arc::new(OpenLease::new(record)))).collect();
        Self { open, created, ..Self::default() }
    }

    /// Returns the members of leases that occupy capacity, each with the uid of its holder.
    pub(crate) fn members(&self) -> impl Iterator<Item = (u32, &LeaseMember)> {
        let open = self.holding().flat_map(|lease| {
            let holder = lease.record.holder.uid;
            lease.record.members.iter().map(move |member| (holder, member))
        });
        let reserved = self.reserved.values().flat_map(|one| one.members.iter().map(|member| (one.holder, member)));
        open.chain(reserved)
    }

    /// Returns a lease.
    pub(crate) fn get(&self, id: LeaseId) -> Option<&OpenLease> {
        self.open.get(&id).map(Arc::as_ref)
    }

    /// Returns a lease to change it.
    pub(crate) fn get_mut(&mut self, id: LeaseId) -> Option<&mut OpenLease> {
        self.open.get_mut(&id).map(Arc::make_mut)
    }

    /// Returns all leases that have not ended.
    pub(crate) fn all(&self) -> impl Iterator<Item = &OpenLease> {
        self.open.values().map(Arc::as_ref)
    }

    /// Returns the leases that occupy capacity.
    pub(crate) fn holding(&self) -> impl Iterator<Item = &OpenLease> {
        self.all().filter(|lease| lease.state.name().holds_capacity())
    }

    /// Returns the leases that have a share of this GPU or MIG device.
    pub(crate) fn on_target(&self, target: &TargetUuid) -> impl Iterator<Item = &OpenLease> {
        self.holding().filter(move |lease| lease.record.members.iter().any(|member| member.target == *target))
    }

    /// Returns the lease that has this whole GPU or MIG device for itself.
    pub(crate) fn exclusive_lease_on(&self, target: &TargetUuid) -> Option<LeaseId> {
        let mut here = self.on_target(target);
        here.find(|lease| lease.record.members.iter().any(|one| one.target == *target && is_exclusive(one)))
            .map(OpenLease::id)
    }

    /// Returns whether a lease has a whole GPU or MIG device for itself.
    pub(crate) fn has_exclusive_lease(&self) -> bool {
        self.holding().any(|lease| lease.record.members.iter().any(is_exclusive))
    }

    /// Returns whether a lease, or a grant that is being recorded, occupies this GPU or MIG device.
    pub(crate) fn is_occupied(&self, target: &TargetUuid) -> bool {
        self.members().any(|(_, member)| member.target == *target)
    }

    /// Returns the uids that may use an MPS target: the holders of active leases, and of grants that are being
    /// recorded.
    pub(crate) fn admitted(&self, target: &TargetUuid) -> BTreeSet<u32> {
        let is_here =
            |member: &LeaseMember| member.target == *target && matches!(member.share, MemberShare::Mps { .. });
        let active = self.open.values().filter(|lease| lease.state.admits());
        let active = active.filter(|lease| lease.record.members.iter().any(is_here));
        let reserved = self.reserved.values().filter(|one| one.members.iter().any(is_here));
        active.map(|lease| lease.record.holder.uid).chain(reserved.map(|one| one.holder)).collect()
    }

    /// Adds the grants that are being recorded to their GPUs, so that plans treat their targets as in use. Such a grant
    /// has no id yet. It is added as a process without a pid, which every user may see.
    pub(crate) fn mark_reservations(&self, gpus: &mut [Gpu]) {
        for member in self.reserved.values().flat_map(|one| &one.members) {
            let Some(gpu) = gpus.iter_mut().find(|gpu| gpu.uuid == member.gpu_uuid) else { continue };
            let command = Some("a lease that is being granted".to_owned());
            let user = Process {
                pid: None,
                uid: None,
                user: None,
                command,
                kind: ProcessKind::Compute,
                memory_mib: None,
                unidentified: false,
            };
            if member.target == gpu.uuid {
                gpu.processes.push(user);
                continue;
            }
            let instances = gpu.mig.iter_mut().flat_map(|mig| &mut mig.instances);
            let mut devices = instances.flat_map(|instance| &mut instance.compute);
            if let Some(device) = devices.find(|device| device.uuid.as_ref() == Some(&member.target)) {
                device.processes.push(user);
            }
        }
    }

    /// Returns the leases on a GPU and on its MIG devices, and the grants on it that are being recorded. Such a grant has
    /// the id [`UNRECORDED`].
    pub(super) fn uses_on(&self, gpu: &GpuUuid) -> Vec<LeaseUse> {
        let of_lease = |lease: &'_ OpenLease, member: &LeaseMember| LeaseUse {
            id: lease.id(),
            target: member.target.clone(),
            kind: member.share.kind(),
            share: member.share.clone(),
            holder: lease.record.holder.clone(),
            until: lease.record.expires_at,
        };
        let of_reservation = |reservation: &Reservation, member: &LeaseMember| LeaseUse {
            id: UNRECORDED,
            target: member.target.clone(),
            kind: member.share.kind(),
            share: member.share.clone(),
            holder: LeaseHolder { uid: reservation.holder, user: None },
            until: None,
        };
        let is_here = |member: &&LeaseMember| member.gpu_uuid == *gpu;
        let leases = self
            .holding()
            .flat_map(|lease| lease.record.members.iter().filter(is_here).map(move |member| of_lease(lease, member)));
        let reservations = self
            .reserved
            .values()
            .flat_map(|one| one.members.iter().filter(is_here).map(move |member| of_reservation(one, member)));
        leases.chain(reservations).collect()
    }

    /// Returns the UUIDs of the GPUs whose leases or reservations differ between two tables. Compares only the fields of
    /// leases that [`LeaseTable::uses_on`] returns.
    pub(super) fn changed_gpus(&self, before: &Self) -> BTreeSet<GpuUuid> {
        let differs = |id: &LeaseId| match (self.open.get(id), before.open.get(id)) {
            (Some(now), Some(before)) => !Arc::ptr_eq(now, before) && now.use_fields() != before.use_fields(),
            (None, None) => false,
            (Some(_), None) | (None, Some(_)) => true,
        };
        let of_lease = |id: &LeaseId| [self.open.get(id), before.open.get(id)].into_iter().flatten();
        let ids: BTreeSet<&LeaseId> = self.open.keys().chain(before.open.keys()).filter(|id| differs(id)).collect();
        let leased = ids.into_iter().flat_map(of_lease).flat_map(|lease| &lease.record.members);
        let changed = |(id, _): &(&ReservationId, &Reservation)| self.reserved.get(*id) != before.reserved.get(*id);
        let reserved = self.reserved.iter().chain(&before.reserved).filter(changed).flat_map(|(_, one)| &one.members);
        leased.chain(reserved).map(|member| member.gpu_uuid.clone()).collect()
    }

    /// Returns whether this table has a reservation that was made after the table `before`. Only reservations take
    /// capacity, so without one, an assignment that was possible then is possible now.
    pub(super) fn has_grants_since(&self, before: &Self) -> bool {
        self.grants != before.grants
    }

    /// Adds a reservation. Returns its number.
    pub(crate) fn reserve(&mut self, reservation: Reservation) -> ReservationId {
        self.next += 1;
        self.grants += 1;
        self.reserved.insert(self.next, reservation);
        self.next
    }

    /// Returns the lease whose MIG devices an operation creates.
    pub(crate) fn granting(&self, operation: OperationId) -> Option<&OpenLease> {
        let is_its = |lease: &&OpenLease| lease.record.operation == Some(operation);
        self.open.values().map(Arc::as_ref).filter(is_its).find(|lease| lease.state.name() == LeaseState::Granting)
    }

    /// Counts a request that is being recorded as queued. Returns its number in [`LeaseTable::entering`].
    pub(crate) fn begin_to_queue(&mut self, holder: u32) -> ReservationId {
        self.next += 1;
        self.entering.insert(self.next, holder);
        self.next
    }

    /// Applies what an operation's end has changed.
    pub(crate) fn apply_operation_end(&mut self, settled: &OperationLeaseEffects) {
        for (gpu, placements) in &settled.created {
            self.created.insert(gpu.clone(), placements.clone());
        }
        let Some(record) = &settled.lease else { return };
        let Some(lease) = self.get_mut(record.id) else { return };
        let event = match record.state {
            LeaseState::Active => machine::Event::Committed,
            LeaseState::Queued | LeaseState::Granting | LeaseState::Releasing | LeaseState::Ended => {
                machine::Event::OperationFailed
            }
        };
        // The time does not matter for these two events.
        (lease.state, _) = machine::step(lease.state, event, machine::Instant::ZERO);
        lease.set_record(record.clone());
    }

    /// Adds a lease, or replaces the lease with this id.
    pub(crate) fn put(&mut self, lease: OpenLease) {
        self.open.insert(lease.id(), Arc::new(lease));
    }

    /// Adds a recorded lease, or replaces the lease with this id.
    #[cfg(test)]
    pub(crate) fn insert(&mut self, record: LeaseRecord) {
        self.put(OpenLease::new(record));
    }
}

#[cfg(test)]
pub(crate) mod tests;
