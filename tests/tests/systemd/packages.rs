//! The .deb on a booted Debian: install, upgrade under load, remove, purge, and the cases in which
//! the package refuses the installation.

use gpush_tests::machine::Machine;

const HOST: &str = "[[gpu]]\nmodel = \"a100-80\"\nmig = true\n";

/// Version of the package for the upgrade. Both versions contain the same programs.
const LATER: &str = "99.0.0";

const CONFIG: &str = "/etc/gpush/config.toml";

/// Boots a machine and installs the package.
fn machine(what: &str) -> Option<Machine> {
    let machine = Machine::boot(what)?;
    let _ = machine.install_package(None)?;
    Some(machine)
}

/// Adds a simulated GPU to the machine and waits until gpushd shows it.
fn with_gpu(machine: &Machine) {
    machine.simulated_host(HOST);
    machine.sh("systemctl restart gpushd.service");
    assert!(machine.sh("gpushctl status").contains("A100"), "gpushd sees the simulated GPU");
}

#[test]
fn installed_package_serves_without_config_driver_and_gpu() {
    let Some(machine) = machine("the package on a host without GPU") else { return };
    assert_eq!(machine.sh("systemctl is-active gpushd.service gpushd.socket gpushd-admin.socket").lines().count(), 3);
    assert_eq!(
        machine.sh("systemctl is-enabled gpushd.service gpushd.socket gpushd-admin.socket | sort -u"),
        "enabled"
    );
    let _ = machine.sh("gpushctl config check");
    assert_eq!(machine.property("gpushd.service", "NRestarts"), "0");
    assert_eq!(machine.sh("stat -c '%a %G' /run/gpush/gpushd.sock /run/gpush/admin.sock"), "666 gpush\n600 root");
    // Every file has the checksum that the package lists.
    assert_eq!(machine.sh("dpkg --verify gpush"), "");
    // A user can connect to gpushd, and the man page is installed.
    let _ = machine.sh("setpriv --reuid=65534 --regid=65534 --clear-groups gpushctl version");
    assert!(machine.sh("zcat /usr/share/man/man1/gpushctl.1.gz | head -5").contains("gpushctl"));
}

#[test]
fn upgrade_fails_no_request_and_keeps_config_layout_and_sockets() {
    let Some(machine) = machine("the package's upgrade") else { return };
    with_gpu(&machine);
    let rule = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\"]\n";
    machine.write(CONFIG, machine.sh(&format!("cat {CONFIG}")) + "\n" + rule);
    machine.sh("gpushctl config reload && gpushctl mig apply --gpu 0");
    let before = machine.sh("gpushctl --json status | grep -o 'MIG-[0-9a-f-]*' | sort -u");
    assert!(before.starts_with("MIG-"), "{before}");
    let (agent, socket) =
        (machine.main_pid("gpushd.service"), machine.property("gpushd.socket", "InactiveExitTimestamp"));

    // Requests run continuously before, during and after the upgrade.
    machine.sh("mkdir /run/load && systemd-run --quiet --unit=load sh -c \
        'until [ -e /run/load/stop ]; do if gpushctl version >/dev/null 2>>/run/load/errors; \
         then echo >>/run/load/answered; else echo >>/run/load/failed; fi; done'");
    machine.await_that("requests are answered", |machine| machine.run("test -s /run/load/answered").status.success());
    let said = machine.install_package(Some(LATER)).expect("both versions are built together");
    let answered = machine.sh("wc -l < /run/load/answered");
    machine.await_that("requests are answered after the upgrade", |machine| {
        machine.sh("wc -l < /run/load/answered") != answered
    });
    machine.sh("touch /run/load/stop");
    machine.await_that("the load ends", |machine| !machine.run("systemctl --quiet is-active load").status.success());
    println!("{} requests during the upgrade", machine.sh("wc -l < /run/load/answered"));
    assert_eq!(machine.sh("cat /run/load/failed /run/load/errors 2>/dev/null; true"), "", "{said}");

    assert_ne!(machine.main_pid("gpushd.service"), agent, "the new gpushd runs");
    assert_eq!(machine.property("gpushd.socket", "InactiveExitTimestamp"), socket, "the socket was not restarted");
    assert_eq!(machine.sh("gpushctl --json status | grep -o 'MIG-[0-9a-f-]*' | sort -u"), before);
    assert!(machine.sh(&format!("cat {CONFIG}")).contains("3g.40gb"), "the administrator's config is kept");
    // A disabled unit remains disabled after an upgrade.
    machine.sh("systemctl disable gpushd.service 2>&1");
    let _ = machine.install_package(None);
    assert_eq!(machine.run("systemctl is-enabled gpushd.service").stdout, b"disabled\n");
}

#[test]
fn removal_keeps_gpus_and_state_and_purge_leaves_only_the_group() {
    let Some(machine) = machine("the package's removal") else { return };
    with_gpu(&machine);
    machine.sh("gpushctl mig apply --gpu 0 --layout 3g.40gb --once");
    let before = machine.sh("cat /var/lib/gpush-sim/state 2>/dev/null | cksum");
    let said = machine.sh("dpkg --remove gpush 2>&1");
    assert!(
        said.contains("MIG instances, compute modes and time-slice settings of the GPUs stay as they are"),
        "{said}"
    );
    assert_eq!(machine.sh("cat /var/lib/gpush-sim/state 2>/dev/null | cksum"), before, "no driver call was made");
    assert!(!machine.run("systemctl --quiet is-active gpushd.service gpushd.socket").status.success());
    machine.sh(&format!("test -s /var/lib/gpush/gpush.db -a -s {CONFIG}"));

    // The recorded state is available again after the package is reinstalled.
    let _ = machine.install_package(None);
    let history = machine.sh("gpushctl operation list");
    assert!(history.contains("op-1"), "{history}");

    let said = machine.sh("dpkg --purge gpush 2>&1");
    let left = machine.sh("ls -d /etc/gpush /var/lib/gpush /run/gpush /run/gpush-mps /var/log/gpush-mps \
         /etc/systemd/system/*/gpushd* 2>/dev/null; true");
    assert_eq!(left, "", "{said}");
    machine.sh("getent group gpush");
}

#[test]
fn package_refuses_old_kernel_and_newer_database() {
    let Some(machine) = Machine::boot("what the package refuses") else { return };
    machine.put("/usr/local/sbin/uname", "#!/bin/sh\necho 4.18.0-553.el8_10.x86_64\n");
    let version = env!("CARGO_PKG_VERSION");
    let install = format!("dpkg --install /opt/built/packages/gpush_{version}-1_amd64.deb 2>&1");
    let old = machine.run(&install);
    let said = String::from_utf8_lossy(&old.stdout).into_owned();
    if said.contains("No such file") {
        return println!("SKIPPED packages: `cargo xtask test` made none");
    }
    assert!(
        !old.status.success() && said.contains("gpush needs Linux 5.4 or later, and this host runs Linux 4.18"),
        "{said}"
    );
    assert!(!machine.run("test -e /usr/sbin/gpushd").status.success(), "nothing was unpacked");
    machine.sh("rm /usr/local/sbin/uname");

    // SQLite stores `user_version` at offset 60 of the file header.
    machine.sh("mkdir -p /var/lib/gpush && { head -c 60 /dev/zero; printf '\\0\\0\\1\\0'; } > /var/lib/gpush/gpush.db");
    let newer = machine.run(&install);
    let said = String::from_utf8_lossy(&newer.stdout).into_owned();
    assert!(!newer.status.success() && said.contains("/var/lib/gpush/gpush.db has schema 256"), "{said}");
    // The command that the message suggests works.
    let way = said.lines().find_map(|line| line.split_once("  systemctl stop")).expect("a command").1.to_owned();
    let _ = machine.run(&format!("systemctl stop{way}"));
    let _ = machine.sh(&install);
    let _ = machine.sh("gpushctl version");
}
