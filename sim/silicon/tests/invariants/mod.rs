//! Conditions that hold in every state of a simulated host. The checks use only the geometry data,
//! and no code of the rules that they check.

use silicon::Machine;

/// Panics if the state is impossible. Returns the number of instances that it has checked.
pub(crate) fn check(machine: &Machine) -> usize {
    let mut looked = 0;
    let mut generations = std::collections::BTreeSet::new();
    for gpu in machine.gpus() {
        let part = machine.part(gpu.index).unwrap();
        let model = &part.model;
        let at = format!("GPU {} ({}): {:?}", gpu.index, model.key, gpu.instances);
        assert!(gpu.mig || gpu.instances.is_empty(), "instances with MIG off on {at}");
        assert!(model.has_mig() || !(gpu.mig || gpu.mig_pending), "MIG mode on {at}");
        assert!(gpu.instances.len() <= 8, "{at}");
        let whole = model.gi_profiles.iter().max_by_key(|p| (p.slices, p.placements[0].1, p.engines.ofa));
        let mut slices = vec![false; usize::from(model.memory_slices)];
        let (mut compute, mut engines) = (0, [0u8; 5]);
        let counts = |e: &gpush_geometry::Engines| [e.copy, e.decoder, e.encoder, e.jpeg, e.ofa];
        for pair in gpu.instances.windows(2) {
            assert!(pair[0].id < pair[1].id, "ids out of order on {at}");
        }
        for gi in &gpu.instances {
            let profile = model.gi_profiles.iter().find(|p| p.id == gi.profile_id).unwrap();
            let place = (gi.placement.start, gi.placement.size);
            assert!(profile.placements.contains(&place), "impossible placement on {at}");
            for slice in place.0..place.0 + place.1 {
                assert!(!std::mem::replace(&mut slices[usize::from(slice)], true), "slice {slice} twice on {at}");
            }
            compute += profile.slices;
            for (sum, count) in engines.iter_mut().zip(counts(&profile.engines)) {
                *sum += count;
            }
            assert!(generations.insert(gi.generation) && gi.generation < machine.state().next_generation, "{at}");
            let (mut slots, mut used) = (vec![false; 16], 0);
            for (position, ci) in gi.instances.iter().enumerate() {
                let inner = profile.compute.iter().find(|p| p.id == ci.profile_id).unwrap();
                let place = (ci.placement.start, ci.placement.size);
                assert!(inner.placements.contains(&place), "impossible compute placement on {at}");
                for slot in place.0..place.0 + place.1 {
                    assert!(!std::mem::replace(&mut slots[usize::from(slot)], true), "slot {slot} twice on {at}");
                }
                used += inner.slices;
                assert!(position == 0 || gi.instances[position - 1].id < ci.id, "{at}");
                assert!(generations.insert(ci.generation) && ci.generation < machine.state().next_generation, "{at}");
                looked += 1;
            }
            assert!(used <= profile.slices && gi.instances.len() <= 8, "compute capacity of {at}");
            looked += 1;
        }
        assert!(compute <= model.compute_slices, "compute slices of {at}");
        if let Some(whole) = whole {
            let has = counts(&whole.engines);
            assert!(engines.iter().zip(has).all(|(used, has)| *used <= has), "engines {engines:?} of {has:?} of {at}");
        }
        for process in &gpu.processes {
            let Some(gi) = process.gpu_instance else { continue };
            let gi = gpu.instance(gi).unwrap_or_else(|| panic!("process in no GPU instance on {at}"));
            let ci = process.compute_instance.map(|ci| gi.compute(ci).is_some());
            assert!(ci.unwrap_or(true), "process in no compute instance on {at}");
        }
    }
    looked
}
