//! Findings about the units of gpushd: a deleted socket, failed starts, stopped and masked units.

use gpush_doctor::Service;

use super::*;

/// Fault: after `rm /run/gpush/gpushd.sock`, the hint was `systemctl start`, which does nothing for an active unit.
#[test]
fn deleted_socket_of_an_active_unit_is_restarted() {
    let host = Planted::healthy();
    host.remove("run/gpush/gpushd.sock");
    for (state, command) in
        [("active", "`systemctl restart gpushd.socket`"), ("inactive", "`systemctl start gpushd.socket`")]
    {
        host.unit("gpushd.socket", &format!("LoadState=loaded\nUnitFileState=enabled\nActiveState={state}\n"));
        let bad = host.bad(Area::Agent, &healthy_agent());
        assert_eq!(bad.len(), 1, "{bad:#?}");
        assert_eq!(bad[0].message, "/run/gpush/gpushd.sock is missing");
        assert!(bad[0].hint.as_ref().is_some_and(|hint| hint.contains(command)), "{bad:#?}");
    }
}

/// Fault: if gpushd failed at each start, the only finding was that it did not answer in time.
#[test]
fn service_in_a_restart_loop_is_reported_with_its_error() {
    let host = Planted::healthy();
    let unanswered = Agent::Unreachable(ApiError::new(Code::TimedOut, "gpushd did not answer"));
    host.program(
        "usr/bin/journalctl",
        "#!/bin/sh\necho 'gpushd: old'\necho 'gpushd: cannot write'\necho 'gpushd.service: Scheduled restart job'\n",
    );
    let failing = [
        ("ActiveState=failed\nSubState=failed\nResult=exit-code\nNRestarts=0", "failed (failed)"),
        ("ActiveState=activating\nSubState=auto-restart\nResult=exit-code\nNRestarts=1", "activating (auto-restart)"),
        ("ActiveState=activating\nSubState=start\nResult=success\nNRestarts=7", "activating (start)"),
    ];
    for (properties, state) in failing {
        host.unit("gpushd.service", &format!("LoadState=loaded\n{properties}\nExecMainStatus=1\n"));
        let service = Service::find(&Host::at(host.0.path())).expect("it fails");
        for agent in [&unanswered, &Agent::NotAsked(service)] {
            let bad = host.bad(Area::Agent, agent);
            assert_eq!(bad.len(), 1, "{bad:#?}");
            assert!(bad[0].message.ends_with(state), "{bad:#?}");
            assert_eq!(bad[0].severity, Severity::Problem);
            assert_eq!(bad[0].causes[1], "last error in the log: gpushd: cannot write");
            assert!(bad[0].hint.as_ref().is_some_and(|hint| hint.contains("`journalctl -u gpushd -n 20`")), "{bad:#?}");
        }
    }
    // A gpushd that starts, or restarts for a new driver, does not fail.
    for properties in [
        "ActiveState=activating\nSubState=start\nNRestarts=0",
        "ActiveState=activating\nSubState=auto-restart\nResult=success\nNRestarts=1",
        "ActiveState=active\nSubState=running\nNRestarts=9",
    ] {
        host.unit("gpushd.service", &format!("LoadState=loaded\n{properties}\n"));
        assert_eq!(Service::find(&Host::at(host.0.path())), None, "{properties}");
    }
}

/// Fault: the doctor started a stopped gpushd, because it connected to its socket.
#[test]
fn stopped_service_is_not_asked() {
    let host = Planted::healthy();
    host.unit("gpushd.service", "LoadState=loaded\nActiveState=inactive\nSubState=dead\nResult=success\nNRestarts=0\n");
    assert_eq!(Service::find(&Host::at(host.0.path())), Some(Service::Stopped));
    let agent = Agent::NotAsked(Service::Stopped);
    let bad = host.bad(Area::Agent, &agent);
    assert_eq!((bad.len(), bad[0].severity), (1, Severity::Warning), "{bad:#?}");
    assert_eq!(bad[0].message, "gpushd is stopped; it starts with the first request");
    host.remove("run/gpush");
    let severities: Vec<Severity> = host.bad(Area::Agent, &agent).iter().map(|finding| finding.severity).collect();
    assert_eq!(severities, [Severity::Problem; 2], "a request reaches nothing");
}

/// Fault: for masked units, the hints were `systemctl start` and `systemctl restart`, which fail.
#[test]
fn masked_units_are_the_only_finding_with_the_command_that_unmasks_them() {
    let host = Planted::healthy();
    host.remove("run/gpush");
    for unit in ["gpushd.service", "gpushd.socket", "gpushd-admin.socket"] {
        host.unit(unit, "LoadState=masked\nUnitFileState=masked\nActiveState=inactive\n");
    }
    let unanswered = Agent::Unreachable(ApiError::new(Code::Unreachable, "there is no socket").hint("start it"));
    let bad = host.bad(Area::Agent, &unanswered);
    assert_eq!((bad.len(), bad[0].severity), (1, Severity::Problem), "{bad:#?}");
    let unmask = "run `systemctl unmask gpushd.service gpushd.socket gpushd-admin.socket`, then `systemctl start \
                  gpushd.service`";
    assert_eq!(bad[0].hint.as_deref(), Some(unmask));
}
