//! Properties that hold for every GPU model after random calls.
#![allow(clippy::unwrap_used)] // A test that cannot continue has failed.

use gpush_geometry::KEYS;
use proptest::prelude::*;
use silicon::machine::{ComputeInstanceHandle, GpuInstanceHandle, Handle};
use silicon::{Machine, Return};

mod invariants;

/// A random call. Its numbers may be out of range: they are reduced to the valid range when the
/// call is made.
#[derive(Debug, Clone)]
enum Act {
    CreateGpu { profile: usize, placement: Option<usize> },
    DestroyGpu(usize),
    CreateCompute { within: usize, profile: usize, placement: Option<usize> },
    DestroyCompute(usize),
}

fn act() -> impl Strategy<Value = Act> {
    let placement = || proptest::option::of(0..16usize);
    prop_oneof![
        3 => (0..16usize, placement()).prop_map(|(profile, placement)| Act::CreateGpu { profile, placement }),
        1 => (0..8usize).prop_map(Act::DestroyGpu),
        3 => (0..8usize, 0..8usize, placement())
            .prop_map(|(within, profile, placement)| Act::CreateCompute { within, profile, placement }),
        2 => (0..16usize).prop_map(Act::DestroyCompute),
    ]
}

fn gpu_instances(machine: &Machine) -> Vec<GpuInstanceHandle> {
    let ids = machine.gpus()[0].instances.iter().map(|gi| gi.id);
    ids.map(|id| machine.gpu_instance_handle(0, id).unwrap()).collect()
}

fn compute_instances(machine: &Machine) -> Vec<ComputeInstanceHandle> {
    let count = machine.mig_devices(0).unwrap().len() as u32;
    (0..count).map(|index| machine.mig_device_by_index(0, index).unwrap()).collect()
}

fn pick<T: Copy>(from: &[T], n: usize) -> Option<T> {
    if from.is_empty() { None } else { Some(from[n % from.len()]) }
}

/// Makes one call, and returns whether it succeeded. After a creation, destroys the instance on a
/// copy of the machine, to check that nothing of the instance is left.
fn perform(machine: &mut Machine, act: &Act) -> Result<bool, TestCaseError> {
    let part = machine.part(0).unwrap();
    match *act {
        Act::CreateGpu { profile, placement } => {
            let profile = &part.profiles[profile % part.profiles.len()];
            let places: Vec<_> = profile.placements().collect();
            let placement = placement.map(|n| places[n % places.len()].0);
            let before = machine.clone();
            let remaining = machine.remaining_gpu_instances(0, profile.data.id).unwrap();
            match machine.create_gpu_instance(0, profile.data.id, placement) {
                Ok(made) => {
                    prop_assert!(remaining > 0, "created one although the simulator reported that none remained");
                    let found = machine.resolve_gpu_instance(made).unwrap();
                    prop_assert!(places.contains(&(found.placement, made.id)), "the id is not that of the placement");
                    let mut undone = machine.clone();
                    undone.destroy_gpu_instance(made).unwrap();
                    prop_assert_eq!(undone.gpus(), before.gpus(), "create and destroy is not identity");
                    prop_assert_eq!(undone.resolve_gpu_instance(made).unwrap_err(), Return::InvalidArgument);
                    Ok(true)
                }
                Err(rc) => {
                    prop_assert_eq!(rc, Return::InsufficientResources);
                    prop_assert!(placement.is_some() || remaining == 0, "refused although {} remain", remaining);
                    prop_assert_eq!(machine.state(), before.state(), "a failed call changed something");
                    Ok(false)
                }
            }
        }
        Act::DestroyGpu(n) => {
            let Some(handle) = pick(&gpu_instances(machine), n) else { return Ok(false) };
            let empty = machine.resolve_gpu_instance(handle).unwrap().instances.is_empty();
            let done = machine.destroy_gpu_instance(handle);
            prop_assert_eq!(done, if empty { Ok(()) } else { Err(Return::InUse) });
            Ok(empty)
        }
        Act::CreateCompute { within, profile, placement } => {
            let Some(handle) = pick(&gpu_instances(machine), within) else { return Ok(false) };
            let before = machine.clone();
            let gi = before.resolve_gpu_instance(handle).unwrap();
            let outer = part.profile(gi.profile_id).unwrap();
            let inner = &outer.data.compute[profile % outer.data.compute.len()];
            let placement = placement.map(|n| {
                let (start, size) = inner.placements[n % inner.placements.len()];
                silicon::machine::Placement { start, size }
            });
            let lowest = (0..).find(|&id| gi.compute(id).is_none()).unwrap();
            match machine.create_compute_instance(handle, inner.id, placement) {
                Ok(made) => {
                    prop_assert_eq!(made.id, lowest);
                    let mut undone = machine.clone();
                    undone.destroy_compute_instance(made).unwrap();
                    prop_assert_eq!(undone.gpus(), before.gpus(), "create and destroy is not identity");
                    Ok(true)
                }
                Err(rc) => {
                    prop_assert_eq!(rc, Return::InsufficientResources);
                    prop_assert!(placement.is_some() || gi.remaining(outer, inner) == 0);
                    prop_assert_eq!(machine.state(), before.state(), "a failed call changed something");
                    Ok(false)
                }
            }
        }
        Act::DestroyCompute(n) => {
            let Some(handle) = pick(&compute_instances(machine), n) else { return Ok(false) };
            let uuid = machine.mig_uuid(handle).unwrap();
            prop_assert_eq!(machine.mig_device_by_uuid(&uuid), Ok(handle));
            prop_assert_eq!(machine.destroy_compute_instance(handle), Ok(()));
            prop_assert_eq!(machine.mig_device_by_uuid(&uuid), Err(Return::NotFound));
            Ok(true)
        }
    }
}

#[test]
fn random_calls_keep_every_model_sound() {
    let (mut models, mut done, mut refused, mut looked) = (0, 0, 0, 0);
    for key in KEYS {
        let fresh = Machine::of_model(key).unwrap();
        if !fresh.part(0).unwrap().has_mig() {
            continue;
        }
        models += 1;
        let config = ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() };
        let mut runner = proptest::test_runner::TestRunner::new(config);
        let counts = std::cell::Cell::new((0, 0, 0));
        runner
            .run(&proptest::collection::vec(act(), 1..40), |acts| {
                let mut machine = fresh.clone();
                for act in &acts {
                    let (d, r, l) = counts.get();
                    let did = perform(&mut machine, act)?;
                    let seen = invariants::check(&machine);
                    counts.set((d + u32::from(did), r + u32::from(!did), l + seen));
                }
                Ok(())
            })
            .unwrap_or_else(|error| panic!("{key}: {error}"));
        let (d, r, l) = counts.get();
        done += d;
        refused += r;
        looked += l;
    }
    println!("{models} models: {done} calls done, {refused} refused, {looked} instances checked");
    assert!(models == 18 && done > 5_000 && refused > 1_000);
}

#[test]
fn stale_handle_never_matches_the_replacement() {
    let mut tried = 0;
    for key in KEYS {
        let mut machine = Machine::of_model(key).unwrap();
        let part = machine.part(0).unwrap();
        for profile in &part.profiles {
            let old = machine.create_gpu_instance(0, profile.data.id, None).unwrap();
            machine.destroy_gpu_instance(old).unwrap();
            let new = machine.create_gpu_instance(0, profile.data.id, None).unwrap();
            assert_eq!(old.id, new.id);
            assert_eq!(machine.destroy_gpu_instance(old), Err(Return::InvalidArgument));
            let stale = Handle::unpack(Handle::GpuInstance(old).pack()).unwrap();
            assert_eq!(stale, Handle::GpuInstance(old));
            machine.destroy_gpu_instance(new).unwrap();
            tried += 1;
        }
    }
    println!("{tried} stale handles refused");
    assert!(tried > 100);
}
