//! The target of a GPU: a layout that was resolved for the geometry of this GPU.
//!
//! A layout is text, for any number of GPUs. A target is for one GPU: it contains GPU instances
//! with the profile ids of the driver, and their compute instances. A rollback makes a target from
//! existing instances, with their placements ([`Target::of_instances`]).

use std::fmt;

use gpush_api::{GpuInstance, Placement, Refusal};

use crate::geometry::{Compute, Geometry, Profile};
use crate::layout::{Entry, Layout};

use super::{packing, refusal};

/// The exact set of instances for one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Target {
    /// GPU instances, in the order of the layout.
    pub instances: Vec<RequestedInstance>,
}

/// A requested GPU instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestedInstance {
    /// Profile id, as the driver reports it.
    pub profile_id: u32,
    /// Fixed placement; `None` if any placement is allowed.
    pub at: Option<Placement>,
    /// The exact set of compute instances, which may be empty.
    pub compute: Vec<RequestedCompute>,
    /// Profile name.
    pub profile: String,
}

/// A requested compute instance. The type does not say whether its MIG device is shared, because a
/// change of sharing does not need a new instance.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RequestedCompute {
    /// Profile id that the driver reports within the GPU instance profile.
    pub profile_id: u32,
    /// Fixed placement in compute slots; `None` if any placement is allowed.
    pub at: Option<Placement>,
    /// Profile name.
    pub profile: String,
}

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

    /// Returns the target that describes the existing instances, with all placements.
    ///
    /// The target includes instances whose profile is not in the geometry: the profile id and the
    /// placement suffice to create such instances again.
    #[must_use]
    pub fn of_instances(geometry: &Geometry, instances: &[GpuInstance]) -> Self {
        let wanted = |instance: &GpuInstance| RequestedInstance {
            profile_id: instance.profile_id,
            at: Some(instance.placement),
            compute: instance
                .compute
                .iter()
                .map(|c| RequestedCompute { profile_id: c.profile_id, at: c.placement, profile: c.profile.clone() })
                .collect(),
            profile: geometry
                .profile(instance.profile_id)
                .map_or_else(|| instance.profile.clone(), |p| p.profile.name.clone()),
        };
        Self { instances: instances.iter().map(wanted).collect() }
    }
}

impl fmt::Display for RequestedInstance {
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
