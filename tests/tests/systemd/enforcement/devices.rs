//! Device access with devices that really open, and limits with all controllers, in a virtual machine.
//!
//! The devices have the numbers of NVIDIA's driver. They appear after the boot, and after `gpushctl enforce on`. An open
//! that the kernel allows succeeds (0); one that it denies fails with `EPERM` (1).

use std::time::Instant;

use gpush_tests::machine::Machine;

use super::{ALICE, enforcement, keep_slices, output, ready, session, start_in_session};

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\ncount = 2\n";

const RULES: &str = "[[gpu]]\nmatch = [\"0-1\"]\nmode = \"exclusive\"\nlease = \"enforced\"\n";

const OPENS: &str = "/opt/built/device_opens";

/// Loads the module of the driver, as far as the kernel shows it: its major number, and its nodes.
fn load_driver(machine: &Machine) {
    for (unit, name, minor) in [("gpu0", "nvidia", 0), ("gpu1", "nvidia1", 1), ("control", "nvidiactl", 255)] {
        machine.sh(&format!("systemd-run --quiet --unit=fake-{unit} {OPENS} serve {name} 195 {minor}"));
    }
    machine.await_that("the devices appear", |machine| {
        machine.sh("grep -c ' nvidia' /proc/devices || true") == "3"
            && machine.run("test -e /dev/nvidiactl").status.success()
    });
    machine.sh("mknod -m 666 /dev/nvidia0 c 195 0; chmod 666 /dev/nvidia /dev/nvidia1 /dev/nvidiactl");
}

#[test]
fn devices_that_appear_after_the_boot_open_only_in_a_lease() {
    let begun = Instant::now();
    let Some(machine) = Machine::resume_vm("device access to devices that open") else { return };
    println!("resumed in {:.1} s", machine.boot.as_secs_f64());
    machine.install();
    machine.simulated_host(HOST);
    machine.write("/var/lib/gpush-sim/proc/devices", "Character devices:\n195 nvidia\n");
    machine.write("/etc/gpush/config.toml", RULES);
    machine.sh("systemctl start gpushd.service");
    keep_slices(&machine);
    ready(&machine, 2);
    machine.sh("gpushctl apply --yes; gpushctl enforce on");
    assert_eq!(machine.sh("grep -c nvidia /proc/devices || true"), "0", "no driver yet");
    load_driver(&machine);
    assert_eq!(enforcement(&machine)["state"], "verified");
    println!("prepared after {:.1} s", begun.elapsed().as_secs_f64());

    assert_eq!(machine.sh(&format!("systemd-run --quiet --pipe --wait {OPENS} count /dev/nvidia0 10")), "0*10");
    let count = |node: &str, number: u32| session(&machine, ALICE, &format!("{OPENS} count {node} {number}"));
    assert_eq!(count("/dev/nvidia0", 1000), "1*1000");
    assert_eq!(count("/dev/nvidia", 10), "1*10", "another name of the same device");
    let of_lease = |line: &str| session(&machine, ALICE, &format!("gpushctl run -q -g 0 -- {OPENS} {line}"));
    assert_eq!(of_lease("count /dev/nvidia0 1000"), "0*1000");
    assert_eq!(of_lease("count /dev/nvidia1 10"), "1*10");
    println!("counted after {:.1} s", begun.elapsed().as_secs_f64());

    limits_of_the_user_hold_in_a_lease(&machine);
    program_without_memory_leaves_nothing_open(&machine);
    bound_node_does_not_open(&machine);
    held_descriptor_outlives_the_lease(&machine);
    println!("held after {:.1} s", begun.elapsed().as_secs_f64());
    end_of_a_lease_closes_a_gpu_in_use(&machine);
    println!("ended after {:.1} s", begun.elapsed().as_secs_f64());
}

/// The kernel has the limits, because the machine has the controllers of cgroup v2.
fn limits_of_the_user_hold_in_a_lease(machine: &Machine) {
    machine.sh(&format!("systemctl set-property --runtime user-{ALICE}.slice MemoryMax=300M TasksMax=77"));
    let slice = format!("/sys/fs/cgroup/gpulease.slice/gpulease-{ALICE}.slice");
    let line = format!("gpushctl run -q -g 0 -- cat {slice}/memory.max {slice}/pids.max");
    assert_eq!(session(machine, ALICE, &line), "314572800\n77");
}

/// The kernel kills the program, because the memory of the user is used up.
fn program_without_memory_leaves_nothing_open(machine: &Machine) {
    machine.sh(&format!("systemctl set-property --runtime user-{ALICE}.slice MemoryMax=60M MemorySwapMax=0"));
    let fills = r#"perl -e "my \$all = 1; \$all .= \$all while 1""#;
    let line = format!("gpushctl run -q -g 0 -- {fills}; echo \"status $?\"; {OPENS} count /dev/nvidia0 10");
    assert_eq!(session(machine, ALICE, &line), "status 137\n1*10\nKilled");
    assert!(machine.sh("journalctl -k | grep -ci \"killed process\" || true") != "0", "the kernel did not kill it");
    machine.await_that("the lease has ended", |machine| machine.sh("gpushctl lease list -o name").is_empty());
    machine.sh(&format!("systemctl set-property --runtime user-{ALICE}.slice MemoryMax=300M"));
}

/// Root in a session bind-mounts the node at another path. The kernel still denies the open.
fn bound_node_does_not_open(machine: &Machine) {
    let bound = format!("touch /srv/bound; mount --bind /dev/nvidia0 /srv/bound && {OPENS} count /srv/bound 10");
    assert_eq!(session(machine, 0, &bound), "1*10");
    assert_eq!(machine.sh(&format!("{OPENS} count /srv/bound 10")), "0*10", "the mount is there");
}

/// A program keeps what it has open, and can pass it on. Neither it nor the receiver can open the device again.
fn held_descriptor_outlives_the_lease(machine: &Machine) {
    machine.sh("install -d -m 1777 /srv/held");
    let hold = format!("gpushctl run -q -g 0 -- {OPENS} hold /dev/nvidia0 /srv/held/ready /srv/held/socket");
    start_in_session(machine, "holds", &hold);
    machine.await_that("the device is open", |machine| machine.run("test -e /srv/held/ready").status.success());
    machine.sh("gpushctl lease end $(gpushctl lease list -o name) --reason test");
    let taken = session(machine, ALICE, &format!("{OPENS} take /srv/held/socket"));
    assert_eq!(taken, "read gpu, opened again 1*1", "a session without a lease");
    assert_eq!(output(machine, "holds"), "read gpu, opened again 1*1", "the holder");
    machine.await_that("the lease has ended", |machine| machine.sh("gpushctl lease list -o name").is_empty());
}

fn end_of_a_lease_closes_a_gpu_in_use(machine: &Machine) {
    let opens = format!("gpushctl run -q -g 0 -- {OPENS} until /dev/nvidia0 /srv/done /srv/acknowledged");
    start_in_session(machine, "closing", &opens);
    machine.await_that("the program runs", |machine| {
        machine.run("pgrep -f '^/opt/built/device_opens until'").status.success()
    });
    machine.sh("gpushctl lease end $(gpushctl lease list -o name) --reason test && touch /srv/acknowledged; sleep 0.5; touch /srv/done");
    let found = output(machine, "closing");
    let (before, after) = found.split_once(' ').expect("two counts");
    println!("opened before the end was acknowledged: {before}; after it: {after}");
    assert!(before.starts_with("0*") && after.starts_with("1*"), "{found}");
}
