//! Decisions about single values. `tests/tests/driver/samples.rs` has the calls.

use super::*;

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
