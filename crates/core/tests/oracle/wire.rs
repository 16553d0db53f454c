//! Conversions between the oracle's sets and the planner's types.

use gpush_api::{ComputeInstance, GpuInstance, Placement, Process, ProcessKind};
use gpush_core::plan::{RequestedCompute, RequestedInstance, Target};

use crate::model_states::{ModelStates, Multiset, State, members, profiles};

/// Returns the id of the GPU instance for a (profile, placement) pair; `pair` is the position of
/// the pair. No id equals a placement, so tests detect a confusion of the two.
pub(crate) fn gi_of(pair: usize) -> u32 {
    100 + pair as u32
}

/// Returns the pair of the GPU instance with this id.
pub(crate) fn pair_of(gi: u32) -> usize {
    gi as usize - 100
}

pub(crate) fn process(pid: u32) -> Process {
    Process {
        pid: Some(pid),
        uid: Some(1000),
        user: None,
        command: None,
        kind: ProcessKind::Compute,
        memory_mib: Some(100),
        unidentified: false,
    }
}

/// Returns the instances of a state. Each instance has one compute instance that occupies the whole
/// GPU instance. The instances in `busy` have a process.
pub(crate) fn instances(part: &ModelStates, state: State, busy: State) -> Vec<GpuInstance> {
    members(state)
        .map(|n| {
            let pair = part.pairs[n];
            let profile = &part.model.gi_profiles[pair.profile];
            let whole = profile.compute.iter().find(|c| c.name == profile.name).unwrap();
            GpuInstance {
                id: gi_of(n),
                profile_id: profile.id,
                profile: profile.name.clone(),
                placement: Placement { start: pair.start, size: pair.size },
                memory: None,
                compute: vec![ComputeInstance {
                    id: 0,
                    profile_id: whole.id,
                    profile: whole.name.clone(),
                    placement: Some(Placement { start: whole.placements[0].0, size: whole.placements[0].1 }),
                    uuid: None,
                    processes: if busy >> n & 1 == 1 { vec![process(1)] } else { Vec::new() },
                }],
                processes: Vec::new(),
            }
        })
        .collect()
}

/// Returns the target of a multiset. The pairs in `fixed` have fixed placements; the other
/// instances may be placed anywhere.
pub(crate) fn target(part: &ModelStates, multiset: Multiset, fixed: State) -> Target {
    let mut fixed: Vec<usize> = members(fixed).collect();
    let instances = profiles(multiset)
        .map(|p| {
            let profile = &part.model.gi_profiles[p];
            let whole = profile.compute.iter().find(|c| c.name == profile.name).unwrap();
            let at = fixed.iter().position(|n| part.pairs[*n].profile == p).map(|n| part.pairs[fixed.swap_remove(n)]);
            RequestedInstance {
                profile_id: profile.id,
                at: at.map(|pair| Placement { start: pair.start, size: pair.size }),
                compute: vec![RequestedCompute { profile_id: whole.id, at: None, profile: whole.name.clone() }],
                profile: profile.name.clone(),
            }
        })
        .collect();
    assert!(fixed.is_empty());
    Target { instances }
}
