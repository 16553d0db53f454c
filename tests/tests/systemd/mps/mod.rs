//! gpushd's MPS daemons on a real systemd. Their units survive gpushd. When a unit ends, all its
//! processes end, and it leaves no files.
//!
//! If NVIDIA's `nvidia-cuda-mps-control` is installed, the tests use it. NVIDIA's servers need a
//! GPU, so the servers and clients are simulated.

mod kills;

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use gpush_tests::{machine::Machine, random::number};
use serde_json::Value;

/// Two GPUs. The first one is shared as a whole. The second one has a MIG device that is shared.
const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n\n[[gpu]]\nmodel = \"a100-80\"\nmig = true\n";

/// NVIDIA's control daemon, and the server of the simulated host next to it.
const MPS: &str = "[mps]\ncontrol = \"/opt/mps/nvidia-cuda-mps-control\"\nhealth = \"1s\"\n";

/// A drop-in with which gpushd restarts daemons more often than usual.
const RESTARTS: &str =
    "[Service]\nExecStart=\nExecStart=/usr/sbin/gpushd --constants mps.failures=100,mps.longest_pause=1s\n";

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

/// Starts a machine with gpush, simulated GPUs and the control daemon. Waits until the daemons of
/// both targets are ready.
fn machine(what: &str) -> Option<Machine> {
    let Ok(control) = std::fs::read("/usr/bin/nvidia-cuda-mps-control") else {
        println!("SKIPPED {what}: nvidia-cuda-mps-control is not installed (Debian's package nvidia-cuda-mps)");
        return None;
    };
    let machine = Machine::boot(what)?;
    println!("booted in {:.2} s", machine.boot.as_secs_f64());
    machine.install();
    machine.simulated_host(HOST);
    // Servers and clients of other users write into this directory which GPUs they have open. With
    // a real driver, this would not be necessary.
    machine.sh("chmod 1777 /var/lib/gpush-sim/proc");
    machine.put("/opt/mps/nvidia-cuda-mps-control", control);
    machine.sh("ln -s /var/lib/gpush-sim/bin/nvidia-cuda-mps-server /opt/mps/");
    machine.write("/etc/systemd/system/gpushd.service.d/restarts.conf", RESTARTS);
    machine.sh("systemctl daemon-reload");
    machine.write("/etc/gpush/config.toml", format!("{MPS}{RULES}"));
    machine.sh("systemctl start gpushd.service");
    machine.await_that("two targets are served", |machine| ready(machine).len() == 2);
    Some(machine)
}

/// Returns all daemons, as the API shows them.
fn daemons(machine: &Machine) -> Vec<Value> {
    let output = machine.run("gpushctl --json mps list");
    serde_json::from_slice(&output.stdout).unwrap_or_default()
}

/// Returns the unit and the pid of each ready daemon.
fn ready(machine: &Machine) -> Vec<(String, u64)> {
    let served = daemons(machine).into_iter().filter(|daemon| daemon["state"] == "ready");
    served.filter_map(|daemon| Some((unit(daemon["target"].as_str()?), daemon["pid"].as_u64()?))).collect()
}

fn unit(target: &str) -> String {
    format!("gpushd-mps@{target}.service")
}

/// Returns the reasons of a daemon's state.
fn reasons(machine: &Machine, target: &str) -> String {
    let found = daemons(machine).into_iter().find(|daemon| daemon["target"] == target);
    found.map(|daemon| daemon["reasons"].to_string()).unwrap_or_default()
}

/// Returns the short name of a target. `kind` selects the whole GPU or the MIG device.
fn target(machine: &Machine, kind: char) -> String {
    let all = daemons(machine);
    let mut names = all.iter().filter_map(|daemon| daemon["target"].as_str());
    names.find(|name| name.starts_with(kind)).expect("a target of each kind").to_owned()
}

/// Starts a client as an unprivileged user, in a separate unit. Waits until a server serves the
/// client, and returns the pid of the client.
fn client(machine: &Machine, name: &str, gpu: &str) -> u32 {
    machine.sh(&format!(
        "systemd-run --quiet --unit={name} --uid=65534 --gid=65534 --setenv=NVML_SIM_STATE=/var/lib/gpush-sim \
         gpushctl run --mps --target {gpu} -- /opt/built/gpush-sim mps-client"
    ));
    let _ = machine.journal_until(&format!("_SYSTEMD_UNIT={name}.service"), "active server=");
    // gpushctl has replaced itself with the client, so the main process is the client.
    machine.main_pid(&format!("{name}.service"))
}

/// Returns whether a client still computes.
fn computes(machine: &Machine, name: &str, pid: u32) -> bool {
    let printed = machine.sh(&format!("journalctl --no-pager --output=cat _SYSTEMD_UNIT={name}.service"));
    !printed.contains("lost") && machine.run(&format!("kill -0 {pid}")).status.success()
}

fn seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64()
}

/// Returns the time of the last log entry that contains `says`, in seconds since the epoch.
fn printed_at(machine: &Machine, says: &str) -> f64 {
    let line = machine.sh(&format!(
        "journalctl --no-pager --output=short-unix -u gpushd.service -u 'gpushd-mps@*' | grep -F -- '{says}' | tail -n1 | cut -d' ' -f1"
    ));
    line.parse().unwrap_or_else(|_| panic!("{says}: {line:?}"))
}

#[test]
fn daemons_and_clients_outlive_a_gpushd_that_ends_or_hangs() {
    let Some(machine) = machine("MPS daemons that outlive gpushd") else { return };
    daemons_and_clients_outlive_gpushd(&machine);
    hung_gpushd_is_restarted_and_daemons_stay(&machine);
}

#[test]
fn killed_daemons_and_gpushd_leave_clean_units() {
    let Some(machine) = machine("MPS daemons that are killed") else { return };
    gpushd_killed_while_starting_daemons_orphans_none(&machine);
    killed_daemon_restarts_with_clean_unit(&machine);
}

#[test]
fn daemon_that_does_not_start_or_answer_is_reported() {
    let Some(machine) = machine("MPS daemons that can't be started or reached") else { return };
    failed_daemon_start_reports_cause(&machine);
    unreachable_daemon_without_server_is_ended(&machine);
}

/// Default number of kills of one kind. `GPUSH_TEST_DAEMON_KILLS` sets another number.
const KILLS: u64 = 4;

fn daemons_and_clients_outlive_gpushd(machine: &Machine) {
    let (short, _) = ready(machine).into_iter().next().expect("a daemon");
    let short = short.trim_start_matches("gpushd-mps@").trim_end_matches(".service");
    let started = printed_at(machine, &format!("the MPS daemon {short} is in state `starting`"));
    println!(
        "served {:.0} ms after the last start began",
        (printed_at(machine, &format!("the MPS daemon {short} is in state `ready`")) - started) * 1e3
    );
    let served = ready(machine);
    for (unit, pid) in &served {
        assert_eq!(u64::from(machine.main_pid(unit)), *pid, "{unit}");
    }
    let clients = [("one", client(machine, "one", "0")), ("two", client(machine, "two", "1:2g.20gb@0"))];
    let steps = [
        ("restart", "systemctl restart gpushd.service"),
        ("kill -9", "kill -9 $(systemctl show --value --property=MainPID gpushd.service | grep -v '^0$')"),
        // Do what a package upgrade does: replace the file with a new one.
        (
            "upgrade",
            "install -m 755 /opt/built/gpushd /usr/sbin/gpushd; systemctl daemon-reload; systemctl restart gpushd.service",
        ),
        (
            "stop",
            "systemctl stop gpushd.service gpushd.socket gpushd-admin.socket; sleep 0.5; systemctl start gpushd.service",
        ),
    ];
    for (what, line) in &steps {
        let before = machine.main_pid("gpushd.service");
        machine.sh(line);
        machine.await_that(what, |machine| {
            let agent = machine.property("gpushd.service", "MainPID");
            agent != "0" && agent != before.to_string() && ready(machine) == served
        });
        for (name, pid) in clients {
            assert!(computes(machine, name, pid), "{name} after {what}");
        }
    }
    let restarts = number("GPUSH_TEST_RESTARTS", 3);
    for _ in 0..restarts {
        machine.sh("systemctl restart gpushd.service");
        machine.await_that("the daemons are adopted", |machine| ready(machine) == served);
    }
    println!("{restarts} more restarts of gpushd, the same pids of MPS daemons");
    for (name, pid) in clients {
        assert!(computes(machine, name, pid), "{name} after {restarts} restarts");
    }
    let all = daemons(machine);
    for (_, pid) in clients {
        assert!(all.iter().any(|daemon| daemon["clients"][0]["pid"] == pid), "{pid}: {all:?}");
    }
    let journal = machine.sh("journalctl --no-pager --output=cat -u gpushd.service");
    let adopted = usize::try_from(2 * (steps.len() as u64 + restarts)).expect("a small number");
    assert_eq!(journal.matches("adopted the MPS daemon").count(), adopted, "{journal}");
    assert_eq!(journal.matches("started the MPS daemon").count(), 2, "{journal}");
}

fn hung_gpushd_is_restarted_and_daemons_stay(machine: &Machine) {
    machine.write("/etc/systemd/system/gpushd.service.d/watchdog.conf", "[Service]\nWatchdogSec=2\n");
    machine.sh("systemctl daemon-reload && systemctl restart gpushd.service");
    machine.await_that("two targets are served", |machine| ready(machine).len() == 2);
    let (served, hung) = (ready(machine), machine.main_pid("gpushd.service"));
    // The client of the previous step.
    let one = machine.main_pid("one.service");
    machine.sh(&format!("kill -STOP {hung}"));
    let _ = machine.journal_until("_PID=1 UNIT=gpushd.service", "Watchdog timeout");
    machine.await_that("another gpushd", |machine| {
        !["0".to_owned(), hung.to_string()].contains(&machine.property("gpushd.service", "MainPID"))
            && ready(machine) == served
    });
    assert_eq!(machine.property("gpushd.service", "NRestarts"), "1");
    assert!(computes(machine, "one", one));
}

fn killed_daemon_restarts_with_clean_unit(machine: &Machine) {
    let target = target(machine, 'g');
    let unit = unit(&target);
    let mut slowest: f64 = 0.0;
    let kills = number("GPUSH_TEST_DAEMON_KILLS", KILLS);
    for turn in 0..kills {
        if turn % 3 == 0 {
            // Start a server. It must end together with the daemon.
            client(machine, &format!("client-{turn}"), "0");
        }
        let (before, group) = (machine.main_pid(&unit), machine.property(&unit, "ControlGroup"));
        let killed = seconds();
        machine.kill(before);
        machine.await_that("another daemon is ready", |machine| {
            ready(machine).iter().any(|(one, pid)| *one == unit && *pid != u64::from(before))
        });
        slowest = slowest.max(printed_at(machine, "the MPS daemon was ended by signal 9") - killed);
        let there = format!("cat /sys/fs/cgroup{group}/cgroup.procs");
        assert_eq!(
            machine.run(&there).stdout,
            format!("{}\n", machine.main_pid(&unit)).into_bytes(),
            "no server is left"
        );
        // The delay before the kill differs between rounds.
        std::thread::sleep(Duration::from_millis(turn * 37 % 100));
    }
    println!("{kills} kills, the slowest was reported after {:.0} ms", slowest * 1e3);
    assert_eq!(machine.property(&unit, "NRestarts"), "0", "that is gpushd's to decide");

    // An administrator stops the unit with systemctl. The config requires the daemon, so gpushd
    // starts it again.
    machine.sh(&format!("systemctl stop {unit}"));
    let _ = machine.journal_until("-u gpushd.service", "systemctl stop");
    machine.await_that("both targets are served again", |machine| ready(machine).len() == 2);
    let before = machine.main_pid(&unit);
    machine.sh(&format!("systemctl restart {unit}"));
    machine.await_that("the other daemon is adopted", |machine| ready(machine).len() == 2);
    assert_ne!(machine.main_pid(&unit), before);

    // If a request to gpushd stops the daemon, it stays stopped.
    machine.sh("gpushctl mps stop 0");
    machine.await_that("the unit is inactive", |machine| machine.property(&unit, "ActiveState") == "inactive");
    machine.sh("systemctl restart gpushd.service; gpushctl status");
    assert_eq!(ready(machine).len(), 1);
    machine.sh("gpushctl mps start 0");
    assert_eq!(ready(machine).len(), 2);

    // When the config has no rules for the targets, nothing of the targets is left except their
    // logs.
    machine.write("/etc/gpush/config.toml", MPS);
    machine.sh("systemctl reload gpushd.service");
    machine.await_that("all are gone", |machine| daemons(machine).is_empty());
    assert_eq!(
        machine.sh("ls /run/gpush-mps; systemctl --failed --no-legend 'gpush*'; pgrep nvidia-cuda-mps || true"),
        "agent.lock"
    );
    assert_eq!(machine.sh("systemctl list-units --no-legend --all 'gpushd-mps@*' | grep -v inactive || true"), "");
}

fn gpushd_killed_while_starting_daemons_orphans_none(machine: &Machine) {
    let unit = unit(&target(machine, 'g'));
    let kills = number("GPUSH_TEST_DAEMON_KILLS", KILLS);
    for turn in 0..kills {
        // When a daemon has ended, gpushd restarts it after a second. The test kills gpushd before,
        // during or after that restart.
        machine.kill(machine.main_pid(&unit));
        std::thread::sleep(Duration::from_millis(900 + turn * 240 / kills));
        machine.kill(machine.main_pid("gpushd.service"));
        machine.await_that("both are served", |machine| ready(machine).len() == 2);
        assert_eq!(machine.sh("pgrep -c -f '^/opt/mps/nvidia-cuda-mps-control -f'"), "2");
        assert_eq!(
            ready(machine).iter().find(|one| one.0 == unit).map(|one| one.1),
            Some(machine.main_pid(&unit).into())
        );
    }
}

fn failed_daemon_start_reports_cause(machine: &Machine) {
    let target = target(machine, 'g');
    let unit = unit(&target);

    // Without a message bus, running daemons continue, but gpushd cannot start a daemon.
    let others = ready(machine);
    machine.sh("systemctl stop dbus.socket dbus.service");
    machine.kill(machine.main_pid(&unit));
    machine.await_that("the missing bus is reported", |machine| {
        reasons(machine, &target).starts_with("[\"cannot reach systemd over the system bus")
    });
    println!("{}", reasons(machine, &target));
    assert_eq!(ready(machine), others.iter().filter(|one| one.0 != unit).cloned().collect::<Vec<_>>());
    machine.sh("systemctl start dbus.socket");
    machine.await_that("both targets are served again", |machine| ready(machine).len() == 2);

    // Until the daemon's program starts, the output of the unit goes to the journal. The API refers
    // to the journal.
    machine.sh(&format!("mkdir -p /etc/systemd/system/{unit}.d"));
    machine.write(&format!("/etc/systemd/system/{unit}.d/none.conf"), "[Service]\nReadOnlyPaths=/var/log\n");
    machine.sh("systemctl daemon-reload");
    machine.kill(machine.main_pid(&unit));
    machine.await_that("the failure is reported", |machine| {
        reasons(machine, &target).contains("ended with status 1: see `journalctl -u")
    });
    println!("{}", reasons(machine, &target));
    let _ = machine.journal_until(&format!("GPUSH_MPS={target}"), "be run: Read-only file system");
    machine.write(
        &format!("/etc/systemd/system/{unit}.d/none.conf"),
        "[Service]\nExecStart=\nExecStart=/usr/bin/no-such-program\n",
    );
    machine.sh("systemctl daemon-reload");
    machine
        .await_that("the failure is reported", |machine| reasons(machine, &target).contains("ended with status 203"));
    println!("{}", reasons(machine, &target));
    machine.sh(&format!("rm -r /etc/systemd/system/{unit}.d; systemctl daemon-reload"));
    machine.await_that("both targets are served again", |machine| ready(machine).len() == 2);
}

fn unreachable_daemon_without_server_is_ended(machine: &Machine) {
    let (whole, part) = (unit(&target(machine, 'g')), unit(&target(machine, 'm')));
    let (kept, ended) = (machine.main_pid(&whole), machine.main_pid(&part));
    // This process stands in for a server. A simulated server would end with its directory.
    let group = machine.property(&whole, "ControlGroup");
    machine.sh(&format!("systemd-run --quiet --unit=server --property=Type=exec sleep 1000; cat /sys/fs/cgroup/system.slice/server.service/cgroup.procs > /sys/fs/cgroup{group}/cgroup.procs"));
    machine.sh("systemctl stop gpushd.service; rm -rf /run/gpush-mps/*; systemctl start gpushd.service");
    machine.await_that("the daemon without a server is replaced", |machine| {
        ready(machine).iter().any(|(unit, pid)| *unit == part && *pid != u64::from(ended))
    });
    let journal = machine.sh("journalctl --no-pager --output=cat -n 40");
    assert_eq!(machine.main_pid(&whole), kept, "{journal}");
    let _ = machine.journal_until("-u gpushd.service", &format!("{whole} runs, but its directory is missing"));
    assert!(reasons(machine, &target(machine, 'g')).contains("`systemctl stop"), "{:?}", daemons(machine));
    machine.sh(&format!("systemctl stop {whole}"));
    machine.await_that("both targets are served again", |machine| ready(machine).len() == 2);
}

#[test]
fn directories_logs_and_accounting_are_in_place() {
    let Some(machine) = machine("places of MPS daemons") else { return };
    let target = target(&machine, 'g');
    let unit = unit(&target);
    let pid = client(&machine, "client", "0");
    let is = |what: &str, is: &dyn Fn(&Value) -> bool| {
        machine.await_that(what, |machine| {
            let all: Value = serde_json::from_str(&machine.sh("gpushctl ps --json")).expect("processes");
            let all = all["gpu_processes"].as_array().expect("processes").clone();
            all.iter().any(|one| one["pid"] == pid && is(one))
        });
    };
    is("its unit", &|one| one["unit"] == "client.service" && one["slurm_job"].is_null());
    // This cgroup path has the form that slurmstepd creates.
    let job = "/sys/fs/cgroup/system.slice/slurmstepd.scope/job_42/step_batch/user/task_0";
    machine.sh(&format!("mkdir -p {job} && echo {pid} > {job}/cgroup.procs"));
    is("its job", &|one| one["slurm_job"] == 42 && one["cgroup"].to_string().contains("job_42/step_batch/user"));
    let modes = format!(
        "stat -c '%a %U %n' /run/gpush-mps /run/gpush-mps/{target} /run/gpush-mps/{target}/1 /run/gpush-mps/{target}/spec.json /var/log/gpush-mps /var/log/gpush-mps/{target}"
    );
    let found = machine.sh(&modes);
    let found: Vec<&str> = found.lines().map(|line| line.rsplit_once(' ').expect("a mode and a name").0).collect();
    // The pipe directory has an access list. So the group part of its mode is the mask of this
    // list.
    assert_eq!(found, ["711 root", "711 root", "750 root", "600 root", "750 root", "750 root"]);
    let look = |uid: u32| {
        machine.run(&format!("setpriv --reuid={uid} --regid={uid} --clear-groups ls /run/gpush-mps/{target}/1/control"))
    };
    assert!(look(65534).status.success() && !look(65533).status.success());

    // The client of the first user ends while gpushd does not run. Nevertheless, the next user gets
    // a directory with another number.
    machine.sh("systemctl stop client.service gpushd.service");
    machine.kill(machine.main_pid(&unit));
    machine.sh("systemctl start gpushd.service");
    machine.await_that("both targets are served again", |machine| ready(machine).len() == 2);
    let other =
        machine.sh("setpriv --reuid=65533 --regid=65533 --clear-groups gpushctl lease env --mps --target 0 --for 1h");
    assert!(other.contains(&format!("/run/gpush-mps/{target}/2")), "{other}");
    assert!(look(65533).stdout.is_empty() && !look(65534).status.success());

    let _ = machine.journal_until(&format!("-u {unit}"), "Started");
    assert!(machine.sh("gpushctl mps logs 0 --all").contains("get_default_active_thread_percentage"));
    let group = machine.property(&unit, "ControlGroup");
    assert_eq!(group, format!("/gpush.slice/gpush-mps.slice/{unit}"));
    for unit in [unit.as_str(), "gpush-mps.slice", "gpush.slice"] {
        let used: u64 = machine.property(unit, "CPUUsageNSec").parse().expect("nanoseconds");
        assert!(used > 0, "{unit}");
        // systemd has this value only on a machine with the memory controller.
        println!("{unit}: {} ms of CPU, memory {}", used / 1_000_000, machine.property(unit, "MemoryCurrent"));
    }
    // The config requires the daemons. Nevertheless, a stop of the slice ends them.
    machine.sh("systemctl stop gpushd.service; systemctl stop gpush.slice");
    assert_eq!(machine.sh("pgrep nvidia-cuda-mps || true"), "");

    // Evaluate the drop-in as needrestart does, with the name of the unit.
    let ask = r#"our %nrconf = (override_rc => {}); do "/etc/needrestart/conf.d/gpush.conf"; die $@ if $@;
                 print join ",", map { $nrconf{override_rc}{$_} } grep { $ARGV[0] =~ /$_/ } keys %{$nrconf{override_rc}}"#;
    machine.write("/srv/ask.pl", ask);
    assert_eq!(machine.sh(&format!("perl /srv/ask.pl {unit}")), "0");
    assert_eq!(machine.sh("perl /srv/ask.pl gpushd.service"), "");
}
