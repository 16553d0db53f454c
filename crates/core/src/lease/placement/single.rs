//! Placement on MPS targets, time-slice replicas, and whole GPUs.

use super::{
    GpuOffer, Member, MpsOffer, PlacementPolicy, PlacementRequest, RequestedShare, UseOccupied,
    choice::GpuChoice,
    cost::{Parts, PlacementCost},
    ends::Blocking,
};

/// Returns two choices: the best one that places no member on this GPU, and the best one that
/// places one member on it.
pub(super) fn best_choices(
    gpu: &GpuOffer,
    wanted: &PlacementRequest,
    policy: PlacementPolicy,
    blocked: UseOccupied,
) -> Vec<Option<GpuChoice>> {
    let one = match &wanted.share {
        RequestedShare::Mps { .. } => {
            let targets = gpu
                .mps
                .iter()
                .filter(|mps| wanted.targets.as_ref().is_none_or(|targets| targets.contains(&mps.target)));
            let ways = targets.filter_map(|mps| on_mps(gpu, mps, wanted, policy, blocked));
            // If several targets have equal cost, the first one is chosen. Targets are sorted by
            // their placement on the GPU.
            ways.reduce(|best, way| if way.cost < best.cost { way } else { best })
        }
        RequestedShare::Timeslice => gpu.timeslice.and_then(|slices| {
            let left = slices.replicas.saturating_sub(slices.taken);
            let full = if left == 0 { Blocking::one(slices.first_end) } else { Blocking::default() };
            let blocking = full.and(Blocking::unknown(u32::from(slices.excluding > 0)));
            let is_free = blocking == Blocking::default();
            // Each replica makes its neighbours slower, so each policy takes the emptiest GPU.
            let parts = Parts { blocking, free: slices.taken, load: slices.taken, ..Parts::default() };
            let way = GpuChoice { cost: parts.cost(policy), ..member(Member::Timeslice { gpu: gpu.index }) };
            (is_free || blocked == UseOccupied::Last && slices.replicas > 0).then_some(way)
        }),
        RequestedShare::Whole => gpu.whole.and_then(|whole| {
            let blocking = if whole.free { Blocking::default() } else { Blocking::one(whole.end) };
            let parts = Parts { blocking, ..Parts::default() };
            let way = GpuChoice { cost: parts.cost(policy), ..member(Member::Whole { gpu: gpu.index }) };
            (whole.free || blocked == UseOccupied::Last).then_some(way)
        }),
        RequestedShare::Mig(_) => None,
    };
    [Some(GpuChoice::default())].into_iter().chain(one.map(Some)).collect()
}

fn on_mps(
    gpu: &GpuOffer,
    mps: &MpsOffer,
    wanted: &PlacementRequest,
    policy: PlacementPolicy,
    blocked: UseOccupied,
) -> Option<GpuChoice> {
    let RequestedShare::Mps { percentage, memory_limit, .. } = &wanted.share else { return None };
    if memory_limit.is_some_and(|limit| limit.mib() > mps.memory_mib) {
        return None;
    }
    let percentage = percentage.unwrap_or(mps.default);
    let tenths = u32::from(percentage.tenths());
    if tenths > mps.capacity_tenths {
        return None;
    }
    let left = mps.capacity_tenths.saturating_sub(mps.taken_tenths);
    let is_others = mps.user.is_some_and(|user| user != wanted.holder);
    let blocking = [
        (tenths > left).then(|| mps.blocking_share(tenths)),
        (mps.leases >= mps.most_leases).then(|| mps.blocking_number()),
        is_others.then(|| mps.blocking_user()),
        (mps.excluding > 0).then(|| Blocking::unknown(1)),
    ];
    let blocking = blocking.into_iter().flatten().fold(Blocking::default(), Blocking::and);
    if blocking != Blocking::default() && blocked == UseOccupied::Never {
        return None;
    }
    // A target whose daemon already serves this user needs no new daemon. Any other target counts
    // as a new daemon.
    let created = u32::from(mps.user != Some(wanted.holder));
    let created = match policy {
        // The daemon would refuse the share, so any other target is better.
        _ if percentage > mps.ceiling => 2,
        PlacementPolicy::Pack => created,
        PlacementPolicy::Spread => 0,
    };
    let parts = Parts { blocking, created, free: left, load: mps.taken_tenths, ..Parts::default() };
    let way = member(Member::Mps { gpu: gpu.index, target: mps.target.clone(), percentage });
    Some(GpuChoice { cost: parts.cost(policy), ..way })
}

fn member(member: Member) -> GpuChoice {
    GpuChoice { cost: PlacementCost::default(), members: vec![member], destroys: Vec::new() }
}
