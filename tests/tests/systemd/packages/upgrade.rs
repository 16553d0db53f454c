//! An upgrade of the .deb while requests, an operation, leases and MPS clients are active.
//!
//! The defaults are 300 requests, and an operation of 7 s. `GPUSH_TEST_UPGRADE_REQUESTS` and
//! `GPUSH_TEST_UPGRADE_OPERATION_S` set other numbers.

use gpush_tests::{machine::Machine, random::number};

use super::{CONFIG, LATER};

/// A host with MIG, MPS and a whole GPU. Driver calls take as long as on hardware.
const HOST: &str = "latencies = true\n[[gpu]]\nmodel = \"a100-80\"\nmig = true\n[[gpu]]\nmodel = \"l4\"\ncount = 2\n";

/// Rules for the GPUs, with the simulated control daemon.
const RULES: &str = "[mps]\ncontrol = \"/var/lib/gpush-sim/bin/nvidia-cuda-mps-control\"\n\
                     [[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\"]\n\
                     [[gpu]]\nmatch = [\"1\"]\nmode = \"mps\"\n[[gpu]]\nmatch = [\"2\"]\nmode = \"exclusive\"\n";

/// A loop of requests, which runs in a unit. It ends when `/run/load/stop` exists and it has sent
/// enough requests.
const LOAD: &str = "n=0; until [ -e /run/load/stop ] && [ $n -ge MOST ]; do n=$((n + 1));
    if gpushctl version >/dev/null 2>>/run/load/errors; then echo >>/run/load/answered; else echo >>/run/load/failed; fi
done";

/// A loop of commands with a lease, which runs in a unit. It ends when `/run/load/stop` exists.
const RUNS: &str = "until [ -e /run/load/stop ]; do
    if gpushctl run --mps 10 --target 1 -- true 2>>/run/load/remarks; then echo >>/run/load/ran; else echo >>/run/load/failed; fi
done";

/// Starts a unit as an unprivileged user, and waits for a line of its output. Returns its pid.
fn unit(machine: &Machine, name: &str, line: &str, says: &str) -> u32 {
    machine.sh(&format!(
        "systemd-run --quiet --unit={name} --uid=65534 --gid=65534 --setenv=NVML_SIM_STATE=/var/lib/gpush-sim {line}"
    ));
    let _ = machine.journal_until(&format!("_SYSTEMD_UNIT={name}.service"), says);
    machine.main_pid(&format!("{name}.service"))
}

#[test]
fn upgrade_fails_no_request_and_ends_nothing() {
    let Some(machine) = Machine::boot("the package's upgrade") else { return };
    if machine.install_package(None).is_none() {
        return;
    }
    machine.simulated_host(HOST);
    machine.sh("chmod 1777 /var/lib/gpush-sim/proc");
    machine.write(CONFIG, RULES);
    machine.sh("systemctl restart gpushd.service && gpushctl ready --timeout 60s && gpushctl apply 0");
    let uuids = "gpushctl --json gpu show 0 | grep -o 'MIG-[0-9a-f-]*' | sort -u";
    let before = machine.sh(uuids);
    assert!(before.starts_with("MIG-"), "{before}");
    let (agent, socket) =
        (machine.main_pid("gpushd.service"), machine.property("gpushd.socket", "InactiveExitTimestamp"));
    let daemon = machine.sh("systemctl list-units --plain --no-legend 'gpushd-mps@*' | cut -d' ' -f1");
    let client = "gpushctl run --mps 40 --target 1 -- /opt/built/gpush-sim mps-client";
    let kept = [
        ("client.service", unit(&machine, "client", client, "active server=")),
        (
            "job.service",
            unit(&machine, "job", "gpushctl run --whole -- sh -c 'echo leased; exec sleep 1000'", "leased"),
        ),
        (daemon.as_str(), machine.main_pid(&daemon)),
    ];
    let leases = machine.sh("gpushctl lease list -o name");
    assert_eq!(leases.lines().count(), 2, "{leases}");

    // Requests run before, during and after the upgrade. An operation begins just before the
    // upgrade.
    let each = number("GPUSH_TEST_UPGRADE_REQUESTS", 300).div_ceil(2);
    machine.write("/srv/load.sh", LOAD.replace("MOST", &each.to_string()));
    machine.write("/srv/runs.sh", RUNS);
    machine
        .sh("mkdir -m 777 /run/load && for n in 1 2; do systemd-run --quiet --unit=load-$n sh /srv/load.sh; done && \
         systemd-run --quiet --unit=runs --uid=65534 --gid=65534 sh /srv/runs.sh");
    machine.await_that("requests are answered", |machine| {
        machine.run("test -s /run/load/answered && test -s /run/load/ran").status.success()
    });
    // One call of the operation takes longer than a client repeats a change for a gpushd that does not answer.
    let delay = 1000 * number("GPUSH_TEST_UPGRADE_OPERATION_S", 7);
    machine.sh(&format!(
        "/opt/built/gpush-sim fault /var/lib/gpush-sim add 'nvmlDeviceCreateGpuInstance*' --delay-ms {delay} --times 1"
    ));
    let apply = "gpushctl mig add -g 0 1g.10gb*4";
    machine.sh(&format!("systemd-run --quiet --unit=operation --property=RemainAfterExit=yes {apply}"));
    machine.await_that("the operation runs", |machine| machine.sh("gpushctl operation list").contains("running"));
    let printed = machine.install_package(Some(LATER)).expect("both versions are built together");
    let answered = ["answered", "ran"].map(|file| machine.sh(&format!("wc -l < /run/load/{file}")));
    machine.await_that("requests are answered after the upgrade", |machine| {
        let now = ["answered", "ran"].map(|file| machine.sh(&format!("wc -l < /run/load/{file}")));
        now[0] != answered[0] && now[1] != answered[1]
    });
    machine.sh("touch /run/load/stop");
    machine.await_that("the load ends", |machine| {
        ["load-1", "load-2", "runs"]
            .iter()
            .all(|unit| !machine.run(&format!("systemctl --quiet is-active {unit}")).status.success())
    });
    let remarks = machine.sh("cat /run/load/remarks");
    assert_eq!(machine.sh("cat /run/load/failed /run/load/errors 2>/dev/null; true"), "", "{remarks}\n{printed}");
    let number = |file: &str| machine.sh(&format!("wc -l < /run/load/{file}"));
    println!("{} requests and {} runs around the upgrade, 0 failed", number("answered"), number("ran"));

    assert_ne!(machine.main_pid("gpushd.service"), agent, "the new gpushd runs");
    assert_eq!(machine.property("gpushd.socket", "InactiveExitTimestamp"), socket, "the socket was not restarted");
    for (unit, pid) in kept {
        assert_eq!(machine.main_pid(unit), pid, "{unit}");
    }
    assert_eq!(machine.sh("gpushctl lease list -o name"), leases);
    let lost = machine.sh("journalctl --no-pager --output=cat -u client.service");
    assert!(!lost.contains("lost"), "{lost}");
    machine.await_that("the operation ends", |machine| machine.property("operation.service", "SubState") == "exited");
    assert_eq!(machine.property("operation.service", "Result"), "success");
    let after = machine.sh(uuids);
    assert!(after.contains(&before) && after.lines().count() == 5, "{after}");
    assert_eq!(machine.sh(&format!("cat {CONFIG}")), RULES.trim_end(), "the administrator's config is kept");
    // A disabled unit remains disabled after an upgrade.
    machine.sh("systemctl disable gpushd.service 2>&1");
    let _ = machine.install_package(None);
    assert_eq!(machine.run("systemctl is-enabled gpushd.service").stdout, b"disabled\n");
}
