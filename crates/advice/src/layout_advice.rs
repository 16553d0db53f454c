//! Today's layouts of a host, compared with those that would have met the most recorded requests.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{Gpu, GpuIndex, Mode, UsageHistory};
use serde::Serialize;

use crate::{
    best_layouts::{GpuOptions, best_layouts, met_by_shares},
    fit::more_that_fits,
    possible_layouts::{Counts, entries, full_layouts},
    request_replay::{RecordedRequests, RequestTally, WHOLE, met_by_number},
};

/// The layouts of one GPU.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GpuLayout {
    /// Index of the GPU.
    #[serde(rename = "gpu")]
    pub index: GpuIndex,
    /// Product name.
    pub name: String,
    /// Entries of today's layout; `["whole"]` if the GPU is granted as a whole.
    pub present_entries: Vec<String>,
    /// Entries of the layout that would have met the most requests.
    pub entries: Vec<String>,
    /// Profiles that fit in addition to that layout.
    pub also_fits: Vec<String>,
    /// Whether the layouts differ.
    pub differs: bool,
}

/// The requests for one share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ShareDemand {
    /// Profile, or `whole`.
    #[serde(rename = "requested_share")]
    pub share: String,
    /// Number of requests.
    #[serde(rename = "request_count")]
    pub requests: usize,
    /// Number of requests that today's layouts meet.
    pub met_today: usize,
    /// Number of requests that the best layouts meet.
    pub met_best: usize,
}

/// The advice for the layouts of a host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct LayoutAdvice {
    /// The numbers of requests that are replayed, and of those that cannot be.
    pub request_tally: RequestTally,
    /// The requests, by share.
    pub demands: Vec<ShareDemand>,
    /// Number of replayed requests that today's layouts meet.
    pub met_today: usize,
    /// Number of replayed requests that the best layouts meet.
    pub met_best: usize,
    /// Whether it is proven that no other layouts meet more requests. It can be unproven only for very large hosts.
    pub is_proven: bool,
    /// GPUs with a fixed layout, or that are granted as a whole.
    pub gpu_layouts: Vec<GpuLayout>,
    /// GPUs that are left out: their mode has no layout, their layout is dynamic, or their devices are shared through MPS.
    #[serde(rename = "left_out_gpus")]
    pub left_out: Vec<GpuIndex>,
}

impl LayoutAdvice {
    /// Returns the number of requests that the best layouts meet and today's do not, as a difference of the totals.
    #[must_use]
    pub fn regret(&self) -> usize {
        self.met_best - self.met_today
    }

    /// Returns the least number of refused requests that today's layouts meet in the replay, although they were refused.
    /// The replay knows their day, but not their time.
    #[must_use]
    pub fn refused_but_met_today(&self) -> usize {
        self.met_today.saturating_sub(self.request_tally.replayed_grants)
    }

    /// Returns the number of requests that are replayed.
    #[must_use]
    pub fn replayed(&self) -> usize {
        self.request_tally.replayed_grants + self.request_tally.replayed_refusals
    }
}

/// Returns the layouts that would have met the most recorded requests. `gpus` must have their profiles.
#[must_use]
pub fn layout_advice(history: &UsageHistory, gpus: &[Gpu]) -> LayoutAdvice {
    let (compared, left_out): (Vec<&Gpu>, Vec<&Gpu>) = gpus.iter().partition(|gpu| has_fixed_layout(gpu));
    let uuids: BTreeSet<&str> = compared.iter().map(|gpu| gpu.uuid.as_str()).collect();
    let has_share = |share: &str| share == WHOLE || compared.iter().any(|gpu| has_profile(gpu, share));
    let requests = RecordedRequests::of(history, |target| uuids.contains(target.gpu_uuid.as_str()), has_share);
    let shares: Vec<&str> = requests.by_share.keys().map(String::as_str).collect();
    let most = compared.len() * MOST_INSTANCES;
    let met: Vec<Vec<usize>> = requests.by_share.values().map(|all| met_by_number(all, most)).collect();
    let options = options(&compared, &shares);
    let best = best_layouts(&options, &met);
    let sum = |chosen: &dyn Fn(usize, &GpuOptions) -> usize| {
        let mut sum = vec![0; shares.len()];
        for (at, gpu) in options.iter().enumerate() {
            let counts = &gpu.options[chosen(at, gpu)];
            sum.iter_mut().zip(counts).for_each(|(sum, more)| *sum += usize::from(*more));
        }
        sum
    };
    let today = sum(&|_, gpu| gpu.present);
    let chosen = sum(&|at, gpu| best.chosen.get(at).copied().unwrap_or(gpu.present));
    let demand = |(at, share): (usize, &&str)| ShareDemand {
        share: (*share).to_owned(),
        requests: requests.by_share.get(*share).map_or(0, Vec::len),
        met_today: met_by_shares(&met[at..=at], &today[at..=at]),
        met_best: met_by_shares(&met[at..=at], &chosen[at..=at]),
    };
    let layouts = compared.iter().zip(&options).zip(&best.chosen);
    LayoutAdvice {
        request_tally: requests.counts,
        demands: shares.iter().enumerate().map(demand).collect(),
        met_today: met_by_shares(&met, &today),
        met_best: best.met,
        is_proven: best.is_proven,
        gpu_layouts: layouts.map(|((gpu, options), chosen)| gpu_layout(gpu, options, *chosen, &shares)).collect(),
        left_out: left_out.iter().map(|gpu| gpu.index).collect(),
    }
}

/// Maximum number of GPU instances on one GPU.
const MOST_INSTANCES: usize = gpush_core::geometry::MOST_INSTANCES;

/// Returns whether the instances of a GPU are fixed by its rule, or the GPU is granted as a whole. A device that is shared
/// through MPS is not granted as a MIG device.
fn has_fixed_layout(gpu: &Gpu) -> bool {
    let is_shared = |layout: &Vec<String>| layout.iter().any(|entry| entry.ends_with(":mps"));
    match gpu.mode {
        Mode::Mig => gpu.mig.is_some() && gpu.layout.as_ref().is_some_and(|layout| !is_shared(layout)),
        Mode::Exclusive => true,
        Mode::Mps | Mode::Timeslice | Mode::Unmanaged | Mode::NoRule => false,
    }
}

fn has_profile(gpu: &Gpu, name: &str) -> bool {
    gpu.mig.iter().flat_map(|mig| mig.profiles.iter()).any(|profile| profile.name == name)
}

/// Returns today's profiles of a GPU; [`WHOLE`] if it is granted as a whole.
fn present(gpu: &Gpu) -> Vec<&str> {
    let mig = gpu.mig.as_ref().filter(|_| gpu.mode == Mode::Mig);
    mig.map_or_else(|| vec![WHOLE], |mig| mig.instances.iter().map(|instance| instance.profile.as_str()).collect())
}

/// Returns the options of each GPU. Searches the layouts of equal GPUs only once.
fn options(gpus: &[&Gpu], shares: &[&str]) -> Vec<GpuOptions> {
    let mut of_models: BTreeMap<(&str, usize), Vec<Counts>> = BTreeMap::new();
    let mut all = Vec::new();
    for gpu in gpus {
        // The driver may report the profiles of a GPU only while its MIG mode is on.
        let profiles = gpu.mig.as_ref().map_or(0, |mig| mig.profiles.len());
        let possible = of_models.entry((&gpu.name, profiles)).or_insert_with(|| {
            let mut possible = full_layouts(gpu, shares);
            possible.push(shares.iter().map(|share| u8::from(*share == WHOLE)).collect());
            possible
        });
        let today = present(gpu);
        let counted = |share: &&str| u8::try_from(today.iter().filter(|one| *one == share).count()).unwrap_or(u8::MAX);
        let mut options = possible.clone();
        options.push(shares.iter().map(counted).collect());
        all.push(GpuOptions { present: options.len() - 1, options });
    }
    all
}

fn gpu_layout(gpu: &Gpu, options: &GpuOptions, chosen: usize, shares: &[&str]) -> GpuLayout {
    let today = present(gpu);
    let mut counted: BTreeMap<&str, u8> = BTreeMap::new();
    today.iter().for_each(|share| *counted.entry(share).or_default() += 1);
    let (names, counts): (Vec<&str>, Vec<u8>) = counted.into_iter().unzip();
    let present_entries = entries(gpu, &names, &counts);
    let entries = if chosen == options.present {
        present_entries.clone()
    } else {
        entries(gpu, shares, &options.options[chosen])
    };
    let is_mig = !entries.is_empty() && entries != [WHOLE];
    GpuLayout {
        index: gpu.index,
        name: gpu.name.clone(),
        also_fits: if is_mig && chosen != options.present { more_that_fits(gpu, &entries) } else { Vec::new() },
        differs: chosen != options.present,
        present_entries,
        entries,
    }
}

#[cfg(test)]
mod tests;
