//! The room of a GPU: how much it offers to later requests.
//!
//! The room is a sum over all (profile, placement) pairs of the GPU:
//! - The value of a pair is the square of its memory slices. So large profiles, which have few placements, count more.
//! - Each instance in the way of the pair divides this by 4. An instance may end before the next request, so a pair that
//!   one instance blocks is worth more than a pair that three instances block.
//! - If the GPU lacks compute slices, engines or a free instance of the profile, although all instances in the way have
//!   ended, this divides the pair by 4 once more.
//!
//! ```text
//! A100 80GB with a 3g.40gb@4
//!   1g.10gb@6   1 slice,  1 in the way:    1 / 4
//!   4g.40gb@0   4 slices, 0 in the way:   16
//!   7g.80gb@0   8 slices, 1 in the way:   64 / 4
//! ```
//!
//! `docs/benchmarks.md` compares this measure with other strategies and with the exact optimum, over eight mixes of requests.

use crate::geometry::{ENGINES, EngineRow, Geometry, MOST_INSTANCES, Profile, Slices};

/// An instance that occupies a GPU.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeldInstance<'a> {
    /// The profile. An instance of an unknown profile occupies only its memory slices.
    profile: Option<&'a Profile>,
    /// Its memory slices.
    pub(crate) slices: Slices,
}

impl<'a> HeldInstance<'a> {
    /// Returns an instance with this profile id.
    pub(crate) fn new(geometry: &'a Geometry, profile_id: u32, slices: Slices) -> Self {
        Self { profile: geometry.profile(profile_id), slices }
    }
}

/// Divisions by 4 that still change the sum.
const MOST_DIVISIONS: u32 = MOST_INSTANCES as u32;

/// The room of a GPU that has some instances. More room for the present instances counts first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct Room {
    /// Sum over the pairs that are possible now, in square memory slices. Instances of a layout stay until an administrator
    /// changes the layout, so a plan for a layout compares this first.
    pub(crate) now: u64,
    /// Sum over all pairs, in units of 4⁻⁸ square memory slices, so that it is an exact integer. Leases end without a change
    /// of the layout, so their placement compares only this.
    pub(crate) later: u64,
}

impl Room {
    /// Returns the room of a GPU that has these instances.
    pub(crate) fn of(geometry: &Geometry, held: &[HeldInstance<'_>]) -> Self {
        let everything = Sums::of(held.iter());
        let mut room = Self::default();
        for profile in &geometry.profiles {
            // If the profile is possible with all instances, it is also possible with some of them.
            let has_place = everything.has_place_for(geometry, profile, held);
            let weight = u64::from(profile.memory_slices().pow(2));
            for spot in &profile.spots {
                let in_the_way = held.iter().filter(|instance| instance.slices.overlaps(spot.slices)).count() as u32;
                let lacks = !has_place && {
                    let rest = || held.iter().filter(|instance| !instance.slices.overlaps(spot.slices));
                    !Sums::of(rest()).has_place_for(geometry, profile, rest())
                };
                let divisions = in_the_way + u32::from(lacks);
                room.now += if divisions == 0 { weight } else { 0 };
                room.later += weight << (2 * MOST_DIVISIONS.saturating_sub(divisions));
            }
        }
        room
    }
}

/// What instances use, apart from their memory slices.
#[derive(Default)]
struct Sums {
    instances: usize,
    compute: u32,
    engines: EngineRow,
}

impl Sums {
    fn of<'a>(held: impl Iterator<Item = &'a HeldInstance<'a>>) -> Self {
        let mut sums = Self::default();
        for instance in held {
            sums.instances += 1;
            let Some(profile) = instance.profile else { continue };
            sums.compute += u32::from(profile.profile.slices);
            for (sum, one) in sums.engines.iter_mut().zip(profile.engines) {
                *sum = sum.saturating_add(one);
            }
        }
        sums
    }

    /// Returns whether one more instance of the profile is possible with the instances `held`. These are their sums.
    fn has_place_for<'a>(
        &self,
        geometry: &Geometry,
        profile: &Profile,
        held: impl IntoIterator<Item = &'a HeldInstance<'a>>,
    ) -> bool {
        let is_equal =
            |instance: &&HeldInstance<'_>| instance.profile.is_some_and(|other| other.profile.id == profile.profile.id);
        self.instances < MOST_INSTANCES
            && self.compute + u32::from(profile.profile.slices) <= u32::from(geometry.compute_slices)
            && (0..ENGINES.len()).all(|e| self.engines[e] + profile.engines[e] <= geometry.engines[e])
            && held.into_iter().filter(is_equal).count() < usize::from(profile.profile.max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpush_api::Placement;

    fn geometry(key: &str) -> Geometry {
        Geometry::of_model(&gpush_geometry::model(key).unwrap())
    }

    /// Returns an instance, such as `3g.40gb@4`.
    fn instance<'a>(geometry: &'a Geometry, text: &str) -> HeldInstance<'a> {
        let (name, start) = text.split_once('@').unwrap();
        let profile = geometry.named(name).unwrap();
        let start: u8 = start.parse().unwrap();
        let spot = profile.spots.iter().find(|spot| spot.placement.start == start).unwrap();
        HeldInstance::new(geometry, profile.profile.id, spot.slices)
    }

    /// Returns the room that an instance takes, in square memory slices.
    fn taken(key: &str, before: &[&str], new: &str) -> f64 {
        let geometry = geometry(key);
        let mut all: Vec<HeldInstance<'_>> = before.iter().map(|text| instance(&geometry, text)).collect();
        let room_before = Room::of(&geometry, &all).later;
        all.push(instance(&geometry, new));
        (room_before - Room::of(&geometry, &all).later) as f64 / f64::from(1 << (2 * MOST_DIVISIONS))
    }

    #[test]
    fn divided_gpu_loses_less_room_than_an_empty_one() {
        assert!(taken("a100-80", &["3g.40gb@4"], "1g.10gb@0") < taken("a100-80", &[], "1g.10gb@6"));
        assert!(taken("a100-80", &["1g.10gb@6"], "3g.40gb@0") < taken("a100-80", &[], "3g.40gb@4"));
    }

    #[test]
    fn pair_counts_its_slices_and_the_instances_in_its_way() {
        let mut geometry = geometry("a100-80");
        geometry.profiles.retain(|profile| profile.profile.name == "7g.80gb");
        let one = u64::from(1_u32 << (2 * MOST_DIVISIONS));
        assert_eq!(Room::of(&geometry, &[]), Room { now: 64, later: 64 * one });
        // A profile that the geometry does not have occupies only its memory slices.
        let small = |start| HeldInstance::new(&geometry, 1000, Slices::of(Placement { start, size: 1 }));
        assert_eq!(Room::of(&geometry, &[small(0)]), Room { now: 0, later: 16 * one });
        assert_eq!(Room::of(&geometry, &[small(0), small(4)]), Room { now: 0, later: 4 * one });
    }

    #[test]
    fn pair_without_compute_slices_counts_less() {
        let mut geometry = geometry("a100-80");
        let before = Room::of(&geometry, &[instance(&geometry, "4g.40gb@0")]);
        geometry.compute_slices = 4;
        assert!(Room::of(&geometry, &[instance(&geometry, "4g.40gb@0")]) < before, "all compute slices are taken");
    }

    /// The search for several members relies on this.
    #[test]
    fn each_instance_takes_room_on_every_model() {
        let mut rng = fastrand::Rng::with_seed(7);
        let mut compared = 0;
        for key in gpush_geometry::KEYS {
            let geometry = geometry(key);
            if geometry.profiles.is_empty() {
                continue;
            }
            for _ in 0..200 {
                let (mut all, mut occupied) = (Vec::new(), Slices::NONE);
                let mut last = Room::of(&geometry, &all);
                for _ in 0..MOST_INSTANCES {
                    let profile = &geometry.profiles[rng.usize(..geometry.profiles.len())];
                    let spot = profile.spots[rng.usize(..profile.spots.len())];
                    if spot.slices.overlaps(occupied) {
                        continue;
                    }
                    occupied = occupied.union(spot.slices);
                    all.push(HeldInstance::new(&geometry, profile.profile.id, spot.slices));
                    let now = Room::of(&geometry, &all);
                    assert!(now.now <= last.now && now.later < last.later, "{key}: {all:?}");
                    (last, compared) = (now, compared + 1);
                }
            }
        }
        assert!(compared > 5_000, "{compared}");
    }
}
