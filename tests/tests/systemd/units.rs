//! The text of the systemd units and their drop-ins. `host` shows that systemd accepts them.

use std::path::PathBuf;

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(repository().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn units_contain_the_settings_that_gpushd_needs() {
    units_contain_required_settings();
    services_of_gpushctl_and_gpushd_are_confined();
    slices_of_leases_have_the_limit_of_user_slices();
    mps_units_do_not_depend_on_gpushd();
    metrics_units_are_confined_and_not_enabled();
}

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

fn slices_of_leases_have_the_limit_of_user_slices() {
    let drop_in = read("systemd/gpulease-.slice.d/10-defaults.conf");
    assert!(drop_in.contains("[Slice]\nTasksMax=33%\n"), "{drop_in}");
    let installed = read("docs/install.md");
    assert!(installed.contains("systemd/gpulease-.slice.d/10-defaults.conf"));
}

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

fn metrics_units_are_confined_and_not_enabled() {
    let relay = read("systemd/gpush-metrics.service");
    for line in [
        "User=gpush-metrics",
        "SupplementaryGroups=gpush",
        "CapabilityBoundingSet=",
        "NoNewPrivileges=yes",
        "Environment=\"GPUSH_METRICS_OPTIONS=--listen 127.0.0.1:9945\"",
        "RestartPreventExitStatus=2 5",
    ] {
        assert!(relay.lines().any(|found| found == line), "{line}");
    }
    let write = read("systemd/gpush-metrics-write.service");
    for line in
        ["CapabilityBoundingSet=CAP_CHOWN CAP_DAC_OVERRIDE", "RestrictAddressFamilies=AF_UNIX", "ProtectSystem=strict"]
    {
        assert!(write.lines().any(|found| found == line), "{line}");
    }
    assert!(read("packaging/sysusers.d/gpush.conf").contains("u gpush-metrics - "));
    let preset = read("packaging/system-preset/80-gpush.preset");
    for unit in ["gpush-metrics.service", "gpush-metrics-write.timer"] {
        assert!(preset.contains(&format!("disable {unit}\n")), "{unit}");
    }
}
