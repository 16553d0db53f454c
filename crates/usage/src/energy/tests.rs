use proptest::prelude::*;

use super::{attribute::*, *};
use crate::share::GPU_UNITS;

const WINDOW_MS: u64 = 10_000;

fn held(part: u32, instance: Option<u32>) -> HeldInWindow {
    HeldInWindow {
        unit_ms: u64::from(GPU_UNITS / part) * WINDOW_MS,
        held_ms: WINDOW_MS,
        instance,
        is_whole: false,
        has_process: true,
        process_use: None,
    }
}

/// A window of 1 kJ on a GPU that needs 50 W at least, so 500 J are active energy.
fn energy_window(holds: Vec<HeldInWindow>) -> EnergyWindow {
    EnergyWindow {
        energy_mj: 1_000_000,
        length_ms: WINDOW_MS,
        least_mw: 50_000,
        holds,
        ended: Vec::new(),
        others: Vec::new(),
        instances: None,
    }
}

fn energies(window: &EnergyWindow) -> (Vec<u64>, u64) {
    let result = attribute(window);
    (result.holds.iter().map(|(mj, _)| *mj).collect(), result.unattributed_mj)
}

#[test]
fn lease_on_the_whole_gpu_gets_all_energy_of_its_time() {
    let whole = HeldInWindow { is_whole: true, ..held(1, None) };
    let result = attribute(&energy_window(vec![whole.clone()]));
    assert_eq!(result, AttributedEnergy { holds: vec![(1_000_000, EnergyMethod::Board)], unattributed_mj: 0 });
    let half = HeldInWindow { unit_ms: whole.unit_ms / 2, held_ms: WINDOW_MS / 2, ..whole };
    assert_eq!(energies(&energy_window(vec![half])), (vec![500_000], 500_000));
}

#[test]
fn active_energy_follows_activity_times_slices() {
    let mut one = energy_window(vec![held(4, Some(1)), held(2, Some(2))]);
    let instance = |instance, part, activity| InstanceActivity { instance, units: GPU_UNITS / part, activity };
    one.instances = Some(vec![instance(1, 4, 1_000_000), instance(2, 2, 250_000), instance(3, 4, 500_000)]);
    // Idle: a quarter and a half of 500 J. Active: weights 1/4, 1/8, and 1/8 of an instance without a lease.
    assert_eq!(energies(&one), (vec![125_000 + 250_000, 250_000 + 125_000], 125_000 + 125_000));
    assert!(attribute(&one).holds.iter().all(|(_, method)| *method == EnergyMethod::Gpm));
}

#[test]
fn clients_of_one_device_share_energy_by_their_use() {
    let client = |process_use| HeldInWindow { process_use, ..held(2, None) };
    let mut one = energy_window(vec![client(Some(300_000)), client(Some(100_000))]);
    assert_eq!(energies(&one), (vec![250_000 + 375_000, 250_000 + 125_000], 0));
    assert_eq!(attribute(&one).holds[0].1, EnergyMethod::Process);
    one.others = vec![OtherProcesses { instance: None, process_use: Some(600_000) }];
    assert_eq!(energies(&one), (vec![250_000 + 150_000, 250_000 + 50_000], 300_000));
}

#[test]
fn leases_with_a_process_share_energy_by_slices() {
    let without = HeldInWindow { has_process: false, ..held(2, None) };
    let mut one = energy_window(vec![held(4, None), without]);
    assert_eq!(energies(&one), (vec![125_000 + 500_000, 250_000], 125_000));
    assert_eq!(attribute(&one).holds[0].1, EnergyMethod::Slices);
    one.holds[0].has_process = false;
    assert_eq!(energies(&one), (vec![125_000, 250_000], 625_000), "no lease has a process");
}

/// Fault: an MPS lease worked for most of the window and ended. The lease that began then got all active energy.
#[test]
fn energy_of_an_ended_lease_is_unattributed() {
    let young = |process_use| HeldInWindow {
        unit_ms: u64::from(GPU_UNITS / 2) * 1_000,
        held_ms: 1_000,
        process_use,
        ..held(2, None)
    };
    // By the use of the processes, and by slices: a tenth of the active energy, and 1/20 of the idle energy.
    for process_use in [Some(300_000), None] {
        let mut one = energy_window(vec![young(process_use)]);
        assert_eq!(energies(&one), (vec![25_000 + 50_000], 925_000), "{process_use:?}");
        one.ended = vec![ended(None, 2, 9_000)];
        let (holds, _) = energies(&one);
        assert!((25_000..=25_000 + 50_000).contains(&holds[0]), "{holds:?}");
        one.ended = vec![ended(Some(4), 2, 9_000)];
        assert_eq!(energies(&one).0, holds, "it had another GPU instance, but the window is of the whole GPU");
    }
}

/// An ended lease overlapped with the present one, so the time before the present one says nothing.
#[test]
fn ended_lease_that_overlapped_counts_with_its_share() {
    let mut one = energy_window(vec![held(2, None)]);
    one.ended = vec![ended(None, 2, WINDOW_MS)];
    assert_eq!(energies(&one), (vec![250_000 + 250_000], 500_000));
    one.instances = Some(vec![InstanceActivity { instance: 1, units: GPU_UNITS, activity: 500_000 }]);
    one.holds[0].instance = Some(1);
    one.ended[0].instance = Some(1);
    assert_eq!(energies(&one), (vec![250_000 + 250_000], 500_000), "both shared a GPU instance");
    one.ended[0].instance = Some(2);
    assert_eq!(energies(&one), (vec![250_000 + 500_000], 250_000), "it had another GPU instance");
}

/// A lease that works all the time pays for the time before its neighbour began.
#[test]
fn energy_before_a_neighbour_began_goes_to_the_first_lease() {
    let young = HeldInWindow { unit_ms: u64::from(GPU_UNITS / 2) * 1_000, held_ms: 1_000, ..held(2, None) };
    let one = energy_window(vec![held(2, None), young]);
    let (holds, unattributed) = energies(&one);
    assert_eq!(holds[0] + holds[1] + unattributed, 1_000_000);
    assert_eq!(unattributed, 225_000, "only idle energy of the free half");
}

fn ended(instance: Option<u32>, part: u32, held_ms: u64) -> EndedInWindow {
    EndedInWindow { instance, unit_ms: u64::from(GPU_UNITS / part) * held_ms, held_ms }
}

#[test]
fn idle_energy_is_never_more_than_the_energy() {
    let mut one = energy_window(vec![held(2, None)]);
    one.energy_mj = 300;
    assert_eq!(energies(&one), (vec![150], 150));
    one.energy_mj = 0;
    assert_eq!(energies(&one), (vec![0], 0));
}

fn some_window() -> impl Strategy<Value = EnergyWindow> {
    let hold = (
        0..=u64::from(GPU_UNITS),
        0..100_000_u64,
        prop::option::of(0..4_u32),
        any::<[bool; 2]>(),
        prop::option::of(0..2_000_000_u64),
    );
    let hold = hold.prop_map(|(units, held_ms, instance, [is_whole, has_process], process_use)| HeldInWindow {
        unit_ms: units * held_ms,
        held_ms,
        instance,
        is_whole,
        has_process,
        process_use,
    });
    let ended = (prop::option::of(0..4_u32), 0..=u64::from(GPU_UNITS), 0..100_000_000_u64)
        .prop_map(|(instance, units, held_ms)| EndedInWindow { instance, unit_ms: units * held_ms, held_ms });
    let other = (prop::option::of(0..4_u32), prop::option::of(0..1_000_000_u64))
        .prop_map(|(instance, process_use)| OtherProcesses { instance, process_use });
    let instance = (0..4_u32, 0..=GPU_UNITS, 0..=1_000_000_u32)
        .prop_map(|(instance, units, activity)| InstanceActivity { instance, units, activity });
    (
        0..1_000_000_000_000_u64,
        0..100_000_000_u64,
        0..2_000_000_u64,
        prop::collection::vec(hold, 0..9),
        prop::collection::vec(ended, 0..3),
        prop::collection::vec(other, 0..3),
        prop::option::of(prop::collection::vec(instance, 0..5)),
    )
        .prop_map(|(energy_mj, length_ms, least_mw, holds, ended, others, instances)| EnergyWindow {
            energy_mj,
            length_ms,
            least_mw,
            holds,
            ended,
            others,
            instances,
        })
}

proptest! {
    #[test]
    fn leases_and_the_rest_add_up_to_the_counter(window in some_window()) {
        let (holds, unattributed) = energies(&window);
        prop_assert_eq!(holds.len(), window.holds.len());
        prop_assert_eq!(holds.iter().sum::<u64>() + unattributed, window.energy_mj);
    }
}
