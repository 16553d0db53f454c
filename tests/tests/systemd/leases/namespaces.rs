//! Callers in other namespaces: a user namespace, and a container that has gpushd's sockets.

use gpush_tests::machine::Machine;

use super::{
    ALICE, CGROUPS, active, cgroup, id, in_session, leases, machine, none_left, pid_of, scopes, start_in_session, text,
};

#[test]
fn callers_in_other_namespaces_keep_their_user_and_place() {
    let Some(machine) = machine("leases in other namespaces") else { return };
    root_of_a_user_namespace_stays_the_user_and_is_not_moved(&machine);
    container_with_the_sockets_is_not_moved_and_has_no_rights(&machine);
}

/// The caller is root of a user namespace. gpushd sees the caller's uid on the host, and moves no process.
fn root_of_a_user_namespace_stays_the_user_and_is_not_moved(machine: &Machine) {
    const ROOT: &str = "exec unshare --user --map-root-user";
    start_in_session(machine, ALICE, "1", &format!("{ROOT} gpushctl run --timeslice -- sleep 1000"));
    let all = active(machine, 1);
    assert_eq!((&all[0]["holder"]["uid"], text(&all[0]["binding"], "kind")), (&ALICE.into(), "process"));
    let pid = pid_of(machine, "sleep 1000");
    assert_eq!(cgroup(machine, &pid), format!("/user.slice/user-{ALICE}.slice/session-1.scope"));
    let refused = machine.run(&in_session(ALICE, "2", &format!("{ROOT} gpushctl gpu cordon 1 --reason test 2>&1")));
    let printed = String::from_utf8_lossy(&refused.stdout).into_owned();
    assert!(!refused.status.success() && printed.contains("another pid or user namespace"), "{printed}");
    machine.sh("pkill -KILL -x sleep");
    none_left(machine);
    // A command of `run` stays in its lease if it enters a user namespace.
    start_in_session(machine, ALICE, "3", "exec gpushctl run --whole -- unshare --user --map-root-user sleep 1000");
    let lease = id(&active(machine, 1)[0]);
    pid_of(machine, "sleep 1000");
    machine.sh(&format!("gpushctl lease end {lease} --reason test"));
    let all = leases(machine);
    assert!(all[0]["waits_for"].to_string().contains("(sleep) runs"), "{all:?}");
    machine.sh("pkill -KILL -x sleep");
    none_left(machine);
}

/// The container has separate namespaces, as with Docker, and contains the directory of gpushd's
/// sockets.
fn container_with_the_sockets_is_not_moved_and_has_no_rights(machine: &Machine) {
    let container = format!("/system.slice/docker-{}.scope", "0123456789abcdef".repeat(4));
    machine.write(
        "/srv/container",
        format!(
            "#!/bin/sh\nset -e\nroot={CGROUPS}\nmkdir -p $root{container}\necho $$ > $root{container}/cgroup.procs\n\
             exec unshare --pid --mount --ipc --uts --net --cgroup --fork --mount-proc sh -c \"$1\" > /srv/output 2>&1\n"
        ),
    );
    machine.sh("chmod 755 /srv/container");
    let start = |line: &str| {
        machine.write("/srv/inside.sh", line);
        machine.sh("systemd-run --quiet --collect --unit=container /srv/container 'exec sh /srv/inside.sh'");
    };
    let stop = || machine.sh("pkill -KILL -xf 'sleep 1000'; systemctl stop container.service 2> /dev/null || true");
    // This lease belongs to another user. Root of the container must not end it.
    start_in_session(machine, ALICE, "1", "exec gpushctl run --whole -- sleep 1001");
    let of_alice = active(machine, 1);
    let lease = id(&of_alice[0]);
    let changes = [
        format!("lease end {lease} --reason test --kill"),
        format!("lease end {lease}"),
        "gpu cordon 1 --reason test".to_owned(),
        "mig off 1".to_owned(),
    ];
    for change in changes {
        start(&format!("gpushctl {change}; echo ended $?; sleep 1000"));
        machine.await_that("it was answered", |machine| machine.run("grep -q ended /srv/output").status.success());
        let printed = machine.sh("cat /srv/output");
        assert!(printed.contains(" may not ") && printed.contains("ended 5"), "{change}: {printed}");
        stop();
        machine.sh("rm /srv/output");
    }
    assert_eq!(active(machine, 1), of_alice);
    machine.sh("pkill -KILL -xf 'sleep 1001'");
    none_left(machine);
    // In every case, the lease is bound to the cgroup of the container, even with a forged cgroup below it. The command
    // `lease request` cannot name its session leader: the leader is outside the container, or gpushd does not know the
    // leader's pid in the container.
    let forged = "own=$(mktemp -d); mount -t cgroup2 cgroup2 $own; mkdir -p $own/gpulease.slice/gpulease-0a1b2c3d-1.scope; \
                  echo $$ > $own/gpulease.slice/gpulease-0a1b2c3d-1.scope/cgroup.procs; ";
    let run = "gpushctl run --timeslice -- sleep 1000";
    for (line, below) in [
        (format!("exec {run}"), ""),
        (format!("{forged} exec {run}"), "/gpulease.slice/gpulease-0a1b2c3d-1.scope"),
        (format!("setpriv --reuid={ALICE} --regid={ALICE} --clear-groups {run}"), ""),
        ("gpushctl lease request --timeslice; exec sleep 1000".to_owned(), ""),
        ("exec setsid --wait sh -c 'gpushctl lease request --timeslice; exec sleep 1000'".to_owned(), ""),
    ] {
        start(&line);
        let all = active(machine, 1);
        assert_eq!(
            (text(&all[0]["binding"], "kind"), text(&all[0]["binding"], "cgroup")),
            ("cgroup", &*container),
            "{line}"
        );
        pid_of(machine, "sleep 1000");
        let pid = pid_of(machine, "sleep 1000");
        assert_eq!(cgroup(machine, &pid), format!("{container}{below}"), "{line}");
        assert_eq!(scopes(machine), [] as [&str; 0]);
        stop();
        none_left(machine);
    }
}
