//! What a GPU shall hold: a layout resolved against one GPU's geometry.
//!
//! A layout is text that may be meant for many GPUs; a target is for one: every entry is one GPU
//! instance with the driver's profile id and the compute instances that it shall have. A target
//! can also be taken from what stands ([`Target::of_instances`]), exact to the placement: that is
//! how a failed change is taken back.

use std::fmt;

use gpush_api::{GpuInstance, Placement, Refusal};

use crate::geometry::{Compute, Geometry, Profile};
use crate::layout::{Entry, Layout};

use super::{packing, refusal};

/// The instances that one GPU shall hold, and no others.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Target {
    /// GPU instances, in the order in which the layout has them.
    pub instances: Vec<Wanted>,
}

/// One GPU instance that is wanted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Wanted {
    /// Profile id, as the driver reports it.
    pub profile_id: u32,
    /// Placement, when it is fixed.
    pub at: Option<Placement>,
    /// Compute instances that it shall have, and no others; empty for none at all.
    pub compute: Vec<WantedCompute>,
    /// Profile name.
    pub profile: String,
}

/// One compute instance that is wanted. How its MIG device is shared is not part of it: that changes
/// nothing about instances, and is no reason to make one anew.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WantedCompute {
    /// Profile id, as the driver reports it within its GPU instance profile.
    pub profile_id: u32,
    /// Placement in compute slots, when it is fixed.
    pub at: Option<Placement>,
    /// Profile name.
    pub profile: String,
}

impl Target {
    /// The target that a layout means on a GPU of this geometry.
    ///
    /// # Errors
    /// A refusal that names the smallest reason why the layout can't be on such a GPU, even an
    /// empty one. A target that is returned here can only be refused for instances in use.
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
            let compute = wanted_compute(profile, entry)?;
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
                Some(_) | None => instances.extend((0..entry.count).map(|_| Wanted {
                    profile_id: profile.profile.id,
                    at,
                    compute: vec![compute.clone()],
                    profile: profile.profile.name.clone(),
                })),
            }
        }
        // Later packs first, so that the positions of earlier ones stay true.
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

    /// The target that is exactly what stands, down to every placement.
    ///
    /// Instances of a profile that the geometry does not know are included: they can be made
    /// again by their profile id where they stood.
    #[must_use]
    pub fn of_instances(geometry: &Geometry, instances: &[GpuInstance]) -> Self {
        let wanted = |instance: &GpuInstance| Wanted {
            profile_id: instance.profile_id,
            at: Some(instance.placement),
            compute: instance
                .compute
                .iter()
                .map(|c| WantedCompute { profile_id: c.profile_id, at: c.placement, profile: c.profile.clone() })
                .collect(),
            profile: geometry
                .profile(instance.profile_id)
                .map_or_else(|| instance.profile.clone(), |p| p.profile.name.clone()),
        };
        Self { instances: instances.iter().map(wanted).collect() }
    }
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.profile)?;
        match self.at {
            Some(at) => write!(f, "@{}", at.start),
            None => Ok(()),
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

/// The compute instance that an entry asks for.
fn wanted_compute(profile: &Profile, entry: &Entry) -> Result<WantedCompute, Refusal> {
    let found: Option<&Compute> = match entry.compute_slices {
        None => profile.whole(),
        Some(slices) => profile.compute_of(slices),
    };
    match found {
        Some(compute) => {
            Ok(WantedCompute { profile_id: compute.profile.id, at: None, profile: compute.profile.name.clone() })
        }
        None => {
            let slices = entry.compute_slices.unwrap_or(profile.profile.slices);
            Err(refusal::unknown_compute_profile(profile, slices))
        }
    }
}
