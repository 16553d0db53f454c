//! The .deb on Debian 11 and 13. The programs of a debug build need the glibc of this host. So the test on Debian 11
//! needs release builds, which `cargo xtask soak` makes.

use gpush_tests::machine::{Debian, Machine, packages_are_releases};

use super::{LATER, with_gpu};

#[test]
fn package_works_on_debian_11() {
    if !packages_are_releases() {
        return println!("SKIPPED the package on Debian 11: only `cargo xtask soak` builds programs for its glibc");
    }
    smoke(Debian::Bullseye);
}

#[test]
fn package_works_on_debian_13() {
    smoke(Debian::Trixie);
}

/// Installs, uses, reboots, upgrades, removes and purges the package.
fn smoke(debian: Debian) {
    let Some(machine) = Machine::boot_lasting(&format!("the package on {debian:?}"), debian) else { return };
    println!("{}", machine.sh("systemctl --version | head -n1"));
    let Some(simulator) = machine.package("gpush-sim_VERSION-1_amd64.deb", None) else { return };
    let _ = machine.install_package(None);
    machine.sh(&format!("dpkg --install {simulator} 2>&1"));
    with_gpu(&machine);
    machine.sh("gpushctl mig apply --gpu 0 --layout 3g.40gb --once");
    machine.sh("setpriv --reuid=65534 --regid=65534 --clear-groups gpushctl status");
    machine.kill(machine.main_pid("gpushd.service"));
    assert!(machine.sh("gpushctl gpu show 0").contains("3g.40gb"), "the socket outlives gpushd");
    // An older systemd may ignore a setting of a unit. systemd then logs that it ignores the setting.
    let ignored = machine.sh("journalctl --no-pager --output=cat | grep -E 'gpush.*(Unknown|ignoring)' || true");
    assert_eq!(ignored, "");

    if debian == Debian::Bullseye {
        let refused = machine.run("gpushctl enforce on 2>&1");
        let printed = String::from_utf8_lossy(&refused.stdout).into_owned();
        assert!(
            !refused.status.success() && printed.contains("systemd 247 opens all devices for a moment"),
            "{printed}"
        );
        assert_eq!(machine.property("user.slice", "DeviceAllow"), "");
    }

    let machine = machine.reboot();
    assert_eq!(machine.sh("systemctl is-active gpushd.service gpush-ready.service"), "active\nactive");
    assert_eq!(machine.sh("systemctl --failed --no-legend"), "");
    assert!(machine.sh("gpushctl operation list").contains("op-1"));

    machine.sh("dpkg --remove gpush-sim 2>&1");
    let _ = machine.install_package(Some(LATER));
    assert_eq!(machine.sh("systemctl is-active gpushd.service"), "active");
    machine.sh("dpkg --purge gpush 2>&1");
    assert_eq!(machine.sh("ls -d /etc/gpush /var/lib/gpush /run/gpush /run/gpush-mps 2>/dev/null; true"), "");
}
