use gpush_api::{LeaseId, LeaseKind};
use proptest::prelude::*;

use super::*;
use crate::{
    input::{GpuSample, Hold, ProcessOwner, Ratio, Reading, WindowScope},
    samples::{hold, process, sample, whole, window},
    share::GPU_UNITS,
};

const LEASE: LeaseId = LeaseId(1);

/// Levels of a GPU that was first sampled without a process, and later with an idle context.
fn levels() -> PowerLevels {
    PowerLevels { least: Some(70_000), without_process: Some(70_000), with_context: Some(100_000) }
}

/// Judges the first hold after two equal samples.
fn judge(sample: &GpuSample, holds: &[(LeaseId, &Hold)]) -> Judgement {
    judge_change(sample, sample, holds)
}

/// Judges the first hold after two samples.
fn judge_change(before: &GpuSample, sample: &GpuSample, holds: &[(LeaseId, &Hold)]) -> Judgement {
    let (lease, hold) = holds[0];
    let trace = Signals::new(before, holds, None).trace(lease, hold);
    let past = HoldPast { trace, held_ms: 3_600_000 };
    judge_past(sample, holds, past)
}

/// Judges the first hold after a past.
fn judge_past(sample: &GpuSample, holds: &[(LeaseId, &Hold)], past: HoldPast) -> Judgement {
    let (lease, hold) = holds[0];
    let signals = Signals::new(sample, holds, Some(crate::samples::INTERVAL_MS));
    decide(signals.observe(lease, hold, past, sample.power_mw.value(), &levels()))
}

fn outcome(judgement: Judgement) -> (UseState, Option<UnknownReason>) {
    (judgement.state, judgement.reason)
}

fn unknown(reason: UnknownReason) -> (UseState, Option<UnknownReason>) {
    (UseState::Unknown, Some(reason))
}

/// A GPU with one process of the lease, at the power of an idle context.
fn with_process() -> GpuSample {
    let mut one = sample(0);
    one.processes = Reading::Value(vec![process(1, 100)]);
    one.power_mw = Reading::Value(100_000);
    one
}

#[test]
fn lease_without_work_is_idle_if_all_evidence_agrees() {
    let judged = judge(&with_process(), &[(LEASE, &whole())]);
    assert_eq!(outcome(judged), (UseState::Idle, None));
    assert_eq!((judged.source, judged.is_estimate), (SignalSource::Gpm, false));
}

#[test]
fn lease_without_process_is_empty() {
    assert_eq!(outcome(judge(&sample(0), &[(LEASE, &whole())])), (UseState::Empty, None));
    let mut foreign = with_process();
    foreign.processes = Reading::Value(vec![process(2, 100)]);
    assert_eq!(outcome(judge(&foreign, &[(LEASE, &whole())])), (UseState::Empty, None));
}

#[test]
fn each_measured_activity_makes_the_lease_busy() {
    let holds = &[(LEASE, &whole())];
    let mut gpm = with_process();
    gpm.windows = vec![window(WindowScope::Gpu, GPU_UNITS, 1)];
    assert_eq!(judge(&gpm, holds).source, SignalSource::Gpm);
    let mut utilization = with_process();
    utilization.utilization = Reading::Value(Ratio::from_millionths(1));
    assert_eq!(judge(&utilization, holds).source, SignalSource::Utilization);
    let mut processes = with_process();
    processes.processes = Reading::Value(vec![crate::input::GpuProcess {
        sm: Reading::Value(Ratio::from_millionths(1)),
        ..process(1, 100)
    }]);
    assert_eq!(judge(&processes, holds).source, SignalSource::Processes);
    for sample in [&gpm, &utilization, &processes] {
        assert_eq!(judge(sample, holds).state, UseState::Busy);
    }
}

/// A process that starts and ends between two samples is in no list, but its work is measured.
#[test]
fn short_process_on_an_own_device_makes_the_lease_busy() {
    let mut gpm = sample(0);
    gpm.windows = vec![window(WindowScope::Gpu, GPU_UNITS, 5)];
    assert_eq!(judge(&gpm, &[(LEASE, &whole())]).state, UseState::Busy);
}

/// Each single failure or contradiction, on a GPU that would be idle otherwise.
#[test]
fn lease_is_unknown_if_one_reading_is_missing_or_disagrees() {
    let mut cases: Vec<(GpuSample, UnknownReason)> = Vec::new();
    let mut add = |reason, change: &dyn Fn(&mut GpuSample)| {
        let mut sample = with_process();
        change(&mut sample);
        cases.push((sample, reason));
    };
    add(UnknownReason::SourceFailed, &|s| s.windows[0].activity = Reading::Failed);
    add(UnknownReason::SourceFailed, &|s| s.utilization = Reading::Failed);
    add(UnknownReason::SourceFailed, &|s| s.processes = Reading::Failed);
    add(UnknownReason::SourceFailed, &|s| s.processes = Reading::Unsupported);
    add(UnknownReason::SourceFailed, &|s| {
        if let Reading::Value(activity) = &mut s.windows[0].activity {
            activity.dram = None;
        }
    });
    add(UnknownReason::SourceFailed, &|s| {
        s.processes = Reading::Value(vec![crate::input::GpuProcess { memory_mib: Reading::Failed, ..process(1, 100) }]);
    });
    add(UnknownReason::SourceFailed, &|s| {
        s.processes = Reading::Value(vec![crate::input::GpuProcess { sm: Reading::Failed, ..process(1, 100) }]);
    });
    add(UnknownReason::NoPowerLevel, &|s| s.power_mw = Reading::Failed);
    add(UnknownReason::NoPowerLevel, &|s| s.power_mw = Reading::Unsupported);
    add(UnknownReason::PowerDisagrees, &|s| s.power_mw = Reading::Value(300_000));
    add(UnknownReason::UncertainProcess, &|s| {
        s.processes = Reading::Value(vec![crate::input::GpuProcess {
            owner: ProcessOwner::Perhaps(vec![LEASE]),
            ..process(1, 100)
        }]);
    });
    for (sample, reason) in &cases {
        assert_eq!(outcome(judge(sample, &[(LEASE, &whole())])), unknown(*reason), "{sample:?}");
    }
    assert_eq!(cases.len(), 11);
}

#[test]
fn change_of_processes_or_memory_is_not_idle() {
    let before = with_process();
    let holds = &[(LEASE, &whole())];
    let mut started = with_process();
    started.processes = Reading::Value(vec![process(1, 100), process(1, 101)]);
    assert_eq!(outcome(judge_change(&before, &started, holds)), unknown(UnknownReason::ProcessesChanged));
    let mut reused = with_process();
    reused.processes = Reading::Value(vec![crate::input::GpuProcess { start: 8, ..process(1, 100) }]);
    assert_eq!(outcome(judge_change(&before, &reused, holds)), unknown(UnknownReason::ProcessesChanged));
    let mut grown = with_process();
    grown.processes =
        Reading::Value(vec![crate::input::GpuProcess { memory_mib: Reading::Value(1_001), ..process(1, 100) }]);
    assert_eq!(outcome(judge_change(&before, &grown, holds)), unknown(UnknownReason::MemoryChanged));
}

#[test]
fn a100_mig_device_is_empty_or_unknown() {
    let hold = hold(LeaseKind::Mig, GPU_UNITS / 7, Some(3));
    let mut a100 = with_process();
    (a100.windows, a100.utilization) = (Vec::new(), Reading::Unsupported);
    let judged = judge(&a100, &[(LEASE, &hold)]);
    assert_eq!(outcome(judged), unknown(UnknownReason::MemoryOnly));
    assert_eq!(judged.source, SignalSource::MemoryOnly);
    assert!(judged.is_still);
    let holds = &[(LEASE, &hold)];
    let still = |changed: &dyn Fn(&mut GpuSample)| {
        let mut after = a100.clone();
        changed(&mut after);
        judge_change(&a100, &after, holds).is_still
    };
    let grown = crate::input::GpuProcess { memory_mib: Reading::Value(1_001), ..process(1, 100) };
    assert!(!still(&|after| after.processes = Reading::Value(vec![grown.clone()])));
    assert!(!still(&|after| after.power_mw = Reading::Value(400_000)), "the lease is alone on the board");
    a100.processes = Reading::Value(vec![crate::input::GpuProcess { instance: Some(4), ..process(2, 100) }]);
    assert_eq!(outcome(judge(&a100, &[(LEASE, &hold)])), (UseState::Empty, None));
}

/// The window of another GPU instance must not count, and a missing window is a failure.
#[test]
fn mig_device_is_judged_by_its_own_window() {
    let hold = hold(LeaseKind::Mig, GPU_UNITS / 7, Some(3));
    let mut one = with_process();
    one.utilization = Reading::Unsupported;
    one.windows = vec![
        window(WindowScope::Instance(3), GPU_UNITS / 7, 0),
        window(WindowScope::Instance(4), GPU_UNITS / 7, 500_000),
    ];
    // The power can come from the work of the neighbour.
    one.power_mw = Reading::Value(180_000);
    let judged = judge(&one, &[(LEASE, &hold)]);
    assert_eq!((judged.state, judged.is_weak), (UseState::Idle, true));
    one.windows.remove(0);
    assert_eq!(outcome(judge(&one, &[(LEASE, &hold)])), unknown(UnknownReason::SourceFailed));
}

/// A GPU at a power limit of 200 W, with a lease on 3 and a lease on 1 of 7 slices.
fn small_board(first: u32, second: u32, power_mw: u64) -> GpuSample {
    let mut one = with_process();
    one.utilization = Reading::Unsupported;
    one.windows = vec![
        window(WindowScope::Instance(1), GPU_UNITS / 7 * 3, first),
        window(WindowScope::Instance(2), GPU_UNITS / 7, second),
    ];
    let on = |instance, lease, pid| crate::input::GpuProcess { instance: Some(instance), ..process(lease, pid) };
    one.processes = Reading::Value(vec![on(1, 1, 100), on(2, 2, 200)]);
    (one.power_mw, one.power_limit_mw) = (Reading::Value(power_mw), Reading::Value(200_000));
    one
}

/// Fault: any active neighbour explained the power of a board at its limit, so a lease with a lying sensor was idle.
#[test]
fn lying_sensor_beside_a_working_neighbour_is_unknown() {
    let (large, little) =
        (hold(LeaseKind::Mig, GPU_UNITS / 7 * 3, Some(1)), hold(LeaseKind::Mig, GPU_UNITS / 7, Some(2)));
    let judge_large = |sample: &GpuSample| judge(sample, &[(LEASE, &large), (LeaseId(2), &little)]);
    let judge_little = |sample: &GpuSample| judge(sample, &[(LeaseId(2), &little), (LEASE, &large)]);
    let lies = judge_large(&small_board(0, 250_000, 200_000));
    assert_eq!(outcome(lies), unknown(UnknownReason::PowerDisagrees));
    assert!(lies.is_refuted());
    let mut with_gpu = small_board(0, 250_000, 200_000);
    with_gpu.windows.push(window(WindowScope::Gpu, GPU_UNITS, 500_000));
    assert_eq!(judge_large(&with_gpu).reason, lies.reason, "only windows of instances are neighbours");
    assert_eq!(outcome(judge_little(&small_board(250_000, 0, 200_000))), unknown(UnknownReason::PowerDisagrees));
    let quiet = judge_large(&small_board(0, 250_000, 112_000));
    assert_eq!((quiet.state, quiet.is_weak), (UseState::Idle, true));
    let alone = judge_large(&small_board(0, 0, 100_000));
    assert_eq!((alone.state, alone.is_weak), (UseState::Idle, false));
    assert_eq!(judge_large(&small_board(1, 250_000, 200_000)).state, UseState::Busy);
}

proptest! {
    /// More power is never better evidence that a lease is idle, and idleness beside a working neighbour is always weak.
    #[test]
    fn more_power_never_makes_a_lease_idle(
        work in 0..=1_000_000_u32,
        power_mw in 1..400_000_u64,
        more_mw in 0..400_000_u64,
    ) {
        let large = hold(LeaseKind::Mig, GPU_UNITS / 7 * 3, Some(1));
        let judge = |power_mw| judge(&small_board(0, work, power_mw), &[(LEASE, &large)]);
        let (less, more) = (judge(power_mw), judge(power_mw + more_mw));
        prop_assert!(less.state == UseState::Idle || more.state != UseState::Idle);
        prop_assert!(work == 0 || less.state != UseState::Idle || less.is_weak);
        prop_assert!(work != 0 || !less.is_weak);
    }
}

#[test]
fn estimates_separate_mps_clients() {
    let half = hold(LeaseKind::Mps, GPU_UNITS / 2, None);
    let holds = &[(LEASE, &half), (LeaseId(2), &half)];
    let own = |sm: u32, other: u32| {
        let mut one = with_process();
        let with = |lease, pid, sm| crate::input::GpuProcess {
            sm: Reading::Value(Ratio::from_millionths(sm)),
            ..process(lease, pid)
        };
        one.processes = Reading::Value(vec![with(1, 100, sm), with(2, 200, other)]);
        one.windows = vec![window(WindowScope::Gpu, GPU_UNITS, 7)];
        one.power_mw = Reading::Value(400_000);
        judge(&one, holds)
    };
    assert_eq!((own(5, 0).state, own(5, 0).is_estimate), (UseState::Busy, true));
    assert_eq!((own(0, 5).state, own(0, 5).is_estimate), (UseState::Idle, true));
}

#[test]
fn shared_device_without_process_readings_is_unknown() {
    let half = hold(LeaseKind::Timeslice, GPU_UNITS / 2, None);
    let holds = &[(LEASE, &half), (LeaseId(2), &half)];
    let mut one = with_process();
    one.processes = Reading::Value(vec![process(1, 100), process(2, 200)]);
    one.windows = vec![window(WindowScope::Gpu, GPU_UNITS, 7)];
    assert_eq!(outcome(judge(&one, holds)), unknown(UnknownReason::SharedDevice));
    one.processes = Reading::Value(vec![process(1, 100)]);
    assert_eq!(judge(&one, holds).state, UseState::Busy, "only this lease has a process");
}

/// Fault: a graphics program was in no list, so the leases of an active GPU were empty.
#[test]
fn active_device_without_any_listed_process_is_unknown() {
    let half = hold(LeaseKind::Mps, GPU_UNITS / 2, None);
    let holds = &[(LEASE, &half), (LeaseId(2), &half)];
    let mut one = sample(0);
    one.windows = vec![window(WindowScope::Gpu, GPU_UNITS, 7)];
    assert_eq!(outcome(judge(&one, holds)), unknown(UnknownReason::SharedDevice));
    one.processes = Reading::Value(vec![process(2, 200)]);
    assert_eq!(outcome(judge(&one, holds)), (UseState::Empty, None), "the other lease can have done the work");
}

/// The activity of a device is a mean over a time that began before the lease.
#[test]
fn lease_younger_than_its_window_is_judged_by_its_processes() {
    let (holds, young) = (&[(LEASE, &whole())], HoldPast { trace: None, held_ms: 999 });
    let mut one = with_process();
    one.utilization = Reading::Unsupported;
    one.windows = vec![window(WindowScope::Gpu, GPU_UNITS, 7)];
    assert_eq!(outcome(judge_past(&one, holds, young)), unknown(UnknownReason::SharedDevice));
    assert_eq!(judge_past(&one, holds, HoldPast { held_ms: 1_000, ..young }).state, UseState::Busy);
    let with =
        |sm| vec![crate::input::GpuProcess { sm: Reading::Value(Ratio::from_millionths(sm)), ..process(1, 100) }];
    one.processes = Reading::Value(with(1));
    assert_eq!(judge_past(&one, holds, young).state, UseState::Busy);
    one.processes = Reading::Value(with(0));
    assert_eq!(outcome(judge_past(&one, holds, young)), unknown(UnknownReason::ProcessesChanged));
    one.processes = Reading::Value(Vec::new());
    assert_eq!(outcome(judge_past(&one, holds, young)), unknown(UnknownReason::SharedDevice));
}

#[test]
fn one_busy_member_makes_the_lease_busy() {
    use UseState::{Busy, Empty, Idle, Unknown};
    for (members, all) in [
        (vec![Idle, Busy, Unknown], Busy),
        (vec![Idle, Unknown], Unknown),
        (vec![Empty, Idle], Idle),
        (vec![Empty, Empty], Empty),
        (vec![], Unknown),
    ] {
        assert_eq!(UseState::of_members(members.clone()), all, "{members:?}");
    }
}

#[test]
fn names_of_states_and_reasons_equal_their_json() {
    for state in UseState::ALL {
        assert_eq!(serde_json::to_value(state).unwrap(), state.name());
    }
    for reason in [UnknownReason::NoSample, UnknownReason::PowerDisagrees, UnknownReason::SharedDevice] {
        assert_eq!(serde_json::to_value(reason).unwrap(), reason.name());
    }
}
