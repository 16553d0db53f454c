//! What a lease is bound to, depending on where the caller runs, and when the lease ends.

use gpush_tests::machine::Machine;

use super::{
    ALICE, CGROUPS, active, cgroup, id, in_session, leases, machine, none_left, on_gpu, pid_of, scopes,
    start_in_session, text,
};

#[test]
fn lease_is_bound_to_the_scope_or_cgroup_of_its_caller() {
    let Some(machine) = machine("what leases are bound to") else { return };
    run_in_a_session_gets_a_scope_and_keeps_it(&machine);
    request_in_a_session_is_bound_to_the_session(&machine);
    service_container_job_and_mixed_unit_get_own_bindings(&machine);
    command_of_run_in_a_service_ends_its_own_lease_only(&machine);
    setuid_program_does_not_move_run_out_of_its_service(&machine);
}

fn run_in_a_session_gets_a_scope_and_keeps_it(machine: &Machine) {
    // The command starts a daemon process that runs longer than the command.
    let line = "gpushctl run --whole -- sh -c \"setsid setsid sleep 1000 > /dev/null 2>&1 & sleep 0.2; cat /proc/self/cgroup\"";
    let output = machine.sh(&in_session(ALICE, "1", line));
    let all = active(machine, 1);
    let (unit, path) = (text(&all[0]["binding"], "unit").to_owned(), text(&all[0]["binding"], "cgroup").to_owned());
    assert_eq!(text(&all[0]["binding"], "kind"), "scope");
    assert!(unit.starts_with("gpulease-") && unit.ends_with("-1.scope"), "{unit}");
    assert_eq!(path, format!("/gpulease.slice/gpulease-{ALICE}.slice/{unit}"));
    assert!(output.contains(&path), "{output}");
    assert_eq!(machine.property(&unit, "Slice"), format!("gpulease-{ALICE}.slice"));
    assert!(machine.property(&unit, "Description").contains("lease L1 of"));
    // With the drop-in, the limit of the slice is a third of the limit of the host.
    let most: u64 = machine.property(&format!("gpulease-{ALICE}.slice"), "TasksMax").parse().expect("a number");
    assert!(most < machine.property("gpulease.slice", "TasksMax").parse().unwrap_or(u64::MAX), "{most}");
    // While a process of the scope runs, the whole GPU stays in use.
    let refused = machine.run(&in_session(ALICE, "2", "gpushctl run --whole -- true"));
    assert_eq!(refused.status.code(), Some(125), "{refused:?}");
    machine.sh(&format!("gpushctl lease end {} --reason test", id(&all[0])));
    let all = leases(machine);
    assert_eq!(all[0]["state"], "releasing");
    assert!(all[0]["waits_for"].to_string().contains("(sleep) runs"), "{all:?}");
    machine.sh("pkill -KILL -x sleep");
    none_left(machine);
}

fn request_in_a_session_is_bound_to_the_session(machine: &Machine) {
    let line = "gpushctl lease request --whole -o name; gpushctl run -- cat /proc/self/cgroup; echo asked; sleep 1000";
    start_in_session(machine, ALICE, "7", line);
    let all = active(machine, 1);
    let session = format!("/user.slice/user-{ALICE}.slice/session-7.scope");
    assert_eq!((text(&all[0]["binding"], "kind"), text(&all[0]["binding"], "cgroup")), ("cgroup", session.as_str()));
    machine.await_that("the lease was answered", |machine| machine.run("grep -q asked /srv/7").status.success());
    let pid = pid_of(machine, "sleep 1000");
    assert_eq!(cgroup(machine, &pid), session, "nothing was moved");
    // When the last process of the session ends, the lease ends.
    machine.sh("systemctl kill --signal=KILL session-7.scope");
    none_left(machine);
}

fn service_container_job_and_mixed_unit_get_own_bindings(machine: &Machine) {
    let run = "gpushctl run --timeslice -- sleep 1000";
    // If a service runs as one user, the lease is bound to the cgroup of the service. The service
    // has Type=exec, so systemd-run returns when systemd has executed gpushctl.
    machine.sh(&format!("systemd-run --quiet --unit=own --uid={ALICE} {run}"));
    let all = active(machine, 1);
    assert_eq!(
        (text(&all[0]["binding"], "kind"), text(&all[0]["binding"], "cgroup")),
        ("cgroup", "/system.slice/own.service")
    );
    machine.sh("systemctl stop own.service");
    none_left(machine);
    // In a service of root that starts sessions, such as cron, the lease gets a new scope. In any other service of
    // root, the process stays, because the service may have limits.
    let of_root = |unit: &str| {
        let line = format!("setpriv --reuid={ALICE} --regid={ALICE} --clear-groups {run}; sleep 1");
        machine.sh(&format!("systemd-run --quiet --collect --unit={unit} sh -c '{line}'"));
        active(machine, 1)
    };
    let all = of_root("crond");
    assert_eq!(text(&all[0]["binding"], "kind"), "scope");
    assert_eq!(scopes(machine), [text(&all[0]["binding"], "unit")]);
    machine.sh("pkill -KILL -x sleep");
    none_left(machine);
    let all = of_root("batch");
    assert_eq!(text(&all[0]["binding"], "kind"), "process");
    let pid = pid_of(machine, "sleep 1000");
    assert_eq!(cgroup(machine, &pid), "/system.slice/batch.service", "nothing was moved");
    machine.sh("pkill -KILL -x sleep");
    none_left(machine);
    // If a service of one user is delegated, the lease is also bound to the cgroup of the service.
    machine.sh(&format!("systemd-run --quiet --unit=delegated --property=Delegate=yes --uid={ALICE} {run}"));
    let all = active(machine, 1);
    assert_eq!(text(&all[0]["binding"], "cgroup"), "/system.slice/delegated.service");
    machine.sh("systemctl stop delegated.service");
    none_left(machine);
    // If a process is in a cgroup of the form that Docker or slurmstepd creates, gpushd does not
    // move it.
    let id = "0123456789abcdef".repeat(4);
    for path in [format!("/system.slice/docker-{id}.scope"), "/system.slice/slurmstepd.scope/job_42".to_owned()] {
        let inside = format!(
            "root={CGROUPS}; mkdir -p $root{path}/step; echo $$ > $root{path}/step/cgroup.procs; exec setpriv --reuid={ALICE} --regid={ALICE} --clear-groups {run}"
        );
        machine.write("/srv/inside", format!("#!/bin/sh\n{inside}\n"));
        machine.sh("chmod 755 /srv/inside; systemd-run --quiet --collect --unit=inside /srv/inside");
        let all = active(machine, 1);
        assert_eq!((text(&all[0]["binding"], "kind"), text(&all[0]["binding"], "cgroup")), ("cgroup", path.as_str()));
        let pid = pid_of(machine, "sleep 1000");
        assert_eq!(cgroup(machine, &pid), format!("{path}/step"), "nothing was moved");
        machine.sh("pkill -KILL -x sleep");
        none_left(machine);
        machine.sh("systemctl stop inside.service 2> /dev/null || true");
    }
}

/// Faults: if `run` was called in a service or container, its lease did not end with the command, but only with the
/// service or container. If two leases had the same cgroup and GPU, the end of the first lease also ended the processes
/// of the second.
fn command_of_run_in_a_service_ends_its_own_lease_only(machine: &Machine) {
    machine.write(
        "/srv/runner",
        "#!/bin/sh\nfor n in 1000 1001; do gpushctl run --timeslice -- sleep $n & done\nwait\nexec sleep 1002\n",
    );
    machine.sh(&format!("chmod 755 /srv/runner; systemd-run --quiet --unit=runner --uid={ALICE} /srv/runner"));
    let all = active(machine, 2);
    for lease in &all {
        assert_eq!(text(&lease["binding"], "cgroup"), "/system.slice/runner.service");
    }
    let pids = [1000, 1001].map(|seconds| {
        let find = format!("pgrep -xf 'sleep {seconds}'");
        machine.await_that("the command runs", |machine| machine.run(&find).status.success());
        machine.sh(&find)
    });
    let lease_of = |pid: &str| machine.sh(&format!("tr '\\0' '\\n' < /proc/{pid}/environ | sed -n s/^GPUSH_LEASE=//p"));
    let ids = [lease_of(&pids[0]), lease_of(&pids[1])];
    pids.iter().for_each(|pid| on_gpu(machine, 1, pid));
    let listed = |machine: &Machine| -> Vec<serde_json::Value> {
        let shown = machine.sh("gpushctl ps --json");
        let shown: serde_json::Value = serde_json::from_str(&shown).expect("processes");
        shown["gpu_processes"].as_array().expect("processes").clone()
    };
    machine.await_that("both are listed", |machine| listed(machine).len() == 2);
    for process in listed(machine) {
        let own = pids.iter().position(|pid| process["pid"].as_u64() == pid.parse().ok()).expect("one of both");
        assert_eq!((&process["lease_id"], &process["unattributed"]), (&ids[own].as_str().into(), &().into()));
    }
    // A process whose environment names no lease counts for the older lease.
    let first = usize::from(ids[0] != id(&all[0]));
    machine.sh(&format!("gpushctl lease end {} --reason test --kill --notice 0s --grace 0s", ids[first]));
    assert_eq!(text(&active(machine, 1)[0], "id"), ids[1 - first]);
    assert!(machine.run(&format!("kill -0 {}", pids[1 - first])).status.success());
    machine.sh(&format!("kill -KILL {}", pids[1 - first]));
    machine.await_that("no lease is left", |machine| leases(machine).is_empty());
    assert!(machine.run("systemctl is-active runner.service").status.success());
    machine.sh("systemctl stop runner.service");
}

/// A process of root in a service of a user could make the service look like a service of root. If `run` then got a new
/// scope, the user would escape the limits of the service. The process also counts for the lease while it uses the GPU.
fn setuid_program_does_not_move_run_out_of_its_service(machine: &Machine) {
    machine.sh("install -m 4755 $(command -v sleep) /srv/rootsleep");
    machine.write("/srv/runner", "#!/bin/sh\n/srv/rootsleep 1001 &\ngpushctl run --timeslice -- sleep 1000\nwait\n");
    machine.sh(&format!(
        "chmod 755 /srv/runner; systemd-run --quiet --unit=limited --property=MemoryMax=256M --uid={ALICE} /srv/runner"
    ));
    let all = active(machine, 1);
    let service = "/system.slice/limited.service";
    assert_eq!((text(&all[0]["binding"], "kind"), text(&all[0]["binding"], "cgroup")), ("cgroup", service));
    let pid_of = |command: &str| {
        let find = format!("pgrep -xf '{command}'");
        machine.await_that("the program runs", |machine| machine.run(&find).status.success());
        machine.sh(&find)
    };
    let (own, roots) = (pid_of("sleep 1000"), pid_of("/srv/rootsleep 1001"));
    assert_eq!((cgroup(machine, &own), cgroup(machine, &roots)), (service.to_owned(), service.to_owned()));
    assert_eq!(machine.sh(&format!("ps -o euid= -p {roots}")).trim(), "0", "the program is setuid root");
    on_gpu(machine, 1, &roots);
    machine.sh(&format!("kill -KILL {own}"));
    machine.await_that("the lease waits for the process of root", |machine| {
        leases(machine).iter().any(|lease| lease["waits_for"].to_string().contains("(rootsleep) runs"))
    });
    machine.sh(&format!("kill -KILL {roots}"));
    none_left(machine);
}
