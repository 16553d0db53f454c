//! gpushd as a service of a real systemd, in a container with a simulated host. gpushd is installed
//! from files, and runs in the sandbox of its unit.

use gpush_tests::machine::Machine;

/// Two GPUs. MIG is enabled on the first one. The second one needs a reset to enable MIG.
const HOST: &str = "[[gpu]]\nmodel = \"a100-80\"\nmig = true\n\n[[gpu]]\nmodel = \"a100-80\"\nmig = false\n";

/// Maximum exposure scores of `systemd-analyze security` that the test accepts.
const GPUSHD_EXPOSURE: f64 = 3.3;
const MPS_EXPOSURE: f64 = 4.2;

/// Starts a machine with gpush and simulated GPUs. Returns `None` if this host cannot run machines.
fn machine(what: &str) -> Option<Machine> {
    let machine = Machine::boot(what)?;
    println!("booted in {:.2} s", machine.boot.as_secs_f64());
    machine.install();
    machine.simulated_host(HOST);
    Some(machine)
}

#[test]
fn service_works_in_the_sandbox_of_its_unit() {
    let Some(machine) = machine("gpushd under systemd") else { return };
    service_starts_reloads_recovers_and_stops(&machine);
    systemd_logs_no_warning_about_units(&machine);
    emptied_state_directory_under_systemd_is_reported(&machine);
}

fn service_starts_reloads_recovers_and_stops(machine: &Machine) {
    // The unit has Type=notify. So the command returns when gpushd is ready.
    machine.sh("systemctl start gpushd.service");
    let first = machine.main_pid("gpushd.service");
    assert_eq!(machine.property("gpushd.service", "ActiveState"), "active");
    assert_eq!(machine.sh("systemctl is-active gpushd.socket gpushd-admin.socket"), "active\nactive");
    assert_eq!(machine.sh("stat -c '%a %G' /run/gpush/gpushd.sock /run/gpush/admin.sock"), "666 gpush\n600 root");

    // Despite the sandbox, another user can read the GPUs.
    let status = machine.sh("setpriv --reuid=65534 --regid=65534 --clear-groups gpushctl status");
    assert!(status.contains("A100"), "{status}");

    // In its sandbox, gpushd can change the hardware. Through a helper unit, it can reset a GPU.
    let sandbox = machine.sh(&format!("cat /proc/{first}/status"));
    assert!(sandbox.lines().any(|line| line == "NoNewPrivs:\t1"), "{sandbox}");
    for gpu in ["0", "1"] {
        machine.sh(&format!("gpushctl mig apply --gpu {gpu} --layout '3g.40gb,1g.10gb*2' --once"));
    }
    // The name of the unit contains the operation and the step.
    let reset = machine.journal_until("-u 'gpush-op-*.reset.1.service'", "Started");
    assert!(reset.contains("gpush op-") && reset.contains(": reset"), "{reset}");

    machine.write("/etc/gpush/config.toml", "[log]\nlevel = \"debug\"\n");
    machine.sh("systemctl reload gpushd.service");
    let _ = machine.journal_until("-u gpushd.service", "the config was reloaded");
    assert_eq!(machine.main_pid("gpushd.service"), first, "a reload is no restart");

    machine.sh("systemctl restart gpushd.service");
    let second = machine.main_pid("gpushd.service");
    assert_ne!(second, first);
    let _ = machine.sh("gpushctl status");

    // systemd keeps the sockets. So a client that connects after the kill waits for the next
    // gpushd.
    machine.kill(second);
    let _ = machine.sh("gpushctl status");
    let third = machine.main_pid("gpushd.service");
    assert_ne!(third, second);
    assert_eq!(machine.property("gpushd.service", "NRestarts"), "1");

    machine.sh("systemctl stop gpushd.service");
    assert_eq!(machine.property("gpushd.service", "Result"), "success");
    assert_eq!(machine.property("gpushd.service", "ActiveState"), "inactive");
    assert_eq!(machine.sh("pgrep -c gpushd || true"), "0", "its worker is gone as well");
    assert_eq!(machine.sh("systemctl --failed --no-legend"), "");
    let journal = machine.sh("journalctl --no-pager --output=cat -u gpushd.service");
    let stopped = |line: &&str| line.contains("Stopped") && line.contains("gpushd.service");
    assert_eq!(journal.lines().filter(stopped).count(), 3, "{journal}");
    assert_eq!(journal.lines().filter(|line| line.starts_with("ready: ")).count(), 3, "{journal}");
}

/// systemd resolves DeviceAllow= when it starts the unit. If the driver is loaded after that,
/// gpushd restarts once.
#[test]
fn driver_that_is_loaded_late_restarts_gpushd_once() {
    let Some(machine) = machine("a driver that is loaded late") else { return };
    let (library, devices) = ("/var/lib/gpush-sim/lib/libnvidia-ml.so.1", "/var/lib/gpush-sim/proc/devices");
    let absent = format!("mv {library} {library}.absent");
    let restarts = |machine: &Machine| machine.property("gpushd.service", "NRestarts");
    let await_gpus = |machine: &Machine| {
        machine.await_that("the GPUs are read", |machine| {
            String::from_utf8_lossy(&machine.run("gpushctl gpu list").stdout).contains("A100")
        });
    };
    let present = |machine: &Machine| {
        machine.sh(&format!("mv {library}.absent {library}"));
        await_gpus(machine);
        restarts(machine)
    };
    machine.sh(&format!("{absent}; systemctl start gpushd.service"));
    // NVML does not use this kernel module. So its major number must not cause a restart.
    machine.write(devices, "Character devices:\n235 nvidia-uvm\n");
    assert_eq!(present(&machine), "0", "a host without a driver");

    // The driver is loaded twice. The second load has the same major numbers as the first load.
    for _ in 0..2 {
        machine.sh(&format!("systemctl stop gpushd.service; {absent}"));
        machine.write(devices, "Character devices:\n235 nvidia-uvm\n");
        machine.sh("systemctl start gpushd.service");
        machine.write(devices, "Character devices:\n195 nvidia\n235 nvidia-uvm\n240 nvidia-caps\n");
        machine.await_that("gpushd restarts", |machine| restarts(machine) == "1");
        assert_eq!(present(&machine), "1", "once");
    }
    let _ = machine.journal_until("-u gpushd.service", "the driver was loaded after gpushd started");

    // Here, the driver is loaded after systemd has resolved the devices, but before gpushd starts.
    if !machine.run("mknod /dev/nvidiactl c 195 255").status.success() {
        return println!("SKIPPED a denied device: the machine permits no device files");
    }
    let fault = "/opt/built/gpush-sim fault /var/lib/gpush-sim";
    machine.sh(&format!(
        "systemctl stop gpushd.service; {fault} add nvmlInit --rc UNKNOWN; systemctl start gpushd.service"
    ));
    machine.await_that("gpushd restarts", |machine| restarts(machine) == "1");
    machine.await_that("gpushd names the denied device", |machine| {
        let status = machine.run("gpushctl status");
        String::from_utf8_lossy(&status.stdout).contains("`systemctl restart gpushd`")
    });
    machine.sh(&format!("{fault} clear"));
    await_gpus(&machine);
    assert_eq!(restarts(&machine), "1", "once");
}

fn systemd_logs_no_warning_about_units(machine: &Machine) {
    let printed = machine.sh("systemd-analyze verify --man=no /usr/lib/systemd/system/gpush* 2>&1");
    assert_eq!(printed, "");
    for (unit, most) in [("gpushd.service", GPUSHD_EXPOSURE), ("gpushd-mps@g5d1b03a2.service", MPS_EXPOSURE)] {
        let security = machine.sh(&format!("systemd-analyze security --no-pager {unit}"));
        let overall = security.lines().find(|line| line.contains("Overall exposure"));
        let overall = overall.unwrap_or_else(|| panic!("{security}")).trim();
        println!("{overall}");
        let figure = overall.split_whitespace().find_map(|word| word.parse::<f64>().ok());
        assert!(figure.is_some_and(|figure| figure <= most), "{overall}\n{security}");
    }
}

/// In the sandbox of its unit, gpushd can write the marker of its state directory. The unit limits
/// the memory of gpushd.
fn emptied_state_directory_under_systemd_is_reported(machine: &Machine) {
    machine.write("/etc/gpush/config.toml", "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\"]\n");
    machine.sh("systemctl start gpushd.service");
    assert_eq!(machine.property("gpushd.service", "MemoryMax"), (1u64 << 30).to_string());
    machine.sh("gpushctl mig apply --gpu 0 --layout 7g.80gb --wait");
    assert_eq!(machine.sh("stat -c '%a %U' /run/gpush/store-*"), "600 root");
    machine.sh("systemctl stop gpushd.service && rm -rf /var/lib/gpush/* && systemctl start gpushd.service");
    let _ = machine.journal_until("-u gpushd.service", "the database was lost");
    machine.await_that("GPU 0 is held", |machine| machine.sh("gpushctl status").contains("held"));
    assert!(machine.sh("gpushctl gpu show 0").contains("7g.80gb"));
    machine.sh("gpushctl recover --reason 'no user is left'");

    // As a system service, gpushd refuses a config file that another user can write.
    machine.sh("systemctl stop gpushd.service && chmod 666 /etc/gpush/config.toml");
    let refused = machine.run("timeout 20 /usr/sbin/gpushd");
    let printed = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && printed.contains("/etc/gpush/config.toml is not trusted"), "{printed}");
    assert!(printed.contains("`chmod go-w /etc/gpush/config.toml`"), "{printed}");
}
