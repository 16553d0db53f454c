//! The .rpm, installed with `rpm` on a booted Debian. The rpm of Debian has no database of
//! installed packages. So these tests do not check the dependencies of the package.

use gpush_tests::machine::Machine;

use super::{CONFIG, LATER, device_access, set_newer_schema, with_gpu};

/// Runs `rpm` on a package file. On Debian, rpm needs `--force-debian`.
fn rpm(machine: &Machine, how: &str) -> String {
    machine.sh(&format!("rpm --force-debian --nodeps {how} 2>&1"))
}

/// The spec of a package whose config is a file of the package, as in earlier versions.
const OLDER: &str = "Name: gpush\nVersion: 0.0.1\nRelease: 1\nSummary: a\nLicense: a\n%description\na\n%install\n\
                     install -D -m 644 /opt/gpush/config.example.toml %{buildroot}/etc/gpush/config.toml\n\
                     %files\n%config(noreplace) /etc/gpush/config.toml\n";

#[test]
fn rpm_is_installed_upgraded_and_removed() {
    let Some(machine) = Machine::boot("the .rpm package") else { return };
    let file = "gpush-VERSION-1.x86_64.rpm";
    let (Some(first), Some(later)) = (machine.package(file, None), machine.package(file, Some(LATER))) else { return };
    rpm_upgrades_and_refuses_an_older_version(&machine, &first, &later);
    machine.sh("rm -rf /etc/gpush");
    config_of_an_older_rpm_survives_the_upgrade(&machine, &first);
}

fn config_of_an_older_rpm_survives_the_upgrade(machine: &Machine, file: &str) {
    machine.write("/srv/older.spec", OLDER);
    machine.sh("rpmbuild -bb --quiet --define '_topdir /srv/rpm' /srv/older.spec 2>&1");
    for edit in ["true", "printf '\n[[gpu]]\nmatch = [\"0\"]\nmode = \"exclusive\"\n' >> /etc/gpush/config.toml"] {
        rpm(machine, "--install /srv/rpm/RPMS/*/gpush-0.0.1-1.*.rpm");
        machine.sh(edit);
        let before = machine.sh(&format!("cat {CONFIG}"));
        rpm(machine, &format!("--upgrade {file}"));
        assert_eq!(machine.sh("ls /etc/gpush"), "config.toml");
        assert_eq!(machine.sh(&format!("cat {CONFIG}")), before);
        rpm(machine, "--erase gpush");
        assert_eq!(machine.sh(&format!("cat {CONFIG}")), before, "a removal keeps the config");
        machine.sh("rm -rf /etc/gpush");
    }
}

fn rpm_upgrades_and_refuses_an_older_version(machine: &Machine, first: &str, later: &str) {
    rpm(machine, &format!("--install {first}"));
    // RHEL and Fedora enable units according to presets. The package has a preset for its units.
    assert_eq!(
        machine.sh("systemctl is-enabled gpushd.service gpushd.socket gpush-ready.service | sort -u"),
        "enabled"
    );
    assert_eq!(machine.sh("systemctl is-active gpushd.service gpushd.socket gpushd-admin.socket | sort -u"), "active");
    assert_eq!(rpm(machine, "--verify gpush"), "");
    for relation in ["requires", "recommends", "suggests", "supplements", "enhances", "conflicts", "obsoletes"] {
        let names = machine.sh(&format!("rpm --query --{relation} gpush"));
        assert!(!names.to_lowercase().contains("nvidia"), "{relation}: {names}");
    }
    assert_eq!(machine.sh(&format!("grep -cv '^#' {CONFIG}; true")), "0", "the config has only a comment");
    assert_eq!(machine.sh("rpm --query --configfiles gpush"), format!("{CONFIG}\n/etc/needrestart/conf.d/gpush.conf"));
    with_gpu(machine);
    machine.write(CONFIG, machine.sh(&format!("cat {CONFIG}")) + "\n# edited\n");
    machine.sh("gpushctl mig apply --gpu 0 --layout 3g.40gb --once");
    let (agent, socket) =
        (machine.main_pid("gpushd.service"), machine.property("gpushd.socket", "InactiveExitTimestamp"));

    rpm(machine, &format!("--upgrade {later}"));
    assert_ne!(machine.main_pid("gpushd.service"), agent, "the new gpushd runs");
    assert_eq!(machine.property("gpushd.socket", "InactiveExitTimestamp"), socket, "the socket was not restarted");
    assert!(machine.sh(&format!("cat {CONFIG}")).ends_with("# edited"), "the administrator's config is kept");
    assert_eq!(machine.sh("ls /etc/gpush"), "config.toml");
    assert!(machine.sh("gpushctl gpu show 0").contains("3g.40gb"));
    // The package refuses an older version only if the database is newer than that version.
    rpm(machine, &format!("--upgrade --oldpackage {first}"));
    let is_denied = device_access::deny(machine);
    machine.sh("systemctl stop gpushd.service");
    set_newer_schema(machine);
    let refused = machine.run(&format!("rpm --force-debian --nodeps --upgrade {later} 2>&1"));
    let printed = String::from_utf8_lossy(&refused.stdout).into_owned();
    assert!(!refused.status.success() && printed.contains("/var/lib/gpush/gpush.db has schema 256"), "{printed}");

    let printed = rpm(machine, "--erase gpush");
    assert!(printed.contains("of the GPUs stay as they are"), "{printed}");
    if is_denied {
        device_access::assert_open(machine, &printed);
    }
    assert!(!machine.run("systemctl --quiet is-active gpushd.service gpushd.socket").status.success());
    assert!(!machine.run("test -e /usr/sbin/gpushd -o -e /usr/share/doc/gpush").status.success());
    machine.sh("test -s /var/lib/gpush/gpush.db");
    assert!(machine.sh(&format!("cat {CONFIG}")).ends_with("# edited"), "a removal keeps the config");
    assert_eq!(machine.sh("ls /etc/systemd/system/*/gpush* 2>/dev/null; true"), "", "no unit stays enabled");

    // After the command of docs/install.md, the next installation does not report a lost database.
    let page = gpush_tests::page::document("install.md");
    let delete = page.split('`').find(|code| code.starts_with("rm -rf ")).expect("a command that deletes all data");
    machine.sh(delete);
    let left = "ls -d /etc/gpush /var/lib/gpush /run/gpush /run/gpush-mps /var/log/gpush-mps 2>/dev/null; true";
    assert_eq!(machine.sh(left), "");
    rpm(machine, &format!("--install {first}"));
    let status = machine.sh("gpushctl status");
    assert!(!status.contains("lost"), "{status}");
    rpm(machine, "--erase gpush");
}
