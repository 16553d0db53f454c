//! Decisions of actions on an MPS daemon.

use gpush_api::Priority;

use super::*;
use crate::modes::scene::{READY, daemon_report};

const TIME: Duration = Duration::from_secs(1);

/// Returns each state of a daemon.
fn states() -> [SupervisorState; 10] {
    [
        SupervisorState::Stopped,
        SupervisorState::Starting { until: TIME },
        SupervisorState::Found { pid: 1 },
        READY,
        SupervisorState::Hung { pid: 1, silences: 3 },
        SupervisorState::Fault { pid: 1 },
        SupervisorState::BackingOff { until: TIME },
        SupervisorState::GivenUp,
        SupervisorState::Draining { pid: 1, until: None, served: true },
        SupervisorState::Stopping { until: TIME, killed: false, failed: false },
    ]
}

fn settings(percentage: &str, memory: Option<&str>) -> MpsSettings {
    let memory_limit_mib = memory.map(|mib| serde_json::from_str(mib).unwrap());
    MpsSettings { percentage: percentage.parse().unwrap(), memory_limit_mib, priority: Priority::Normal }
}

#[test]
fn leases_block_only_actions_that_end_their_daemon() {
    for state in states() {
        let (stopped, name) = (state == SupervisorState::Stopped, format!("{state:?}"));
        for pid in [None, Some(1)] {
            let seen = DaemonReport { pid, ..daemon_report(state.clone()) };
            assert!(!ends_use(MpsAction::Start, &seen) && !ends_use(MpsAction::Drain, &seen), "{name}");
            assert_eq!(ends_use(MpsAction::Stop, &seen), !stopped, "{name}");
            // A restart ends the use only if the daemon has a process.
            assert_eq!(ends_use(MpsAction::Restart, &seen), pid.is_some(), "{name}");
        }
    }
}

#[test]
fn settings_that_the_request_leaves_out_are_kept() {
    let from = settings("50", Some("2048"));
    let change = |text: &str| changed_settings(&serde_json::from_str(text).unwrap(), &from);
    assert_eq!(change("{}"), from);
    assert_eq!(change("{\"percentage\": 25}"), settings("25", Some("2048")));
    assert_eq!(change("{\"memory_limit_mib\": 512}"), settings("50", Some("512")));
    let below_normal = MpsSettings { priority: Priority::BelowNormal, ..from.clone() };
    assert_eq!(change("{\"priority\": \"below_normal\"}"), below_normal);
}

#[test]
fn audit_record_has_the_new_values_of_requested_settings() {
    let now = settings("25", Some("512"));
    let target = || AuditedTarget { uuid: "MIG-1".into(), gpu_uuid: "GPU-0".into() };
    let asked = |text: &str| {
        let event = audited(&serde_json::from_str(text).unwrap(), &now, target(), None);
        event.record(None, "g1", "done").detail
    };
    let with = |settings: serde_json::Value| {
        let mut all = serde_json::json!({ "uuid": "MIG-1", "gpu_uuid": "GPU-0", "reason": null });
        all.as_object_mut().unwrap().extend(settings.as_object().unwrap().clone());
        all
    };
    assert_eq!(asked("{}"), with(serde_json::json!({})));
    assert_eq!(asked("{\"percentage\": 25}"), with(serde_json::json!({ "percentage": 25 })));
    assert_eq!(
        asked("{\"memory_limit_mib\": 512, \"clear\": true}"),
        with(serde_json::json!({ "memory_limit_mib": 512, "from_rule": true }))
    );
}

#[test]
fn settings_change_is_effective_when_the_daemon_reports_it() {
    let (before, now) = (settings("50", None), settings("25", None));
    let policy = gpush_api::MpsPolicy { settings: now.clone(), ..gpush_api::MpsPolicy::default() };
    let seen = |in_force: &MpsSettings| DaemonReport {
        in_force: Some(in_force.clone()),
        policy: Some(policy.clone()),
        ..daemon_report(READY)
    };
    let effect = |running, seen| describe_effect(&before, &now, running, &seen);
    assert_eq!(effect(0, seen(&now)), ["the change applies to clients that start from now on"]);
    assert_eq!(effect(3, seen(&now))[1], "the clients that run now (3) keep their settings");
    assert_eq!(effect(0, seen(&before)), ["the change takes effect when the daemon answers gpushd"]);
    // The reconciler has not given the settings to the supervisor task yet.
    let unread = DaemonReport { policy: None, ..seen(&before) };
    assert_eq!(effect(0, unread), ["the change takes effect when gpushd has read the GPU"]);
    let unchanged = describe_effect(&now, &now, 3, &seen(&now));
    assert_eq!(unchanged, ["no change: the daemon already had these settings"]);
}

#[test]
fn running_server_keeps_its_memory_limit() {
    let (before, now) = (settings("50", None), settings("50", Some("512")));
    let seen = |servers| DaemonReport { in_force: Some(now.clone()), servers, ..daemon_report(READY) };
    let names_server =
        |servers| describe_effect(&before, &now, 0, &seen(servers)).iter().any(|one| one.contains("server"));
    assert!(names_server(vec![(7, None)]));
    assert!(!names_server(Vec::new()));
    // The limit stays the same.
    let percentage = describe_effect(&now, &settings("25", Some("512")), 0, &seen(vec![(7, None)]));
    assert!(percentage.iter().all(|one| !one.contains("server")), "{percentage:?}");
}

#[test]
fn effect_of_a_change_depends_on_the_state_of_the_daemon() {
    let effect = |state| describe_effect(&settings("50", None), &settings("25", None), 0, &daemon_report(state));
    for state in states().into_iter().filter(|state| *state != READY) {
        let when = match state {
            SupervisorState::Starting { .. } | SupervisorState::BackingOff { .. } | SupervisorState::GivenUp => {
                "has started"
            }
            SupervisorState::Draining { .. } | SupervisorState::Stopping { .. } | SupervisorState::Stopped => {
                "is started again"
            }
            SupervisorState::Found { .. }
            | SupervisorState::Hung { .. }
            | SupervisorState::Fault { .. }
            | SupervisorState::Ready { .. } => "is ready",
        };
        assert_eq!(effect(state), [format!("the change takes effect when the daemon {when}")]);
    }
}

#[test]
fn clients_are_named_before_leases() {
    assert_eq!(use_clause(None, 1, true), "gpushd cannot tell whether the MPS daemon has clients");
    assert_eq!(use_clause(Some(1), 1, true), "1 client is connected");
    assert_eq!(use_clause(Some(2), 0, false), "2 clients are connected");
    assert_eq!(use_clause(Some(0), 1, true), "1 lease is in use");
    assert_eq!(use_clause(Some(0), 2, true), "2 leases are in use");
}

/// Fault: during a grant, the refusal said that gpushd cannot tell whether the daemon has clients.
#[test]
fn grant_in_progress_is_named_as_the_use() {
    assert_eq!(use_clause(Some(0), 0, true), "a lease on it is being granted");
    assert_eq!(use_clause(Some(0), 0, false), "its last client has just ended");
}
