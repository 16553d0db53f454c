//! The systemd units and their snippets: systemd itself understands them, and they say what the
//! agent relies on.

use std::{path::PathBuf, process::Command};

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(repository().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

#[test]
fn systemd_finds_nothing_wrong_with_the_units() {
    let Ok(version) = Command::new("systemd-analyze").arg("--version").output() else {
        println!("skipped: systemd-analyze is not installed");
        return;
    };
    println!("{}", String::from_utf8_lossy(&version.stdout).lines().next().unwrap_or_default());
    // With the program where the unit has it, in a root of our own: verify looks for it.
    let scratch = tempfile::tempdir().unwrap();
    let mut checked = 0;
    for unit in ["gpushd.service", "gpushd.socket", "gpushd-admin.socket"] {
        let text = read(&format!("systemd/{unit}")).replace("/usr/sbin/gpushd", "/bin/true");
        std::fs::write(scratch.path().join(unit), text).unwrap();
        checked += 1;
    }
    let output = Command::new("systemd-analyze")
        .args(["verify", "--man=no", "--recursive-errors=no"])
        .arg(scratch.path().join("gpushd.service"))
        .arg(scratch.path().join("gpushd.socket"))
        .arg(scratch.path().join("gpushd-admin.socket"))
        .env("SYSTEMD_UNIT_PATH", format!("{}:", scratch.path().display()))
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let ours: Vec<&str> = said.lines().filter(|line| line.contains("gpushd")).collect();
    assert!(output.status.success() && ours.is_empty(), "{said}");
    println!("{checked} units verified");
}

#[test]
fn the_units_keep_what_the_agent_relies_on() {
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
    ] {
        assert!(service.lines().any(|found| found == line), "{line}");
    }
    // The path of the socket, its directory and its group are one thing said in three files.
    assert!(socket.contains("ListenStream=/run/gpush/gpushd.sock\n") && socket.contains("SocketGroup=gpush\n"));
    assert!(read("packaging/tmpfiles.d/gpush.conf").contains("d /run/gpush 0755 root gpush -\n"));
    assert!(read("packaging/sysusers.d/gpush.conf").contains("g gpush -\n"));
    assert!(!service.contains("RuntimeDirectory="), "it would take the socket with it");
    assert!(!service.contains("PrivateDevices="), "it would hide the GPUs");
}
