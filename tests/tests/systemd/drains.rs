//! Commands that wait for a drain, while gpushd is restarted again and again.
//!
//! The default is 5 restarts. `GPUSH_TEST_DRAIN_RESTARTS` sets another number.

use gpush_tests::{machine::Machine, random::number};

/// Driver calls take as long as on hardware, so a restarted gpushd does not know the GPUs for a while.
const HOST: &str = "latencies = true\n[[gpu]]\nmodel = \"l4\"\n";

/// A rule for the GPU, with the simulated control daemon.
const CONFIG: &str = "[mps]\ncontrol = \"/var/lib/gpush-sim/bin/nvidia-cuda-mps-control\"\n\
                      [[gpu]]\nmatch = [\"0\"]\nmode = \"mps\"\n";

/// Faults: after a restart of gpushd, `mps stop --wait` ended because "another user has started the daemon", or because the
/// driver had not answered yet. `gpu drain` ended in the second case.
#[test]
fn restarts_of_gpushd_end_no_drain() {
    let Some(machine) = Machine::boot("drains over restarts of gpushd") else { return };
    machine.install();
    machine.simulated_host(HOST);
    machine.sh("chmod 1777 /var/lib/gpush-sim/proc");
    machine.write("/etc/gpush/config.toml", CONFIG);
    machine.sh("systemctl start gpushd.service && gpushctl ready --timeout 60s");
    machine.sh("systemd-run --quiet --unit=client --uid=65534 --gid=65534 --setenv=NVML_SIM_STATE=/var/lib/gpush-sim \
         gpushctl run --mps --target 0 -- /opt/built/gpush-sim mps-client");
    let _ = machine.journal_until("_SYSTEMD_UNIT=client.service", "active server=");
    let drains = [("mps", "mps stop 0 --wait"), ("gpu", "gpu drain 0")].map(|(noun, command)| {
        let unit = format!("{noun}-drain.service");
        machine.sh(&format!("systemd-run --quiet --unit={unit} --property=RemainAfterExit=yes gpushctl {command}"));
        let _ = machine.journal_until(&format!("_SYSTEMD_UNIT={unit}"), "nobody");
        unit
    });
    let restarts = number("GPUSH_TEST_DRAIN_RESTARTS", 5);
    for _ in 0..restarts {
        machine.sh("systemctl restart gpushd.service");
        machine.await_that("gpushd knows the daemon", |machine| {
            let shown = machine.run("gpushctl mps show 0 --json");
            String::from_utf8_lossy(&shown.stdout).contains("\"draining\"")
        });
    }
    let of = |unit: &String, property: &str| machine.property(unit, property);
    for unit in &drains {
        let printed = machine.sh(&format!("journalctl --no-pager --output=cat -u {unit}"));
        assert_eq!(of(unit, "SubState"), "running", "after {restarts} restarts: {printed}");
    }
    println!("0 of {restarts} restarts ended a drain");
    // nvidia-modprobe is not installed, so no unit tries to run it.
    assert!(!machine.sh("journalctl --no-pager --output=cat").contains("nvidia-modprobe"));
    machine.sh("systemctl stop client.service");
    for unit in &drains {
        machine.await_that("the drain ends", |_| of(unit, "SubState") != "running");
        assert_eq!((of(unit, "SubState"), of(unit, "Result")), ("exited".into(), "success".into()), "{unit}");
    }
}
