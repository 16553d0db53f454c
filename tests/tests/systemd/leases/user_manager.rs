//! The service manager of a user (`systemd --user`): leases of its units, and processes that leave
//! a lease through it.

use gpush_tests::machine::Machine;

use super::{
    ALICE, CGROUPS, active, cgroup, id, in_session, leases, machine, none_left, on_gpu_0, start_in_session, text,
};

/// Starts the service manager of a user. Sets the variable that pam_systemd would set, because the
/// machine has no pam_systemd.
fn start_manager(machine: &Machine, uid: u32) {
    machine.write(
        "/etc/systemd/system/user@.service.d/test.conf",
        "[Service]\nEnvironment=XDG_RUNTIME_DIR=/run/user/%i HOME=/\n",
    );
    machine.sh(&format!("systemctl daemon-reload; systemctl start user@{uid}.service"));
}

/// Returns a command that runs in a new scope of the user's service manager.
fn in_user_scope(command: &str) -> String {
    format!("env XDG_RUNTIME_DIR=/run/user/{ALICE} systemd-run --user --quiet --scope {command}")
}

/// Waits for a command `sleep`, which systemd-run starts by its full path. Returns its pid.
fn sleeping(machine: &Machine, seconds: u32) -> String {
    let find = format!("pgrep -xf '(/usr/bin/)?sleep {seconds}'");
    machine.await_that("the command runs", |machine| machine.run(&find).status.success());
    machine.sh(&find)
}

#[test]
fn manager_of_a_user_neither_forges_nor_ends_leases() {
    let Some(machine) = machine("the service manager of a user") else { return };
    start_manager(&machine, ALICE);
    unit_of_the_users_manager_gets_a_scope(&machine);
    process_that_left_its_scope_still_counts_for_the_lease(&machine);
}

fn unit_of_the_users_manager_gets_a_scope(machine: &Machine) {
    for forged in
        ["", "gpulease.slice/gpulease-0.slice/gpulease-0a1b2c3d-1.scope", "slurmstepd.scope/job_1", "docker-0.scope"]
    {
        // The cgroup of a unit of the user belongs to the user. So the user can create cgroups with
        // any name below this cgroup.
        let script = format!(
            "#!/bin/sh\nset -e\nown={CGROUPS}$(sed -n s/^0:://p /proc/self/cgroup)/{forged}\nmkdir -p $own\n\
             echo $$ > $own/cgroup.procs\nsed -n s/^0:://p /proc/self/cgroup > /tmp/before\n\
             exec gpushctl run --timeslice -- sleep 1000\n"
        );
        machine.write("/srv/forge", script);
        machine.sh("chmod 755 /srv/forge; rm -f /tmp/before");
        start_in_session(machine, ALICE, "1", &format!("exec {}", in_user_scope("/srv/forge")));
        let all = active(machine, 1);
        let before = machine.sh("cat /tmp/before");
        assert!(before.contains(&format!("/user@{ALICE}.service/")) && before.ends_with(forged), "{before}");
        assert_eq!(text(&all[0]["binding"], "kind"), "scope", "{forged}");
        let pid = sleeping(machine, 1000);
        machine.await_that("it is in the scope", |machine| cgroup(machine, &pid) == text(&all[0]["binding"], "cgroup"));
        machine.sh("pkill -KILL -x sleep");
        none_left(machine);
    }
    // A cgroup that a user has named like a login session is not a login session.
    machine.write("/srv/ask", "#!/bin/sh\ngpushctl lease request --timeslice\nexec sleep 1000\n");
    machine.sh("chmod 755 /srv/ask");
    start_in_session(machine, ALICE, "1", &format!("exec {}", in_user_scope("/srv/ask")));
    assert_eq!(text(&active(machine, 1)[0]["binding"], "kind"), "process");
    machine.sh("systemctl stop session-1.scope; pkill -KILL -x sleep");
    none_left(machine);
}

/// A user can ask systemd to move a process of the user into the user's own service manager. The
/// process then leaves the scope of its lease. The GPU must stay in use until the process ends.
fn process_that_left_its_scope_still_counts_for_the_lease(machine: &Machine) {
    // The environment of the second process does not name the lease. So gpushd finds this process
    // only because it uses the GPU.
    let (named, hidden) = (in_user_scope("sleep 1000"), in_user_scope("env --unset=GPUSH_LEASE sleep 1001"));
    // The command of `run` lasts until both processes are on the GPU.
    let line = format!(
        "exec gpushctl run --whole -- sh -c \"{named} & {hidden} & until [ -e /srv/go ]; do sleep 0.05; done\""
    );
    start_in_session(machine, ALICE, "1", &line);
    let lease = id(&active(machine, 1)[0]);
    let (named, hidden) = (sleeping(machine, 1000), sleeping(machine, 1001));
    for pid in [&named, &hidden] {
        let left = format!("/user@{ALICE}.service/");
        machine.await_that("it has left the scope", |machine| cgroup(machine, pid).contains(&left));
        on_gpu_0(machine, pid);
    }
    machine.sh("touch /srv/go");
    let waits_for = |pid: &str| {
        machine.await_that("the lease waits for the process", |machine| {
            let all = leases(machine);
            all[0]["state"] == "releasing"
                && all[0]["waits_for"].to_string().contains(&format!("process {pid} (sleep)"))
        });
    };
    waits_for(&named);
    waits_for(&hidden);
    // gpushd ends the process that names the lease. It cannot prove that the other process belonged
    // to the lease.
    machine.sh(&format!("gpushctl lease end {lease} --reason test --kill --notice 0s --grace 0s"));
    machine.await_that("the process is ended", |machine| !machine.run(&format!("kill -0 {named}")).status.success());
    let refused = machine.run(&in_session(ALICE, "2", "gpushctl run --whole -g 0 -- true"));
    assert_eq!(refused.status.code(), Some(125), "{refused:?}");
    waits_for(&hidden);
    machine.sh(&format!("kill -KILL {hidden}"));
    none_left(machine);
}
