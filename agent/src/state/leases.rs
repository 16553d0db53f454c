//! Leases as data: those that have not ended, and grants that are being recorded.
//!
//! ```text
//! reserve ──► reservation ──committed──► open lease ──ended──► gone: history is in the store
//!                 └── commit failed ──► gone
//! ```
//!
//! A reservation occupies capacity from the moment of its placement, so two grants never get one share. It has no id
//! yet: the commit gives it one. [`crate::leases`] decides; all other modules only read.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::{Duration, Instant},
};

use gpush_api::{
    Gpu, Happening, Lease, LeaseBinding, LeaseChange, LeaseId, LeaseMember, LeaseQueuePosition, LeaseState, LeaseUse,
    MemberShare, Placement, Process, ProcessKind,
};
use gpush_core::lease::machine;
use gpush_host::proc;
use gpush_store::{CreatedInstances, LeaseRecord, OperationId};
use jiff::Timestamp;

use super::{State, Touched};
use crate::caller::Viewer;

/// A lease that has not ended.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct OpenLease {
    /// As recorded last.
    pub(crate) record: LeaseRecord,
    /// Where it is in its life.
    pub(crate) state: machine::State,
    /// Its end by this process's own clock.
    pub(crate) deadline: Option<Instant>,
    /// Its place in the queue.
    pub(crate) queue: Option<LeaseQueuePosition>,
    /// What it waits for while it is releasing, one sentence each.
    pub(crate) waits_for: Vec<String>,
    /// Processes that were left when it was probed last.
    pub(crate) left: Vec<u32>,
}

impl OpenLease {
    /// A recorded lease in the state that its record says.
    pub(crate) fn new(record: LeaseRecord) -> Self {
        let state = machine::State::restored(record.state, record.reason);
        let deadline = deadline(record.expires_at);
        Self { record, state, deadline, queue: None, waits_for: Vec::new(), left: Vec::new() }
    }

    /// Id.
    pub(crate) fn id(&self) -> LeaseId {
        self.record.id
    }

    /// Replaces the record, and with it the end time. The state stays. A record that is older than the present one is
    /// ignored: two changes may be shown in another order than they were recorded.
    pub(crate) fn set_record(&mut self, record: LeaseRecord) {
        if record.sequence < self.record.sequence {
            return;
        }
        self.deadline = deadline(record.expires_at);
        self.record = record;
    }

    /// Whether it has expired by the wall clock, or by the time that this process has seen pass: a clock that is set
    /// back does not lengthen a lease.
    pub(crate) fn has_expired(&self, now: Timestamp, at: Instant) -> bool {
        self.record.expires_at.is_some_and(|expires| expires <= now) || self.deadline.is_some_and(|end| end <= at)
    }

    /// Whether no process is known that it waits for: the processes have ended, or were killed and are about to end.
    pub(crate) fn ends_now(&self) -> bool {
        match (self.state.name(), &self.record.binding) {
            (LeaseState::Releasing, _) => self.left.iter().all(|pid| proc::is_ending(*pid)),
            (LeaseState::Active, LeaseBinding::Process { pid: Some(pid), start }) => {
                proc::start(*pid) != *start || proc::is_ending(*pid)
            }
            (LeaseState::Queued | LeaseState::Granting | LeaseState::Active | LeaseState::Ended, _) => false,
        }
    }

    /// Its holder and end, as a refusal names it: `lease L17 of alice until 2026-01-02 03:04:05 UTC`.
    pub(crate) fn describe(&self) -> String {
        let holder = self.record.holder.user.clone().unwrap_or_else(|| format!("uid {}", self.record.holder.uid));
        let end = match (self.state.name(), self.record.expires_at) {
            (LeaseState::Releasing, _) => " (releasing)".to_owned(),
            (_, Some(at)) => format!(" until {}", at.strftime("%Y-%m-%d %H:%M:%S UTC")),
            (_, None) => String::new(),
        };
        format!("lease {} of {holder}{end}", self.id())
    }

    /// The lease as a caller may see it.
    pub(crate) fn shown(&self, viewer: Viewer) -> Lease {
        let mut lease = whole(&self.record);
        (lease.state, lease.reason) = (self.state.name(), self.state.reason());
        lease.queue.clone_from(&self.queue);
        lease.waits_for.clone_from(&self.waits_for);
        redacted(lease, viewer)
    }

    /// The event that reports it.
    fn event(&self) -> LeaseChange {
        let record = &self.record;
        let uuids: BTreeSet<String> = record.members.iter().map(|member| member.gpu.clone()).collect();
        LeaseChange {
            lease_id: record.id,
            holder: record.holder.clone(),
            share: record.kind,
            state: self.state.name(),
            reason: self.state.reason(),
            targets: record.members.iter().map(|member| member.target.clone()).collect(),
            gpu_uuids: uuids.into_iter().collect(),
            expires_at: record.expires_at,
            processes_end_at: record.revocation.as_ref().and_then(|revocation| revocation.processes_end_at),
        }
    }
}

/// Returns a recorded lease as a caller may see it.
pub(crate) fn shown(record: &LeaseRecord, viewer: Viewer) -> Lease {
    redacted(whole(record), viewer)
}

fn redacted(mut lease: Lease, viewer: Viewer) -> Lease {
    if !viewer.may_see(Some(lease.holder.uid)) {
        lease.redact();
    }
    lease
}

/// A recorded lease with everything that administrators see.
fn whole(record: &LeaseRecord) -> Lease {
    Lease {
        id: record.id,
        holder: record.holder.clone(),
        asked_by: Some(record.asked_by.clone()),
        kind: record.kind,
        enforcement: record.kind.enforcement(),
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
    }
}

/// The end of a lease by this process's own clock.
fn deadline(expires_at: Option<Timestamp>) -> Option<Instant> {
    let left = Duration::try_from(expires_at?.duration_since(Timestamp::now())).unwrap_or_default();
    Instant::now().checked_add(left)
}

/// A grant that is being recorded.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Reservation {
    /// The user who is admitted.
    pub(crate) holder: u32,
    /// What it occupies.
    pub(crate) members: Vec<LeaseMember>,
}

/// What the end of an operation recorded about leases.
#[derive(Debug, Clone, Default)]
pub(crate) struct Settled {
    /// The lease whose MIG devices it created: active, or ended.
    pub(crate) lease: Option<LeaseRecord>,
    /// Instances that gpushd has created, by UUID of the GPU, where that has changed.
    pub(crate) created: Vec<(String, BTreeSet<Placement>)>,
}

/// Number of a [`Reservation`], unique until gpushd restarts.
pub(crate) type ReservationId = u64;

/// All leases that have not ended.
#[derive(Debug, Clone, Default)]
pub(crate) struct LeaseTable {
    /// By id, which is the order of arrival.
    pub(crate) open: BTreeMap<LeaseId, OpenLease>,
    /// Grants that are being recorded.
    pub(crate) reserved: BTreeMap<ReservationId, Reservation>,
    /// Instances that gpushd created. Leases destroy no others.
    pub(crate) created: CreatedInstances,
    next: ReservationId,
}

impl LeaseTable {
    /// The leases of an earlier process, from their records, and the instances that gpushd created.
    pub(crate) fn new(recorded: Vec<LeaseRecord>, created: CreatedInstances) -> Self {
        let open = recorded.into_iter().map(|record| (record.id, OpenLease::new(record))).collect();
        Self { open, created, ..Self::default() }
    }

    /// Members that occupy capacity, each with the uid of its holder.
    pub(crate) fn members(&self) -> impl Iterator<Item = (u32, &LeaseMember)> {
        let open = self.holding().flat_map(|lease| {
            let holder = lease.record.holder.uid;
            lease.record.members.iter().map(move |member| (holder, member))
        });
        let reserved = self.reserved.values().flat_map(|one| one.members.iter().map(|member| (one.holder, member)));
        open.chain(reserved)
    }

    /// Leases that occupy capacity.
    pub(crate) fn holding(&self) -> impl Iterator<Item = &OpenLease> {
        self.open.values().filter(|lease| lease.state.name().holds_capacity())
    }

    /// Leases with a member on this GPU or MIG device that occupy it.
    pub(crate) fn on_target(&self, target: &str) -> impl Iterator<Item = &OpenLease> {
        self.holding().filter(move |lease| lease.record.members.iter().any(|member| member.target == target))
    }

    /// Whether a lease, or a grant that is being recorded, occupies this GPU or MIG device.
    pub(crate) fn is_occupied(&self, target: &str) -> bool {
        self.members().any(|(_, member)| member.target == target)
    }

    /// Uids of the users who are admitted to an MPS target: holders of active leases, and of grants that are being
    /// recorded.
    pub(crate) fn admitted(&self, target: &str) -> BTreeSet<u32> {
        let is_here = |member: &LeaseMember| member.target == target && matches!(member.share, MemberShare::Mps { .. });
        let active = self.open.values().filter(|lease| lease.state.admits());
        let active = active.filter(|lease| lease.record.members.iter().any(is_here));
        let reserved = self.reserved.values().filter(|one| one.members.iter().any(is_here));
        active.map(|lease| lease.record.holder.uid).chain(reserved.map(|one| one.holder)).collect()
    }

    /// Marks what leases have as in use, for plans: a leased target is in use, idle or not. A grant that is being
    /// recorded has no id yet: it is shown as a process without a pid, which every user may read.
    pub(crate) fn mark_in_use(&self, gpus: &mut [Gpu]) {
        for lease in self.holding() {
            for member in &lease.record.members {
                if let Some(gpu) = gpus.iter_mut().find(|gpu| gpu.uuid == member.gpu) {
                    gpu.leases.push(LeaseUse {
                        id: lease.id(),
                        target: member.target.clone(),
                        kind: lease.record.kind,
                        holder: lease.record.holder.clone(),
                        until: lease.record.expires_at,
                    });
                }
            }
        }
        for member in self.reserved.values().flat_map(|one| &one.members) {
            let Some(gpu) = gpus.iter_mut().find(|gpu| gpu.uuid == member.gpu) else { continue };
            let command = Some("a lease that is being granted".to_owned());
            let user =
                Process { pid: None, uid: None, user: None, command, kind: ProcessKind::Compute, memory_mib: None };
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

    /// Adds a reservation. Returns its number.
    pub(crate) fn reserve(&mut self, reservation: Reservation) -> ReservationId {
        self.next += 1;
        self.reserved.insert(self.next, reservation);
        self.next
    }

    /// The lease whose MIG devices an operation creates.
    pub(crate) fn granting(&self, operation: OperationId) -> Option<&OpenLease> {
        let is_its = |lease: &&OpenLease| lease.record.operation == Some(operation);
        self.open.values().filter(is_its).find(|lease| lease.state.name() == LeaseState::Granting)
    }

    /// Shows what the end of an operation recorded.
    pub(crate) fn settle(&mut self, settled: &Settled) {
        for (gpu, placements) in &settled.created {
            self.created.insert(gpu.clone(), placements.clone());
        }
        let Some(record) = &settled.lease else { return };
        let Some(lease) = self.open.get_mut(&record.id) else { return };
        let event = match record.state {
            LeaseState::Active => machine::Event::Committed,
            LeaseState::Queued | LeaseState::Granting | LeaseState::Releasing | LeaseState::Ended => {
                machine::Event::OperationFailed
            }
        };
        // Neither event depends on the time.
        (lease.state, _) = machine::step(lease.state, event, machine::Instant::ZERO);
        lease.set_record(record.clone());
    }

    /// Adds a recorded lease, or replaces its record. An active lease has a deadline from its end time.
    pub(crate) fn put(&mut self, record: LeaseRecord) {
        self.open.insert(record.id, OpenLease::new(record));
    }
}

impl State {
    /// All leases that have not ended.
    pub(crate) fn leases(&self) -> Arc<LeaseTable> {
        Arc::clone(&self.0.snapshot.borrow().leases)
    }

    /// Changes the leases, and publishes how they differ from before. Leases that have ended are removed afterwards.
    pub(crate) fn change_leases<T>(&self, change: impl FnOnce(&mut LeaseTable) -> T) -> T {
        self.update(|known| {
            let before = Arc::clone(&known.leases);
            let table = Arc::make_mut(&mut known.leases);
            let result = change(table);
            for lease in table.open.values() {
                let event = lease.event();
                if before.open.get(&lease.id()).is_none_or(|before| before.event() != event) {
                    self.0.events.publish(Happening::Lease(Box::new(event)));
                }
            }
            table.open.retain(|_, lease| lease.state.name() != LeaseState::Ended);
            (Touched::None, result)
        })
    }
}

#[cfg(test)]
mod tests;
