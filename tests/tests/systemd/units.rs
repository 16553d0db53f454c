//! The systemd units and their drop-ins. systemd must accept them, and they must contain the
//! settings that gpushd needs.

use std::{path::PathBuf, process::Command};

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(repository().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn systemd_verify_accepts_units() {
    let Ok(version) = Command::new("systemd-analyze").arg("--version").output() else {
        println!("SKIPPED the check of the units: systemd-analyze is not installed");
        return;
    };
    println!("{}", String::from_utf8_lossy(&version.stdout).lines().next().unwrap_or_default());
    // `systemd-analyze verify` checks whether the program of the unit exists. So create the program
    // in the root directory of this test.
    let scratch = tempfile::tempdir().unwrap();
    let mut verify = Command::new("systemd-analyze");
    verify.args(["verify", "--man=no", "--recursive-errors=no"]);
    let mut checked = 0;
    for entry in std::fs::read_dir(repository().join("systemd")).unwrap() {
        let entry = entry.unwrap();
        // Drop-ins are in directories.
        if entry.path().is_dir() {
            continue;
        }
        let unit = entry.file_name().into_string().unwrap();
        let text = read(&format!("systemd/{unit}"))
            .replace("/usr/sbin/gpushd", "/bin/true")
            .replace("/usr/bin/gpushctl", "/bin/true");
        std::fs::write(scratch.path().join(&unit), text).unwrap();
        verify.arg(scratch.path().join(&unit));
        checked += 1;
    }
    let output = verify.env("SYSTEMD_UNIT_PATH", format!("{}:", scratch.path().display())).output().unwrap();
    let printed = String::from_utf8_lossy(&output.stderr);
    let ours: Vec<&str> = printed.lines().filter(|line| line.contains("gpush")).collect();
    assert!(output.status.success() && ours.is_empty(), "{printed}");
    println!("{checked} units verified");
}

#[test]
fn units_contain_required_settings() {
    let service = read("systemd/gpushd.service");
    let socket = read("systemd/gpushd.socket");
    let admin = read("systemd/gpushd-admin.socket");
    for line in ["ListenStream=/run/gpush/admin.sock", "SocketMode=0600", "FileDescriptorName=admin"] {
        assert!(admin.lines().any(|found| found == line), "{line}");
    }
    for line in [
        "Type=notify",
        "Requires=gpushd.socket gpushd-admin.socket",
        "Sockets=gpushd.socket gpushd-admin.socket",
        "KillMode=mixed",
        "StateDirectory=gpush",
        "LogsDirectory=gpush-mps",
    ] {
        assert!(service.lines().any(|found| found == line), "{line}");
    }
    // The path, the directory and the group of the socket are in three files, which must agree.
    assert!(socket.contains("ListenStream=/run/gpush/gpushd.sock\n") && socket.contains("SocketGroup=gpush\n"));
    assert!(read("packaging/tmpfiles.d/gpush.conf").contains("d /run/gpush 0755 root gpush -\n"));
    assert!(read("packaging/sysusers.d/gpush.conf").contains("g gpush -\n"));
    assert!(!service.contains("RuntimeDirectory="), "it would take the socket with it");
    assert!(!service.contains("PrivateDevices="), "it would hide the GPUs");
}

/// When gpushd's slice is stopped, everything in it ends. So the scopes of leases are in other
/// slices, which have the same limit as systemd's user slices.
#[test]
fn services_of_gpushctl_and_gpushd_are_confined() {
    let service = read("systemd/gpushd.service");
    for line in ["OOMPolicy=continue", "MemoryMax=1G", "TasksMax=2048", "LimitCORE=0", "UMask=0027"] {
        assert!(service.lines().any(|found| found == line), "{line}");
    }
    let ready = read("systemd/gpush-ready.service");
    for line in [
        "CapabilityBoundingSet=",
        "LimitCORE=0",
        "NoNewPrivileges=yes",
        "RestrictNamespaces=yes",
        "SystemCallFilter=~@privileged",
        "TasksMax=64",
        "UMask=0077",
    ] {
        assert!(ready.lines().any(|found| found == line), "{line}");
    }
}

#[test]
fn slices_of_leases_have_the_limit_of_user_slices() {
    let drop_in = read("systemd/gpulease-.slice.d/10-defaults.conf");
    assert!(drop_in.contains("[Slice]\nTasksMax=33%\n"), "{drop_in}");
    let installed = read("docs/install.md");
    assert!(installed.contains("systemd/gpulease-.slice.d/10-defaults.conf"));
}

#[test]
fn mps_units_do_not_depend_on_gpushd() {
    let unit = read("systemd/gpushd-mps@.service");
    for line in [
        "Type=exec",
        "ExecStart=/usr/sbin/gpushd mps-daemon /run/gpush-mps/%i",
        "Restart=no",
        "KillMode=mixed",
        "TimeoutStopSec=30",
        "Slice=gpush-mps.slice",
        "LogExtraFields=GPUSH_MPS=%i",
    ] {
        assert!(unit.lines().any(|found| found == line), "{line}");
    }
    for harm in ["BindsTo=", "PartOf=", "Requires=", "PrivateTmp=", "PrivateDevices=", "RuntimeDirectory", "[Install]"]
    {
        assert!(!unit.lines().any(|line| line.starts_with(harm)), "{harm}");
    }
    assert!(read("packaging/tmpfiles.d/gpush.conf").contains("d /run/gpush-mps 0711 root root -\n"));
}
