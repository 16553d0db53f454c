//! Visits all states of a GPU. A state is a set of (profile, placement) pairs. The test creates
//! every profile at every placement, until it finds no new state.
#![allow(clippy::unwrap_used)] // A test that cannot continue has failed.

use std::collections::BTreeSet;

use silicon::Machine;
use silicon::Return;
use silicon::machine::Placement;

mod invariants;

type State = BTreeSet<(u32, Placement)>;

/// Returns how many states exist with only these profiles, and how many of them are full.
fn walk(model: &str, wanted: impl Fn(&str) -> bool) -> (usize, usize) {
    let empty = Machine::of_model(model).unwrap();
    let part = empty.part(0).unwrap();
    let pairs: Vec<(u32, Placement)> = part
        .profiles
        .iter()
        .filter(|profile| wanted(&profile.data.name))
        .flat_map(|profile| profile.placements().map(|(placement, _)| (profile.data.id, placement)))
        .collect();
    let mut seen: BTreeSet<State> = BTreeSet::from([State::new()]);
    let mut open = vec![(State::new(), empty)];
    let mut maximal = 0;
    while let Some((state, machine)) = open.pop() {
        let mut grew = false;
        for &(profile, placement) in &pairs {
            let mut next = machine.clone();
            match next.create_gpu_instance(0, profile, Some(placement)) {
                Ok(_) => {
                    grew = true;
                    let mut bigger = state.clone();
                    assert!(bigger.insert((profile, placement)));
                    if seen.insert(bigger.clone()) {
                        invariants::check(&next);
                        open.push((bigger, next));
                    }
                }
                Err(rc) => assert_eq!(rc, Return::InsufficientResources),
            }
        }
        maximal += usize::from(!grew);
    }
    println!("{model}: {} states, {maximal} maximal, of {} pairs", seen.len(), pairs.len());
    (seen.len(), maximal)
}

#[test]
fn states_of_an_a100_are_counted() {
    let double = |name: &str| name == "1g.20gb";
    let media = |name: &str| name.contains("+me");
    assert_eq!(walk("a100-80", |name| !double(name) && !media(name)), (298, 19));
    assert_eq!(walk("a100-80", |name| !media(name)), (723, 78));
    assert_eq!(walk("a100-80", |_| true), (2319, 239));
}

#[test]
fn states_of_an_a30_are_counted() {
    assert_eq!(walk("a30-24", |name| !name.contains("+me")), (26, 5));
}

#[test]
fn other_seven_slice_gpus_have_the_states_of_an_a100() {
    for model in ["a100-40", "h100-80-sxm", "h100-80-pcie", "h200-141", "gh200-96", "b200-180"] {
        assert_eq!(walk(model, |_| true), (2319, 239), "{model}");
    }
}

#[test]
fn profile_memory_depends_on_the_driver() {
    use silicon::description::{Description, DriverVersion};
    let memory = |driver| {
        let machine = Machine::new(&Description::of_model("a100-40", driver)).unwrap();
        let part = machine.part(0).unwrap();
        part.profiles.iter().find(|profile| profile.data.name == "3g.20gb").unwrap().data.memory_mib
    };
    assert_eq!(memory(DriverVersion::new(470, 57, 2)), 20096);
    assert_eq!(memory(DriverVersion::new(550, 163, 1)), 19968);
}

#[test]
fn profiles_depend_on_the_driver() {
    use silicon::description::{Description, DriverVersion};
    let names = |driver| -> Vec<String> {
        let machine = Machine::new(&Description::of_model("a100-40", driver)).unwrap();
        machine.part(0).unwrap().profiles.iter().map(|profile| profile.data.name.clone()).collect()
    };
    let old = names(DriverVersion::new(450, 80, 2));
    assert!(!old.contains(&"1g.5gb+me".to_owned()) && !old.contains(&"1g.10gb".to_owned()), "{old:?}");
    let middle = names(DriverVersion::new(470, 57, 2));
    assert!(middle.contains(&"1g.5gb+me".to_owned()) && !middle.contains(&"1g.10gb".to_owned()), "{middle:?}");
    let new = names(DriverVersion::new(550, 163, 1));
    assert!(new.contains(&"1g.5gb+me".to_owned()) && new.contains(&"1g.10gb".to_owned()), "{new:?}");
}

/// Returns the number of states of the compute instances in one GPU instance of this profile.
fn compute_states(model: &str, name: &str) -> usize {
    let mut machine = Machine::of_model(model).unwrap();
    let part = machine.part(0).unwrap();
    let profile = part.profiles.iter().find(|profile| profile.data.name == name).unwrap();
    machine.create_gpu_instance(0, profile.data.id, None).unwrap();
    let handle = |machine: &Machine| machine.gpu_instance_handle(0, machine.gpu(0).unwrap().instances[0].id).unwrap();
    let pairs: Vec<(u32, Placement)> = profile
        .data
        .compute
        .iter()
        .flat_map(|c| c.placements.iter().map(|&(start, size)| (c.id, Placement { start, size })))
        .collect();
    let mut seen: BTreeSet<State> = BTreeSet::from([State::new()]);
    let mut open = vec![(State::new(), machine)];
    while let Some((state, machine)) = open.pop() {
        for &(profile, placement) in &pairs {
            let mut next = machine.clone();
            match next.create_compute_instance(handle(&next), profile, Some(placement)) {
                Ok(_) => {
                    let mut bigger = state.clone();
                    assert!(bigger.insert((profile, placement)));
                    if seen.insert(bigger.clone()) {
                        invariants::check(&next);
                        open.push((bigger, next));
                    }
                }
                Err(rc) => assert_eq!(rc, Return::InsufficientResources),
            }
        }
    }
    seen.len()
}

#[test]
fn compute_instances_have_the_states_of_their_parts() {
    // A double-memory 1g instance is empty, or has compute profile 0. Except on the A100, it can
    // have compute profile 7 instead.
    for key in gpush_geometry::KEYS {
        let model = gpush_geometry::model(key).unwrap();
        let Some(double) = model.gi_profiles.iter().find(|profile| profile.index == 9) else { continue };
        let states = if key.starts_with("a100") { 2 } else { 3 };
        assert_eq!(compute_states(key, &double.name), states, "{key}");
    }
    let counted = [
        ("a100-80", "3g.40gb", 11),
        ("h100-80-sxm", "3g.40gb", 11),
        ("a100-80", "4g.40gb", 26),
        ("h100-80-sxm", "4g.40gb", 26),
        ("a30-24", "4g.24gb", 26),
    ];
    for (key, name, states) in counted {
        println!("{key} {name}: {} states", compute_states(key, name));
        assert_eq!(compute_states(key, name), states, "{key} {name}");
    }
}
