//! Ways of a user to open a GPU without a lease: another identity, a container, a unit with the name of a lease, and a
//! program that is frozen or killed while its lease ends.

use gpush_tests::machine::Machine;

use super::{ALICE, is_opening, output, session, start_in_session};

/// A process of a session stays in the session, whatever its user and namespaces are.
pub(super) fn other_identity_does_not_open(machine: &Machine) {
    let opens = "opens /dev/nvidia0 10";
    assert_eq!(session(machine, 0, &format!("su -s /bin/sh games -c \"{opens}\"")), "1*10", "su");
    assert_eq!(session(machine, 0, &format!("runuser -u games -- {opens}")), "1*10", "runuser");
    assert_eq!(session(machine, 0, &format!("setsid --wait setpriv --reuid=games --clear-groups {opens}")), "1*10");
    // What a container of the user starts with: namespaces of its own, in which the user is root.
    let container = format!("unshare --user --map-root-user --mount --pid --fork {opens}");
    assert_eq!(session(machine, ALICE, &container), "1*10", "a container of the user");
    let bound = "touch /tmp/bound && mount --bind /dev/nvidia0 /tmp/bound && opens /tmp/bound 10";
    let container = format!("unshare --user --map-root-user --mount sh -c \"{bound}\"");
    assert_eq!(session(machine, ALICE, &container), "1*10", "a node in a container of the user");
}

/// The user manager names a unit like the scope of an active lease.
pub(super) fn unit_with_the_name_of_a_lease_does_not_open(machine: &Machine) {
    let line = "gpushctl run -q -g 0 -- sh -c \"cat /proc/self/cgroup; until [ -e /srv/named ]; do sleep 0.05; done\"";
    start_in_session(machine, "lease", line);
    let cgroup = output(machine, "lease");
    let unit = cgroup.trim().rsplit('/').next().expect("a scope");
    assert!(unit.starts_with("gpulease-") && unit.ends_with(".scope"), "{cgroup}");
    let options = format!("--scope --unit={unit} --slice=gpulease-{ALICE}.slice");
    let line = format!("XDG_RUNTIME_DIR=/run/user/{ALICE} systemd-run --user --quiet {options} opens /dev/nvidia0 10");
    assert_eq!(session(machine, ALICE, &line), "1*10", "{unit} of the user manager");
    machine.sh("touch /srv/named");
    machine.await_that("the lease has ended", |machine| machine.sh("gpushctl lease list --json") == "[]");
}

/// A program that is frozen while its lease ends opens nothing after it continues, and one that is killed leaves nothing
/// open.
pub(super) fn frozen_and_killed_programs_open_nothing_after_the_end(machine: &Machine) {
    let line = "gpushctl run -q -g 0 -- opens-until /dev/nvidia0 /srv/thawed /srv/ended";
    start_in_session(machine, "frozen", line);
    machine.await_that("the program runs", is_opening);
    let scope = machine.sh("systemctl list-units --plain --no-legend \"gpulease-*.scope\" | cut -d\" \" -f1");
    machine.sh(&format!(
        "systemctl freeze {scope}; gpushctl lease end $(gpushctl lease list -o name) --reason test; touch /srv/ended; \
         systemctl thaw {scope}; sleep 0.2; touch /srv/thawed"
    ));
    assert!(output(machine, "frozen").ends_with(" 1"), "it opened the GPU after the end of its lease");
    machine.await_that("the lease has ended", |machine| machine.sh("gpushctl lease list --json") == "[]");

    start_in_session(machine, "killed", "gpushctl run -q -g 0 -- opens-until /dev/nvidia0 /srv/never /srv/never");
    machine.await_that("the program runs", is_opening);
    machine.sh("systemctl kill --signal=KILL \"gpulease-*.scope\"");
    machine.await_that("the lease has ended", |machine| machine.sh("gpushctl lease list --json") == "[]");
    assert_eq!(session(machine, ALICE, "opens /dev/nvidia0 10"), "1*10");
}
