//! Leases on hosts with cgroup v1, alone or together with the unified hierarchy. The machines of
//! all other tests have only the unified hierarchy.

use gpush_tests::machine::{Hierarchy, Machine};

use super::{
    ALICE, CGROUPS, active, in_session, leases, none_left, on_gpu_0, scopes, start_in_session, text, with_gpush,
};

#[test]
fn lease_is_bound_and_ends_with_cgroup_v1_only() {
    is_bound_and_ends("leases with cgroup v1", Hierarchy::Legacy);
}

#[test]
fn lease_is_bound_and_ends_with_hybrid_hierarchies() {
    is_bound_and_ends("leases with hybrid cgroups", Hierarchy::Hybrid);
}

fn is_bound_and_ends(what: &str, hierarchy: Hierarchy) {
    let Some(machine) = Machine::boot_with_cgroups(what, hierarchy).map(with_gpush) else { return };
    // With cgroup v1, the kernel starts a program that reports an empty cgroup to systemd. In a
    // container, the report does not reach systemd, so units of ended scopes remain. gpushd learns
    // from the kernel that the processes have ended.
    let none_left = || match hierarchy {
        Hierarchy::Legacy => machine.await_that("no lease is left", |machine| leases(machine).is_empty()),
        Hierarchy::Hybrid | Hierarchy::Unified => none_left(&machine),
    };
    // The command of `run` gets a scope. The scope contains all descendants of the command, and
    // ends with the last of them.
    start_in_session(&machine, ALICE, "1", "exec gpushctl run --whole -- sh -c \"setsid -f sleep 1000; sleep 1001\"");
    let all = active(&machine, 1);
    let scope = text(&all[0]["binding"], "cgroup").to_owned();
    let of = |seconds: u32| {
        let find = format!("pgrep -xf 'sleep {seconds}'");
        machine.await_that("the command runs", |machine| machine.run(&find).status.success());
        machine.sh(&find)
    };
    let is_in = |pid: &str, path: &str| machine.run(&format!("grep -q ':{path}$' /proc/{pid}/cgroup")).status.success();
    for pid in [of(1000), of(1001)] {
        assert!(is_in(&pid, &scope), "{scope}");
    }
    on_gpu_0(&machine, &of(1000));
    machine.sh("pkill -KILL -xf 'sleep 1001'; gpushctl lease end L1 --reason test");
    assert!(leases(&machine)[0]["waits_for"].to_string().contains("(sleep) runs"));
    assert_eq!(scopes(&machine).len(), 1);
    machine.sh("pkill -KILL -xf 'sleep 1000'");
    none_left();
    // In a login session, a service, a container and a Slurm job, processes stay in their cgroup.
    let session = format!("/user.slice/user-{ALICE}.slice/session-2.scope");
    start_in_session(&machine, ALICE, "2", "gpushctl lease request --timeslice; sleep 1000");
    assert_eq!(text(&active(&machine, 1)[0]["binding"], "cgroup"), session);
    machine.sh("systemctl kill --signal=KILL session-2.scope");
    none_left();
    let run = "exec gpushctl run --timeslice -- sleep 1000";
    let become_alice = format!("exec setpriv --reuid={ALICE} --regid={ALICE} --clear-groups sh -c '{run}'");
    let unit = "/system.slice/own.service".to_owned();
    for path in [unit, format!("/docker/{}", "0123456789abcdef".repeat(4)), "/slurm/uid_0/job_42".to_owned()] {
        let enter = match path.ends_with(".service") {
            true => String::new(),
            false => format!("root={CGROUPS}; mkdir -p $root{path}; echo $$ > $root{path}/cgroup.procs;"),
        };
        machine.write("/srv/own", format!("#!/bin/sh\n{enter}\n{become_alice}\n"));
        machine.sh("chmod 755 /srv/own; systemd-run --quiet --collect --unit=own /srv/own");
        assert_eq!(text(&active(&machine, 1)[0]["binding"], "cgroup"), path);
        assert!(is_in(&of(1000), &path), "{path}");
        machine.sh("pkill -KILL -x sleep");
        none_left();
        machine.sh("systemctl stop own.service 2> /dev/null || true");
    }
    assert!(machine.run(&in_session(ALICE, "3", "gpushctl run --whole -- true")).status.success());
    none_left();
}
