//! gpushd's MPS daemons on a real systemd: units that outlive gpushd, end whole and leave nothing.
//!
//! `nvidia-cuda-mps-control` is NVIDIA's own, where it is installed; its servers need a GPU, so those of
//! the simulated host stand in for them, and so do the clients.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gpush_tests::machine::Machine;
use serde_json::Value;

/// Two GPUs: one shared whole, one with a MIG device that is shared.
const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n\n[[gpu]]\nmodel = \"a100-80\"\nmig = true\n";

/// The server is looked for where the simulated host is; NVIDIA's daemon where it always is.
const MPS: &str = "[mps]\nserver = \"/var/lib/gpush-sim/bin/nvidia-cuda-mps-server\"\nfailures = 100\nlongest_pause_s = 1\nhealth_s = 1\n";

const RULES: &str = r#"
[layouts]
shared = ["2g.20gb:mps", "3g.40gb"]

[[gpu]]
name = "whole"
match = ["0"]
mode = "mps"

[[gpu]]
name = "parts"
match = ["1"]
mode = "mig"
layout = "shared"
"#;

/// A machine with gpush, simulated GPUs and the control daemon; both targets are served.
fn machine(what: &str) -> Option<Machine> {
    let Ok(control) = std::fs::read("/usr/bin/nvidia-cuda-mps-control") else {
        println!("SKIPPED {what}: nvidia-cuda-mps-control is not installed (Debian's package nvidia-cuda-mps)");
        return None;
    };
    let machine = Machine::boot(what)?;
    println!("booted in {:.2} s", machine.boot.as_secs_f64());
    machine.install();
    machine.simulated_host(HOST);
    // Where the driver would show it, servers and clients of other users say that they have a GPU open.
    machine.sh("chmod 1777 /var/lib/gpush-sim/proc");
    machine.put("/usr/bin/nvidia-cuda-mps-control", control);
    machine.write("/etc/gpush/config.toml", format!("{MPS}{RULES}"));
    machine.sh("systemctl start gpushd.service");
    machine.await_that("two targets are served", |machine| ready(machine).len() == 2);
    Some(machine)
}

/// All daemons, as the API shows them.
fn daemons(machine: &Machine) -> Vec<Value> {
    let output = machine.run("gpushctl --json mps list");
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

/// Pids of those that serve, each with its unit.
fn ready(machine: &Machine) -> Vec<(String, u64)> {
    let served = daemons(machine).into_iter().filter(|daemon| daemon["state"] == "ready");
    served.filter_map(|daemon| Some((unit(daemon["target"].as_str()?), daemon["pid"].as_u64()?))).collect()
}

fn unit(target: &str) -> String {
    format!("gpushd-mps@{target}.service")
}

/// What is said of a daemon, in its own words.
fn reasons(machine: &Machine, target: &str) -> String {
    let found = daemons(machine).into_iter().find(|daemon| daemon["target"] == target);
    found.map(|daemon| daemon["reasons"].to_string()).unwrap_or_default()
}

/// A target's short name: of the whole GPU, or of the MIG device.
fn target(machine: &Machine, kind: char) -> String {
    let all = daemons(machine);
    let mut names = all.iter().filter_map(|daemon| daemon["target"].as_str());
    names.find(|name| name.starts_with(kind)).expect("a target of each kind").to_owned()
}

/// Starts a client, as a user without rights, in a unit of its own; gives its pid once it is served.
fn client(machine: &Machine, name: &str, gpu: &str) -> u32 {
    machine.sh(&format!(
        "systemd-run --quiet --unit={name} --uid=65534 --gid=65534 --setenv=NVML_SIM_STATE=/var/lib/gpush-sim \
         gpushctl mps run {gpu} -- /opt/built/gpush-sim mps-client"
    ));
    let _ = machine.journal_until(&format!("_SYSTEMD_UNIT={name}.service"), "active server=");
    // gpushctl runs the client, and gives its share back at its end.
    let pid = machine.sh(&format!("pgrep -P {} -f mps-client", machine.main_pid(&format!("{name}.service"))));
    pid.trim().parse().unwrap_or_else(|_| panic!("the client's pid: {pid:?}"))
}

/// Whether a client computes on.
fn computes(machine: &Machine, name: &str, pid: u32) -> bool {
    let said = machine.sh(&format!("journalctl --no-pager --output=cat _SYSTEMD_UNIT={name}.service"));
    !said.contains("lost") && machine.run(&format!("kill -0 {pid}")).status.success()
}

fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64()
}

/// When gpushd said something last, in seconds since the epoch.
fn said_at(machine: &Machine, says: &str) -> f64 {
    let line = machine.sh(&format!(
        "journalctl --no-pager --output=short-unix -u gpushd.service | grep -F -- '{says}' | tail -n1 | cut -d' ' -f1"
    ));
    line.parse().unwrap_or_else(|_| panic!("{says}: {line:?}"))
}

#[test]
fn daemons_and_their_clients_outlive_gpushd() {
    let Some(machine) = machine("MPS daemons that outlive gpushd") else { return };
    let started = said_at(&machine, "the MPS daemon is starting");
    println!(
        "served {:.0} ms after the last start began",
        (said_at(&machine, "the MPS daemon is ready") - started) * 1e3
    );
    let served = ready(&machine);
    for (unit, pid) in &served {
        assert_eq!(u64::from(machine.main_pid(unit)), *pid, "{unit}");
    }
    let clients = [("one", client(&machine, "one", "0")), ("two", client(&machine, "two", "1:2g.20gb@0"))];
    let steps = [
        ("restart", "systemctl restart gpushd.service"),
        ("kill -9", "kill -9 $(systemctl show --value --property=MainPID gpushd.service | grep -v '^0$')"),
        // As a package does it: another file in the place of the first.
        (
            "upgrade",
            "install -m 755 /opt/built/gpushd /usr/sbin/gpushd; systemctl daemon-reload; systemctl restart gpushd.service",
        ),
        (
            "stop",
            "systemctl stop gpushd.service gpushd.socket gpushd-admin.socket; sleep 0.5; systemctl start gpushd.service",
        ),
    ];
    for (what, line) in steps {
        let before = machine.main_pid("gpushd.service");
        machine.sh(line);
        machine.await_that(what, |machine| {
            let agent = machine.property("gpushd.service", "MainPID");
            agent != "0" && agent != before.to_string() && ready(machine) == served
        });
        for (name, pid) in clients {
            assert!(computes(&machine, name, pid), "{name} after {what}");
        }
    }
    let all = daemons(&machine);
    for (_, pid) in clients {
        assert!(all.iter().any(|daemon| daemon["clients"][0]["pid"] == pid), "{pid}: {all:?}");
    }
    let journal = machine.sh("journalctl --no-pager --output=cat -u gpushd.service");
    assert_eq!(journal.matches("is there: gone on with").count(), 8, "{journal}");
    assert_eq!(journal.matches("was started").count(), 2, "{journal}");
}
