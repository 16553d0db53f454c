//! The packages on a booted Debian.
//!
//! | file | subject |
//! |---|---|
//! | `mod` | the .deb: first start, remove, purge, and the cases in which it refuses the installation |
//! | `config` | unattended upgrades, and the config over upgrades, a removal and a purge |
//! | `device_access` | a removal opens the GPUs that `gpushctl enforce on` has denied |
//! | `drivers` | `apt install` on hosts with and without drivers changes only gpush |
//! | `metrics` | the relay of the metrics, and the timer that writes them to a file |
//! | `image` | the packages in an image, where no systemd runs |
//! | `purge` | the .deb is removed and purged while an MPS control daemon has a client |
//! | `upgrade` | the .deb is upgraded while requests, an operation, leases and MPS clients run |
//! | `rpm` | the .rpm, installed with `rpm` on Debian |
//! | `releases` | the .deb on Debian 11 and 13 |

mod config;
mod device_access;
mod drivers;
mod image;
mod metrics;
mod purge;
mod releases;
mod rpm;
mod upgrade;

use gpush_tests::{
    machine::Machine,
    page::{blocks, document},
};

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
fn package_serves_confines_gpushd_and_is_purged() {
    let Some(machine) = machine("the package from its installation to its purge") else { return };
    installed_package_serves_without_config_driver_and_gpu(&machine);
    sandbox_of_the_unit_denies_what_gpushd_does_not_need(&machine);
    removal_keeps_gpus_and_state_and_purge_leaves_only_the_group(&machine);
}

#[test]
fn package_refuses_hosts_that_it_cannot_serve() {
    let Some(machine) = Machine::boot("what the package refuses") else { return };
    if machine.package("gpush_VERSION-1_amd64.deb", None).is_none() {
        return;
    }
    package_refuses_old_kernel_and_newer_database(&machine);
    refused_downgrade_names_the_way_to_usable_gpus(&machine);
}

fn installed_package_serves_without_config_driver_and_gpu(machine: &Machine) {
    assert_eq!(machine.sh("systemctl is-active gpushd.service gpushd.socket gpushd-admin.socket").lines().count(), 3);
    assert_eq!(
        machine.sh("systemctl is-enabled gpushd.service gpushd.socket gpushd-admin.socket | sort -u"),
        "enabled"
    );
    let _ = machine.sh("gpushctl config check");
    assert_eq!(machine.property("gpushd.service", "NRestarts"), "0");
    assert_eq!(machine.sh("stat -c '%a %G' /run/gpush/gpushd.sock /run/gpush/admin.sock"), "666 gpush\n600 root");
    // The checksums of all files match the list in the package.
    assert_eq!(machine.sh("dpkg --verify gpush"), "");
    // A user can connect to gpushd, and the man page is installed.
    let _ = machine.sh("setpriv --reuid=65534 --regid=65534 --clear-groups gpushctl version");
    for page in ["man1/gpushctl.1", "man5/gpush-config.5", "man8/gpushd.8"] {
        assert!(machine.sh(&format!("zcat /usr/share/man/{page}.gz | head -5")).contains("gpush"));
    }
    // `docs/known-gaps.md` in a hint is a path below this directory.
    let hint = machine.sh("cd /usr/share/doc/gpush && cat docs/known-gaps.md config.example.toml README.md | wc -l");
    assert!(hint.parse::<u32>().is_ok_and(|lines| lines > 300), "{hint}");
    // The admin socket is only for root.
    let user =
        "setpriv --reuid=65534 --regid=65534 --clear-groups gpushctl --socket /run/gpush/admin.sock version 2>&1";
    assert!(String::from_utf8_lossy(&machine.run(user).stdout).contains("ermission"));
    // A request starts gpushd.
    machine.sh("systemctl stop gpushd.service && gpushctl version");
    assert_eq!(machine.property("gpushd.service", "ActiveState"), "active");
}

fn removal_keeps_gpus_and_state_and_purge_leaves_only_the_group(machine: &Machine) {
    with_gpu(machine);
    machine.sh("chmod 1777 /var/lib/gpush-sim/proc");
    machine.write(CONFIG, "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\"]\n");
    machine.sh("gpushctl config reload && gpushctl apply");
    let job = job(machine);
    let is_denied = device_access::deny(machine);
    let before = machine.sh("cat /var/lib/gpush-sim/state 2>/dev/null | cksum");
    let printed = machine.sh("dpkg --remove gpush 2>&1");
    assert!(
        printed.contains("MIG instances, compute modes and time-slice settings of the GPUs stay as they are"),
        "{printed}"
    );
    assert!(printed.contains("programs with leases keep running"), "{printed}");
    assert_eq!(machine.sh("cat /var/lib/gpush-sim/state 2>/dev/null | cksum"), before, "no driver call was made");
    assert!(!machine.run("systemctl --quiet is-active gpushd.service gpushd.socket").status.success());
    if is_denied {
        device_access::assert_open(machine, &printed);
    }
    machine.sh(&format!("test -s /var/lib/gpush/gpush.db -a -s {CONFIG}"));

    // When the package is installed again, gpushd has its recorded state again.
    let _ = machine.install_package(None);
    let history = machine.sh("gpushctl operation list");
    assert!(history.contains("op-1"), "{history}");
    assert_eq!(machine.sh("gpushctl lease list -o name"), "L1", "the lease is active again");
    assert_eq!(machine.main_pid(JOB), job, "no job was ended");

    let is_denied = device_access::deny(machine);
    let printed = machine.sh("dpkg --purge gpush 2>&1");
    assert!(!printed.contains("not empty so not removed"), "{printed}");
    if is_denied {
        device_access::assert_open(machine, &printed);
    }
    let left = machine.sh("ls -d /etc/gpush /var/lib/gpush /run/gpush /run/gpush-mps /var/log/gpush-mps \
         /etc/systemd/system/gpush* /etc/systemd/system/*/gpush* /etc/needrestart/conf.d/gpush.conf \
         2>/dev/null | grep -v '/gpushd.service.d$'; true");
    assert_eq!(left, "", "{printed}");
    machine.sh("getent group gpush");
    assert_eq!(machine.main_pid(JOB), job, "no job was ended");
}

/// The unit in which a job with a lease runs.
const JOB: &str = "job.service";

/// Starts a job with a lease of a MIG device. Returns the pid of the job.
fn job(machine: &Machine) -> u32 {
    machine.sh(
        "systemd-run --quiet --unit=job --uid=65534 gpushctl run --mig 3g.40gb -- sh -c 'echo leased; exec sleep 1000'",
    );
    let _ = machine.journal_until("_SYSTEMD_UNIT=job.service", "leased");
    machine.main_pid(JOB)
}

/// Runs the commands of the section "Use the installed gpushd" in docs/first-steps.md.
#[test]
fn installed_gpushd_uses_a_simulated_host() {
    let Some(machine) = machine("the installed gpushd on a simulated host") else { return };
    let Some(simulator) = machine.package("gpush-sim_VERSION-1_amd64.deb", None) else { return };
    let page = document("first-steps.md");
    let (_, section) = page.split_once("## Use the installed gpushd").expect("the section");
    let [start, undo] = &blocks(section, "sh")[..] else { panic!("{section}") };
    let (apt, start) = start.split_once('\n').expect("several lines");
    assert!(apt.starts_with("apt install "), "{apt}");
    machine.sh(&format!("dpkg --install {simulator} 2>&1"));
    let printed = machine.sh(&format!("set -e\n{start}"));
    assert!(printed.contains("SIMULATED"), "{printed}");

    // The reports of doctor that the section describes.
    machine.write(CONFIG, "[[gpu]]\nmatch = [\"4\"]\nmode = \"mps\"\n");
    machine.sh("gpushctl config reload && gpushctl apply 4 && gpushctl ready --timeout 60s");
    let printed = machine.sh("gpushctl doctor; true");
    for report in [
        "driver    problem  NVIDIA's kernel module is not loaded",
        "driver    problem  libnvidia-ml.so.1 is not installed",
        "mps       problem",
        "agent     ok",
    ] {
        assert!(printed.contains(report), "{report}: {printed}");
    }
    assert_eq!(printed.matches("  problem  ").count(), 3, "{printed}");

    machine.sh(&format!("set -e\n{undo}"));
    assert!(!machine.run("test -e /var/lib/gpush-sim").status.success());
    let status = machine.sh("gpushctl status 2>&1; true");
    assert!(!status.contains("SIMULATED"), "{status}");
}

/// In the sandbox of gpushd's unit, a process cannot do what gpushd does not need. The probes run in a unit with the
/// same settings.
fn sandbox_of_the_unit_denies_what_gpushd_does_not_need(machine: &Machine) {
    let probes = [
        ("write to /etc", "touch /etc/probe"),
        ("write to /usr", "touch /usr/probe"),
        ("read home directories", "ls ~root/probe"),
        ("make a cgroup", "mkdir /sys/fs/cgroup/probe"),
        // The port is closed. If the sandbox denies the socket, bash prints a different error.
        ("open a network socket", "( exec 3<>/dev/tcp/127.0.0.1/9 ) 2>&1 | grep -q refused"),
        ("open another device", "( : < /dev/net/tun ) 2>&1 | grep -qv 'not permitted' || : < /dev/net/tun"),
        ("make a device node", "mknod /run/gpush/node c 1 3"),
        ("make a namespace", "unshare --mount true"),
    ];
    let lines =
        probes.map(|(what, line)| format!("if ( {line} ) >/dev/null 2>&1; then echo 'permitted: {what}'; fi\n"));
    let own =
        "rm -f /run/gpush/probe; touch /var/lib/gpush/probe /run/gpush/probe /run/gpush-mps/probe && echo probed\n";
    machine.write("/srv/probe.sh", lines.concat() + own);
    machine.sh("touch ~root/probe");
    // Run the probes in two units: the unit of gpushd with another program, and a unit without a sandbox. In the second
    // one, all probes must succeed.
    machine.sh("sed -e 's|^ExecStart=.*|ExecStart=/bin/bash /srv/probe.sh|' -e 's|^Type=.*|Type=oneshot|' -e '/^Restart=/d' -e '/^Sockets=/d' \
        /usr/lib/systemd/system/gpushd.service > /etc/systemd/system/probe.service && systemctl daemon-reload");
    let probe = |start: &str| {
        machine.sh(start);
        let _ = machine.journal_until("-t bash", "probed");
        machine.sh("journalctl --no-pager --output=cat -t bash; journalctl --rotate --vacuum-time=1s 2>/dev/null")
    };
    let printed = probe("systemctl start probe.service");
    assert!(!printed.contains("permitted"), "{printed}");
    let printed = probe("systemd-run --quiet --wait --unit=without bash /srv/probe.sh");
    assert_eq!(printed.matches("permitted").count(), probes.len(), "{printed}");
    machine.sh("rm -rf /etc/systemd/system/probe.service ~root/probe /etc/probe /usr/probe /sys/fs/cgroup/probe \
         /run/gpush/node /var/lib/gpush/probe /run/gpush/probe /run/gpush-mps/probe 2>/dev/null; \
         rmdir /sys/fs/cgroup/probe 2>/dev/null; systemctl daemon-reload");
}

fn package_refuses_old_kernel_and_newer_database(machine: &Machine) {
    machine.put("/usr/local/sbin/uname", "#!/bin/sh\necho 4.18.0-553.el8_10.x86_64\n");
    let file = machine.package("gpush_VERSION-1_amd64.deb", None).expect("the caller has checked it");
    let install = format!("dpkg --install {file} 2>&1");
    let old = machine.run(&install);
    let printed = String::from_utf8_lossy(&old.stdout).into_owned();
    assert!(
        !old.status.success() && printed.contains("gpush needs Linux 5.4 or later, and this host runs Linux 4.18"),
        "{printed}"
    );
    assert!(!machine.run("test -e /usr/sbin/gpushd").status.success(), "nothing was unpacked");
    machine.sh("rm /usr/local/sbin/uname");

    // The newer schema is in the database, or only in its write-ahead log, as after a SIGKILL.
    for is_in_log in [false, true] {
        put_database(machine, is_in_log);
        let newer = machine.run(&install);
        let printed = String::from_utf8_lossy(&newer.stdout).into_owned();
        let expected = "/var/lib/gpush/gpush.db has schema 256";
        assert!(!newer.status.success() && printed.contains(expected), "in the log: {is_in_log}: {printed}");
        // The command that the message suggests works. The units do not exist yet.
        let _ = machine.run(&commands(&printed)[0]);
        let left = machine.sh("cd /var/lib/gpush && echo *");
        let log = if is_in_log { " gpush.db.schema-256-wal" } else { "" };
        assert_eq!(left, format!("gpush.db.schema-256{log}"));
    }
    let _ = machine.sh(&install);
    let _ = machine.sh("gpushctl version");
}

/// Puts a database with schema 256 into the machine. If `is_in_log` is set, the schema is only in the write-ahead log,
/// and another transaction follows it.
fn put_database(machine: &Machine, is_in_log: bool) {
    let scratch = tempfile::tempdir().expect("a directory");
    let path = scratch.path().join("gpush.db");
    let database = rusqlite::Connection::open(&path).expect("a database");
    let run = |text: &str| database.execute_batch(text).unwrap_or_else(|error| panic!("{text}: {error}"));
    run("PRAGMA journal_mode = WAL; PRAGMA wal_autocheckpoint = 0; PRAGMA user_version = 1; CREATE TABLE t (x)");
    run("PRAGMA wal_checkpoint(TRUNCATE); PRAGMA user_version = 256");
    if is_in_log {
        run("INSERT INTO t VALUES (randomblob(20000))");
    } else {
        run("PRAGMA wal_checkpoint(TRUNCATE)");
    }
    machine.sh("rm -rf /var/lib/gpush && mkdir -p /var/lib/gpush");
    for name in ["gpush.db", "gpush.db-wal"] {
        let content = std::fs::read(scratch.path().join(name)).expect("a file of SQLite");
        if !content.is_empty() {
            machine.write(&format!("/var/lib/gpush/{name}"), content);
        }
    }
}

/// Returns the commands in a message of the package. The lines of commands are indented.
fn commands(message: &str) -> Vec<String> {
    message.lines().filter_map(|line| Some(line.strip_prefix("gpush:   ")?.to_owned())).collect()
}

/// The refused downgrade prints commands. After these commands, the GPUs are usable.
fn refused_downgrade_names_the_way_to_usable_gpus(machine: &Machine) {
    with_gpu(machine);
    machine.sh("chmod 1777 /var/lib/gpush-sim/proc");
    machine.write(CONFIG, "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\"]\n");
    machine.sh("gpushctl config reload && gpushctl apply");
    machine.sh("systemctl stop gpushd.service");
    set_newer_schema(machine);
    let file = machine.package("gpush_VERSION-1_amd64.deb", None).expect("the package was installed");
    let install = format!("dpkg --install {file} 2>&1");
    let refused = machine.run(&install);
    let printed = String::from_utf8_lossy(&refused.stdout).into_owned();
    assert!(!refused.status.success() && printed.contains("/var/lib/gpush/gpush.db has schema 256"), "{printed}");

    let commands = commands(&printed);
    let [set_aside, recover] = &commands[..] else { panic!("{printed}") };
    machine.sh(set_aside);
    machine.sh(&install);
    let run = "gpushctl run --mig 3g.40gb -- true 2>&1";
    assert!(!machine.run(run).status.success(), "GPU 0 is held");
    machine.sh(recover);
    machine.sh(run);
}

/// Makes the database look newer than this build. SQLite stores `user_version` at offset 60 of the file header.
fn set_newer_schema(machine: &Machine) {
    machine.sh("printf '\\0\\0\\1\\0' | dd of=/var/lib/gpush/gpush.db bs=1 seek=60 conv=notrunc 2>&1");
}
