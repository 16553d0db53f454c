//! A dynamic host that executes grants.

use gpush_api::GpuIndex;

use super::Ticket;
use crate::{
    lease::placement::{
        Assignment, GpuOffer, Host, Instance, KnownEnd, Member, legal,
        scene::{instance, mig},
    },
    schedule::LeaseReservation,
};

pub(super) const MODEL: &str = "a100-80";

/// The host, and the instances of each lease.
pub(super) struct World {
    pub(super) host: Host,
    pub(super) held: Vec<(Ticket, Vec<(GpuIndex, u32)>)>,
}

impl World {
    /// Returns a host of empty GPUs, on which gpushd ends the processes of expired leases.
    pub(super) fn new(gpus: u32) -> Self {
        let gpu = |index| GpuOffer { ends_leases: true, ..mig(index, MODEL, true, "") };
        Self { host: Host { gpus: (0..gpus).map(gpu).collect() }, held: Vec::new() }
    }

    /// Executes a grant. Panics if the GPU does not allow it.
    pub(super) fn grant(&mut self, ticket: Ticket, assignment: &Assignment, end: KnownEnd) {
        let mut ids = Vec::new();
        for gpu in &mut self.host.gpus {
            let mig = gpu.mig.as_mut().unwrap();
            let is_destroyed = |one: &Instance| assignment.destroys.contains(&(gpu.index, one.id));
            assert!(mig.instances.iter().all(|one| !is_destroyed(one) || one.is_free()), "an instance in use");
            mig.instances.retain(|one| !is_destroyed(one));
            for member in assignment.members.iter().filter(|member| member.gpu() == gpu.index) {
                match member {
                    Member::Create { profile_id, placement, .. } => {
                        assert!(mig.instances.iter().all(|one| !one.placement.overlaps(*placement)));
                        let mut one = instance(MODEL, *profile_id, *placement, false);
                        one.devices[0].uuid = format!("{}/{}", gpu.index, placement.start).into();
                        one.devices[0].end = end;
                        ids.push((gpu.index, one.id));
                        mig.instances.push(one);
                    }
                    Member::Device { uuid, .. } => {
                        let mut all = mig.instances.iter_mut();
                        let one = all.find(|one| one.devices[0].uuid == *uuid).unwrap();
                        assert!(one.devices[0].free, "{uuid} granted twice");
                        (one.devices[0].free, one.devices[0].end) = (false, end);
                        ids.push((gpu.index, one.id));
                    }
                    _ => panic!(),
                }
            }
            let all: Vec<_> = mig.instances.iter().map(|one| (one.profile_id, one.placement)).collect();
            assert!(legal(&mig.geometry, &all), "the GPU cannot have these instances: {all:?}");
        }
        self.held.push((ticket, ids));
    }

    /// Ends the lease at this position of `held`.
    pub(super) fn release(&mut self, n: usize) -> Ticket {
        let (ticket, ids) = self.held.swap_remove(n);
        for (gpu, id) in ids {
            let mig = self.host.gpus[gpu.0 as usize].mig.as_mut().unwrap();
            let device = &mut mig.instances.iter_mut().find(|one| one.id == id).unwrap().devices[0];
            (device.free, device.end) = (true, None);
        }
        ticket
    }

    /// Returns the number of instances in use that must become free before the assignment can be granted. An instance that
    /// is in the way of two members counts once.
    pub(super) fn blockers(&self, assignment: &Assignment) -> usize {
        self.in_the_way(assignment).count()
    }

    /// Returns the number of leases without a known end in the way of a reservation, and the latest known end.
    pub(super) fn waits_for(&self, reservation: &LeaseReservation) -> (usize, u64) {
        let ends: Vec<KnownEnd> =
            self.in_the_way(&reservation.assignment).map(|instance| instance.devices[0].end).collect();
        (ends.iter().filter(|end| end.is_none()).count(), ends.into_iter().flatten().max().unwrap_or_default())
    }

    fn in_the_way(&self, assignment: &Assignment) -> impl Iterator<Item = &Instance> {
        let blocks = |gpu: GpuIndex, one: &Instance| {
            assignment.members.iter().filter(|member| member.gpu() == gpu).any(|member| match member {
                Member::Create { placement, .. } => one.placement.overlaps(*placement),
                Member::Device { uuid, .. } => one.devices[0].uuid == *uuid,
                _ => false,
            })
        };
        let all =
            self.host.gpus.iter().flat_map(|gpu| {
                gpu.mig.iter().flat_map(move |mig| mig.instances.iter().map(move |one| (gpu.index, one)))
            });
        all.filter(move |(gpu, one)| !one.is_free() && blocks(*gpu, one)).map(|(_, one)| one)
    }
}
