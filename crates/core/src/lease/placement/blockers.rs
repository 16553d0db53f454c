//! The leases and processes without which a request would be granted.
//!
//! For each lease or process, the search tests whether the request fits on the host without this
//! lease or process. If the end of one lease or process is not enough, the search takes all leases
//! and processes on one GPU, or on all GPUs, and leaves out those that need not end. It returns the
//! smallest of these sets.

use std::collections::BTreeSet;

use gpush_api::{GpuIndex, GpuUuid, LeaseKind, LeaseMember, MemberShare, Placement, TargetUuid};

use crate::lease::capacity::{Held, Relation};

use super::{
    Assignment, Closed, GpuOffer, Host, Instance, Member, PlacementPolicy, PlacementRequest, Unoffered, UseOccupied,
    gang,
};

/// Maximum number of leases and processes that the search tests, so that a refusal stays cheap on a
/// large host.
const MOST_TESTED: usize = 64;

/// The leases and processes that block a request. `L` identifies a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Blockers<L> {
    /// Leases whose end makes the grant possible.
    pub leases: Vec<L>,
    /// UUIDs of GPUs and MIG devices that processes without a lease use. If these processes end, the
    /// grant is possible.
    pub in_use: Vec<TargetUuid>,
    /// Whether all of these leases and processes must end. If not, the end of one of them is enough.
    pub together: bool,
}

/// One lease, or the processes on a target that has no lease.
#[derive(Clone, Copy)]
enum Occupant<'a, L> {
    Lease(L, &'a [&'a LeaseMember]),
    Target(&'a TargetUuid),
}

/// Finds what blocks a request. `host` must not contain the reservations of the queue. `leases` are
/// the leases that hold capacity. The result is empty if only the queue, a closed GPU or an
/// instance of another program blocks the request.
#[must_use]
pub fn blockers<L: Copy>(
    host: &Host,
    wanted: &PlacementRequest,
    policy: PlacementPolicy,
    leases: &[(L, Vec<&LeaseMember>)],
) -> Blockers<L> {
    let selected = host.selected(wanted);
    let fits = |host: &Host| gang::best(host, wanted, policy, UseOccupied::Never).is_some();
    let none = Blockers { leases: Vec::new(), in_use: Vec::new(), together: false };
    if fits(&selected) {
        return none;
    }
    let kind = wanted.share.kind();
    let offers = |gpu: &GpuOffer| gpu.closed.is_none() && gpu.kinds().any(|one| one == kind);
    let is_here = |members: &[&LeaseMember]| {
        members.iter().any(|member| selected.gpus.iter().any(|gpu| gpu.uuid == member.gpu_uuid && offers(gpu)))
    };
    let here = leases.iter().filter(|(_, members)| is_here(members));
    let leases = here.map(|(lease, members)| Occupant::Lease(*lease, members.as_slice()));
    let used = selected.gpus.iter().flat_map(GpuOffer::used_without_lease).map(Occupant::Target);
    let candidates: Vec<Occupant<'_, L>> = leases.chain(used).take(MOST_TESTED).collect();
    let alone: Vec<_> = candidates.iter().copied().filter(|one| fits(&selected.without(&[*one]))).collect();
    if !alone.is_empty() {
        return Blockers::of(&alone, false);
    }
    let on_gpu = |gpu: &GpuOffer| -> Vec<Occupant<'_, L>> {
        let is_on = |one: &Occupant<'_, L>| match one {
            Occupant::Lease(_, members) => members.iter().any(|member| member.gpu_uuid == gpu.uuid),
            Occupant::Target(target) => gpu.targets().any(|uuid| uuid == *target),
        };
        candidates.iter().copied().filter(is_on).collect()
    };
    let mut sets: Vec<Vec<Occupant<'_, L>>> = selected.gpus.iter().map(on_gpu).collect();
    sets.push(candidates.clone());
    let sets = sets.into_iter().filter(|set| fits(&selected.without(set)));
    let least = sets.map(|set| {
        // Remove from the set what need not end.
        let mut least = set.clone();
        for at in (0..set.len()).rev() {
            let one = least.remove(at);
            if !fits(&selected.without(&least)) {
                least.insert(at, one);
            }
        }
        least
    });
    least.min_by_key(Vec::len).map_or(none, |least| Blockers::of(&least, true))
}

impl<L: Copy> Blockers<L> {
    fn of(found: &[Occupant<'_, L>], together: bool) -> Self {
        let mut all = Self { leases: Vec::new(), in_use: Vec::new(), together };
        for one in found {
            match one {
                Occupant::Lease(lease, _) => all.leases.push(*lease),
                Occupant::Target(target) => all.in_use.push((*target).clone()),
            }
        }
        all
    }
}

/// Returns which of these instances alone block a request: without one of them, the request fits. An instance is given
/// as the index of its GPU and its placement. Returns all of them if no single instance blocks the request.
#[must_use]
pub fn instances_that_block(
    host: &Host,
    wanted: &PlacementRequest,
    policy: PlacementPolicy,
    instances: &[(GpuIndex, Placement)],
) -> Vec<(GpuIndex, Placement)> {
    let selected = host.selected(wanted);
    let fits_without = |(index, placement): &&(GpuIndex, Placement)| {
        let mut host = selected.clone();
        let gpu = host.gpus.iter_mut().find(|gpu| gpu.index == *index);
        if let Some(mig) = gpu.and_then(|gpu| gpu.mig.as_mut()) {
            mig.instances.retain(|instance| instance.placement != *placement);
        }
        gang::best(&host, wanted, policy, UseOccupied::Never).is_some()
    };
    let alone: Vec<(GpuIndex, Placement)> = instances.iter().take(MOST_TESTED).filter(fits_without).copied().collect();
    if alone.is_empty() { instances.to_vec() } else { alone }
}

/// Returns the UUIDs of the targets that an assignment grants. Where the assignment creates an
/// instance, returns the UUIDs of the MIG devices that are in use there now.
#[must_use]
pub fn occupied_targets(host: &Host, assignment: &Assignment) -> BTreeSet<TargetUuid> {
    let mut targets = BTreeSet::new();
    for member in &assignment.members {
        let Some(gpu) = host.gpus.iter().find(|gpu| gpu.index == member.gpu()) else { continue };
        match member {
            Member::Device { uuid, .. } => drop(targets.insert(uuid.clone())),
            Member::Mps { target, .. } => drop(targets.insert(target.clone())),
            Member::Timeslice { .. } | Member::Whole { .. } => drop(targets.insert(gpu.uuid.clone().into())),
            Member::Create { placement, .. } => {
                let instances = gpu.mig.iter().flat_map(|mig| &mig.instances);
                let here = instances.filter(|instance| instance.placement.overlaps(*placement));
                let devices = here.flat_map(|instance| &instance.devices).filter(|device| !device.free);
                targets.extend(devices.map(|device| device.uuid.clone()));
            }
        }
    }
    targets
}

impl GpuOffer {
    /// Returns whether a new reading of the GPU alone may show more room: processes use the GPU or an MPS daemon without a
    /// lease, another program has created instances, or the last reading does not allow grants. All other changes of the
    /// offers have a cause in gpushd.
    #[must_use]
    pub fn may_improve_with_a_reading(&self) -> bool {
        let is_closed = match self.closed {
            Some(Closed::Prohibited | Closed::NotReady) => true,
            None
            | Some(Closed::Cordoned | Closed::Claimed | Closed::Pending | Closed::StillShared | Closed::NotShared) => {
                false
            }
        };
        let is_unoffered = match self.unoffered {
            Some(Unoffered::OtherMode(_) | Unoffered::NotReady(_)) => true,
            None
            | Some(
                Unoffered::NoRule
                | Unoffered::Unmanaged
                | Unoffered::NoMps
                | Unoffered::Reboot(_)
                | Unoffered::Pending(_),
            ) => false,
        };
        // Another program may remove these instances.
        let is_foreign = |instance: &Instance| instance.foreign || instance.devices.is_empty();
        let has_foreign = self.mig.as_ref().is_some_and(|mig| mig.dynamic && mig.instances.iter().any(is_foreign));
        // The daemon serves a client of a user without a lease.
        let has_client = self.mps.iter().any(|mps| mps.leases == 0 && mps.user.is_some());
        is_closed || is_unoffered || has_foreign || has_client || self.used_without_lease().next().is_some()
    }

    /// Returns the UUIDs of the GPU and of its MIG devices that processes use without a lease.
    fn used_without_lease(&self) -> impl Iterator<Item = &TargetUuid> {
        let instances = self.mig.iter().flat_map(|mig| &mig.instances);
        let devices = instances.flat_map(|one| one.devices.iter().map(move |device| (one.busy, device)));
        let used = devices.filter(|(busy, device)| !device.leased && !device.shared && (*busy || !device.free));
        let whole = self.whole.filter(|whole| !whole.free && !whole.leased).map(|_| self.uuid.as_target());
        used.map(|(_, device)| &device.uuid).chain(whole)
    }

    /// Frees a target, because its lease and the processes on it end. The end of a lease on the GPU frees all devices.
    fn free_target(&mut self, target: &TargetUuid) {
        for instance in self.mig.iter_mut().flat_map(|mig| &mut mig.instances) {
            if let Some(device) = instance.devices.iter_mut().find(|device| device.uuid == *target) {
                (device.free, device.leased, device.end) = (!device.shared, false, None);
                instance.busy = false;
            }
        }
        if let Some(whole) = self.whole.as_mut().filter(|_| self.uuid == *target) {
            (whole.free, whole.leased, whole.end) = (true, false, None);
        }
    }

    /// Frees the share of a member whose lease ends.
    fn free_member(&mut self, member: &LeaseMember) {
        let held = Held::by_member(member);
        let excludes = |gpu: &GpuUuid, target: &TargetUuid, kind| {
            u32::from(held.relation(gpu, target, kind) == Relation::Excludes)
        };
        for mps in &mut self.mps {
            mps.excluding = mps.excluding.saturating_sub(excludes(&self.uuid, &mps.target, LeaseKind::Mps));
        }
        if let Some(slices) = &mut self.timeslice {
            let one = excludes(&self.uuid, self.uuid.as_target(), LeaseKind::Timeslice);
            slices.excluding = slices.excluding.saturating_sub(one);
        }
        match &member.share {
            MemberShare::Mig { .. } | MemberShare::Whole => self.free_target(&member.target),
            MemberShare::Timeslice { .. } => {
                if let Some(slices) = &mut self.timeslice {
                    slices.taken = slices.taken.saturating_sub(1);
                }
            }
            MemberShare::Mps { percentage, .. } => {
                if let Some(mps) = self.mps.iter_mut().find(|mps| mps.target == member.target) {
                    mps.taken_tenths = mps.taken_tenths.saturating_sub(u32::from(percentage.tenths()));
                    mps.leases = mps.leases.saturating_sub(1);
                    if mps.leases == 0 {
                        mps.user = None;
                    }
                }
            }
        }
    }
}

impl Host {
    fn without<L>(&self, ended: &[Occupant<'_, L>]) -> Self {
        let mut host = self.clone();
        for gpu in &mut host.gpus {
            for one in ended {
                match one {
                    Occupant::Lease(_, members) => {
                        for member in *members {
                            if member.gpu_uuid == gpu.uuid {
                                gpu.free_member(member);
                            }
                        }
                    }
                    Occupant::Target(target) => gpu.free_target(target),
                }
            }
        }
        host
    }
}
