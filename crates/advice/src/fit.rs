//! MIG instances for tenants: the profile, the number of instances, and the profiles that fit in addition.

use std::cmp::Reverse;

use gpush_api::{Gpu, GpuProfile, InstanceStep, LayoutSource, Placement, PlanRequest, Step};
use gpush_core::{config::Config, desired};
use serde::Serialize;

use crate::packing_bound::Demand;

/// An instance of a layout, with its place on the GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Placed {
    /// Profile.
    pub profile: String,
    /// Memory slices.
    pub placement: Placement,
}

/// Equal instances for tenants on one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InstanceFit {
    /// Profile of each tenant.
    pub profile: String,
    /// Number of instances.
    pub count: u32,
    /// Profiles of further instances that fit in addition, largest first.
    pub spare: Vec<String>,
    /// The instances and the further ones, in the order of their places.
    pub placed: Vec<Placed>,
}

impl InstanceFit {
    /// Returns the entries of a layout with one instance for each tenant.
    pub(crate) fn layout(&self) -> Vec<String> {
        vec![entry(&self.profile, self.count)]
    }
}

pub(crate) fn entry(profile: &str, count: u32) -> String {
    if count == 1 { profile.to_owned() } else { format!("{profile}*{count}") }
}

/// Returns the instances for at least `wanted` tenants on a GPU: the largest profile of which so many fit. If no profile is small
/// enough, returns the profile of which the most fit. `None` if no profile meets the demand, or if the GPU has no MIG.
pub(crate) fn fit(gpu: &Gpu, demand: &Demand, wanted: u32) -> Option<InstanceFit> {
    let gpu = desired::as_if_idle(gpu);
    let profiles = meeting(&gpu, demand);
    let enough = profiles.iter().filter(|profile| u32::from(profile.max) >= wanted);
    let largest = enough.max_by_key(|profile| (profile.memory_mib, profile.sm, Reverse(profile.max)));
    let most = || profiles.iter().max_by_key(|profile| (profile.max, profile.memory_mib));
    let chosen = largest.or_else(most)?;
    let count = u32::from(chosen.max);
    let base = entry(&chosen.name, count);
    let placed = plan(&gpu, std::slice::from_ref(&base))?;
    let spare = more_that_fits(&gpu, std::slice::from_ref(&base));
    let all: Vec<String> = [base].into_iter().chain(spare.iter().cloned()).collect();
    let mut placed = plan(&gpu, &all).unwrap_or(placed);
    placed.sort_by_key(|instance| instance.placement);
    Some(InstanceFit { profile: chosen.name.clone(), count, spare, placed })
}

/// Returns the profiles of further instances that fit in addition to a layout: the largest that still fits, until none does.
pub(crate) fn more_that_fits(gpu: &Gpu, entries: &[String]) -> Vec<String> {
    let gpu = desired::as_if_idle(gpu);
    let mut others: Vec<&GpuProfile> = plain(&gpu).collect();
    others.sort_by_key(|profile| Reverse((profile.memory_mib, profile.sm)));
    let mut all = entries.to_vec();
    for other in others {
        loop {
            all.push(other.name.clone());
            if plan(&gpu, &all).is_none() {
                all.pop();
                break;
            }
        }
    }
    all.split_off(entries.len())
}

/// Returns the profile of which the most instances meet the demand, with their number, for the packing bound.
pub(crate) fn most_instances<'g>(gpu: &'g Gpu, demand: &Demand) -> Option<(&'g str, u32)> {
    let found = meeting(gpu, demand).into_iter().max_by_key(|profile| (profile.max, profile.memory_mib))?;
    Some((&found.name, u32::from(found.max)))
}

/// Returns the profiles of which one instance meets the demand.
fn meeting<'g>(gpu: &'g Gpu, demand: &Demand) -> Vec<&'g GpuProfile> {
    let whole = plain(gpu).map(|profile| profile.sm).max().unwrap_or_default();
    let has_compute =
        |profile: &&GpuProfile| u64::from(profile.sm) * 1000 >= u64::from(demand.compute_tenths()) * u64::from(whole);
    let has_memory = |profile: &&GpuProfile| demand.memory_mib.is_none_or(|own| profile.memory_mib >= own);
    plain(gpu).filter(has_compute).filter(has_memory).collect()
}

/// Returns the profiles without special engines, whose names have a suffix such as `+me`, and without graphics.
pub(crate) fn plain(gpu: &Gpu) -> impl Iterator<Item = &GpuProfile> {
    let all = gpu.mig.iter().flat_map(|mig| mig.profiles.iter());
    all.filter(|profile| !profile.gfx && profile.max > 0 && !profile.name.contains(['+', '-']))
}

/// Returns where the planner places the instances of a layout; `None` if they do not fit on the idle GPU.
fn plan(gpu: &Gpu, entries: &[String]) -> Option<Vec<Placed>> {
    let layout = LayoutSource::Entries(entries.to_vec());
    let request = PlanRequest { gpus: vec![gpu.index.to_string()], layout };
    let plans = desired::plan_host(&Config::default(), std::slice::from_ref(gpu), &request).ok()?;
    let [plan] = plans.plans.as_slice() else { return None };
    if plan.refusal.is_some() || plan.error.is_some() {
        return None;
    }
    let placed = plan.steps.iter().filter_map(|step| match step {
        Step::Instance(InstanceStep::CreateGpuInstance { profile, placement, .. }) => {
            Some(Placed { profile: profile.clone(), placement: *placement })
        }
        Step::Instance(_) | Step::Mps(_) | Step::MigMode(_) | Step::Timeslice(_) => None,
    });
    Some(placed.collect())
}

#[cfg(test)]
mod tests {
    use gpush_api::Percentage;
    use gpush_core::preset;
    use proptest::prelude::*;

    use super::*;

    fn gpu(preset: &str) -> Gpu {
        preset::gpus(preset).unwrap().swap_remove(0)
    }

    fn fitted(preset: &str, memory_gib: u64, percent: u16, wanted: u32) -> Option<(String, u32, Vec<String>)> {
        let demand = Demand {
            memory_mib: (memory_gib > 0).then_some(memory_gib * 1024),
            compute: Percentage::of_tenths(percent * 10),
        };
        fit(&gpu(preset), &demand, wanted).map(|fit| (fit.profile, fit.count, fit.spare))
    }

    #[test]
    fn largest_profile_with_enough_instances_is_chosen() {
        let some = |profile: &str, count, spare: &[&str]| {
            Some((profile.to_owned(), count, spare.iter().map(|&name| name.to_owned()).collect::<Vec<_>>()))
        };
        assert_eq!(fitted("dgx-a100", 0, 0, 7), some("1g.10gb", 7, &[]));
        assert_eq!(fitted("dgx-a100", 0, 0, 3), some("2g.20gb", 3, &["1g.20gb"]));
        assert_eq!(fitted("dgx-a100", 0, 0, 2), some("3g.40gb", 2, &[]));
        assert_eq!(fitted("a30x4", 0, 0, 4), some("1g.6gb", 4, &[]));
        // 15 GiB need the 1g profile with double memory.
        assert_eq!(fitted("dgx-a100", 15, 0, 7), some("1g.20gb", 4, &[]));
        assert_eq!(fitted("dgx-a100", 60, 0, 7), some("7g.80gb", 1, &[]));
        assert_eq!(fitted("dgx-a100", 90, 0, 7), None);
        assert_eq!(fitted("dgx-a100", 0, 30, 7).map(|fit| fit.0).as_deref(), Some("3g.40gb"));
    }

    /// Instances of different sizes fit on one GPU, which some guides deny.
    #[test]
    fn mixed_sizes_fit_on_an_a100() {
        let found = fit(&gpu("dgx-a100"), &Demand::default(), 3).unwrap();
        assert_ne!(found.spare.first(), Some(&found.profile));
        assert_eq!(found.placed.len(), 4);
    }

    #[test]
    fn gpu_without_mig_has_no_instances() {
        let gpus = preset::gpus("mixed").unwrap();
        let t4 = gpus.iter().find(|gpu| gpu.mig.is_none()).unwrap();
        assert_eq!(fit(t4, &Demand::default(), 4), None);
        assert_eq!(most_instances(t4, &Demand::default()), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// The places do not overlap, each instance meets the demand, and nothing else fits.
        #[test]
        fn places_are_disjoint_and_instances_meet_the_demand(
            memory in 1u64..100_000, tenths in 1u16..=1000, wanted in 1u32..9, preset in 0usize..5,
        ) {
            let gpu = gpu(["dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "a30x4"][preset]);
            let demand = Demand { memory_mib: Some(memory), compute: Percentage::of_tenths(tenths) };
            let Some(found) = fit(&gpu, &demand, wanted) else {
                prop_assert!(meeting(&gpu, &demand).is_empty());
                return Ok(());
            };
            prop_assert!(found.count >= 1 && !found.spare.contains(&found.profile));
            prop_assert_eq!(found.placed.len(), found.spare.len() + found.count as usize);
            let end = |placement: Placement| placement.start + placement.size;
            prop_assert!(found.placed.windows(2).all(|two| end(two[0].placement) <= two[1].placement.start));
            let profile = meeting(&gpu, &demand).into_iter().find(|profile| profile.name == found.profile).unwrap();
            prop_assert!(profile.memory_mib >= memory);
        }
    }
}
