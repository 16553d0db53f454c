//! The removal of the package opens the GPUs that `gpushctl enforce on` has denied.

use gpush_tests::machine::Machine;

/// Tries to open a GPU in a new login session. There is no device behind the node.
const OPEN: &str = "systemd-run --quiet --scope --slice=user-65534.slice --uid=65534 --gid=65534 cat /dev/nvidia0 2>&1";

/// Denies the GPUs to login sessions. Returns false if the machine permits no device files.
pub(super) fn deny(machine: &Machine) -> bool {
    if !machine.run("test -e /dev/nvidia0 || mknod -m 666 /dev/nvidia0 c 195 0").status.success() {
        println!("SKIPPED device access after a removal: the machine permits no device files");
        return false;
    }
    machine.sh("gpushctl enforce on");
    let opened = machine.sh(&format!("{OPEN}; true"));
    assert!(opened.contains("Operation not permitted"), "{opened}");
    true
}

/// Checks that nothing of the setting is left.
pub(super) fn assert_open(machine: &Machine, printed: &str) {
    let opened = machine.sh(&format!("{OPEN}; true"));
    assert!(opened.contains("No such device"), "{opened}: {printed}");
    assert_eq!(machine.sh("find /etc/systemd/system.control -type f 2>/dev/null; true"), "", "{printed}");
    assert_eq!(machine.property("user.slice", "DeviceAllow"), "", "{printed}");
    assert_eq!(machine.property("user.slice", "DevicePolicy"), "auto", "{printed}");
}
