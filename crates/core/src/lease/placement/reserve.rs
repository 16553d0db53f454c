//! Applies reservations and grants to a host.
//!
//! A queued request reserves at most its own size. Later requests are placed on the host with that assignment applied, so
//! they do not delay the earlier request.

use super::{Assignment, Host, KnownEnd, Member, PlacementPolicy, PlacementRequest, UseOccupied, gang};

impl Host {
    /// Returns the assignment that a waiting request reserves, and the time at which the last lease in its way ends.
    /// Returns `None` if the host can never fulfil the request. See [`ends`](super::ends) for the choice.
    #[must_use]
    pub fn reservation(&self, wanted: &PlacementRequest, policy: PlacementPolicy) -> Option<(Assignment, KnownEnd)> {
        let (assignment, cost) = gang::best_with_cost(self, wanted, policy, UseOccupied::Last)?;
        Some((assignment, cost.free_at()))
    }

    /// Applies a grant: occupies its targets, and removes the instances that it destroys. `holder`
    /// becomes the user of the MPS targets.
    pub fn occupy(&mut self, assignment: &Assignment, holder: u32) {
        for gpu in &mut self.gpus {
            let index = gpu.index;
            if let Some(mig) = &mut gpu.mig {
                mig.instances.retain(|instance| !assignment.destroys.contains(&(index, instance.id)));
            }
        }
        self.take_members(assignment, holder);
    }

    /// Applies a reservation: occupies its free targets, so that later requests do not get them.
    /// The instances that it will destroy still exist.
    pub fn reserve(&mut self, assignment: &Assignment, holder: u32) {
        for gpu in &mut self.gpus {
            for instance in gpu.mig.iter_mut().flat_map(|mig| &mut mig.instances) {
                instance.clearing |= assignment.destroys.contains(&(gpu.index, instance.id));
            }
        }
        self.take_members(assignment, holder);
    }

    fn take_members(&mut self, assignment: &Assignment, holder: u32) {
        for member in &assignment.members {
            let Some(gpu) = self.gpus.iter_mut().find(|gpu| gpu.index == member.gpu()) else { continue };
            match member {
                Member::Device { uuid, .. } => {
                    let instances = gpu.mig.iter_mut().flat_map(|mig| &mut mig.instances);
                    let mut devices = instances.flat_map(|instance| &mut instance.devices);
                    if let Some(device) = devices.find(|device| device.uuid == *uuid) {
                        device.free = false;
                    }
                }
                Member::Create { profile_id, placement, .. } => {
                    if let Some(mig) = &mut gpu.mig {
                        mig.reserved.push((*profile_id, *placement));
                    }
                }
                Member::Mps { target, percentage, .. } => {
                    if let Some(mps) = gpu.mps.iter_mut().find(|mps| mps.target == *target) {
                        let taken = mps.taken_tenths.saturating_add(u32::from(percentage.tenths()));
                        mps.taken_tenths = taken.min(mps.capacity_tenths.max(mps.taken_tenths));
                        mps.leases = mps.leases.saturating_add(1).min(mps.most_leases.max(mps.leases));
                        mps.user = mps.user.or(Some(holder));
                    }
                }
                Member::Timeslice { .. } => {
                    if let Some(slices) = &mut gpu.timeslice {
                        slices.taken = slices.taken.saturating_add(1).min(slices.replicas.max(slices.taken));
                    }
                }
                Member::Whole { .. } => {
                    if let Some(whole) = &mut gpu.whole {
                        whole.free = false;
                    }
                }
            }
        }
    }
}
