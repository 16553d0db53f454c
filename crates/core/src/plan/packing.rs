//! Packs compute instances into the fewest GPU instances.
//!
//! `1c.3g.40gb*4` requests only compute instances; this module determines how many `3g.40gb` they
//! need. The module takes the compute instances in the written order, and puts each compute
//! instance into the first GPU instance with enough room. The module chooses a later GPU instance
//! only if the total number of GPU instances would otherwise not be the minimum.

use gpush_api::{Placement, Refusal};

use crate::geometry::{MOST_INSTANCES, Profile};

use super::compute;
use super::target::{RequestedCompute, RequestedInstance};

/// Compute instances that may share GPU instances.
#[derive(Debug)]
pub(super) struct Pack<'a> {
    /// Profile of the GPU instances.
    pub(super) profile: &'a Profile,
    /// Fixed placement, if any. With a fixed placement, only one GPU instance is possible.
    pub(super) at: Option<Placement>,
    /// Position in the target's list at which the GPU instances are inserted.
    pub(super) position: usize,
    /// Compute instances, in the written order.
    pub(super) compute: Vec<RequestedCompute>,
}

impl<'a> Pack<'a> {
    pub(super) fn new(profile: &'a Profile, at: Option<Placement>, position: usize) -> Self {
        Self { profile, at, position, compute: Vec::new() }
    }

    /// Returns the GPU instances, with the compute instances in them.
    pub(super) fn into_instances(self) -> Result<Vec<RequestedInstance>, Refusal> {
        let slices =
            |c: &RequestedCompute| self.profile.compute(c.profile_id).map_or(0, |p| usize::from(p.profile.slices));
        let all: usize = self.compute.iter().map(slices).sum();
        let fewest = all.div_ceil(usize::from(self.profile.profile.slices).max(1)).max(1);
        let most = if self.at.is_some() { 1 } else { usize::from(self.profile.profile.max).min(MOST_INSTANCES) };
        let packed = (fewest..=most).find_map(|bins| {
            let mut bins: Vec<Vec<RequestedCompute>> = vec![Vec::new(); bins];
            fill(self.profile, &self.compute, &mut bins).then_some(bins)
        });
        let Some(bins) = packed else {
            return Err(Refusal::ComputeDoesNotFit {
                profile: self.profile.profile.name.clone(),
                compute: self.compute.into_iter().map(|c| c.profile).collect(),
            });
        };
        let wanted = |compute| RequestedInstance {
            profile_id: self.profile.profile.id,
            at: self.at,
            compute,
            profile: self.profile.profile.name.clone(),
        };
        Ok(bins.into_iter().map(wanted).collect())
    }
}

/// Puts each compute instance into the first bin (GPU instance) that leaves enough room for all
/// later compute instances.
fn fill(profile: &Profile, compute: &[RequestedCompute], bins: &mut [Vec<RequestedCompute>]) -> bool {
    let Some((first, later)) = compute.split_first() else { return true };
    for n in 0..bins.len() {
        // A bin with the same content as an earlier bin gives the same result.
        if bins[..n].contains(&bins[n]) {
            continue;
        }
        bins[n].push(first.clone());
        if compute::fits(Some(profile), &bins[n]) && fill(profile, later, bins) {
            return true;
        }
        bins[n].pop();
    }
    false
}
