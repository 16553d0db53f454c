//! The packages in an image: a chroot in which no systemd runs and /proc is not mounted.

use gpush_tests::machine::Machine;

use super::CONFIG;

/// Boots a machine with an image in `/srv/image`. The image contains the files of the machine, without its mounts,
/// and the package.
fn image(what: &str, file: &str) -> Option<Machine> {
    let machine = Machine::boot(what)?;
    let package = machine.package(file, None)?;
    machine.sh(&format!(
        "mkdir /srv/image && mount --bind / /srv/image && mount --bind /dev /srv/image/dev && cp {package} /srv/package"
    ));
    assert!(!machine.run("test -e /srv/image/proc/self -o -e /srv/image/run/systemd/system").status.success());
    Some(machine)
}

/// Runs a command in the image.
fn inside(machine: &Machine, line: &str) -> String {
    machine.sh(&format!("chroot /srv/image sh -c '{line} 2>&1'"))
}

/// The links of enabled units.
const LINKS: &str = "ls -d /etc/systemd/system/*/gpush* 2>/dev/null; true";

#[test]
fn deb_in_an_image_is_installed_and_purged() {
    let Some(machine) = image("the .deb in an image", "gpush_VERSION-1_amd64.deb") else { return };
    let printed = inside(&machine, "dpkg --install /srv/package");
    assert_eq!(machine.sh("dpkg-query --show --showformat='${Status}' gpush"), "install ok installed", "{printed}");
    assert_eq!(machine.sh(LINKS).lines().count(), 4, "the units are enabled: {printed}");
    let printed = inside(&machine, "dpkg --purge gpush");
    assert_eq!(machine.sh(LINKS), "", "{printed}");
    assert!(!machine.run(&format!("test -e {CONFIG}")).status.success());
}

#[test]
fn rpm_in_an_image_is_installed_and_erased() {
    let Some(machine) = image("the .rpm in an image", "gpush-VERSION-1.x86_64.rpm") else { return };
    let printed = inside(&machine, "rpm --force-debian --nodeps --install /srv/package");
    assert_eq!(machine.sh(LINKS).lines().count(), 4, "the units are enabled: {printed}");
    let printed = inside(&machine, "rpm --force-debian --nodeps --erase gpush");
    assert_eq!(machine.sh(LINKS), "", "{printed}");
    assert!(!machine.run("test -e /usr/sbin/gpushd").status.success());
}
