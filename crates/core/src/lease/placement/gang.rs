//! Finds the best distribution of a request's members over the GPUs. A gang is placed completely or
//! not at all.
//!
//! The cost of an assignment is the sum of its costs on each GPU, so dynamic programming finds the
//! best distribution. For each GPU and each number of remaining members, the algorithm computes how
//! many of these members the GPU gets.

use super::{
    Assignment, Closed, GpuOffer, Host, PlacementPolicy, PlacementRequest, RequestedShare, UseOccupied,
    choice::GpuChoice,
    cost::{Parts, PlacementCost},
    ends::Blocking,
    equal_gpus, mig, single,
};

/// Returns the best assignment; `None` if no assignment is possible.
pub(super) fn best(
    host: &Host,
    wanted: &PlacementRequest,
    policy: PlacementPolicy,
    blocked: UseOccupied,
) -> Option<Assignment> {
    best_with_cost(host, wanted, policy, blocked).map(|(assignment, _)| assignment)
}

/// Does the same as [`best`], and returns the cost too.
pub(super) fn best_with_cost(
    host: &Host,
    wanted: &PlacementRequest,
    policy: PlacementPolicy,
    blocked: UseOccupied,
) -> Option<(Assignment, PlacementCost)> {
    let count = wanted.count;
    let mut gpus: Vec<&GpuOffer> = host.gpus.iter().filter(|gpu| may_use(gpu, wanted, blocked)).collect();
    gpus.sort_by_key(|gpu| gpu.index);
    let ways = equal_gpus::choices(&gpus, wanted, blocked, |gpu| choices_on(gpu, wanted, policy, blocked));
    let chosen = distribute(&ways, count)?;
    let (mut assignment, mut cost) = (Assignment::default(), PlacementCost::default());
    for (ways, number) in ways.into_iter().zip(chosen) {
        let way = ways.into_iter().nth(number).flatten()?;
        assignment.members.extend(way.members);
        assignment.destroys.extend(way.destroys);
        cost = cost + way.cost;
    }
    Some((assignment, cost))
}

/// Returns the maximum number of members that one GPU alone can hold now, up to the requested
/// number.
pub(super) fn capacity(gpu: &GpuOffer, wanted: &PlacementRequest, policy: PlacementPolicy) -> usize {
    capacities(&[gpu], wanted, policy).into_iter().sum()
}

/// Returns the [`capacity`] of each GPU.
pub(super) fn capacities(gpus: &[&GpuOffer], wanted: &PlacementRequest, policy: PlacementPolicy) -> Vec<usize> {
    let choices = equal_gpus::choices(gpus, wanted, UseOccupied::Never, |gpu| {
        choices_on(gpu, wanted, policy, UseOccupied::Never)
    });
    choices.iter().map(|choices| choices.iter().rposition(Option::is_some).unwrap_or(0)).collect()
}

/// Returns the cheapest choice on one GPU for 0, 1, 2 … members.
fn choices_on(
    gpu: &GpuOffer,
    wanted: &PlacementRequest,
    policy: PlacementPolicy,
    blocked: UseOccupied,
) -> Vec<Option<GpuChoice>> {
    let mut ways = match &wanted.share {
        RequestedShare::Mig(device) => {
            mig::best_choices(gpu, device, wanted.targets.as_ref(), wanted.count, policy, blocked)
        }
        RequestedShare::Mps { .. } | RequestedShare::Timeslice | RequestedShare::Whole => {
            single::best_choices(gpu, wanted, policy, blocked)
        }
    };
    if gpu.closed.is_some() {
        for way in ways.iter_mut().flatten() {
            let blocking = Blocking::unknown(u32::try_from(way.members.len()).unwrap_or(u32::MAX));
            way.cost = way.cost + Parts { blocking, ..Parts::default() }.cost(policy);
        }
    }
    ways
}

/// Returns whether the request may use a GPU. If an operation has claimed the GPU, only a
/// reservation may use the GPU, because a reservation can wait for the end of the operation.
fn may_use(gpu: &GpuOffer, wanted: &PlacementRequest, blocked: UseOccupied) -> bool {
    let selected = wanted.gpus.as_ref().is_none_or(|gpus| gpus.contains(&gpu.index));
    selected
        && match gpu.closed {
            None => true,
            Some(Closed::Claimed) => blocked == UseOccupied::Last,
            Some(
                Closed::Cordoned
                | Closed::NotReady
                | Closed::Pending
                | Closed::Prohibited
                | Closed::StillShared
                | Closed::NotShared,
            ) => false,
        }
}

/// Returns how many members each GPU gets in the cheapest distribution. Among distributions of
/// equal cost, earlier GPUs get more members.
fn distribute(ways: &[Vec<Option<GpuChoice>>], count: usize) -> Option<Vec<usize>> {
    // `least[gpu][number]`: the least cost of placing `number` members on this GPU and the later
    // GPUs, and how many of these members this GPU gets.
    let mut least: Vec<Vec<Option<(PlacementCost, usize)>>> = vec![vec![None; count + 1]; ways.len() + 1];
    least[ways.len()][0] = Some((PlacementCost::default(), 0));
    for (gpu, ways) in ways.iter().enumerate().rev() {
        let (head, rest) = least.split_at_mut(gpu + 1);
        let (here, after) = (&mut head[gpu], &rest[0]);
        for (number, least) in here.iter_mut().enumerate() {
            let most = number.min(ways.len().saturating_sub(1));
            for own in (0..=most).rev() {
                let (Some(way), Some((others, _))) = (&ways[own], after[number - own]) else { continue };
                let cost = way.cost + others;
                if least.is_none_or(|(best, _)| cost < best) {
                    *least = Some((cost, own));
                }
            }
        }
    }
    let mut left = count;
    let mut chosen = Vec::with_capacity(ways.len());
    for least in least.iter().take(ways.len()) {
        let (_, own) = least[left]?;
        chosen.push(own);
        left -= own;
    }
    (left == 0).then_some(chosen)
}
