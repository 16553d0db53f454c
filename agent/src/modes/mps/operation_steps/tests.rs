//! How long an operation waits for the MPS daemons that it starts, and what it reports about them.

use gpush_api::Actor;
use gpush_core::mps::{MpsStopped, MpsTargetRecord};

use super::*;
use crate::{
    modes::scene::{READY, daemon_report, mps_target},
    state::State,
};

const TIME: Duration = Duration::from_secs(1);

fn failed(failures: usize) -> DaemonReport {
    let trouble = vec!["it exited with status 1".to_owned()];
    DaemonReport { failures, trouble, ..daemon_report(SupervisorState::BackingOff { until: TIME }) }
}

/// Returns a snapshot with the target of GPU 0. `is_stopped` is whether an administrator has stopped its daemon.
fn host(report: DaemonReport, is_stopped: bool) -> (Arc<HostState>, MpsTarget) {
    let state = State::empty();
    let target = mps_target("GPU-0", report);
    state.add_mps_target(target.clone());
    let stopped = MpsStopped { by: Actor { uid: 0, user: None, pid: None }, end_at: None };
    let stopped = is_stopped.then_some(stopped);
    let record = move |record: MpsTargetRecord| MpsTargetRecord { stopped, ..record };
    state.change_mps(|targets| targets.change_record(&"GPU-0".into(), record));
    (state.now(), target)
}

#[test]
fn daemon_start_has_ended_when_it_serves_or_has_failed() {
    for (report, expected) in [
        (daemon_report(READY), true),
        (daemon_report(SupervisorState::GivenUp), true),
        (failed(1), false),
        (failed(2), true),
        (daemon_report(SupervisorState::Starting { until: TIME }), false),
        (daemon_report(SupervisorState::Found { pid: 1 }), false),
        (daemon_report(SupervisorState::Hung { pid: 1, silences: 3 }), false),
        (daemon_report(SupervisorState::Stopping { until: TIME, killed: false, failed: true }), false),
    ] {
        for is_stopped in [true, false] {
            assert_eq!(is_decided(&report, is_stopped), expected, "{:?}", report.state);
        }
    }
    // An administrator has stopped the daemon, so it does not start.
    let stopped = daemon_report(SupervisorState::Stopped);
    assert!(is_decided(&stopped, true) && !is_decided(&stopped, false));
}

#[test]
fn operation_waits_for_a_daemon_that_may_still_start() {
    for (state, expected) in [
        (SupervisorState::Stopped, true),
        (SupervisorState::Starting { until: TIME }, true),
        (SupervisorState::Found { pid: 1 }, true),
        (SupervisorState::Stopping { until: TIME, killed: false, failed: false }, true),
        (READY, false),
        (SupervisorState::Hung { pid: 1, silences: 3 }, false),
        (SupervisorState::Fault { pid: 1 }, false),
        (SupervisorState::Draining { pid: 1, until: None, served: true }, false),
        (SupervisorState::GivenUp, false),
    ] {
        let (now, target) = host(daemon_report(state.clone()), false);
        assert_eq!(is_late(&now, &target), expected, "{state:?}");
        let (stopped, target) = host(daemon_report(state.clone()), true);
        assert!(!is_late(&stopped, &target), "an administrator has stopped it: {state:?}");
    }
    // Fault: the operation reported that the daemon does not start, although its second attempt succeeded.
    for (failures, expected) in [(0, false), (1, true), (2, false)] {
        let (now, target) = host(failed(failures), false);
        assert_eq!(is_late(&now, &target), expected, "{failures} failures");
    }
    let (_, target) = host(daemon_report(SupervisorState::Stopped), false);
    assert!(!is_late(&State::empty().now(), &target), "the target was removed");
}

#[test]
fn operation_reports_each_daemon_that_does_not_serve() {
    let sentence = |report, is_stopped| {
        let (host, target) = host(report, is_stopped);
        sentence_on(&host, &target)
    };
    let fails = "the MPS daemon of GPU 0 does not start: it exited with status 1";
    let given_up = DaemonReport { state: SupervisorState::GivenUp, ..failed(5) };
    assert_eq!(sentence(given_up.clone(), false).as_deref(), Some(fails));
    assert_eq!(sentence(failed(2), false).as_deref(), Some(fails));
    let starting = || daemon_report(SupervisorState::Starting { until: TIME });
    assert_eq!(sentence(starting(), false).as_deref(), Some("the MPS daemon of GPU 0 is not ready yet"));
    assert_eq!(sentence(daemon_report(READY), false), None);
    for report in [given_up, starting()] {
        assert_eq!(sentence(report, true), None, "an administrator has stopped it");
    }
}
