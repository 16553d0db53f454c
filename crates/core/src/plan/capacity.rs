//! The total demand of a target, regardless of placements.

use crate::geometry::{ENGINES, EngineRow, Geometry, MOST_INSTANCES, Profile, engine_row};

use super::target::Target;

/// Sums over the GPU instances of a target. An instance of an unknown profile adds only to the
/// number of instances, because its slices and engines are unknown. Such an instance can be
/// requested only at the placement where it already exists.
#[derive(Debug)]
pub(crate) struct Demand<'a> {
    geometry: &'a Geometry,
    instances: usize,
    /// Number of instances of each profile, in the order of the geometry.
    numbers: Vec<u32>,
    /// Minimum number of memory slices that the instances need.
    pub(in crate::plan) memory: u32,
    /// Number of compute slices that the instances need.
    pub(in crate::plan) compute: u32,
    /// Number of engines that the instances need.
    pub(in crate::plan) engines: EngineRow,
}

impl<'a> Demand<'a> {
    /// Returns the sums for the GPU instances of a target.
    pub(super) fn of(geometry: &'a Geometry, target: &Target) -> Self {
        Self::of_profiles(geometry, target.instances.iter().map(|wanted| wanted.profile_id))
    }

    /// Returns the sums for GPU instances with these profile ids.
    pub(crate) fn of_profiles(geometry: &'a Geometry, profiles: impl Iterator<Item = u32>) -> Self {
        let mut demand = Self {
            geometry,
            instances: 0,
            numbers: vec![0; geometry.profiles.len()],
            memory: 0,
            compute: 0,
            engines: engine_row(gpush_api::Engines::default()),
        };
        for profile_id in profiles {
            demand.instances += 1;
            let known = geometry.profiles.iter().zip(&mut demand.numbers).find(|(p, _)| p.profile.id == profile_id);
            let Some((profile, number)) = known else { continue };
            *number += 1;
            demand.memory += profile.memory_slices();
            demand.compute += u32::from(profile.profile.slices);
            for (sum, one) in demand.engines.iter_mut().zip(profile.engines) {
                *sum = sum.saturating_add(one);
            }
        }
        demand
    }

    /// Returns the requested profiles with their counts.
    pub(super) fn numbers(&self) -> impl Iterator<Item = (&'a Profile, u32)> {
        self.geometry.profiles.iter().zip(self.numbers.iter().copied()).filter(|(_, number)| *number > 0)
    }

    /// Returns whether the GPU has enough compute slices, engines and instances for the demand.
    pub(crate) fn is_met(&self) -> bool {
        self.instances <= MOST_INSTANCES
            && self.compute <= u32::from(self.geometry.compute_slices)
            && self.numbers().all(|(profile, number)| number <= u32::from(profile.profile.max))
            && self.insufficient_engine().is_none()
    }

    /// Returns the first kind of engine of which the GPU has too few, as an index of [`ENGINES`].
    pub(super) fn insufficient_engine(&self) -> Option<usize> {
        (0..ENGINES.len()).find(|&e| self.engines[e] > self.geometry.engines[e])
    }
}
