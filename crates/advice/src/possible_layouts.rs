//! The layouts of a GPU in which no further instance of the given profiles fits. The planner decides what fits.

use gpush_api::{Gpu, Mig};
use gpush_core::{
    geometry::Geometry,
    layout::{Entry, Layout},
    plan::Target,
};

/// Numbers of instances, in the order of the profiles.
pub(crate) type Counts = Vec<u8>;

/// Returns the numbers of instances of each layout in which no further instance of these profiles fits. Without MIG,
/// there is no layout. The result is sorted.
pub(crate) fn full_layouts(gpu: &Gpu, profiles: &[&str]) -> Vec<Counts> {
    let Some(mig) = &gpu.mig else { return Vec::new() };
    let search = Search { geometry: geometry(mig), profiles };
    let mut found = Vec::new();
    search.extend(&mut vec![0; profiles.len()], 0, &mut found);
    found.retain(|counts: &Counts| counts.iter().any(|count| *count > 0));
    found.sort_unstable();
    found
}

fn geometry(mig: &Mig) -> Geometry {
    Geometry::new(&mig.profiles, mig.memory_slices, mig.compute_slices)
}

struct Search<'p> {
    geometry: Geometry,
    profiles: &'p [&'p str],
}

impl Search<'_> {
    /// Adds instances of the profiles from a position on, so that each set of instances is tried once.
    fn extend(&self, counts: &mut Counts, from: usize, found: &mut Vec<Counts>) {
        for position in from..self.profiles.len() {
            counts[position] += 1;
            if self.fits(counts) {
                self.extend(counts, position, found);
            }
            counts[position] -= 1;
        }
        if self.is_full(counts) {
            found.push(counts.clone());
        }
    }

    fn is_full(&self, counts: &Counts) -> bool {
        (0..counts.len()).all(|position| {
            let mut more = counts.clone();
            more[position] += 1;
            !self.fits(&more)
        })
    }

    fn fits(&self, counts: &Counts) -> bool {
        Target::resolve(&self.geometry, &layout(self.profiles, counts)).is_ok()
    }
}

fn layout(profiles: &[&str], counts: &[u8]) -> Layout {
    let counted = profiles.iter().zip(counts).filter(|(_, count)| **count > 0);
    let entries = counted.map(|(profile, count)| Entry {
        compute_slices: None,
        profile: (*profile).to_owned(),
        start: None,
        count: *count,
        share: None,
    });
    Layout { entries: entries.collect() }
}

/// Returns a layout in the form of the config, the largest profiles first.
pub(crate) fn entries(gpu: &Gpu, profiles: &[&str], counts: &[u8]) -> Vec<String> {
    let size = |name: &str| {
        let profile = gpu.mig.iter().flat_map(|mig| mig.profiles.iter()).find(|profile| profile.name == name);
        profile.map_or((0, 0), |profile| (profile.memory_mib, profile.sm))
    };
    let mut counted: Vec<(&str, u8)> =
        profiles.iter().copied().zip(counts.iter().copied()).filter(|(_, count)| *count > 0).collect();
    counted.sort_by_key(|(name, _)| std::cmp::Reverse(size(name)));
    counted.iter().map(|(name, count)| crate::fit::entry(name, u32::from(*count))).collect()
}

#[cfg(test)]
mod tests {
    use gpush_core::preset;

    use super::*;

    fn gpu(preset: &str) -> Gpu {
        preset::gpus(preset).unwrap().remove(0)
    }

    #[test]
    fn full_layouts_of_an_a100_leave_no_room() {
        let found = full_layouts(&gpu("dgx-a100"), &["1g.10gb", "2g.20gb", "3g.40gb"]);
        let all = [[0, 0, 2], [0, 2, 1], [1, 3, 0], [2, 1, 1], [3, 2, 0], [4, 0, 1], [5, 1, 0], [7, 0, 0]];
        assert_eq!(found, all);
    }

    #[test]
    fn gpu_without_mig_or_profile_has_no_layout() {
        let t4 = preset::gpus("mixed").unwrap().into_iter().find(|gpu| gpu.mig.is_none()).unwrap();
        assert_eq!(full_layouts(&t4, &["1g.10gb"]), [] as [Counts; 0]);
        assert_eq!(full_layouts(&gpu("dgx-a100"), &["1g.11gb"]), [] as [Counts; 0]);
        assert_eq!(full_layouts(&gpu("dgx-a100"), &[]), [] as [Counts; 0]);
    }

    #[test]
    fn entries_have_the_largest_profile_first() {
        let profiles = ["1g.10gb", "2g.20gb", "3g.40gb"];
        assert_eq!(entries(&gpu("dgx-a100"), &profiles, &[3, 0, 1]), ["3g.40gb", "1g.10gb*3"]);
        assert_eq!(entries(&gpu("dgx-a100"), &profiles, &[0, 0, 0]), [] as [&str; 0]);
    }
}
