//! Leases that share a device, or follow each other on it. The work of one must not count for another.

use gpush_api::LeaseKind;

use super::*;
use crate::{
    input::{ActivityWindow, GpuProcess, ProcessOwner, Ratio, Reading, WindowScope},
    judge::UnknownReason,
    samples::{INTERVAL_MS, busy, hold, idle, process, whole, window},
};

const LEASE: LeaseId = LeaseId(1);
const OTHER: LeaseId = LeaseId(2);
const SEVENTH: u32 = GPU_UNITS / 7;

fn member(ledger: &Ledger, lease: LeaseId, ms: u64) -> MemberFigures {
    ledger.lease(lease, at(ms)).unwrap().members.remove(0)
}

fn energy_mj(ledger: &Ledger, lease: LeaseId, ms: u64) -> u64 {
    member(ledger, lease, ms).totals.sums.energy_mj
}

fn gpu_sums(ledger: &Ledger, ms: u64) -> GpuSums {
    ledger.gpus(at(ms)).next().unwrap().sums
}

/// Fault: an MPS lease worked for 14 s and ended. The lease that began then paid for all active energy of the 15 s.
#[test]
fn mps_lease_does_not_pay_for_the_work_of_an_ended_lease() {
    let mut ledger = ledger();
    let half = || vec![hold(LeaseKind::Mps, GPU_UNITS / 2, None)];
    let with = |lease: u64, ms, mj| {
        let sm = Reading::Value(Ratio::from_millionths(500_000));
        let processes = Reading::Value(vec![GpuProcess { sm, ..process(lease, 100) }]);
        GpuSample { energy_mj: Reading::Value(mj), processes, ..busy(ms) }
    };
    ledger.set_lease(LEASE, half(), at(2_000));
    assert!(ledger.sample(&with(1, 3_000, 0)));
    ledger.end_lease(LEASE, at(17_000)).unwrap();
    ledger.set_lease(OTHER, half(), at(17_000));
    assert!(ledger.sample(&with(2, 18_000, 6_000_000)));
    // Idle energy: 70 W for 15 s. The lease had half of the GPU for 1 s of it, and 1 s of the active energy.
    assert_eq!(energy_mj(&ledger, OTHER, 18_000), 35_000 + 330_000);
    assert_eq!(gpu_sums(&ledger, 18_000).unattributed_mj, 6_000_000 - 365_000);
    // The ended lease does not count in the next window.
    assert!(ledger.sample(&with(2, 28_000, 10_000_000)));
    assert_eq!(energy_mj(&ledger, OTHER, 28_000), 365_000 + 350_000 + 3_300_000);
}

/// Fault: after an hour without samples of an A100 with MIG, a lease of one minute paid for the work of the hour.
#[test]
fn mig_lease_does_not_pay_for_an_hour_before_it() {
    const MINUTE_MS: u64 = 60_000;
    let mut ledger = ledger();
    let device = || vec![hold(LeaseKind::Mig, SEVENTH, Some(1))];
    let with = |lease, ms, mj| GpuSample {
        energy_mj: Reading::Value(mj),
        windows: Vec::new(),
        utilization: Reading::Unsupported,
        processes: Reading::Value(vec![GpuProcess { instance: Some(1), ..process(lease, 100) }]),
        ..busy(ms)
    };
    ledger.set_lease(LEASE, device(), at(2_000));
    assert!(ledger.sample(&with(1, 3_000, 0)));
    ledger.end_lease(LEASE, at(3_000 + 59 * MINUTE_MS)).unwrap();
    ledger.set_lease(OTHER, device(), at(3_000 + 59 * MINUTE_MS));
    let end = 3_000 + 60 * MINUTE_MS;
    assert!(ledger.sample(&with(2, end, 1_440_000_000)));
    assert_eq!(energy_mj(&ledger, OTHER, end), 252_000_000 / 60 / 7 + 1_188_000_000 / 60);
    assert_eq!(gpu_sums(&ledger, end).energy_mj, 1_440_000_000);
}

/// Fault: the lease of a MIG device was busy because of the lease before it, and its mean activity had 15 s of it.
#[test]
fn new_lease_is_not_busy_because_of_the_lease_before_it() {
    let mut ledger = ledger();
    let device = || vec![hold(LeaseKind::Mig, SEVENTH, Some(1))];
    let with = |ms, age_ms| GpuSample {
        windows: vec![ActivityWindow { age_ms, ..window(WindowScope::Instance(1), SEVENTH, 900_000) }],
        utilization: Reading::Unsupported,
        processes: Reading::Value(vec![GpuProcess { instance: Some(1), ..process(2, 100) }]),
        ..busy(ms)
    };
    ledger.set_lease(LEASE, device(), at(2_000));
    assert!(ledger.sample(&with(3_000, 1_000)));
    ledger.end_lease(LEASE, at(17_000)).unwrap();
    ledger.set_lease(OTHER, device(), at(17_000));
    assert!(ledger.sample(&with(18_000, 15_000)));
    let young = member(&ledger, OTHER, 18_000);
    assert_eq!(young.judgement.state, UseState::Unknown);
    assert_eq!((young.sm, young.totals.sums.sm.known_ms), (None, 0));
    assert!(ledger.sample(&with(28_000, 10_000)));
    let later = member(&ledger, OTHER, 28_000);
    assert_eq!((later.judgement.state, later.totals.sums.sm.known_ms), (UseState::Busy, 10_000));
}

/// Fault: the utilization of a whole GPU since the last sample made the next lease busy.
#[test]
fn new_lease_is_not_busy_because_of_an_older_utilization() {
    let mut ledger = ledger();
    let with = |ms| GpuSample {
        windows: Vec::new(),
        utilization: Reading::Value(Ratio::from_millionths(900_000)),
        processes: Reading::Value(Vec::new()),
        ..busy(ms)
    };
    assert!(ledger.sample(&with(3_000)));
    ledger.set_lease(LEASE, vec![whole()], at(17_000));
    assert!(ledger.sample(&with(18_000)));
    assert_eq!(member(&ledger, LEASE, 18_000).judgement.state, UseState::Unknown);
    assert!(ledger.sample(&with(33_000)));
    assert_eq!(member(&ledger, LEASE, 33_000).judgement.state, UseState::Busy);
}

/// Fault: an MPS lease without a process showed the activity of its neighbour.
#[test]
fn activity_of_a_shared_device_belongs_to_no_lease() {
    let mut ledger = ledger();
    let half = || vec![hold(LeaseKind::Mps, GPU_UNITS / 2, None)];
    ledger.set_lease(LEASE, half(), at(2_000));
    ledger.set_lease(OTHER, half(), at(2_000));
    for ms in [3_000, 13_000] {
        assert!(ledger.sample(&busy(ms)));
    }
    let shared = member(&ledger, LEASE, 13_000);
    assert_eq!((shared.sm, shared.dram, shared.totals.sums.sm.mean()), (None, None, None));
    let without_process = member(&ledger, OTHER, 13_000);
    assert_eq!((without_process.sm, without_process.dram), (Some(Ratio::ZERO), None));
    ledger.end_lease(OTHER, at(14_000)).unwrap();
    assert!(ledger.sample(&busy(24_000)));
    let alone = member(&ledger, LEASE, 24_000);
    assert_eq!((alone.sm, alone.totals.sums.sm.known_ms), (Some(Ratio::from_millionths(500_000)), 11_000));
}

/// Fault: MPS leases had an activity only while all other clients did nothing, so their means were far too low.
#[test]
fn clients_of_a_shared_device_have_estimated_activities() {
    let mut ledger = ledger();
    let share = |percent| vec![hold(LeaseKind::Mps, GPU_UNITS / 100 * percent, None)];
    ledger.set_lease(LEASE, share(20), at(2_000));
    ledger.set_lease(OTHER, share(50), at(2_000));
    let with = |ms, first: [u32; 2], other| {
        let client = |lease, pid, percent: u32| {
            let sm = Reading::Value(Ratio::from_millionths(percent * 10_000));
            GpuProcess { sm, ..process(lease, pid) }
        };
        let processes = vec![client(1, 100, first[0]), client(1, 101, first[1]), client(2, 200, other)];
        GpuSample { processes: Reading::Value(processes), ..busy(ms) }
    };
    for ms in [3_000, 13_000, 23_000] {
        assert!(ledger.sample(&with(ms, [12, 8], 45)));
    }
    for (lease, percent) in [(LEASE, 20), (OTHER, 45)] {
        let client = member(&ledger, lease, 23_000);
        assert_eq!((client.sm, client.judgement.is_estimate), (Some(Ratio::from_millionths(percent * 10_000)), true));
        assert_eq!(client.totals.sums.sm.mean(), Some(u64::from(percent) * 10_000), "the mean of the busy time");
        assert_eq!(client.dram, None);
    }
    assert!(ledger.sample(&with(33_000, [90, 90], 0)));
    assert_eq!(member(&ledger, LEASE, 33_000).sm, Some(Ratio::from_millionths(1_000_000)));
    let mut uncertain = with(43_000, [12, 8], 45);
    if let Reading::Value(processes) = &mut uncertain.processes {
        processes[0].owner = ProcessOwner::Perhaps(vec![LEASE, OTHER]);
    }
    assert!(ledger.sample(&uncertain));
    assert_eq!(member(&ledger, LEASE, 43_000).sm, None);
}

/// Fault: a sensor that read 0 under load was shown as an activity of 0 %, and counted in the mean.
#[test]
fn activity_that_the_power_refutes_is_absent() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    assert!(ledger.sample(&idle(3_000)));
    assert!(ledger.sample(&idle(13_000)));
    assert_eq!(member(&ledger, LEASE, 13_000).sm, Some(Ratio::ZERO));
    let known_ms = member(&ledger, LEASE, 13_000).totals.sums.sm.known_ms;
    assert!(ledger.sample(&GpuSample { power_mw: Reading::Value(400_000), ..idle(23_000) }));
    let refuted = member(&ledger, LEASE, 23_000);
    assert_eq!(refuted.judgement.reason, Some(UnknownReason::PowerDisagrees));
    assert_eq!((refuted.sm, refuted.dram, refuted.totals.sums.sm.known_ms), (None, None, known_ms));
    let of_gpu = |ms| ledger.gpus(at(ms)).next().unwrap().refuted;
    assert_eq!(of_gpu(23_000), [None]);
    assert_eq!(of_gpu(23_000 + 3 * INTERVAL_MS + 1), Vec::<Option<u32>>::new());
}

/// A process without a lease counts as a neighbour, unless the driver reports that it did not work.
#[test]
fn activity_beside_a_working_process_of_no_lease_is_absent() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    let with = |ms, sm| {
        let foreign = GpuProcess { owner: ProcessOwner::NoLease, sm, ..process(0, 200) };
        GpuSample { processes: Reading::Value(vec![process(1, 100), foreign]), ..busy(ms) }
    };
    for (ms, sm, activity) in [
        (3_000, Reading::Value(Ratio::from_millionths(1)), None),
        (13_000, Reading::Unsupported, None),
        (23_000, Reading::Value(Ratio::ZERO), Some(Ratio::from_millionths(500_000))),
    ] {
        assert!(ledger.sample(&with(ms, sm)));
        assert_eq!(member(&ledger, LEASE, ms).sm, activity, "{sm:?}");
    }
}

/// Fault: two compute instances of one GPU instance both counted the memory of all processes in the GPU instance.
#[test]
fn process_counts_only_for_its_compute_instance() {
    let mut ledger = ledger();
    let device = |target: &str| Hold { target: target.into(), ..hold(LeaseKind::Mig, SEVENTH, Some(1)) };
    ledger.set_lease(LEASE, vec![device("MIG-a"), device("MIG-b")], at(2_000));
    let on =
        |target: Option<&str>, pid| GpuProcess { instance: Some(1), target: target.map(Into::into), ..process(1, pid) };
    let with = |ms, processes| GpuSample {
        windows: Vec::new(),
        utilization: Reading::Unsupported,
        processes: Reading::Value(processes),
        ..busy(ms)
    };
    let memories = |ledger: &Ledger, ms| {
        let members = ledger.lease(LEASE, at(ms)).unwrap().members;
        members.iter().map(|member| (member.judgement.state, member.memory_mib)).collect::<Vec<_>>()
    };
    assert!(ledger.sample(&with(3_000, vec![on(Some("MIG-a"), 100)])));
    assert_eq!(memories(&ledger, 3_000), [(UseState::Unknown, Some(1_000)), (UseState::Empty, Some(0))]);
    assert!(ledger.sample(&with(4_000, vec![on(Some("MIG-a"), 100), on(Some("MIG-b"), 101), on(None, 102)])));
    let both = (UseState::Unknown, Some(2_000));
    assert_eq!(memories(&ledger, 4_000), [both, both], "one process can be in either");
}

/// Fault: a lease whose only process was uncertain had a memory of 0 MiB, and a mean and a percentile of 0.
#[test]
fn memory_beside_an_uncertain_process_is_absent() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    let uncertain = GpuProcess { owner: ProcessOwner::Perhaps(vec![LEASE, OTHER]), ..process(1, 101) };
    let with = |ms, processes| GpuSample { processes: Reading::Value(processes), ..idle(ms) };
    assert!(ledger.sample(&with(3_000, vec![uncertain.clone()])));
    assert!(ledger.sample(&with(4_000, vec![process(1, 100), uncertain.clone()])));
    let figures = member(&ledger, LEASE, 4_000);
    assert_eq!((figures.memory_mib, figures.totals.sums.memory.mean()), (None, None));
    assert_eq!(figures.totals.memory_p98_mib, None);
    // The memory of the certain process is still compared.
    let grown = GpuProcess { memory_mib: Reading::Value(1_001), ..process(1, 100) };
    assert!(ledger.sample(&with(5_000, vec![grown, uncertain])));
    assert_eq!(member(&ledger, LEASE, 5_000).judgement.reason, Some(UnknownReason::MemoryChanged));
}

/// Fault: a process made its context 1 s before a sample. The mean power of that window became the level with an idle
/// context, and idle leases were never found again.
#[test]
fn level_with_context_needs_the_same_processes_in_two_samples() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    let with = |ms, mw| GpuSample { power_mw: Reading::Value(mw), ..idle(ms) };
    let level = |ledger: &Ledger| ledger.gpus(at(0)).next().unwrap().levels.with_context;
    assert!(ledger.sample(&with(17_000, 73_000)));
    assert_eq!(level(&ledger), None);
    assert!(ledger.sample(&with(32_000, 110_000)));
    assert_eq!(level(&ledger), Some(110_000));
    assert_eq!(member(&ledger, LEASE, 32_000).judgement.state, UseState::Idle);
}

/// The counter of a failed reading goes on, so the next difference also covers the time before the process.
#[test]
fn level_is_not_learned_from_a_window_of_two_samples() {
    let mut ledger = ledger();
    let with = |one: GpuSample, mj| GpuSample { energy_mj: mj, ..one };
    assert!(ledger.sample(&with(sample(3_000), Reading::Value(0))));
    assert!(ledger.sample(&with(idle(13_000), Reading::Failed)));
    assert!(ledger.sample(&with(idle(23_000), Reading::Value(1_800_000))));
    let level = |ledger: &Ledger| ledger.gpus(at(0)).next().unwrap().levels.with_context;
    assert_eq!(level(&ledger), None);
    assert!(ledger.sample(&with(idle(33_000), Reading::Value(2_900_000))));
    assert_eq!(level(&ledger), Some(110_000));
}

/// After a reset, the counter can exceed its old base before the next sample.
#[test]
fn reset_before_a_long_pause_attributes_no_wrong_energy() {
    let mut ledger = ledger();
    let with = |ms, mj| GpuSample { energy_mj: Reading::Value(mj), ..busy(ms) };
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    assert!(ledger.sample(&with(3_000, 5_000)));
    ledger.reset(&"GPU-1".into(), at(4_000));
    let later = 4_000 + 7 * 3_600_000;
    ledger.advance(at(later));
    assert!(ledger.sample(&with(later, 900_000_000)));
    assert_eq!((energy_mj(&ledger, LEASE, later), gpu_sums(&ledger, later).energy_mj), (0, 0));
    assert!(ledger.sample(&with(later + INTERVAL_MS, 900_600_000)));
    assert_eq!(energy_mj(&ledger, LEASE, later + INTERVAL_MS), 600_000);
}

/// The open time counts as busy, and becomes unknown if no sample follows. A counter must not fall then.
#[test]
fn settled_time_does_not_fall_after_a_silence() {
    let mut ledger = ledger();
    ledger.set_lease(LEASE, vec![whole()], at(2_000));
    assert!(ledger.sample(&busy(3_000)));
    assert!(ledger.sample(&busy(13_000)));
    let open = ledger.totals(LEASE, at(40_000)).unwrap().times.busy_ms;
    assert_eq!((open, ledger.settled_totals(LEASE).unwrap().times.busy_ms), (37_000, 10_000));
    let silent = 13_000 + 3 * INTERVAL_MS + 1;
    assert_eq!(ledger.totals(LEASE, at(silent)).unwrap().times.busy_ms, 10_000, "the open time is unknown now");
    assert!(ledger.sample(&busy(silent)));
    let settled = ledger.settled_totals(LEASE).unwrap();
    assert_eq!((settled.times.busy_ms, settled.times.unknown_ms), (10_000, 1_000 + 3 * INTERVAL_MS + 1));
    assert_eq!(ledger.settled_totals(OTHER), None);
}
