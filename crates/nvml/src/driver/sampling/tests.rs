//! Decisions about single values. `tests/tests/driver/samples.rs` has the calls.

use super::{utilization::ProcessUtilization, *};
use crate::sample::Ratio;

fn process(pid: u32) -> ProcessSample {
    ProcessSample { pid, gi: None, ci: None, memory_bytes: None, busy: None, dram: None }
}

fn entry(pid: u32, percent: f64) -> ProcessUtilization {
    ProcessUtilization { pid, at_us: 9, busy: Ratio::from_percent(percent), dram: Ok(Ratio::ZERO) }
}

#[test]
fn foreign_and_impossible_entries_are_left_out_and_counted() {
    let mut processes = [process(1), process(2), process(3)];
    let mut doubts = Doubts::default();
    add_utilization(&mut processes, &[entry(1, 50.0), entry(2, 4000.0), entry(9, 80.0)], true, &mut doubts);
    let busy: Vec<_> = processes.iter().map(|process| process.busy).collect();
    assert_eq!(busy, [Some(Ratio::from_ppm(500_000)), None, Some(Ratio::ZERO)]);
    assert_eq!(doubts, Doubts { impossible: 1, foreign_process: 1, ..Doubts::default() });
}

#[test]
fn process_without_entry_is_idle_only_after_a_whole_period() {
    let mut processes = [process(1)];
    add_utilization(&mut processes, &[], false, &mut Doubts::default());
    assert_eq!(processes[0].busy, None);
    add_utilization(&mut processes, &[], true, &mut Doubts::default());
    assert_eq!(processes[0].busy, Some(Ratio::ZERO));
    let stale = ProcessUtilization { busy: Err(Doubt::StaleTime), dram: Err(Doubt::StaleTime), ..entry(1, 0.0) };
    add_utilization(&mut processes, &[stale], true, &mut Doubts::default());
    assert_eq!(processes[0].busy, None, "a stale entry is not idleness");
}

/// Fault: a GPU instance without a window was skipped, so the caller kept the activity of the instance that had the same id
/// before.
#[test]
fn instance_without_window_is_not_skipped() {
    assert_eq!(Sampling::default().not_read(3).doubt, Some(Doubt::FirstSample));
}

/// Fault: one failed call made a GPU count as one without performance monitoring until the worker ended.
#[test]
fn failed_question_for_gpm_is_asked_again() {
    let mut sampling = Sampling::default();
    let failed = || Err(DriverError::new(ErrorKind::Unknown, "nvmlGpmQueryDeviceSupport"));
    assert_eq!(sampling.gpm(failed), Ok(None));
    assert_eq!(sampling.gpm(|| Ok(true)), Ok(Some(true)));
    assert_eq!(sampling.gpm(failed), Ok(Some(true)), "the answer is remembered");
    let lost = || Err(DriverError::new(ErrorKind::GpuIsLost, "nvmlGpmQueryDeviceSupport"));
    assert!(Sampling::default().gpm(lost).is_err());
}

/// Fault: a failed window looked like a GPU without activity readings, so its leases could be idle.
#[test]
fn failed_activity_keeps_its_source() {
    let failed = DriverError::new(ErrorKind::Unknown, "nvmlGpmMetricsGet");
    for source in [SignalSource::Gpm, SignalSource::Utilization] {
        let activity = or_failed(Err(failed.clone()), source).unwrap();
        assert_eq!((activity.source, activity.doubt), (source, Some(Doubt::Failed)));
    }
    assert_eq!(without_window(&failed), waiting(Doubt::Failed));
    let gone = DriverError::new(ErrorKind::NotFound, "nvmlGpmMigSampleGet");
    assert_eq!(without_window(&gone), Activity::default());
    assert!(or_failed(Err(DriverError::new(ErrorKind::GpuIsLost, "nvmlGpmSampleGet")), SignalSource::Gpm).is_err());
}
