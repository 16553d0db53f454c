//! The geometry of a GPU: its profiles, their placements, and their resources.
//!
//! The driver reports the numbers (`api::GpuProfile`). This module prepares them for fast queries:
//! it converts spans to bit masks, and engine counts to rows that can be added. gpushd builds the
//! geometry once for each reading. The rules about which instances fit together are in
//! [`crate::plan`].

use gpush_api::{ComputeProfile, Engines, GpuProfile, Placement};
use gpush_geometry::Model;

/// Maximum number of GPU instances on one GPU, and of compute instances in one GPU instance (from
/// NVML).
pub const MOST_INSTANCES: usize = 8;

/// Kinds of engines, in the order of the rows of [`engine_row`].
pub const ENGINES: [&str; 5] = ["copy", "decoder", "encoder", "jpeg", "ofa"];

/// Engine counts, in the order of [`ENGINES`].
pub type EngineRow = [u16; ENGINES.len()];

/// Returns engine counts as a row.
#[must_use]
pub fn engine_row(engines: Engines) -> EngineRow {
    [engines.copy, engines.decoder, engines.encoder, engines.jpeg, engines.ofa].map(u16::from)
}

/// A set of slices: memory slices of a GPU, or compute slots of a GPU instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Slices(u32);

impl Slices {
    /// The empty set.
    pub const NONE: Self = Self(0);
    /// Every possible slice.
    pub const ALL: Self = Self(u32::MAX);

    /// Returns the slices of a span. Slices beyond 31 are ignored: no GPU has that many.
    #[must_use]
    pub fn of(span: Placement) -> Self {
        let up_to = |slice: u32| if slice >= u32::BITS { u32::MAX } else { (1 << slice) - 1 };
        let start = u32::from(span.start);
        Self(up_to(start + u32::from(span.size)) & !up_to(start))
    }

    /// Returns whether the sets have a slice in common.
    #[must_use]
    pub fn overlaps(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Returns the number of slices.
    #[must_use]
    pub fn count(self) -> u32 {
        self.0.count_ones()
    }

    /// Returns the union of the sets.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// A possible position of an instance.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spot {
    /// The position as the driver reports it.
    pub placement: Placement,
    /// The position as a set of slices.
    pub slices: Slices,
}

impl Spot {
    /// Returns the spot that has this placement.
    #[must_use]
    pub fn from_placement(placement: Placement) -> Self {
        Self { placement, slices: Slices::of(placement) }
    }
}

/// A compute instance profile within a GPU instance profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Compute {
    /// The profile as the driver reports it.
    pub profile: ComputeProfile,
    /// Possible positions, sorted by start.
    pub spots: Vec<Spot>,
    /// Whether the driver reports placements for this profile. If false, the driver chooses the
    /// placement, and `spots` is a guess.
    pub placeable: bool,
}

/// A GPU instance profile.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// The profile as the driver reports it.
    pub profile: GpuProfile,
    /// Possible positions, sorted by start.
    pub spots: Vec<Spot>,
    /// Engines of one instance.
    pub engines: EngineRow,
    /// Profiles of the compute instances that a GPU instance of this profile can contain.
    pub compute: Vec<Compute>,
}

impl Profile {
    /// Returns the compute instance profile with this id.
    #[must_use]
    pub fn compute(&self, id: u32) -> Option<&Compute> {
        self.compute.iter().find(|c| c.profile.id == id)
    }

    /// Returns the compute instance profile of `Nc.PROFILE`, where N is `slices`.
    ///
    /// Several profiles can have the same number of slices: on Hopper and newer GPUs, a `1g.20gb`
    /// with double memory offers `1c.1g.20gb` and `1g.20gb`. A profile with exactly the name
    /// `Nc.PROFILE` is preferred. If no profile has this name, only the number of slices is
    /// compared.
    #[must_use]
    pub fn compute_of(&self, slices: u8) -> Option<&Compute> {
        let name = format!("{slices}c.{}", self.profile.name);
        let named = self.compute.iter().find(|c| c.profile.name == name);
        named.or_else(|| {
            let whole = (slices == self.profile.slices).then(|| self.whole()).flatten();
            whole.or_else(|| self.compute.iter().find(|c| c.profile.slices == slices))
        })
    }

    /// Returns the compute instance profile that occupies the whole GPU instance: the profile with
    /// the same name. If no profile has that name, only profiles with the same number of slices are
    /// considered. Of these, the profile with the most streaming multiprocessors is returned.
    #[must_use]
    pub fn whole(&self) -> Option<&Compute> {
        self.compute.iter().find(|c| c.profile.name == self.profile.name).or_else(|| {
            let all = self.compute.iter().filter(|c| c.profile.slices == self.profile.slices);
            all.max_by_key(|c| (c.profile.sm, std::cmp::Reverse(c.profile.index)))
        })
    }

    /// Returns the number of memory slices of the smallest spot.
    #[must_use]
    pub fn memory_slices(&self) -> u32 {
        self.spots.iter().map(|s| u32::from(s.placement.size)).min().unwrap_or(0)
    }
}

/// The geometry of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Geometry {
    /// Profiles in the driver's order.
    pub profiles: Vec<Profile>,
    /// Memory slices of the GPU.
    pub memory_slices: u8,
    /// Compute slices of the GPU.
    pub compute_slices: u8,
    /// Number of engines of each kind on the GPU. The driver does not report these numbers, so they
    /// are computed: for each profile, the engines of one instance are multiplied by the maximum
    /// number of instances. The result is the largest product.
    pub engines: EngineRow,
}

impl Geometry {
    /// Creates the geometry from the driver's profiles. Ignores placements beyond the GPU's memory
    /// slices.
    #[must_use]
    pub fn new(profiles: &[GpuProfile], memory_slices: u8, compute_slices: u8) -> Self {
        let profiles: Vec<Profile> = profiles.iter().map(|p| profile(p, memory_slices)).collect();
        let mut engines = EngineRow::default();
        for profile in &profiles {
            for (all, one) in engines.iter_mut().zip(profile.engines) {
                *all = (*all).max(one * u16::from(profile.profile.max));
            }
        }
        Self { profiles, memory_slices, compute_slices, engines }
    }

    /// Creates the geometry of a GPU model from the built-in data, for planning without hardware.
    #[must_use]
    pub fn of_model(model: &Model) -> Self {
        Self::new(&profiles_of_model(model), model.memory_slices, model.compute_slices)
    }

    /// Returns the profile with this name, such as `3g.40gb`.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<&Profile> {
        self.profiles.iter().find(|p| p.profile.name == name)
    }

    /// Returns the profile with this driver id.
    #[must_use]
    pub fn profile(&self, id: u32) -> Option<&Profile> {
        self.profiles.iter().find(|p| p.profile.id == id)
    }
}

fn profile(described: &GpuProfile, memory_slices: u8) -> Profile {
    let mut spots: Vec<Spot> = described
        .placements
        .iter()
        .filter(|p| p.size > 0 && u32::from(p.start) + u32::from(p.size) <= u32::from(memory_slices).min(u32::BITS))
        .map(|p| Spot::from_placement(*p))
        .collect();
    spots.sort_by_key(|s| s.placement);
    spots.dedup();
    let compute = described.compute.iter().cloned().map(compute).collect();
    Profile { profile: described.clone(), spots, engines: engine_row(described.engines), compute }
}

fn compute(profile: ComputeProfile) -> Compute {
    let mut spots: Vec<Spot> =
        profile.placements.iter().filter(|p| p.size > 0).map(|p| Spot::from_placement(*p)).collect();
    spots.sort_by_key(|s| s.placement);
    spots.dedup();
    let placeable = !spots.is_empty();
    if !placeable {
        let side_by_side = |n: u8| Placement { start: n.saturating_mul(profile.slices), size: profile.slices };
        spots = (0..profile.max).map(|n| Spot::from_placement(side_by_side(n))).collect();
    }
    Compute { profile, spots, placeable }
}

/// Returns the profiles of a GPU model, in the form in which its driver would report them.
#[must_use]
pub fn profiles_of_model(model: &Model) -> Vec<GpuProfile> {
    let spans = |spans: &[(u8, u8)]| spans.iter().map(|&(start, size)| Placement { start, size }).collect();
    model
        .gi_profiles
        .iter()
        .map(|p| GpuProfile {
            name: p.name.clone(),
            id: p.id,
            index: p.index,
            slices: p.slices,
            max: p.max,
            remaining: None,
            memory_mib: p.memory_mib,
            sm: p.sm,
            engines: Engines {
                copy: p.engines.copy,
                decoder: p.engines.decoder,
                encoder: p.engines.encoder,
                jpeg: p.engines.jpeg,
                ofa: p.engines.ofa,
            },
            gfx: p.gfx,
            placements: spans(&p.placements),
            compute: p
                .compute
                .iter()
                .map(|c| ComputeProfile {
                    name: c.name.clone(),
                    id: c.id,
                    index: c.index,
                    slices: c.slices,
                    max: c.max,
                    sm: c.sm,
                    placements: spans(&c.placements),
                })
                .collect(),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_become_sets() {
        let set = |start, size| Slices::of(Placement { start, size });
        assert!(set(0, 4).overlaps(set(3, 1)));
        assert!(!set(0, 4).overlaps(set(4, 4)));
        assert_eq!(set(0, 4).union(set(4, 4)), set(0, 8));
        assert_eq!(set(200, 200), Slices::NONE);
        assert_eq!(set(0, 255), Slices::ALL);
    }

    #[test]
    fn engines_of_a_part_are_those_of_its_whole_profile() {
        for key in gpush_geometry::KEYS {
            let model = gpush_geometry::model(key).unwrap();
            let geometry = Geometry::of_model(&model);
            let Some(whole) = geometry.profiles.iter().max_by_key(|p| p.memory_slices()) else { continue };
            assert_eq!(geometry.engines, whole.engines, "{key}");
        }
    }
}
