use proptest::prelude::*;

use super::*;
use crate::moment::Moment;

const GRACE_S: u64 = 600;

fn at(second: u64) -> Moment {
    Moment { boot: 1, monotonic_ms: second * 1000, wall_ms: i64::try_from(second * 1000).unwrap() }
}

fn policy(action: OverLimitAction) -> OverLimitPolicy {
    OverLimitPolicy { action, grace_ms: GRACE_S * 1000, is_slurm_job: false, ends_slurm_jobs: false }
}

fn above(second: u64) -> OverLimitEvent {
    let excess = MemoryExcess { used_mib: 30, limit_mib: 20 };
    OverLimitEvent::Read(MemoryReading::Above { excess, at: at(second) })
}

/// Returns a machine that has just sent its first notice, after readings in the seconds 1 to 3.
fn notified(policy: &OverLimitPolicy) -> OverLimitMachine {
    let mut machine = OverLimitMachine::new();
    let effects: Vec<_> = (1..=3).filter_map(|second| machine.step(above(second), policy, at(second))).collect();
    assert!(matches!(effects[..], [OverLimitEffect::Notify { notice: 1, .. }]), "{effects:?}");
    machine
}

#[test]
fn lease_is_ended_only_after_the_grace_period_of_a_recorded_notice() {
    let policy = policy(OverLimitAction::End);
    let mut machine = notified(&policy);
    assert_eq!(machine.step(above(4000), &policy, at(4000)), None, "the notice is not recorded");
    assert_eq!(machine.step(OverLimitEvent::NoticeRecorded(1), &policy, at(4001)), None);
    assert_eq!(machine.step(above(4000 + GRACE_S), &policy, at(4000 + GRACE_S)), None);
    let end = machine.step(above(4001 + GRACE_S), &policy, at(4001 + GRACE_S));
    let Some(OverLimitEffect::End(report)) = end else { panic!("{end:?}") };
    assert_eq!((report.since, report.excess.above_mib()), (at(1), 10));
    assert_eq!(machine.step(above(5000), &policy, at(5000)), None, "the end was requested already");
}

#[test]
fn one_high_reading_or_the_same_sample_again_is_not_enough() {
    let policy = policy(OverLimitAction::End);
    let mut machine = OverLimitMachine::new();
    for now in 1..100 {
        assert_eq!(machine.step(above(1), &policy, at(now)), None, "the same sample");
    }
    assert_eq!(machine.step(above(2), &policy, at(100)), None);
    assert_eq!(machine.step(above(1), &policy, at(101)), None, "a late sample");
    assert!(machine.step(above(3), &policy, at(102)).is_some());
}

/// A late sample says nothing about the time after it, so it does not end the lease.
#[test]
fn sample_from_before_the_end_of_the_grace_period_ends_nothing() {
    let policy = policy(OverLimitAction::End);
    let mut machine = notified(&policy);
    assert_eq!(machine.step(OverLimitEvent::NoticeRecorded(1), &policy, at(4)), None);
    assert_eq!(machine.step(above(GRACE_S), &policy, at(9000)), None);
}

#[test]
fn lease_within_its_limit_or_of_unknown_memory_begins_again() {
    let policy = policy(OverLimitAction::End);
    for reading in [MemoryReading::Within, MemoryReading::Unknown] {
        let mut machine = notified(&policy);
        assert_eq!(machine.step(OverLimitEvent::NoticeRecorded(1), &policy, at(4)), None);
        let read = OverLimitEvent::Read(reading);
        assert_eq!(machine.step(read, &policy, at(5)), Some(OverLimitEffect::Withdraw));
        assert_eq!(machine.step(read, &policy, at(6)), None);
        assert_eq!(machine.step(above(9000), &policy, at(9000)), None);
        assert_eq!(machine.step(above(9001), &policy, at(9001)), None);
        let again = machine.step(above(9002), &policy, at(9002));
        assert!(matches!(again, Some(OverLimitEffect::Notify { notice: 2, .. })), "{again:?}");
        assert_eq!(machine.step(OverLimitEvent::NoticeRecorded(1), &policy, at(9003)), None, "a late record");
        assert_eq!(machine.step(above(20_000), &policy, at(20_000)), None);
    }
}

#[test]
fn report_ends_nothing_and_is_withdrawn() {
    let policy = policy(OverLimitAction::Report);
    let mut machine = notified(&policy);
    assert_eq!(machine.step(OverLimitEvent::NoticeRecorded(1), &policy, at(4)), None);
    assert!((5..20_000).step_by(15).all(|second| machine.step(above(second), &policy, at(second)).is_none()));
    let within = OverLimitEvent::Read(MemoryReading::Within);
    assert_eq!(machine.step(within, &policy, at(20_000)), Some(OverLimitEffect::Withdraw));
}

#[test]
fn changed_config_needs_a_new_notice() {
    let (report, end) = (policy(OverLimitAction::Report), policy(OverLimitAction::End));
    let mut machine = notified(&report);
    assert_eq!(machine.step(OverLimitEvent::NoticeRecorded(1), &report, at(4)), None);
    let stricter = machine.step(above(9000), &end, at(9000));
    assert!(matches!(stricter, Some(OverLimitEffect::Notify { notice: 2, action: OverLimitAction::End, .. })));
    assert_eq!(machine.step(OverLimitEvent::NoticeRecorded(2), &end, at(9001)), None);
    let shorter = OverLimitPolicy { grace_ms: 1000, ..end };
    assert_eq!(machine.step(above(9100), &shorter, at(9100)), None, "the notice has announced a longer time");
    let longer = OverLimitPolicy { grace_ms: end.grace_ms + 1000, ..end };
    let later = machine.step(above(9150), &longer, at(9150));
    assert!(
        matches!(later, Some(OverLimitEffect::Notify { notice: 3, action: OverLimitAction::End, .. })),
        "{later:?}"
    );
    let milder = machine.step(above(9200), &report, at(9200));
    assert!(matches!(milder, Some(OverLimitEffect::Notify { notice: 4, action: OverLimitAction::Report, .. })));
}

#[test]
fn refused_end_begins_again_with_a_new_notice() {
    let policy = policy(OverLimitAction::End);
    let mut machine = notified(&policy);
    assert_eq!(machine.step(OverLimitEvent::NoticeRecorded(1), &policy, at(4)), None);
    assert!(matches!(machine.step(above(700), &policy, at(700)), Some(OverLimitEffect::End(_))));
    assert_eq!(machine.step(OverLimitEvent::EndRefused, &policy, at(701)), None);
    let effects: Vec<_> = (702..=704).filter_map(|second| machine.step(above(second), &policy, at(second))).collect();
    assert!(matches!(effects[..], [OverLimitEffect::Notify { notice: 2, .. }]), "{effects:?}");
}

#[test]
fn slurm_job_is_only_reported_unless_the_config_says_so() {
    let job = OverLimitPolicy { is_slurm_job: true, ..policy(OverLimitAction::End) };
    assert_eq!(job.action(), OverLimitAction::Report);
    assert_eq!(OverLimitPolicy { ends_slurm_jobs: true, ..job }.action(), OverLimitAction::End);
}

proptest! {
    /// Random readings, late records and times. Before each end, a notice of the present time above the limit was recorded
    /// a grace period ago, and each reading of that time was above the limit: at least the ones that a notice needs, and
    /// one after the grace period.
    #[test]
    fn every_end_follows_a_recorded_notice_and_readings_above_the_limit(
        steps in prop::collection::vec((0..20_u8, 0..400_u64, any::<bool>()), 1..300),
    ) {
        let policy = policy(OverLimitAction::End);
        let mut machine = OverLimitMachine::new();
        let mut now = 1;
        // Readings above the limit in a row, each new; the notice that is not recorded yet; the time of the record.
        let (mut row, mut open, mut recorded) = (Vec::new(), None, None);
        for (kind, seconds, records) in steps {
            now += seconds;
            let event = match kind {
                0 => OverLimitEvent::Read(MemoryReading::Within),
                1 => OverLimitEvent::Read(MemoryReading::Unknown),
                // A sample that is a little older than now.
                2..=4 => above(now - (now - 1).min(7)),
                _ => above(now),
            };
            match event {
                OverLimitEvent::Read(MemoryReading::Above { at, .. }) => {
                    let second = at.monotonic_ms / 1000;
                    if row.last().is_none_or(|last| second > *last) {
                        row.push(second);
                    }
                }
                _ => (row, open, recorded) = (Vec::new(), None, None),
            }
            match machine.step(event, &policy, at(now)) {
                Some(OverLimitEffect::Notify { notice, .. }) => {
                    prop_assert!(row.len() >= 3, "{:?}", row);
                    open = Some(notice);
                }
                Some(OverLimitEffect::End(report)) => {
                    let noticed: u64 = recorded.expect("a recorded notice");
                    prop_assert!(row.len() > 3 && row.last().is_some_and(|last| *last >= noticed + GRACE_S));
                    prop_assert_eq!(report.since, at(row[0]));
                    let refused = machine.step(OverLimitEvent::EndRefused, &policy, at(now));
                    prop_assert_eq!(refused, None);
                    (row, open, recorded) = (Vec::new(), None, None);
                }
                Some(OverLimitEffect::Withdraw) => prop_assert!(row.is_empty()),
                None => {}
            }
            if records && let Some(notice) = open.take() {
                let _ = machine.step(OverLimitEvent::NoticeRecorded(notice), &policy, at(now));
                recorded = Some(now);
            }
        }
    }
}
