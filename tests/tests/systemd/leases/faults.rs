//! Leases when gpushd, systemd or the bus restarts, or when the database is deleted.

use gpush_tests::machine::Machine;

use super::{
    ALICE, BOB, active, id, in_session, leases, machine, none_left, on_gpu_0, pid_of, scopes, start_in_session, text,
};

const RUN: &str = "exec gpushctl run --whole -- sleep 1000";

#[test]
fn scopes_survive_restarts_a_missing_bus_and_a_lost_database() {
    let Some(machine) = machine("scopes and faults") else { return };
    scope_is_found_again_after_restarts(&machine);
    scope_without_a_bus_is_refused_and_release_works(&machine);
    scopes_of_a_deleted_database_are_shown_and_never_ended(&machine);
}

fn scope_is_found_again_after_restarts(machine: &Machine) {
    start_in_session(machine, ALICE, "1", RUN);
    let before = active(machine, 1);
    for restart in [
        "systemctl restart gpushd.service",
        "kill -9 $(systemctl show --value --property=MainPID gpushd.service | grep -v '^0$'); sleep 0.1; gpushctl status > /dev/null",
        "systemctl daemon-reexec",
        "systemctl daemon-reload",
        "systemctl stop gpush.slice",
    ] {
        machine.sh(restart);
        let after = active(machine, 1);
        assert_eq!(after[0]["binding"], before[0]["binding"], "{restart}");
        assert_eq!(scopes(machine), [text(&before[0]["binding"], "unit")], "{restart}");
    }
    // The scope ends while gpushd does not run.
    machine.sh("systemctl stop gpushd.service; pkill -KILL -x sleep; systemctl start gpushd.service");
    none_left(machine);
    // gpushd connected to systemd before systemd's reexec. It must still be able to create scopes
    // through this connection.
    start_in_session(machine, ALICE, "2", RUN);
    pid_of(machine, "sleep 1000");
    machine.sh("systemctl daemon-reexec; pkill -KILL -x sleep");
    none_left(machine);
    start_in_session(machine, ALICE, "3", RUN);
    pid_of(machine, "sleep 1000");
    machine.sh("pkill -KILL -x sleep");
    none_left(machine);
}

fn scope_without_a_bus_is_refused_and_release_works(machine: &Machine) {
    start_in_session(machine, ALICE, "1", RUN);
    let lease = id(&active(machine, 1)[0]);
    // Start the session now, because it cannot start without the bus.
    start_in_session(
        machine,
        ALICE,
        "2",
        "until [ -e /srv/go ]; do sleep 0.05; done; gpushctl run --timeslice -- true; echo ended $?",
    );
    machine
        .await_that("the session runs", |machine| machine.run("systemctl is-active session-2.scope").status.success());
    machine.sh("systemctl stop dbus.socket dbus.service; touch /srv/go");
    machine.await_that("the request was answered", |machine| machine.run("grep -q ended /srv/2").status.success());
    let printed = machine.sh("cat /srv/2");
    assert!(
        printed.contains("cannot create a systemd scope")
            && printed.contains("system bus")
            && printed.contains("ended 125"),
        "{printed}"
    );
    assert_eq!(leases(machine).len(), 1, "nothing was granted");
    machine.sh(&format!("gpushctl lease end {lease} --reason test; pkill -KILL -xf 'sleep 1000'"));
    none_left(machine);
    machine.sh("systemctl start dbus.socket");
    assert!(machine.run(&in_session(ALICE, "3", "gpushctl run --whole -- true")).status.success());
    none_left(machine);
}

fn scopes_of_a_deleted_database_are_shown_and_never_ended(machine: &Machine) {
    machine
        .write("/etc/gpush/config.toml", format!("[processes]\nunleased = \"end\"\ngrace = \"1s\"\n{}", super::RULES));
    machine.sh("systemctl reload gpushd.service");
    start_in_session(machine, ALICE, "1", RUN);
    let unit = text(&active(machine, 1)[0]["binding"], "unit").to_owned();
    let pid = pid_of(machine, "sleep 1000");
    on_gpu_0(machine, &pid);
    machine.sh(
        "systemctl stop gpushd.service; rm -rf /var/lib/gpush/* /run/gpush/store-*; systemctl start gpushd.service",
    );
    machine.await_that("the scope is reported", |machine| machine.sh("gpushctl status --json || true").contains(&unit));
    let printed = machine.sh("gpushctl status --json || true");
    assert!(printed.contains("a lease that gpushd does not know"), "{printed}");
    // Until an administrator accepts the loss of the database, gpushd treats no process as
    // unleased. After that, gpushd ends unleased processes, such as the witness. When gpushd has
    // asked the witness to end, it has also checked the process `pid`.
    machine.sh("gpushctl recover --reason test");
    machine.await_that("GPUs are read", super::gpus_are_read);
    machine.sh(&format!("systemd-run --quiet --unit=witness --uid={BOB} sleep 1002"));
    on_gpu_0(machine, &machine.main_pid("witness.service").to_string());
    let _ = machine.journal_until("-u gpushd.service", "asked to end");
    assert!(machine.run(&format!("kill -0 {pid}")).status.success());
    assert_eq!(scopes(machine), [unit]);
}
