//! Units of MPS control daemons on a real systemd: they outlive the agent, end whole and leave nothing.
//!
//! `nvidia-cuda-mps-control` is the real one, where it is installed; its servers need a GPU, so a
//! script stands in for them.

use gpush_tests::{host::program, machine::Machine};

const UNIT: &str = "gpushd-mps@g5d1b03a2.service";
const DIRECTORY: &str = "/run/gpush-mps/g5d1b03a2";

/// Instead of `gpushd mps-daemon`, which becomes this program.
const STAND_IN: &str = "[Service]\nExecStart=\nExecStart=/usr/bin/nvidia-cuda-mps-control -f\n\
                        Environment=CUDA_MPS_PIPE_DIRECTORY=/run/gpush-mps/%i\n";

/// What is started as a server: it says who it is, and stays.
const SERVER: &str = "#!/bin/sh\necho server of $(id -u)\nexec sleep 3600\n";

/// A machine with gpush, a simulated GPU and the control daemon.
fn machine(what: &str) -> Option<Machine> {
    let Ok(control) = std::fs::read("/usr/bin/nvidia-cuda-mps-control") else {
        println!("SKIPPED {what}: nvidia-cuda-mps-control is not installed (Debian's package nvidia-cuda-mps)");
        return None;
    };
    let machine = Machine::boot(what)?;
    machine.install();
    machine.simulated_host("[[gpu]]\nmodel = \"l4\"\n");
    machine.put("/usr/bin/nvidia-cuda-mps-control", control);
    machine.put("/usr/bin/nvidia-cuda-mps-server", SERVER);
    machine.write("/etc/systemd/system/gpushd-mps@.service.d/stand-in.conf", STAND_IN);
    machine.sh("systemctl daemon-reload");
    Some(machine)
}

/// As gpushd will: the directory with the settings, then the unit.
fn start(machine: &Machine) -> u32 {
    machine.write(&format!("{DIRECTORY}/spec.json"), "{}");
    machine.sh(&format!("systemctl start {UNIT}"));
    machine.main_pid(UNIT)
}

/// Says a command to the daemon; its answer.
fn control(machine: &Machine, command: &str) -> String {
    machine.sh(&format!("echo {command} | CUDA_MPS_PIPE_DIRECTORY={DIRECTORY} nvidia-cuda-mps-control"))
}

fn answers(machine: &Machine) {
    assert_eq!(control(machine, "get_default_active_thread_percentage"), "100.0");
}

/// Has it start a server as another user; gives the server's pid.
fn server(machine: &Machine) -> u32 {
    control(machine, "start_server -uid 65534");
    let _ = machine.journal_until("GPUSH_MPS=g5d1b03a2", "server of 65534");
    machine.sh("pgrep -x -U 65534 sleep").parse().expect("one server")
}

#[test]
fn a_control_daemon_outlives_the_agent() {
    let Some(machine) = machine("MPS daemons that outlive the agent") else { return };
    machine.sh("systemctl start gpushd.service");
    let daemon = start(&machine);
    let agent = machine.main_pid("gpushd.service");

    machine.sh("systemctl restart gpushd.service");
    assert_ne!(machine.main_pid("gpushd.service"), agent);
    assert_eq!(machine.main_pid(UNIT), daemon, "restart");

    machine.kill(machine.main_pid("gpushd.service"));
    let _ = machine.sh("gpushctl status");
    assert_eq!(machine.main_pid(UNIT), daemon, "kill -9");

    // As a package does it: another file in the place of the first.
    machine.sh("install -m 755 /opt/built/gpushd /usr/sbin/gpushd");
    machine.sh("systemctl daemon-reload; systemctl restart gpushd.service");
    assert_eq!(machine.main_pid(UNIT), daemon, "upgrade");

    machine.sh("systemctl stop gpushd.service");
    assert_eq!(machine.main_pid(UNIT), daemon, "stop");
    answers(&machine);

    // A gpushd that starts daemons before it is ready waits for none of its own.
    machine.sh(&format!("systemctl stop {UNIT}"));
    machine.write(
        "/etc/systemd/system/gpushd.service.d/starts.conf",
        format!("[Service]\nExecStartPre=+/usr/bin/systemctl start {UNIT}\n"),
    );
    machine.sh("systemctl daemon-reload; systemctl start gpushd.service");
    answers(&machine);
}

#[test]
fn a_control_daemon_ends_whole_and_leaves_nothing() {
    let Some(machine) = machine("the end of MPS daemons") else { return };
    let daemon = start(&machine);
    let child = server(&machine);
    machine.sh(&format!("systemctl stop {UNIT}"));
    assert_eq!(machine.sh(&format!("ps --no-headers {daemon} {child} || true; ls /run/gpush-mps")), "", "stop");
    assert_eq!(machine.property(UNIT, "Result"), "success");

    // Its servers would go on without it, and the next daemon would know nothing of them.
    let daemon = start(&machine);
    let child = server(&machine);
    machine.kill(daemon);
    machine.await_that("it failed", |machine| machine.property(UNIT, "ActiveState") == "failed");
    assert_eq!(machine.sh(&format!("ps --no-headers {child} || true; ls /run/gpush-mps")), "", "kill -9");
    assert_eq!(machine.property(UNIT, "Result"), "signal");
    assert_eq!(machine.property(UNIT, "ExecMainStatus"), "9");
    assert_eq!(machine.property(UNIT, "NRestarts"), "0", "that is the agent's to decide");

    // Often: nobody but the agent counts starts.
    for _ in 0..8 {
        machine.sh(&format!("systemctl reset-failed {UNIT}"));
        machine.kill(start(&machine));
        machine.await_that("it failed", |machine| machine.property(UNIT, "ActiveState") == "failed");
    }
    start(&machine);
    machine.sh("systemctl stop gpush.slice");
    assert_eq!(machine.property(UNIT, "ActiveState"), "inactive");
}

#[test]
fn its_directory_is_as_the_unit_says() {
    let Some(machine) = machine("directories of MPS daemons") else { return };
    assert_eq!(machine.sh("stat -c '%a %U' /run/gpush-mps"), "711 root");
    machine.write(&format!("{DIRECTORY}/spec.json"), "{}");
    machine.sh(&format!("chgrp -R gpush {DIRECTORY}; chmod 770 {DIRECTORY}"));
    machine.sh(&format!("systemctl start {UNIT}"));
    let found = machine.sh(&format!("stat -c '%a %U %G' {DIRECTORY}; stat -c %G {DIRECTORY}/spec.json"));
    assert_eq!(found, "700 root root\nroot", "nobody is in before gpushd grants it, and the spec is kept");

    let before = machine.main_pid(UNIT);
    machine.sh(&format!("systemctl restart {UNIT}"));
    assert_ne!(machine.main_pid(UNIT), before);
    let _ = machine.sh(&format!("cat {DIRECTORY}/spec.json"));

    // gpushd makes such a directory from within its sandbox, which has the rest read-only.
    machine.sh("systemctl start gpushd.service");
    let inside = format!("nsenter --mount --root --target {} --", machine.main_pid("gpushd.service"));
    machine.sh(&format!("{inside} sh -c 'mkdir /run/gpush-mps/g1 && echo {{}} > /run/gpush-mps/g1/spec.json'"));
    assert!(!machine.run(&format!("{inside} touch /var/lib/elsewhere")).status.success());
    machine.sh("ls /run/gpush-mps/g1/spec.json");
}

#[test]
fn what_it_says_is_told_apart_and_what_it_takes_is_counted() {
    let Some(machine) = machine("logs and accounts of MPS daemons") else { return };
    let daemon = start(&machine);
    answers(&machine);
    let _ = machine.journal_until("GPUSH_MPS=g5d1b03a2", "get_default_active_thread_percentage");
    let _ = machine.journal_until("_SYSTEMD_UNIT=gpushd-mps@g5d1b03a2.service", "Starting control daemon");

    // A journal that dies takes nothing along, and what is said afterwards arrives.
    let journal = machine.main_pid("systemd-journald.service");
    machine.kill(journal);
    machine.await_that("the journal is back", |machine| {
        !["0", &journal.to_string()].contains(&machine.property("systemd-journald.service", "MainPID").as_str())
    });
    control(&machine, "get_server_status 4711");
    let _ = machine.journal_until("GPUSH_MPS=g5d1b03a2", "get_server_status 4711");
    assert_eq!(machine.main_pid(UNIT), daemon);

    let group = machine.property(UNIT, "ControlGroup");
    assert_eq!(group, format!("/gpush.slice/gpush-mps.slice/{UNIT}"));
    for unit in [UNIT, "gpush-mps.slice", "gpush.slice"] {
        let used: u64 = machine.property(unit, "CPUUsageNSec").parse().expect("nanoseconds");
        assert!(used > 0, "{unit}");
        // Whether there is a figure is for the controllers that this machine has left.
        println!("{unit}: {} ms of CPU, memory {}", used / 1_000_000, machine.property(unit, "MemoryCurrent"));
    }

    // What needrestart would make of its snippet; it asks with the unit's name.
    let ask = r#"our %nrconf = (override_rc => {}); do "/etc/needrestart/conf.d/gpush.conf"; die $@ if $@;
                 print join ",", map { $nrconf{override_rc}{$_} } grep { $ARGV[0] =~ /$_/ } keys %{$nrconf{override_rc}}"#;
    machine.write("/srv/ask.pl", ask);
    assert_eq!(machine.sh(&format!("perl /srv/ask.pl {UNIT}")), "0");
    assert_eq!(machine.sh("perl /srv/ask.pl gpushd.service"), "");
}

/// What `agent/examples/systemd.rs` prints for each step, run as gpushd would be: in its unit's place.
fn steps(machine: &Machine, steps: &[&str]) -> Vec<String> {
    let quoted: Vec<String> = steps.iter().map(|step| format!("\"{step}\"")).collect();
    let run = format!("/opt/built/examples/systemd {}", quoted.join(" "));
    machine.write(
        "/etc/systemd/system/gpushd.service.d/steps.conf",
        format!(
            "[Service]\nType=oneshot\nRestart=no\nStandardOutput=truncate:/srv/steps\nStandardError=journal\nExecStart=\nExecStart={run}\n"
        ),
    );
    machine.sh("systemctl daemon-reload; systemctl start gpushd.service");
    let told = machine.sh("cat /srv/steps");
    println!("{told}");
    let told: Vec<String> = told.lines().map(str::to_owned).collect();
    assert_eq!(told.len(), steps.len(), "{told:?}");
    told
}

#[test]
fn gpushd_starts_and_stops_units_from_within_its_sandbox() {
    // An example: `cargo test --workspace` builds it, `cargo build` does not.
    if !program("gpushd").with_file_name("examples/systemd").exists() {
        println!("SKIPPED units over D-Bus: `cargo build --package gpushd --example systemd` was not run");
        return;
    }
    let Some(machine) = machine("units over D-Bus") else { return };
    machine.write(&format!("{DIRECTORY}/spec.json"), "{}");
    // After the stand-in of the template, by its name.
    machine.write(
        "/etc/systemd/system/gpushd-mps@none.service.d/without.conf",
        "[Service]\nExecStart=\nExecStart=/usr/bin/no-such-program\n",
    );
    machine.write("/etc/systemd/system/mute.service", "[Service]\nType=notify\nExecStart=/bin/true\n");
    let told = steps(
        &machine,
        &[
            "start gpushd-mps@g5d1b03a2.service",
            "start gpushd-mps@g5d1b03a2.service",
            "state gpushd-mps@g5d1b03a2.service",
            "kill gpushd-mps@g5d1b03a2.service KILL",
            "until-failed gpushd-mps@g5d1b03a2.service",
            "reset gpushd-mps@g5d1b03a2.service",
            "reset gpushd-mps@g5d1b03a2.service",
            "state gpushd-mps@g5d1b03a2.service",
            "stop gpushd-mps@g5d1b03a2.service",
            "start gpushd-mps@none.service",
            "start no-such.service",
            "stop no-such.service",
            "start mute.service",
            "state mute.service",
        ],
    );
    let said = |at: usize| told[at].split_once(": ").expect("a step and what came of it").1;
    assert_eq!(said(0), said(1), "what runs is left as it is");
    assert!(said(0).parse::<u32>().is_ok_and(|pid| pid > 1));
    let ends = |at: usize, end: &str| assert!(said(at).ends_with(end), "{} …{end}", told[at]);
    ends(2, &format!("main_pid: Some({}), exec_main_code: 0, exec_main_status: 0 }}", said(0)));
    ends(4, "result: \"signal\", main_pid: None, exec_main_code: 2, exec_main_status: 9 }");
    assert_eq!((said(5), said(6), said(8)), ("reset", "reset", "stopped"));
    assert!(said(7).contains("\"inactive\""), "{}", told[7]);
    ends(9, "ended with \"failed\"");
    ends(10, "not found. (org.freedesktop.systemd1.NoSuchUnit)");
    assert_eq!(said(11), "stopped", "nothing of it runs");
    ends(12, "ended with \"failed\"");
    assert!(said(13).contains("result: \"protocol\""), "{}", told[13]);
}

#[test]
fn a_bus_that_was_restarted_is_found_again() {
    if !program("gpushd").with_file_name("examples/systemd").exists() {
        println!("SKIPPED a bus that was restarted: `cargo build --package gpushd --example systemd` was not run");
        return;
    }
    let Some(machine) = machine("a bus that was restarted") else { return };
    machine.write(&format!("{DIRECTORY}/spec.json"), "{}");
    let told = steps(
        &machine,
        &[
            "state gpushd-mps@g5d1b03a2.service",
            "sh pkill -KILL -x dbus-daemon",
            "start gpushd-mps@g5d1b03a2.service",
            "sh pkill -KILL -x dbus-daemon",
            "stop gpushd-mps@g5d1b03a2.service",
        ],
    );
    assert!(!told.iter().any(|line| line.contains("error")), "{told:?}");
}
