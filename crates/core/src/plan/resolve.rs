//! Resolves a layout for the geometry of a GPU.

use gpush_api::{Placement, Refusal};

use crate::geometry::{Compute, Geometry, Profile};
use crate::layout::{Entry, Layout};

use super::{RequestedCompute, RequestedInstance, Target, packing, refusal};

impl Target {
    /// Resolves a layout for a GPU with this geometry.
    ///
    /// # Errors
    /// The simplest reason why the layout does not fit even on an empty GPU of this kind. If the
    /// function succeeds, only instances in use can block the target.
    pub fn resolve(geometry: &Geometry, layout: &Layout) -> Result<Self, Refusal> {
        let mut instances = Vec::new();
        let mut packs: Vec<packing::Pack<'_>> = Vec::new();
        for entry in &layout.entries {
            let profile =
                geometry.named(&entry.profile).ok_or_else(|| refusal::unknown_profile(geometry, &entry.profile))?;
            let at = match entry.start {
                Some(start) => Some(placement_at(profile, start)?),
                None => None,
            };
            let compute = requested_compute(profile, entry)?;
            match entry.compute_slices {
                Some(slices) if slices != profile.profile.slices => {
                    let pack = match packs.iter_mut().find(|p| p.profile == profile && p.at == at) {
                        Some(pack) => pack,
                        None => {
                            packs.push(packing::Pack::new(profile, at, instances.len()));
                            let last = packs.len() - 1;
                            &mut packs[last]
                        }
                    };
                    pack.compute.extend((0..entry.count).map(|_| compute.clone()));
                }
                Some(_) | None => instances.extend((0..entry.count).map(|_| RequestedInstance {
                    profile_id: profile.profile.id,
                    at,
                    compute: vec![compute.clone()],
                    profile: profile.profile.name.clone(),
                })),
            }
        }
        // Packs are inserted from the last to the first, so that the positions of earlier packs
        // remain valid.
        for pack in packs.into_iter().rev() {
            let position = pack.position;
            instances.splice(position..position, pack.into_instances()?);
        }
        let target = Self { instances };
        match refusal::impossible(geometry, &target) {
            Some(refusal) => Err(refusal),
            None => Ok(target),
        }
    }
}

fn placement_at(profile: &Profile, start: u8) -> Result<Placement, Refusal> {
    let starts = || profile.spots.iter().map(|s| s.placement);
    starts().find(|p| p.start == start).ok_or_else(|| Refusal::NoSuchPlacement {
        profile: profile.profile.name.clone(),
        start,
        possible: starts().map(|p| p.start).collect(),
    })
}

/// Returns the compute instance of an entry.
fn requested_compute(profile: &Profile, entry: &Entry) -> Result<RequestedCompute, Refusal> {
    let found: Option<&Compute> = match entry.compute_slices {
        None => profile.whole(),
        Some(slices) => profile.compute_of(slices),
    };
    match found {
        Some(compute) => {
            Ok(RequestedCompute { profile_id: compute.profile.id, at: None, profile: compute.profile.name.clone() })
        }
        None => {
            let slices = entry.compute_slices.unwrap_or(profile.profile.slices);
            Err(refusal::unknown_compute_profile(profile, slices))
        }
    }
}
