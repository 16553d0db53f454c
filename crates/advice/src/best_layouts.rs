//! The layouts of all GPUs that together meet the most requests.
//!
//! A request names a share, not a GPU, so only the numbers of shares of the whole host count. The replay gives the
//! number of requests that a number of shares meets. Dynamic programming over the GPUs finds all numbers of shares that
//! the host can have. The result is the numbers that meet the most requests.

use std::collections::BTreeMap;

use crate::possible_layouts::Counts;

/// Maximum number of sets of shares that the search keeps after each GPU. Eight equal GPUs with seven requested shares reach
/// it. Then the search continues with the sets that meet the most so far, and its result is not proven.
const MOST_SETS: usize = 20_000;

/// The options of one GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuOptions {
    /// Numbers of shares, in the order of the shares.
    pub(crate) options: Vec<Counts>,
    /// Position of today's option.
    pub(crate) present: usize,
}

/// The best options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct BestLayouts {
    /// Position of the option of each GPU.
    pub(crate) chosen: Vec<usize>,
    /// Number of requests that they meet.
    pub(crate) met: usize,
    /// Whether no other options meet more.
    pub(crate) is_proven: bool,
}

/// Returns the number of requests that these numbers of shares meet. `met` contains, for each share, the number of
/// requests that 0, 1, 2 … shares meet.
pub(crate) fn met_by_shares(met: &[Vec<usize>], shares: &[usize]) -> usize {
    let of_share = |(met, number): (&Vec<usize>, &usize)| met.get(*number).or(met.last()).copied().unwrap_or(0);
    met.iter().zip(shares).map(of_share).sum()
}

/// Returns the options that meet the most requests. Of equal ones, those that change the fewest GPUs.
pub(crate) fn best_layouts(gpus: &[GpuOptions], met: &[Vec<usize>]) -> BestLayouts {
    let mut steps: Vec<BTreeMap<Vec<usize>, Reached>> = Vec::new();
    let start = Reached { unchanged: 0, option: 0, before: Vec::new() };
    let mut sets = BTreeMap::from([(vec![0; met.len()], start)]);
    let mut is_proven = true;
    for gpu in gpus {
        let mut next: BTreeMap<Vec<usize>, Reached> = BTreeMap::new();
        for (before, reached) in &sets {
            for option in useful_options(gpu) {
                let shares = added(before, &gpu.options[option], met);
                let unchanged = reached.unchanged + usize::from(option == gpu.present);
                let known = next.get(&shares);
                if known.is_none_or(|known| known.unchanged < unchanged) {
                    next.insert(shares, Reached { unchanged, option, before: before.clone() });
                }
            }
        }
        if next.len() > MOST_SETS {
            is_proven = false;
            let mut ranked: Vec<_> = next.into_iter().collect();
            ranked.sort_by_key(|(shares, reached)| std::cmp::Reverse((met_by_shares(met, shares), reached.unchanged)));
            ranked.truncate(MOST_SETS);
            next = ranked.into_iter().collect();
        }
        steps.push(std::mem::replace(&mut sets, next));
    }
    steps.push(sets);
    let value = |(shares, reached): &(&Vec<usize>, &Reached)| (met_by_shares(met, shares), reached.unchanged);
    let last = steps.last().and_then(|sets| sets.iter().max_by_key(value));
    let Some((best, _)) = last else { return BestLayouts { chosen: Vec::new(), met: 0, is_proven } };
    let (mut at, mut chosen) = (best.clone(), Vec::new());
    for sets in steps.iter().skip(1).rev() {
        let Some(reached) = sets.get(&at) else { break };
        chosen.push(reached.option);
        at.clone_from(&reached.before);
    }
    chosen.reverse();
    BestLayouts { met: met_by_shares(met, best), chosen, is_proven }
}

/// How a set of shares was reached.
struct Reached {
    /// Number of GPUs that keep their layout.
    unchanged: usize,
    option: usize,
    before: Vec<usize>,
}

/// Returns today's option, and each option unless another one has at least as many shares of every kind. One more share
/// never meets fewer requests.
fn useful_options(gpu: &GpuOptions) -> Vec<usize> {
    let is_beaten = |own: &Counts| {
        gpu.options.iter().any(|other| other != own && other.iter().zip(own).all(|(other, own)| other >= own))
    };
    (0..gpu.options.len()).filter(|at| *at == gpu.present || !is_beaten(&gpu.options[*at])).collect()
}

/// Adds the shares of a GPU. Shares beyond the number that meets all requests do not count.
fn added(before: &[usize], option: &Counts, met: &[Vec<usize>]) -> Vec<usize> {
    let sum = |((before, more), met): ((&usize, &u8), &Vec<usize>)| (before + usize::from(*more)).min(met.len() - 1);
    before.iter().zip(option).zip(met).map(sum).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn gpu(options: &[&[u8]], present: usize) -> GpuOptions {
        GpuOptions { options: options.iter().map(|counts| counts.to_vec()).collect(), present }
    }

    #[test]
    fn equally_good_layouts_change_the_fewest_gpus() {
        let one = || gpu(&[&[7, 0], &[0, 1]], 1);
        let met = vec![vec![0, 3, 4], vec![0, 5, 6]];
        let best = best_layouts(&[one(), one(), one()], &met);
        assert_eq!((best.met, best.is_proven), (10, true));
        assert_eq!(best.chosen.iter().filter(|option| **option == 1).count(), 2);
    }

    #[test]
    fn no_gpu_or_no_request_meets_nothing() {
        assert_eq!(best_layouts(&[], &[vec![0, 1]]).met, 0);
        let kept = best_layouts(&[gpu(&[&[], &[]], 1)], &[]);
        assert_eq!((kept.met, kept.chosen), (0, vec![1]));
    }

    proptest! {
        /// No combination of options meets more, and of those that meet as many, none keeps more GPUs.
        #[test]
        fn no_combination_of_options_is_better(
            gpus in prop::collection::vec((prop::collection::vec(prop::collection::vec(0u8..4, 3), 1..5), 0usize..5), 1..4),
            steps in prop::collection::vec(prop::collection::vec(0usize..5, 0..6), 3),
        ) {
            let gpus: Vec<GpuOptions> = gpus
                .into_iter()
                .map(|(options, present)| GpuOptions { present: present % options.len(), options })
                .collect();
            let met: Vec<Vec<usize>> = steps
                .iter()
                .map(|steps| steps.iter().scan(0, |sum, step| { *sum += step; Some(*sum) }).collect::<Vec<_>>())
                .map(|sums| std::iter::once(0).chain(sums).collect())
                .collect();
            let best = best_layouts(&gpus, &met);
            let value = |chosen: &[usize]| {
                let mut shares = vec![0; 3];
                for (gpu, option) in gpus.iter().zip(chosen) {
                    shares.iter_mut().zip(&gpu.options[*option]).for_each(|(sum, more)| *sum += usize::from(*more));
                }
                let kept = gpus.iter().zip(chosen).filter(|(gpu, option)| gpu.present == **option).count();
                (met_by_shares(&met, &shares), kept)
            };
            let mut most = (0, 0);
            let all: usize = gpus.iter().map(|gpu| gpu.options.len()).product();
            for mut number in 0..all {
                let chosen: Vec<usize> = gpus
                    .iter()
                    .map(|gpu| { let at = number % gpu.options.len(); number /= gpu.options.len(); at })
                    .collect();
                most = most.max(value(&chosen));
            }
            prop_assert!(best.is_proven);
            prop_assert_eq!(value(&best.chosen), most);
            prop_assert_eq!(best.met, most.0);
        }
    }
}
