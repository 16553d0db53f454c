//! gpushd as a service of a real systemd: installed by hand in a machine of its own, with a
//! simulated host, within the sandbox of its unit.

use gpush_tests::machine::Machine;

/// A machine with gpush installed and 8 simulated GPUs; `None` where there can be none.
fn machine(what: &str) -> Option<Machine> {
    let machine = Machine::boot(what)?;
    println!("booted in {:.2} s", machine.boot.as_secs_f64());
    machine.install();
    machine.simulated_host("dgx-a100");
    Some(machine)
}

#[test]
fn the_service_starts_reloads_comes_back_and_stops() {
    let Some(machine) = machine("gpushd under systemd") else { return };
    // Type=notify: it returns once gpushd is ready.
    machine.sh("systemctl start gpushd.service");
    let first = machine.main_pid("gpushd.service");
    assert_eq!(machine.property("gpushd.service", "ActiveState"), "active");
    assert_eq!(machine.sh("systemctl is-active gpushd.socket gpushd-admin.socket"), "active\nactive");
    assert_eq!(machine.sh("stat -c '%a %G' /run/gpush/gpushd.sock /run/gpush/admin.sock"), "666 gpush\n600 root");

    // Another user sees the GPUs, through the sandbox.
    let status = machine.sh("setpriv --reuid=65534 --regid=65534 --clear-groups gpushctl status");
    assert!(status.contains("A100"), "{status}");

    machine.write("/etc/gpush/config.toml", "[log]\nlevel = \"debug\"\n");
    machine.sh("systemctl reload gpushd.service");
    let _ = machine.journal_until("-u gpushd.service", "config");
    assert_eq!(machine.main_pid("gpushd.service"), first, "a reload is no restart");

    machine.sh("systemctl restart gpushd.service");
    let second = machine.main_pid("gpushd.service");
    assert_ne!(second, first);
    let _ = machine.sh("gpushctl status");

    // The sockets stay, so a client that comes meanwhile waits for the next gpushd.
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
    println!("{}", machine.sh("journalctl -u gpushd -o short-monotonic --no-pager; ls -la /run/gpush /var/lib/gpush"));
}

#[test]
fn systemd_has_nothing_to_say_of_the_units() {
    let Some(machine) = machine("systemd-analyze of the installed units") else { return };
    let said = machine.sh("systemd-analyze verify --man=no /usr/lib/systemd/system/gpush* 2>&1");
    assert_eq!(said, "");
    let security = machine.sh("systemd-analyze security --no-pager gpushd.service");
    let overall = security.lines().find(|line| line.contains("Overall exposure")).unwrap_or_default();
    println!("{}", overall.trim());
    println!("{security}");
}
