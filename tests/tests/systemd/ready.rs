//! gpush-ready.service: services that use the GPUs start when gpushd has applied the layouts of the
//! boot and started the MPS daemons.

use gpush_tests::{machine::Machine, random::number};

/// The second GPU is shared through MPS. Driver calls take as long as on hardware, so gpushd needs
/// time for its start.
const HOST: &str = "latencies = true\n\n[[gpu]]\nmodel = \"a100-80\"\nmig = true\n\n[[gpu]]\nmodel = \"l4\"\n";

/// A config that also uses the simulated control daemon.
const CONFIG: &str = "[mps]\ncontrol = \"/var/lib/gpush-sim/bin/nvidia-cuda-mps-control\"\n\n\
                      [[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\", \"2g.20gb\"]\n\n\
                      [[gpu]]\nmatch = [\"1\"]\nmode = \"mps\"\n";

/// A unit with the name of Slurm's unit. When it starts, it writes the state of the GPUs and MPS
/// daemons to a file.
const SLURMD: &str = "[Service]\nType=oneshot\nExecStart=sh -c 'gpushctl mig apply --check -g 0 && gpushctl mps list > /run/found'\n\
                      RemainAfterExit=yes\n";

fn machine(what: &str) -> Option<Machine> {
    let machine = Machine::boot(what)?;
    machine.install();
    Some(machine)
}

#[test]
fn ready_unit_delays_services_only_for_a_reason() {
    let Some(machine) = machine("the readiness of gpushd") else { return };
    let stop = "systemctl stop gpush-ready.service gpushd.service gpushd.socket gpushd-admin.socket slurmd.service; \
                systemctl reset-failed";
    host_without_config_and_driver_is_ready(&machine);
    // As before the first start, gpushd has applied no layout on this boot.
    machine.sh("systemctl stop gpush-ready.service gpushd.service; rm -rf /var/lib/gpush/* /run/gpush/store-*");
    failed_layout_fails_the_ready_unit_but_delays_nothing(&machine);
    machine.sh(stop);
    hanging_nvidia_modprobe_delays_services_only_by_the_timeout(&machine);
}

fn failed_layout_fails_the_ready_unit_but_delays_nothing(machine: &Machine) {
    machine.simulated_host(HOST);
    // The GPU has no room for this layout.
    machine.write("/etc/gpush/config.toml", CONFIG.replace("\"2g.20gb\"", "\"7g.80gb\""));
    machine
        .write("/etc/systemd/system/slurmd.service", "[Service]\nType=oneshot\nExecStart=true\nRemainAfterExit=yes\n");
    let started =
        machine.run("systemctl daemon-reload && systemctl start gpushd.service gpush-ready.service slurmd.service");
    assert!(!started.status.success());
    assert_eq!(machine.run("systemctl is-active slurmd.service").stdout, b"active\n", "the order is the only effect");
    let printed = machine.journal_until("-u gpush-ready.service", "gpushctl apply 0");
    assert!(printed.contains("run `gpushctl apply 0`"), "{printed}");
}

fn host_without_config_and_driver_is_ready(machine: &Machine) {
    machine.sh("rm -f /etc/gpush/config.toml && systemctl start gpushd.service gpush-ready.service");
    assert_eq!(machine.sh("systemctl is-active gpush-ready.service"), "active");
}

/// Removes the driver, as before the kernel module is loaded.
const UNLOAD: &str = "mv /var/lib/gpush-sim/lib/libnvidia-ml.so.1 /var/lib/gpush-sim/absent && \
                      echo 'Character devices:' > /var/lib/gpush-sim/proc/devices";

/// Loads the driver.
const LOAD: &str = "printf 'Character devices:\n195 nvidia\n' > /var/lib/gpush-sim/proc/devices && \
                    mv /var/lib/gpush-sim/absent /var/lib/gpush-sim/lib/libnvidia-ml.so.1";

/// Starts all units as at boot, on a host whose driver is not loaded. Waits until gpush-ready.service waits for the driver.
fn boot_without_driver(what: &str, limit: &str) -> Option<Machine> {
    let machine = machine(what)?;
    machine.simulated_host(HOST);
    machine.write("/etc/gpush/config.toml", CONFIG);
    machine.write("/etc/systemd/system/slurmd.service", SLURMD);
    machine.write(
        "/etc/systemd/system/gpush-ready.service.d/limit.conf",
        format!("[Service]\nExecStart=\nExecStart=/usr/bin/gpushctl ready --timeout {limit}\n"),
    );
    machine.sh(UNLOAD);
    machine.sh("systemctl daemon-reload && \
         systemctl start --no-block gpushd.service gpush-ready.service slurmd.service");
    let waiting = machine.journal_until("-u gpush-ready.service", "waiting: ");
    assert!(waiting.contains("libnvidia-ml.so.1"), "{waiting}");
    Some(machine)
}

/// Fault: gpush-ready.service failed after 6 ms if the driver was not loaded yet, so slurmd started without the layout.
#[test]
fn ready_unit_waits_for_a_driver_that_is_loaded_later() {
    let Some(machine) = boot_without_driver("a driver that is loaded during the boot", "90s") else { return };
    let state = |unit: &str| machine.property(unit, "ActiveState");
    assert_eq!((state("gpush-ready.service"), state("slurmd.service")), ("activating".into(), "inactive".into()));
    machine.sh(LOAD);
    machine.await_that("slurmd starts", |_| state("slurmd.service") == "active");
    assert_eq!(state("gpush-ready.service"), "active");
    let found = machine.sh("cat /run/found");
    assert!(found.contains("ready"), "{found}");
}

/// The driver is loaded after the limit of the unit, or never. The default limit is 2 s. `GPUSH_TEST_READY_LIMIT_S` sets
/// another limit.
#[test]
fn ready_unit_fails_after_its_limit_and_names_the_driver() {
    let limit = format!("{}s", number("GPUSH_TEST_READY_LIMIT_S", 2));
    let Some(machine) = boot_without_driver("a driver that is loaded too late", &limit) else { return };
    let state = |unit: &str| machine.property(unit, "ActiveState");
    // The limit may be longer than a command in the machine may take, so poll. The unit's TimeoutStartSec= bounds this.
    while state("gpush-ready.service") == "activating" {
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    assert_eq!(state("gpush-ready.service"), "failed");
    let _ = machine.journal_until("-u gpush-ready.service", "not finished its start-up work within");
    let printed = machine.sh("journalctl --no-pager --output=cat -u gpush-ready.service");
    assert!(printed.contains("libnvidia-ml.so.1") && printed.contains("hint: install the NVIDIA driver"), "{printed}");
    machine.await_that("slurmd.service has ended its start", |_| state("slurmd.service") != "inactive");

    // A rule that is added while there is no driver does not count as applied.
    machine.write("/etc/gpush/config.toml", "");
    machine.sh("gpushctl config reload && gpushctl ready --timeout 30s");
    machine.write("/etc/gpush/config.toml", CONFIG);
    machine.sh("gpushctl config reload");
    assert_eq!(machine.run("gpushctl ready --timeout 0s").status.code(), Some(8));

    // When the driver is loaded, gpushd does what is left, or names the command for what it does not do by itself.
    machine.sh(LOAD);
    let ready = machine.run("gpushctl ready --timeout 60s 2>&1");
    let printed = String::from_utf8_lossy(&ready.stdout).into_owned();
    assert!(!ready.status.success() && printed.contains("run `gpushctl apply 0"), "{printed}");
    machine.sh("gpushctl apply && gpushctl ready --timeout 60s && systemctl restart gpush-ready.service");
    assert_eq!(state("gpush-ready.service"), "active");
}

/// `nvidia-modprobe` ignores SIGTERM, so gpushd.service does not start for a while.
fn hanging_nvidia_modprobe_delays_services_only_by_the_timeout(machine: &Machine) {
    machine.put("/usr/bin/nvidia-modprobe", "#!/bin/sh\ntrap '' TERM\nwhile :; do sleep 1000; done\n");
    machine
        .write("/etc/systemd/system/slurmd.service", "[Service]\nType=oneshot\nExecStart=true\nRemainAfterExit=yes\n");
    machine.write(
        "/etc/systemd/system/gpush-ready.service.d/short.conf",
        "[Service]\nExecStart=\nExecStart=/usr/bin/gpushctl ready --timeout 1s\n",
    );
    let start =
        "systemctl daemon-reload && systemctl start --no-block gpushd.service gpush-ready.service slurmd.service";
    machine.sh(start);
    let state = |unit: &str| machine.property(unit, "ActiveState");
    machine.await_that("slurmd starts", |_| state("slurmd.service") == "active");
    assert_eq!((state("gpush-ready.service"), state("gpushd.service")), ("failed".into(), "activating".into()));

    // gpushd starts without nvidia-modprobe. The test shortens the limit of the unit.
    machine.sh("systemctl stop --no-block gpushd.service gpushd.socket gpushd-admin.socket slurmd.service");
    machine.await_that("gpushd.service stops", |machine| {
        let _ = machine.run("systemctl kill --signal=KILL gpushd.service");
        ["failed", "inactive"].contains(&state("gpushd.service").as_str()) && state("gpushd.socket") == "inactive"
    });
    machine.sh("sed -i 's/kill-after=5 30 /kill-after=1 1 /' /usr/lib/systemd/system/gpushd.service");
    machine.sh("systemctl daemon-reload && systemctl start gpushd.service && gpushctl version");
    assert_eq!(machine.property("gpushd.service", "NRestarts"), "0");
}
