//! The .deb is removed and purged while an MPS control daemon has a client.

use gpush_tests::machine::Machine;

use super::{CONFIG, machine};

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";

/// A rule for the GPU, with the simulated control daemon.
const RULES: &str = "[mps]\ncontrol = \"/var/lib/gpush-sim/bin/nvidia-cuda-mps-control\"\n\
                     [[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n";

/// Starts an MPS control daemon with a client. Returns the unit of the daemon.
fn daemon_with_client(machine: &Machine) -> String {
    machine.write(CONFIG, RULES);
    machine.sh("systemctl restart gpushd.service && gpushctl apply 0 --wait && gpushctl ready --timeout 60s");
    machine.sh("systemctl stop client.service 2>/dev/null; systemctl reset-failed client.service 2>/dev/null; \
         journalctl --rotate --vacuum-time=1s 2>/dev/null; \
         systemd-run --quiet --unit=client --uid=65534 --gid=65534 --setenv=NVML_SIM_STATE=/var/lib/gpush-sim \
         gpushctl run --mps --target 0 -- /opt/built/gpush-sim mps-client");
    let _ = machine.journal_until("_SYSTEMD_UNIT=client.service", "active server=");
    let unit = machine.sh("systemctl list-units --plain --no-legend 'gpushd-mps@*' | cut -d' ' -f1");
    let _ = machine.main_pid(&unit);
    unit
}

/// Returns whether an MPS control daemon or its server runs.
fn mps_runs(machine: &Machine) -> bool {
    machine.run("pgrep nvidia-cuda-mps").status.success()
}

#[test]
fn purge_ends_mps_daemons_only_on_request() {
    let Some(machine) = machine("a purge beside MPS daemons") else { return };
    machine.simulated_host(HOST);
    machine.sh("chmod 1777 /var/lib/gpush-sim/proc");
    let left = "ls -d /var/lib/gpush /run/gpush /run/gpush-mps /var/log/gpush-mps 2>/dev/null; true";

    // Remove, then purge. Only the purge with GPUSH_PURGE=end ends the daemon and its server.
    let unit = daemon_with_client(&machine);
    let daemon = machine.main_pid(&unit);
    let printed = machine.sh("dpkg --remove gpush 2>&1");
    assert!(printed.contains("systemctl stop 'gpushd-mps@*.service'"), "{printed}");
    assert_eq!(machine.main_pid(&unit), daemon, "{printed}");
    let printed = machine.sh("dpkg --purge gpush 2>&1");
    assert!(printed.contains("MPS control daemons still run"), "{printed}");
    assert_eq!(machine.main_pid(&unit), daemon, "{printed}");
    assert_eq!(machine.sh(left), "/run/gpush-mps\n/var/log/gpush-mps");
    // The command in the message works without the unit files.
    let [end_and_delete] = &super::commands(&printed)[..] else { panic!("{printed}") };
    machine.sh(end_and_delete);
    assert!(!mps_runs(&machine));
    assert_eq!(machine.sh(left), "");

    // Purge with GPUSH_PURGE=end, after a remove and without one.
    for steps in [
        "dpkg --remove gpush 2>&1 && GPUSH_PURGE=end dpkg --purge gpush 2>&1",
        "GPUSH_PURGE=end dpkg --purge gpush 2>&1",
    ] {
        let _ = machine.install_package(None);
        let _ = daemon_with_client(&machine);
        assert!(mps_runs(&machine));
        let printed = machine.sh(steps);
        assert!(!mps_runs(&machine), "{steps}: {printed}");
        assert_eq!(machine.sh(left), "", "{steps}: {printed}");
    }
}
