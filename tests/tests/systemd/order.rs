//! The order of gpushd and its MPS control daemons when units stop.

use gpush_tests::machine::Machine;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";

/// A rule for the GPU, with the simulated control daemon.
const CONFIG: &str = "[mps]\ncontrol = \"/var/lib/gpush-sim/bin/nvidia-cuda-mps-control\"\n\
                      [[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n";

/// Starts a machine with an MPS control daemon. Returns the machine and the unit of the daemon.
fn machine(what: &str) -> Option<(Machine, String)> {
    let machine = Machine::boot(what)?;
    machine.install();
    machine.simulated_host(HOST);
    machine.write("/etc/gpush/config.toml", CONFIG);
    machine.sh("systemctl start gpushd.service && gpushctl ready --timeout 60s");
    let unit = machine.sh("systemctl list-units --plain --no-legend 'gpushd-mps@*' | cut -d' ' -f1");
    Some((machine, unit))
}

#[test]
fn gpushd_and_daemons_stop_and_start_in_their_order() {
    let Some((machine, unit)) = machine("the order of gpushd and its MPS daemons") else { return };
    gpushd_stops_before_daemons_at_shutdown(&machine, &unit);
    machine.sh("systemctl stop end.target; systemctl start gpushd.service && gpushctl ready --timeout 60s");
    gpushd_starts_while_a_daemon_stops(&machine, &unit);
}

fn gpushd_starts_while_a_daemon_stops(machine: &Machine, unit: &str) {
    let before = machine.main_pid("gpushd.service");
    machine.write(
        &format!("/etc/systemd/system/{unit}.d/slow.conf"),
        "[Service]\nExecStop=/bin/sleep 1000\nTimeoutStopSec=1000\n",
    );
    machine.sh(&format!("systemctl daemon-reload && systemctl stop --no-block {unit}"));
    let state = || machine.property(unit, "ActiveState");
    machine.await_that("the daemon stops", |_| state() == "deactivating");
    machine.sh("systemctl restart gpushd.service && gpushctl version");
    assert_ne!(machine.main_pid("gpushd.service"), before);
    assert_eq!(state(), "deactivating");
}

/// At shutdown, systemd stops all units in one transaction, because they conflict with shutdown.target.
fn gpushd_stops_before_daemons_at_shutdown(machine: &Machine, unit: &str) {
    machine.write(
        "/etc/systemd/system/end.target",
        format!("[Unit]\nConflicts={unit} gpushd.service gpushd.socket gpushd-admin.socket gpush-mps.target\n"),
    );
    machine.sh("systemctl daemon-reload && systemctl start end.target");
    let _ = machine.journal_until("_PID=1", &format!("Stopped {unit}"));
    let journal = machine.sh("journalctl --no-pager --output=cat _PID=1");
    let at = |says: &str| journal.find(says).unwrap_or_else(|| panic!("no line {says}:\n{journal}"));
    assert!(at("Stopped gpushd.service") < at(&format!("Stopping {unit}")), "{journal}");
    let printed = machine.sh("journalctl --no-pager --output=cat -u gpushd.service");
    assert!(!printed.contains("as by `systemctl stop`"), "{printed}");
}
