use proptest::prelude::*;

use super::*;
use crate::{judge::UseState, ledger::UnusedSpan, moment::Moment};

const MINUTE: u64 = 60_000;

fn at(minutes: u64) -> Moment {
    Moment { boot: 1, monotonic_ms: minutes * MINUTE, wall_ms: i64::try_from(minutes * MINUTE).unwrap() }
}

fn policy(action: IdleAction) -> IdlePolicy {
    IdlePolicy { action, ..IdlePolicy::default() }
}

fn terms() -> LeaseTerms {
    LeaseTerms { granted: at(0), is_slurm_job: false, is_exempt: false }
}

/// Observes a lease that is unused since a minute.
fn unused(state: UseState, since: u64) -> IdleEvent {
    IdleEvent::Observed { state, since: at(since), unused_since: Some(at(since)) }
}

fn used(state: UseState, now: u64) -> IdleEvent {
    IdleEvent::Observed { state, since: at(now), unused_since: None }
}

/// Runs a lease that is unused from a minute on, and records each notice at once. Returns the minutes of all effects.
fn run(policy: &IdlePolicy, terms: LeaseTerms, state: UseState, since: u64, until: u64) -> Vec<(u64, String)> {
    let mut machine = IdleMachine::new();
    let mut all = Vec::new();
    for minute in since..=until {
        for effect in machine.step(unused(state, since), policy, terms, at(minute)) {
            all.push((minute, name(&effect).to_owned()));
            if let IdleEffect::Warn { notice, .. } = effect {
                assert_eq!(machine.step(IdleEvent::NoticeRecorded(notice), policy, terms, at(minute)), []);
            }
        }
    }
    all
}

fn name(effect: &IdleEffect) -> &'static str {
    match effect {
        IdleEffect::Warn { .. } => "warn",
        IdleEffect::Withdraw => "withdraw",
        IdleEffect::Report(_) => "report",
        IdleEffect::Release(_) => "release",
        IdleEffect::End(_) => "end",
    }
}

fn texts(effects: &[(u64, String)]) -> Vec<(u64, &str)> {
    effects.iter().map(|(minute, name)| (*minute, name.as_str())).collect()
}

#[test]
fn idle_lease_is_warned_twice_and_then_released() {
    let all = run(&policy(IdleAction::Release), terms(), UseState::Idle, 100, 600);
    assert_eq!(texts(&all), [(280, "warn"), (325, "warn"), (340, "release")]);
    let all = run(&policy(IdleAction::End), terms(), UseState::Idle, 100, 600);
    assert_eq!(all.last().map(|(minute, name)| (*minute, name.as_str())), Some((340, "end")));
}

/// A warning that is longer than the time that the deadline allows is left out.
#[test]
fn empty_lease_is_released_earlier_with_one_warning() {
    let all = run(&policy(IdleAction::Release), terms(), UseState::Empty, 100, 600);
    assert_eq!(texts(&all), [(115, "warn"), (130, "release")]);
}

#[test]
fn nothing_counts_before_the_end_of_the_start_grace() {
    let all = run(&policy(IdleAction::Release), terms(), UseState::Empty, 0, 600);
    assert_eq!(texts(&all), [(75, "warn"), (90, "release")]);
    let all = run(&policy(IdleAction::Release), terms(), UseState::Idle, 10, 600);
    assert_eq!(all.last().map(|(minute, _)| *minute), Some(300));
}

#[test]
fn report_and_warn_end_nothing() {
    let report = run(&policy(IdleAction::Report), terms(), UseState::Idle, 100, 2_000);
    assert_eq!(texts(&report), [(340, "report")]);
    let warn = run(&policy(IdleAction::Warn), terms(), UseState::Idle, 100, 2_000);
    assert_eq!(texts(&warn), [(280, "warn"), (325, "warn"), (340, "report")]);
}

#[test]
fn slurm_job_is_only_reported_unless_the_config_says_so() {
    let job = LeaseTerms { is_slurm_job: true, ..terms() };
    for action in [IdleAction::Release, IdleAction::End] {
        assert_eq!(texts(&run(&policy(action), job, UseState::Empty, 100, 600)), [(130, "report")]);
    }
    let ends = IdlePolicy { ends_slurm_jobs: true, ..policy(IdleAction::End) };
    assert_eq!(texts(&run(&ends, job, UseState::Empty, 100, 600)), [(115, "warn"), (130, "end")]);
}

#[test]
fn exempt_lease_is_left_alone() {
    let exempt = LeaseTerms { is_exempt: true, ..terms() };
    for action in IdleAction::ALL {
        assert_eq!(run(&policy(action), exempt, UseState::Empty, 100, 2_000), []);
    }
}

#[test]
fn one_unknown_or_busy_sample_begins_everything_again() {
    for state in [UseState::Unknown, UseState::Busy] {
        let (policy, mut machine) = (policy(IdleAction::Release), IdleMachine::new());
        let mut step = |event, minute| machine.step(event, &policy, terms(), at(minute));
        assert_eq!(name(&step(unused(UseState::Idle, 100), 335)[0]), "warn");
        assert_eq!(step(IdleEvent::NoticeRecorded(1), 335), []);
        assert_eq!(step(used(state, 336), 336), [IdleEffect::Withdraw]);
        assert_eq!(step(unused(UseState::Idle, 337), 400), []);
        assert_eq!(step(unused(UseState::Idle, 337), 337 + 179), []);
        assert_eq!(step(unused(UseState::Idle, 337), 337 + 180).len(), 1);
    }
}

/// A lease does not end before a notice is recorded, even if the notice cannot reach the holder.
#[test]
fn lease_is_not_ended_before_a_notice_is_recorded() {
    let (policy, mut machine) = (policy(IdleAction::End), IdleMachine::new());
    let mut notices = Vec::new();
    for minute in 100..5_000 {
        for effect in machine.step(unused(UseState::Idle, 100), &policy, terms(), at(minute)) {
            let IdleEffect::Warn { notice, .. } = effect else { panic!("{effect:?}") };
            notices.push(notice);
        }
    }
    assert_eq!(notices, [1]);
    let mut step = |event, minute| machine.step(event, &policy, terms(), at(minute));
    assert_eq!(step(IdleEvent::NoticeRecorded(1), 5_000), []);
    let names = |effects: Vec<IdleEffect>| effects.iter().map(name).collect::<Vec<_>>();
    assert_eq!(step(unused(UseState::Idle, 100), 5_044), []);
    assert_eq!(names(step(unused(UseState::Idle, 100), 5_045)), ["warn"]);
    assert_eq!(step(unused(UseState::Idle, 100), 5_059), []);
    assert_eq!(names(step(unused(UseState::Idle, 100), 5_060)), ["end"], "60 minutes after the record");
}

#[test]
fn record_of_an_earlier_notice_does_not_count() {
    let (policy, mut machine) = (policy(IdleAction::End), IdleMachine::new());
    let mut step = |event, minute| machine.step(event, &policy, terms(), at(minute));
    assert_eq!(step(unused(UseState::Idle, 100), 335).len(), 1);
    assert_eq!(step(used(UseState::Busy, 336), 336), [IdleEffect::Withdraw]);
    assert_eq!(step(unused(UseState::Idle, 340), 566).len(), 1);
    assert_eq!(step(IdleEvent::NoticeRecorded(1), 567), []);
    assert_eq!(step(unused(UseState::Idle, 340), 4_000), []);
    assert_eq!(step(IdleEvent::NoticeRecorded(2), 4_000), []);
    assert_eq!(step(unused(UseState::Idle, 340), 4_045).len(), 1, "the second warning");
    assert_eq!(step(unused(UseState::Idle, 340), 4_059), []);
    assert_eq!(step(unused(UseState::Idle, 340), 4_060).len(), 1);
}

/// Fault: after a notice about an end at 4:00, the process exited. The notice about the earlier end did not reach the
/// holder, and the lease ended all the same.
#[test]
fn end_that_moves_to_an_earlier_time_needs_a_new_notice() {
    let (policy, mut machine) = (policy(IdleAction::Release), IdleMachine::new());
    let mut step = |event, minute| machine.step(event, &policy, terms(), at(minute));
    let empty = IdleEvent::Observed { state: UseState::Empty, since: at(281), unused_since: Some(at(100)) };
    assert_eq!(step(unused(UseState::Idle, 100), 280).len(), 1);
    assert_eq!(step(IdleEvent::NoticeRecorded(1), 280), []);
    assert_eq!(step(empty.clone(), 281), []);
    let warned = step(empty.clone(), 296);
    assert!(matches!(warned[..], [IdleEffect::Warn { notice: 2, .. }]), "{warned:?}");
    assert_eq!(step(IdleEvent::NoticeRecorded(1), 297), [], "a late record of the first notice");
    assert_eq!(step(empty.clone(), 340), []);
    assert_eq!(step(IdleEvent::NoticeRecorded(2), 350), []);
    assert_eq!(step(empty.clone(), 364), []);
    assert_eq!(step(empty, 365).iter().map(name).collect::<Vec<_>>(), ["release"]);
}

/// Fault: a reload with a shorter `after`, or with another action, ended a lease that had a notice of something else.
#[test]
fn stricter_config_begins_to_warn_again() {
    let release = policy(IdleAction::Release);
    let shorter = IdlePolicy { after_ms: 150 * MINUTE, ..release.clone() };
    let warn = policy(IdleAction::Warn);
    for (before, after) in [(&release, &shorter), (&warn, &release)] {
        let mut machine = IdleMachine::new();
        assert_eq!(machine.step(unused(UseState::Idle, 100), before, terms(), at(280)).len(), 1);
        assert_eq!(machine.step(IdleEvent::NoticeRecorded(1), before, terms(), at(280)), []);
        let warned = machine.step(unused(UseState::Idle, 100), after, terms(), at(341));
        assert!(matches!(warned[..], [IdleEffect::Warn { notice: 2, .. }]), "{warned:?}");
        assert_eq!(machine.step(IdleEvent::NoticeRecorded(2), after, terms(), at(341)), []);
        assert_eq!(machine.step(unused(UseState::Idle, 100), after, terms(), at(386)).len(), 1, "the second warning");
        assert_eq!(machine.step(unused(UseState::Idle, 100), after, terms(), at(400)), []);
        let ended = machine.step(unused(UseState::Idle, 100), after, terms(), at(401));
        assert_eq!(ended.iter().map(name).collect::<Vec<_>>(), ["release"]);
    }
}

#[test]
fn warning_of_an_end_is_withdrawn_if_the_config_ends_nothing_any_more() {
    for milder in [IdleAction::Report, IdleAction::Warn] {
        let mut machine = IdleMachine::new();
        assert_eq!(machine.step(unused(UseState::Idle, 100), &policy(IdleAction::End), terms(), at(280)).len(), 1);
        let effects = machine.step(unused(UseState::Idle, 100), &policy(milder), terms(), at(281));
        assert_eq!(effects, [IdleEffect::Withdraw]);
        let mut later =
            (282..2_000).flat_map(|now| machine.step(unused(UseState::Idle, 100), &policy(milder), terms(), at(now)));
        assert!(later.all(|effect| matches!(effect, IdleEffect::Warn { .. } | IdleEffect::Report(_))));
    }
}

#[test]
fn kept_lease_begins_again_at_the_end_of_its_keep() {
    let (policy, mut machine) = (policy(IdleAction::Release), IdleMachine::new());
    let mut step = |event, minute| machine.step(event, &policy, terms(), at(minute));
    assert_eq!(step(unused(UseState::Idle, 100), 335).len(), 1);
    let keep = Keep::new(&policy, at(336), 120 * MINUTE, " demo at noon ").unwrap();
    assert_eq!(keep.reason, "demo at noon");
    assert_eq!(step(IdleEvent::Kept(keep), 336), [IdleEffect::Withdraw]);
    assert_eq!(step(unused(UseState::Idle, 100), 456 + 179), []);
    assert_eq!(step(unused(UseState::Idle, 100), 456 + 180).len(), 1, "an hour before the new deadline");
}

#[test]
fn keep_has_a_limit_and_needs_a_reason() {
    let policy = IdlePolicy::default();
    let most_ms = policy.max_keep_ms;
    let error = Keep::new(&policy, at(0), most_ms + 1, "x").unwrap_err();
    assert_eq!(
        (error, error.to_string()),
        (KeepError::TooLong { most_ms }, "an unused lease can be kept for 8h at most".to_owned())
    );
    assert_eq!(Keep::new(&policy, at(0), 1, " \t").unwrap_err(), KeepError::NoReason);
    assert_eq!(Keep::new(&policy, at(0), 1, &"x".repeat(201)).unwrap_err(), KeepError::LongReason);
    let keep = Keep::new(&policy, at(0), most_ms, "x").unwrap();
    let mut machine = IdleMachine::new();
    let _ = machine.step(IdleEvent::Kept(keep), &policy, terms(), at(0));
    assert!(machine.keep(at(479)).is_some() && machine.keep(at(480)).is_none());
}

#[test]
fn refused_end_is_tried_again_after_a_new_notice() {
    let (policy, mut machine) = (policy(IdleAction::Release), IdleMachine::new());
    let mut step = |event, minute| machine.step(event, &policy, terms(), at(minute));
    assert_eq!(step(unused(UseState::Empty, 100), 115).len(), 1);
    assert_eq!(step(IdleEvent::NoticeRecorded(1), 115), []);
    assert_eq!(step(unused(UseState::Empty, 100), 130).iter().map(name).collect::<Vec<_>>(), ["release"]);
    assert_eq!(step(unused(UseState::Empty, 100), 131), []);
    assert_eq!(step(IdleEvent::EndRefused, 132), []);
    assert_eq!(step(unused(UseState::Empty, 100), 133).iter().map(name).collect::<Vec<_>>(), ["warn"]);
    assert_eq!(step(IdleEvent::NoticeRecorded(2), 133), []);
    assert_eq!(step(unused(UseState::Empty, 100), 148).iter().map(name).collect::<Vec<_>>(), ["release"]);
}

#[test]
fn stricter_config_acts_on_a_reported_lease() {
    let mut machine = IdleMachine::new();
    let report = policy(IdleAction::Report);
    assert_eq!(machine.step(unused(UseState::Idle, 100), &report, terms(), at(340)).len(), 1);
    let release = policy(IdleAction::Release);
    let effects = machine.step(unused(UseState::Idle, 100), &release, terms(), at(341));
    assert_eq!(effects.iter().map(name).collect::<Vec<_>>(), ["warn"]);
}

#[test]
fn policy_without_usable_warnings_warns_once() {
    let short = IdlePolicy { warn_before_ms: vec![0, 600 * MINUTE], ..policy(IdleAction::Release) };
    let all = run(&short, terms(), UseState::Idle, 100, 600);
    assert_eq!(texts(&all), [(220, "warn"), (340, "release")]);
}

#[test]
fn dry_run_names_what_would_have_been_ended() {
    let span = |state, from: u64, until: u64| UnusedSpan {
        lease: gpush_api::LeaseId(1),
        state,
        from_ms: at(from).wall_ms,
        until_ms: at(until).wall_ms,
    };
    let release = policy(IdleAction::Release);
    let short = [span(UseState::Idle, 100, 300), span(UseState::Idle, 310, 500)];
    assert_eq!(replay(&release, terms(), &short), None);
    let joined = [span(UseState::Idle, 100, 320), span(UseState::Empty, 320, 345)];
    let end = replay(&release, terms(), &joined).unwrap();
    assert_eq!((end.unused_since_ms, end.at_ms, end.warnings), (at(100).wall_ms, at(340).wall_ms, 2));
    assert_eq!((end.action, end.is_empty), (IdleAction::Release, false));
    let empty = [span(UseState::Empty, 100, 131)];
    assert!(replay(&release, terms(), &empty).unwrap().is_empty);
    let reported = replay(&policy(IdleAction::Report), terms(), &empty).unwrap();
    assert_eq!((reported.action, reported.warnings), (IdleAction::Report, 0));
}

proptest! {
    /// Random states, late records, keeps and times. An end always follows a recorded notice about the same unused time
    /// that announced no later end. The longest warning has passed since, and an unknown sample never ends anything.
    #[test]
    fn every_end_follows_a_recorded_notice(
        steps in prop::collection::vec((0..4_usize, 1..90_u64, any::<bool>(), 0..40_u8), 1..200),
    ) {
        let policy = policy(IdleAction::End);
        let mut machine = IdleMachine::new();
        let (mut now, mut state, mut since, mut unused_since) = (0, UseState::Unknown, 0, None);
        // Notices that are not recorded yet, and recorded ones: the announced deadline, and the minute of the record.
        let mut open: Vec<(u32, Moment)> = Vec::new();
        let mut recorded: Vec<(Moment, u64)> = Vec::new();
        for (next, minutes, records, keeps) in steps {
            now += minutes;
            let next = UseState::ALL[next];
            if next != state {
                (state, since) = (next, now);
            }
            let is_unused = matches!(state, UseState::Idle | UseState::Empty);
            unused_since = if is_unused { unused_since.or(Some(now)) } else { None };
            if !is_unused || keeps == 0 {
                recorded.clear();
                open.clear();
            }
            if keeps == 0 {
                let keep = Keep::new(&policy, at(now), minutes * MINUTE, "test").unwrap();
                let _ = machine.step(IdleEvent::Kept(keep), &policy, terms(), at(now));
            }
            let observed = IdleEvent::Observed { state, since: at(since), unused_since: unused_since.map(at) };
            for effect in machine.step(observed, &policy, terms(), at(now)) {
                match effect {
                    IdleEffect::Warn { notice, report, .. } => open.push((notice, report.deadline.at)),
                    IdleEffect::End(report) => {
                        prop_assert!(is_unused && now >= 60);
                        let longest = if report.deadline.is_empty { 15 } else { 60 };
                        let is_warning = |(deadline, minute): &(Moment, u64)| {
                            deadline.ms_since(report.deadline.at) == 0 && minute + longest <= now
                        };
                        prop_assert!(recorded.iter().any(is_warning), "{:?} {}", recorded, now);
                        prop_assert!(report.deadline.at.ms_since(at(now)) == 0);
                    }
                    IdleEffect::Withdraw => {}
                    IdleEffect::Report(_) | IdleEffect::Release(_) => prop_assert!(false, "{:?}", effect),
                }
            }
            if records && let Some((notice, deadline)) = open.pop() {
                let _ = machine.step(IdleEvent::NoticeRecorded(notice), &policy, terms(), at(now));
                recorded.push((deadline, now));
            }
        }
    }
}
