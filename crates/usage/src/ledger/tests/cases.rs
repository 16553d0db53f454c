use gpush_api::LeaseKind;

use super::*;
use crate::{
    energy::EnergyMethod,
    input::{ActivityWindow, ClockLimits, GpuProcess, Ratio, Reading, WindowScope},
    judge::UnknownReason,
    moment::HOUR_MS,
    samples::{INTERVAL_MS, at, busy, hold, idle, process, sample, whole, window},
    share::Share,
};

const LEASE: LeaseId = LeaseId(1);

fn times(busy_ms: u64, idle_ms: u64, empty_ms: u64, unknown_ms: u64) -> StateTimes {
    StateTimes { busy_ms, idle_ms, empty_ms, unknown_ms }
}

#[test]
fn time_belongs_to_the_state_of_the_sample_at_its_start() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(3_000));
    for one in [sample(4_000), busy(5_000), busy(15_000), idle(25_000), idle(35_000), sample(50_000)] {
        assert!(ledger.sample(&one));
    }
    let totals = ledger.end_lease(LEASE, at(51_000)).unwrap();
    // From the start to the first sample nothing is known.
    assert_eq!(totals.times, times(20_000, 25_000, 2_000, 1_000));
    assert_eq!(totals.members[0].sums.times, totals.times);
    assert_eq!(totals.members[0].sums.memory_peak_mib, 1_000);
    assert_eq!(totals.until_ms - totals.begun_ms, 48_000);
    assert_eq!(ledger.end_lease(LEASE, at(52_000)), None);
}

#[test]
fn silence_of_three_intervals_is_unknown_and_restarts_the_state() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    for ms in [3_000, 13_000, 13_000 + 3 * INTERVAL_MS] {
        assert!(ledger.sample(&idle(ms)));
    }
    let figures = ledger.lease(LEASE, at(60_000)).unwrap();
    // The first sample has no sample before it, so it cannot show that the processes are the same.
    assert_eq!((figures.state, figures.since, figures.unused_since), (UseState::Idle, at(13_000), Some(at(13_000))));
    assert_eq!(figures.times, times(0, 47_000, 0, 11_000));
    let late = 58_000 + 3 * INTERVAL_MS + 1;
    let figures = ledger.lease(LEASE, at(late)).unwrap();
    assert_eq!((figures.state, figures.unused_since), (UseState::Unknown, None));
    assert!(ledger.sample(&idle(late)));
    assert!(ledger.sample(&idle(late + 5_000)));
    let figures = ledger.lease(LEASE, at(late + 6_000)).unwrap();
    assert_eq!(figures.times, times(0, 45_000 + 1_000, 0, 11_000 + 45_001 + 5_000));
    assert_eq!((figures.state, figures.since), (UseState::Idle, at(late + 5_000)));
}

#[test]
fn worker_restart_is_a_gap_and_not_idle() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    for ms in [3_000, 13_000] {
        assert!(ledger.sample(&idle(ms)));
    }
    ledger.gap(&"GPU-1".into(), at(14_000));
    let figures = ledger.lease(LEASE, at(20_000)).unwrap();
    assert_eq!((figures.state, figures.times), (UseState::Unknown, times(0, 1_000, 0, 17_000)));
    assert_eq!(figures.members[0].judgement.reason, Some(UnknownReason::NoSample));
    assert_eq!(figures.members[0].memory_mib, None);
}

/// Fault: each restart of the driver worker or of gpushd restarted the unused time, so a lease never reached 4 hours.
#[test]
fn short_silence_does_not_interrupt_unused_time() {
    let idle_ledger = || {
        let mut ledger = ledger();
        ledger.set_lease(LEASE, vec![whole()], at(2_000));
        for ms in [3_000, 13_000, 23_000] {
            assert!(ledger.sample(&idle(ms)));
        }
        ledger
    };
    let unused_since = |ledger: &Ledger, ms| ledger.lease(LEASE, at(ms)).unwrap().unused_since;
    let failed = |ms| GpuSample { windows: vec![failed_window()], ..idle(ms) };
    let silence = 3 * INTERVAL_MS;
    let mut restarted_worker = idle_ledger();
    restarted_worker.gap(&"GPU-1".into(), at(24_000));
    assert_eq!(unused_since(&restarted_worker, 25_000), None, "the use is unknown");
    // The first window after a restart has no beginning.
    assert!(restarted_worker.sample(&failed(30_000)));
    assert!(restarted_worker.sample(&idle(24_000 + silence)));
    assert_eq!(unused_since(&restarted_worker, 24_000 + silence), Some(at(13_000)));
    let unknown_ms = restarted_worker.lease(LEASE, at(24_000 + silence)).unwrap().times.unknown_ms;
    assert_eq!(unknown_ms, 11_000 + silence, "the silence itself is not idle time");

    let mut restarted: Ledger = serde_json::from_str(&serde_json::to_string(&idle_ledger()).unwrap()).unwrap();
    restarted.resume(Vec::new(), at(27_000));
    assert!(restarted.sample(&idle(28_000)));
    assert_eq!(unused_since(&restarted, 28_000), Some(at(13_000)));

    let mut late = idle_ledger();
    late.gap(&"GPU-1".into(), at(24_000));
    assert!(late.sample(&failed(50_000)));
    assert!(late.sample(&idle(24_000 + silence + 1)));
    assert_eq!(unused_since(&late, 24_000 + silence + 1), Some(at(24_000 + silence + 1)));

    let mut contradicted = idle_ledger();
    contradicted.gap(&"GPU-1".into(), at(24_000));
    assert!(contradicted.sample(&GpuSample { processes: Reading::Value(vec![process(1, 101)]), ..idle(26_000) }));
    assert!(contradicted.sample(&GpuSample { processes: Reading::Value(vec![process(1, 101)]), ..idle(28_000) }));
    assert_eq!(unused_since(&contradicted, 28_000), Some(at(28_000)), "a process has started");

    let mut busy_between = idle_ledger();
    busy_between.gap(&"GPU-1".into(), at(24_000));
    assert!(busy_between.sample(&busy(26_000)));
    assert!(busy_between.sample(&idle(28_000)));
    assert_eq!(unused_since(&busy_between, 28_000), Some(at(28_000)));
}

fn failed_window() -> ActivityWindow {
    ActivityWindow { activity: Reading::Failed, ..window(WindowScope::Gpu, GPU_UNITS, 0) }
}

/// Fault: one window without GPM made the energy of a day an estimate by slices.
#[test]
fn method_is_the_one_of_most_of_the_energy() {
    let mut sums = HoldSums::default();
    assert_eq!((sums.energy_method(), sums.is_energy_mixed()), (EnergyMethod::None, false));
    sums.add_energy(10, EnergyMethod::None);
    assert_eq!((sums.energy_method(), sums.is_energy_mixed()), (EnergyMethod::Slices, false));
    sums.add_energy(100, EnergyMethod::Gpm);
    assert_eq!((sums.energy_method(), sums.is_energy_mixed()), (EnergyMethod::Gpm, false));
    let mut other = HoldSums::default();
    other.add_energy(99, EnergyMethod::Slices);
    sums.merge(&other);
    assert_eq!((sums.energy_method(), sums.is_energy_mixed()), (EnergyMethod::Gpm, true));
    sums.add_energy(2, EnergyMethod::Slices);
    assert_eq!((sums.energy_method(), sums.is_energy_mixed()), (EnergyMethod::Slices, true));
    assert_eq!(sums.energy_mj, 211);
}

#[test]
fn late_sample_is_dropped_and_late_end_counts_nothing_twice() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    assert!(ledger.sample(&busy(10_000)));
    assert!(!ledger.sample(&busy(9_999)));
    let totals = ledger.end_lease(LEASE, at(5_000)).unwrap();
    assert_eq!(totals.times.held_ms(), 8_000);
    assert!(!ledger.sample(&GpuSample { gpu: "GPU-2".into(), ..busy(20_000) }), "an unknown GPU");
}

#[test]
fn change_of_a_share_splits_the_row_and_keeps_the_sums() {
    let mut ledger = ledger();
    let half = hold(LeaseKind::Mps, GPU_UNITS / 2, None);
    let quarter = hold(LeaseKind::Mps, GPU_UNITS / 4, None);
    ledger.set_lease(LEASE, vec![half], at(2_000));
    ledger.set_lease(LEASE, vec![quarter], at(12_000));
    let totals = ledger.end_lease(LEASE, at(32_000)).unwrap();
    let expected = u64::from(GPU_UNITS) * (10_000 / 2 + 20_000 / 4);
    assert_eq!((totals.members.len(), totals.sums().unit_ms), (1, expected));
    let rows = ledger.take_closed().leases;
    let shares: Vec<(u32, u64)> = rows.iter().map(|row| (row.hold.share.units, row.sums.times.held_ms())).collect();
    assert_eq!(shares, [(GPU_UNITS / 2, 10_000), (GPU_UNITS / 4, 20_000)]);
    assert_eq!(rows.iter().map(|row| row.number).collect::<Vec<_>>(), [0, 1]);
}

#[test]
fn lease_that_moves_to_another_target_keeps_what_it_used() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![hold(LeaseKind::Mig, GPU_UNITS / 7, Some(1))], at(2_000));
    ledger.set_lease(LEASE, vec![hold(LeaseKind::Mig, GPU_UNITS / 7, Some(2))], at(5_000));
    let totals = ledger.totals(LEASE, at(6_000)).unwrap();
    assert_eq!(totals.members.iter().map(|member| member.sums.times.held_ms()).collect::<Vec<_>>(), [3_000, 0]);
    assert_eq!(ledger.end_lease(LEASE, at(9_000)).unwrap().times.held_ms(), 7_000);
}

/// Fault: after each start of gpushd, a MIG device of an open lease was unknown for a moment, and counted as another target
/// from then on.
#[test]
fn target_that_a_lease_holds_again_keeps_its_sums() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(3_000));
    for one in [sample(4_000), busy(5_000), busy(15_000)] {
        assert!(ledger.sample(&one));
    }
    ledger.set_lease(LEASE, Vec::new(), at(16_000));
    ledger.set_lease(LEASE, vec![whole()], at(17_000));
    assert!(ledger.sample(&busy(20_000)));
    let totals = ledger.end_lease(LEASE, at(21_000)).unwrap();
    assert_eq!(totals.members.len(), 1, "{totals:?}");
    // The lease held nothing for a second.
    assert_eq!(totals.members[0].sums.times.held_ms() + 1_000, totals.times.held_ms());
    assert_eq!(totals.members[0].sums.times.busy_ms, totals.times.busy_ms);
    assert!(totals.times.busy_ms > 10_000, "{totals:?}");
}

#[test]
fn hours_close_rows_of_leases_and_gpus() {
    let mut ledger = Ledger::new();
    let hour = u64::try_from(HOUR_MS).unwrap();
    let start = Moment { boot: 1, monotonic_ms: 0, wall_ms: 10 * HOUR_MS - 1_000 };
    ledger.set_lease(LEASE, vec![whole()], start);
    ledger.advance(start.plus_ms(2 * hour));
    let closed = ledger.take_closed();
    let held: Vec<(i64, u64)> =
        closed.leases.iter().map(|row| (row.hour_ms / HOUR_MS, row.sums.times.held_ms())).collect();
    assert_eq!(held, [(9, 1_000), (10, hour)]);
    let known: Vec<(i64, u64)> = closed.gpus.iter().map(|row| (row.hour_ms / HOUR_MS, row.sums.known_ms)).collect();
    assert_eq!(known, held);
    assert!(ledger.take_closed().is_empty());
}

/// The wall clock goes back by a day: held time is neither lost nor counted twice.
#[test]
fn wall_clock_set_back_changes_no_sum() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    assert!(ledger.sample(&busy(10_000)));
    let back = |ms| Moment { wall_ms: at(ms).wall_ms - 24 * HOUR_MS, ..at(ms) };
    assert!(ledger.sample(&GpuSample { at: back(20_000), ..busy(0) }));
    assert!(ledger.sample(&GpuSample { at: back(30_000), ..busy(0) }));
    let totals = ledger.end_lease(LEASE, back(31_000)).unwrap();
    assert_eq!(totals.times, times(21_000, 0, 0, 8_000));
    let rows = ledger.take_closed().leases;
    assert_eq!(rows.iter().map(|row| row.sums.times.held_ms()).sum::<u64>(), 29_000);
}

#[test]
fn crash_loses_states_and_no_held_time() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    assert!(ledger.sample(&busy(10_000)));
    let json = serde_json::to_string(&ledger).unwrap();
    let mut restarted: Ledger = serde_json::from_str(&json).unwrap();
    restarted.resume(Vec::new(), at(100_000));
    let boot = Moment { boot: 2, monotonic_ms: 5, wall_ms: at(150_000).wall_ms };
    restarted.resume(Vec::new(), boot);
    let totals = restarted.end_lease(LEASE, boot.plus_ms(50)).unwrap();
    assert_eq!(totals.times, times(0, 0, 0, 98_000 + 50_000 + 50));
    let gpu = restarted.gpus(boot.plus_ms(50)).next().unwrap();
    assert_eq!(gpu.sums.capacity, u64::from(GPU_UNITS) * 150_050);
}

#[test]
fn whole_gpu_gets_the_difference_of_the_counter() {
    let mut ledger = ledger();
    let energy = |ms, mj| GpuSample { energy_mj: Reading::Value(mj), ..busy(ms) };
    assert!(ledger.sample(&energy(3_000, 5_000)));
    ledger.set_lease(LEASE, vec![whole()], at(3_000));
    for one in [energy(10_000, 9_000), energy(20_000, 10_500)] {
        assert!(ledger.sample(&one));
    }
    // The driver was loaded again: the counter has fallen.
    assert!(ledger.sample(&energy(30_000, 100)));
    assert!(ledger.sample(&energy(40_000, 350)));
    let totals = ledger.end_lease(LEASE, at(40_000)).unwrap();
    let sums = totals.sums();
    assert_eq!((sums.energy_mj, sums.energy_method()), (5_500 + 250, EnergyMethod::Board));
    let gpu = ledger.gpus(at(40_000)).next().unwrap();
    assert_eq!((gpu.sums.energy_mj, gpu.sums.unattributed_mj), (5_750, 0));
}

#[test]
fn reset_begins_a_new_base_of_the_counter() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    assert!(ledger.sample(&GpuSample { energy_mj: Reading::Value(1_000), ..busy(10_000) }));
    ledger.reset(&"GPU-1".into(), at(11_000));
    assert!(ledger.sample(&GpuSample { energy_mj: Reading::Value(9_000), ..busy(20_000) }));
    assert_eq!(ledger.lease(LEASE, at(20_000)).unwrap().members[0].totals.sums.energy_mj, 0);
}

#[test]
fn unused_times_of_five_minutes_are_recorded() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    let mut ms = 3_000;
    while ms < 500_000 {
        assert!(ledger.sample(&if ms < 350_000 { idle(ms) } else { sample(ms) }));
        ms += 10_000;
    }
    assert_eq!(ledger.open_span(LEASE, at(ms)), None, "shorter than 5 minutes");
    let totals = ledger.end_lease(LEASE, at(ms)).unwrap();
    assert!(totals.times.empty_ms > 100_000);
    let spans = ledger.take_closed().spans;
    let spans: Vec<(UseState, i64)> = spans.iter().map(|span| (span.state, span.until_ms - span.from_ms)).collect();
    assert_eq!(spans, [(UseState::Idle, 340_000)]);
}

#[test]
fn figures_of_a_gpu_tell_idle_shares_from_free_ones() {
    let mut ledger = ledger();
    let seventh = GPU_UNITS / 7;
    ledger.set_lease(LEASE, vec![hold(LeaseKind::Mig, 2 * seventh, Some(1))], at(2_000));
    ledger.set_unusable(&"GPU-1".into(), seventh, at(2_000));
    let mut one = idle(3_000);
    one.windows = vec![window(WindowScope::Instance(1), 2 * seventh, 0)];
    one.utilization = Reading::Unsupported;
    assert!(ledger.sample(&one));
    assert!(ledger.sample(&GpuSample { at: at(4_000), ..one }));
    let gpu = ledger.gpus(at(5_000)).next().unwrap();
    assert_eq!((gpu.leased, gpu.unused), (2 * seventh, Some(2 * seventh)));
    assert_eq!((gpu.free, gpu.unusable), (4 * seventh, seventh));
    assert!(gpu.is_sampled);
    let later = ledger.gpus(at(4_000 + 3 * INTERVAL_MS + 1)).next().unwrap();
    assert_eq!((later.is_sampled, later.leased, later.unused), (false, 2 * seventh, None), "nothing is known now");
}

#[test]
fn leased_target_that_was_shared_out_twice_is_excess() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    let charged = Share { units: 0, charged: GPU_UNITS / 2 };
    let other = Hold { share: charged, ..hold(LeaseKind::Mps, 0, None) };
    ledger.set_lease(LeaseId(2), vec![other, hold(LeaseKind::Mig, GPU_UNITS / 4, Some(1))], at(2_000));
    ledger.advance(at(102_000));
    let sums = ledger.gpus(at(102_000)).next().unwrap().sums;
    assert_eq!(sums.excess, u64::from(GPU_UNITS) / 4 * 100_000);
    assert_eq!(sums.overlap, u64::from(GPU_UNITS) / 4 * 3 * 100_000);
}

#[test]
fn mean_activity_is_weighted_by_time() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    let with = |ms, activity| GpuSample { windows: vec![window(WindowScope::Gpu, GPU_UNITS, activity)], ..busy(ms) };
    assert!(ledger.sample(&with(2_000, 0)));
    assert!(ledger.sample(&with(12_000, 900_000)));
    assert!(ledger.sample(&with(42_000, 100_000)));
    let member = ledger.lease(LEASE, at(42_000)).unwrap().members.remove(0);
    assert_eq!(member.totals.sums.sm.mean(), Some((900_000 * 10 + 100_000 * 30) / 40));
    assert_eq!(member.sm, Some(Ratio::from_millionths(100_000)));
}

#[test]
fn memory_of_unsupported_readings_is_absent() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    let unsupported = GpuProcess { memory_mib: Reading::Unsupported, ..process(1, 100) };
    let one = GpuSample { processes: Reading::Value(vec![unsupported]), ..busy(3_000) };
    assert!(ledger.sample(&one));
    let member = ledger.end_lease(LEASE, at(9_000)).unwrap().members.remove(0);
    assert_eq!((member.memory_p98_mib, member.sums.memory.mean()), (None, None));
}

#[test]
fn time_under_a_power_limit_counts_for_the_lease() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    let with = |ms, power, thermal| GpuSample { limits: Reading::Value(ClockLimits { power, thermal }), ..busy(ms) };
    for one in [with(3_000, true, false), with(10_000, true, true), with(12_000, false, false), busy(20_000)] {
        assert!(ledger.sample(&one));
    }
    let sums = ledger.end_lease(LEASE, at(30_000)).unwrap().sums();
    assert_eq!((sums.limits_known_ms, sums.power_limited_ms, sums.thermal_limited_ms), (17_000, 9_000, 2_000));
}

#[test]
fn unused_time_that_lasts_is_known_to_a_dry_run() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    for ms in (3_000..400_000).step_by(10_000) {
        assert!(ledger.sample(&idle(ms)));
    }
    let open = ledger.open_span(LEASE, at(400_000)).unwrap();
    assert_eq!((open.state, open.until_ms - open.from_ms), (UseState::Idle, 387_000));
}

/// Two MPS leases that are charged for their memory. Energy without activity follows the compute part.
#[test]
fn idle_energy_of_shares_follows_their_compute_part() {
    let mut ledger = ledger();
    let share = |units| Hold { share: Share { units, charged: GPU_UNITS / 2 }, ..hold(LeaseKind::Mps, units, None) };
    let energy =
        |ms, mj| GpuSample { energy_mj: Reading::Value(mj), processes: Reading::Value(Vec::new()), ..idle(ms) };
    assert!(ledger.sample(&energy(3_000, 0)));
    ledger.set_lease(LEASE, vec![share(GPU_UNITS / 4)], at(3_000));
    ledger.set_lease(LeaseId(2), vec![share(GPU_UNITS / 8)], at(3_000));
    // 70 W is the least power that the GPU has needed, so all of this is idle energy.
    assert!(ledger.sample(&energy(13_000, 700_000)));
    let sums = |lease| ledger.lease(lease, at(13_000)).unwrap().members[0].totals.sums;
    assert_eq!((sums(LEASE).energy_mj, sums(LeaseId(2)).energy_mj), (175_000, 87_500));
    assert_eq!(sums(LEASE).energy_method(), EnergyMethod::Slices);
    assert_eq!(ledger.gpus(at(13_000)).next().unwrap().sums.unattributed_mj, 437_500);
}

#[test]
fn unused_time_goes_on_when_the_process_ends() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    for one in [idle(3_000), idle(10_000), idle(20_000), sample(30_000), sample(40_000)] {
        assert!(ledger.sample(&one));
    }
    let figures = ledger.lease(LEASE, at(45_000)).unwrap();
    assert_eq!((figures.state, figures.since, figures.unused_since), (UseState::Empty, at(30_000), Some(at(10_000))));
}

#[test]
fn lease_of_a_lost_gpu_is_held_until_it_ends() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    let _ = ledger.remove_gpu(&"GPU-1".into(), at(5_000));
    let totals = ledger.end_lease(LEASE, at(9_000)).unwrap();
    assert_eq!(totals.times.held_ms(), 7_000);
    assert_eq!(totals.members[0].sums.times.held_ms(), 3_000, "the GPU was there for 3 s");
}

/// A process that ends between two samples has needed power, so its window teaches nothing about an empty GPU.
#[test]
fn level_without_process_needs_two_samples_without_process() {
    let mut ledger = Ledger::new();
    ledger.add_gpu(&"GPU-1".into(), at(0));
    let level = |ledger: &Ledger| ledger.gpus(at(0)).next().unwrap().levels.without_process;
    assert!(ledger.sample(&busy(1_000)));
    assert!(ledger.sample(&GpuSample { power_mw: Reading::Value(300_000), ..sample(2_000) }));
    assert_eq!(level(&ledger), None);
    assert!(ledger.sample(&sample(3_000)));
    assert_eq!(level(&ledger), Some(70_000));
}

/// The agent writes the checkpoint with each begin and end of a lease, so it must stay small.
#[test]
fn checkpoint_of_many_leases_is_small() {
    let mut ledger = Ledger::new();
    for lease in 0..200 {
        let hold = Hold { target: format!("MIG-{lease}").into(), ..hold(LeaseKind::Mig, GPU_UNITS / 200, Some(1)) };
        ledger.set_lease(LeaseId(lease), vec![hold], at(lease));
    }
    let mut one = busy(1_000);
    one.processes = Reading::Value((0..200).map(|lease| process(lease, 100)).collect());
    assert!(ledger.sample(&one));
    assert!(ledger.sample(&GpuSample { at: at(9_000), ..one }));
    let json = serde_json::to_string(&ledger).unwrap();
    assert!(json.len() < 700_000, "{} bytes", json.len());
}

/// Windows of the GPU instances count, also if the driver reports the whole GPU in addition.
#[test]
fn energy_of_mig_devices_follows_their_activity() {
    let mut ledger = ledger();
    let energy = |ms, mj| GpuSample {
        energy_mj: Reading::Value(mj),
        utilization: Reading::Unsupported,
        windows: vec![
            window(WindowScope::Gpu, GPU_UNITS, 500_000),
            window(WindowScope::Instance(1), GPU_UNITS / 2, 900_000),
            window(WindowScope::Instance(2), GPU_UNITS / 2, 100_000),
        ],
        ..busy(ms)
    };
    assert!(ledger.sample(&energy(3_000, 0)));
    ledger.set_lease(LEASE, vec![hold(LeaseKind::Mig, GPU_UNITS / 2, Some(1))], at(3_000));
    ledger.set_lease(LeaseId(2), vec![hold(LeaseKind::Mig, GPU_UNITS / 2, Some(2))], at(3_000));
    assert!(ledger.sample(&energy(13_000, 1_700_000)));
    let sums = |lease| ledger.lease(lease, at(13_000)).unwrap().members[0].totals.sums;
    // 70 W are idle power, which both share equally.
    assert_eq!(sums(LEASE).energy_mj + sums(LeaseId(2)).energy_mj, 1_700_000);
    assert_eq!((sums(LEASE).energy_mj, sums(LEASE).energy_method()), (350_000 + 900_000, EnergyMethod::Gpm));
}
