//! The packages in an image: a chroot in which no systemd runs and /proc is not mounted.

use gpush_tests::machine::Machine;

use super::CONFIG;

/// Boots a machine with an image in `/srv/image`. The image contains the files of the machine, without its mounts,
/// and these packages.
fn image(what: &str, files: &[&str]) -> Option<Machine> {
    let machine = Machine::boot(what)?;
    machine.sh("mkdir /srv/image && mount --bind / /srv/image && mount --bind /dev /srv/image/dev");
    for file in files {
        let package = machine.package(file, None)?;
        machine.sh(&format!("cp {package} /srv/package.{}", file.rsplit('.').next().unwrap_or_default()));
    }
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
fn packages_in_an_image_are_installed_and_removed() {
    let files = ["gpush_VERSION-1_amd64.deb", "gpush-VERSION-1.x86_64.rpm"];
    let Some(machine) = image("the packages in an image", &files) else { return };
    let printed = inside(&machine, "dpkg --install /srv/package.deb");
    assert_eq!(machine.sh("dpkg-query --show --showformat='${Status}' gpush"), "install ok installed", "{printed}");
    assert_eq!(machine.sh(LINKS).lines().count(), 4, "the units are enabled: {printed}");
    let printed = inside(&machine, "dpkg --purge gpush");
    assert_eq!(machine.sh(LINKS), "", "{printed}");
    assert!(!machine.run(&format!("test -e {CONFIG}")).status.success());

    let printed = inside(&machine, "rpm --force-debian --nodeps --install /srv/package.rpm");
    assert_eq!(machine.sh(LINKS).lines().count(), 4, "the units are enabled: {printed}");
    let printed = inside(&machine, "rpm --force-debian --nodeps --erase gpush");
    assert_eq!(machine.sh(LINKS), "", "{printed}");
    assert!(!machine.run("test -e /usr/sbin/gpushd").status.success());
}
