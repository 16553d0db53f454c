//! `gpushctl doctor` on a real systemd: the commands in its hints solve the problems.

use gpush_tests::machine::Machine;
use serde_json::Value;

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";

/// Runs the doctor, and returns the findings that are not ok.
fn bad(machine: &Machine) -> Vec<Value> {
    let printed = machine.run("gpushctl doctor --only agent,disk --json").stdout;
    let mut report: Value = serde_json::from_slice(&printed).expect("a JSON document");
    let findings = report["checks"].as_array_mut().expect("a list of findings");
    findings.drain(..).filter(|finding| finding["severity"] != "ok").collect()
}

/// Returns the only finding that is not ok, and checks its message.
fn only(machine: &Machine, message: &str) -> Value {
    let bad = bad(machine);
    assert!(bad.len() == 1 && bad[0]["message"].as_str().is_some_and(|text| text.contains(message)), "{bad:#?}");
    bad[0].clone()
}

/// Runs the first `count` commands of a hint.
fn follow(machine: &Machine, finding: &Value, count: usize) {
    let hint = finding["hint"].as_str().expect("a hint");
    hint.split('`').skip(1).step_by(2).take(count).for_each(|command| drop(machine.sh(command)));
}

/// Faults: for a deleted socket file, the hint was a command that does nothing. The doctor started a stopped gpushd.
/// If gpushd failed at each start, the doctor only reported that it did not answer.
#[test]
fn hints_about_units_and_the_state_directory_work() {
    let Some(machine) = Machine::boot("hints of the doctor") else { return };
    machine.install();
    machine.simulated_host(HOST);
    machine.sh("systemctl start gpushd.service");
    assert_eq!(bad(&machine), [] as [Value; 0]);

    machine.sh("rm /run/gpush/gpushd.sock");
    let user = "setpriv --reuid=65534 --regid=65534 --clear-groups gpushctl status";
    let printed = String::from_utf8_lossy(&machine.run(user).stderr).replace("\n        ", " ");
    assert!(printed.contains("`systemctl restart gpushd.socket`"), "{printed}");
    follow(&machine, &only(&machine, "/run/gpush/gpushd.sock is missing"), 1);
    machine.sh(user);

    machine.sh("systemctl stop gpushd.service");
    let stopped = only(&machine, "gpushd is stopped; it starts with the first request");
    assert_eq!(machine.property("gpushd.service", "ActiveState"), "inactive", "the doctor starts nothing");
    follow(&machine, &stopped, 1);
    assert_eq!(machine.property("gpushd.service", "ActiveState"), "active");

    let read_only = "mount -t tmpfs -o ro,mode=700 tmpfs /var/lib/gpush";
    fail_and_follow(&machine, read_only, "read-only", "mounted read-only");
    let replaced = "umount /var/lib/gpush; mv /var/lib/gpush /var/lib/kept; touch /var/lib/gpush";
    fail_and_follow(&machine, replaced, "STATE_DIRECTORY", "is not a directory");

    // Fault: if an administrator masked only the service, systemd reset the first connection to the socket, and the
    // message did not name `systemctl unmask`.
    machine.sh("systemctl start gpushd.service && systemctl mask --now gpushd.service 2>&1");
    for attempt in ["first", "second"] {
        let printed = String::from_utf8_lossy(&machine.run(user).stderr).replace("\n        ", " ");
        assert!(printed.contains("`systemctl unmask gpushd.service`"), "{attempt} attempt: {printed}");
    }
    machine.sh("systemctl unmask gpushd.service 2>&1 && systemctl start gpushd");
    machine.sh(user);

    // Masked units, as after the removal of an earlier package.
    let units = "gpushd.service gpushd.socket gpushd-admin.socket";
    machine.sh(&format!("systemctl stop {units} && systemctl mask {units} 2>&1"));
    let unmask = format!("`systemctl unmask {units}`");
    let printed = String::from_utf8_lossy(&machine.run(user).stderr).replace("\n        ", " ");
    assert!(printed.contains(&unmask) && printed.contains("`systemctl start gpushd`"), "{printed}");
    let masked = only(&machine, "are masked");
    assert!(masked["hint"].as_str().is_some_and(|hint| hint.contains(&unmask)), "{masked}");
    follow(&machine, &masked, 2);
    machine.sh(user);

    machine.write("/etc/systemd/system/gpushd.service.d/log.conf", "[Service]\nEnvironment=GPUSH_LOG=inof\n");
    let failing = fail(&machine, "systemctl daemon-reload");
    assert_eq!(failing.len(), 1, "{failing:#?}");
    assert!(cause(&failing[0]).contains("inof"), "{failing:#?}");
}

/// Plants a fault that ends gpushd at each start, and returns the findings after a restart.
fn fail(machine: &Machine, fault: &str) -> Vec<Value> {
    machine.sh(&format!("systemctl stop gpushd.service && ({fault}) && systemctl start --no-block gpushd.service"));
    machine.await_that("gpushd has ended", |machine| machine.property("gpushd.service", "NRestarts") != "0");
    let bad = bad(machine);
    assert!(bad[0]["message"].as_str().is_some_and(|text| text.contains("gpushd exits")), "{bad:#?}");
    bad
}

/// Plants a fault of the state directory, checks the line of the log and the message, and follows the hint.
fn fail_and_follow(machine: &Machine, fault: &str, line: &str, message: &str) {
    let bad = fail(machine, fault);
    let [failing, directory] = &bad[..] else { panic!("{bad:#?}") };
    assert!(cause(failing).contains(line), "{failing:#?}");
    assert!(directory["message"].as_str().is_some_and(|text| text.contains(message)), "{directory:#?}");
    follow(machine, directory, 2);
    assert_eq!(machine.property("gpushd.service", "ActiveState"), "active");
}

/// Returns the last error in the log, as a finding shows it.
fn cause(failing: &Value) -> &str {
    failing["causes"][1].as_str().unwrap_or_default()
}
