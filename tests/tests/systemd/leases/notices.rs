//! Notices of the sandboxed gpushd: its unit permits it to write to the terminals of users, and to create their files.

use gpush_tests::machine::Machine;

use super::{ALICE, BOB, active, id, in_session, machine, none_left, start_in_session};

#[test]
fn holder_is_told_on_a_terminal_before_a_program_is_ended() {
    let Some(machine) = machine("notices on terminals") else { return };
    if !machine.run("command -v script").status.success() {
        println!("SKIPPED notices on terminals: the machine has no `script`");
        return;
    }
    // `script` gives its command a terminal, and writes what the terminal shows to a file.
    machine.sh("install -d -m 1777 /srv/shown");
    let run = "gpushctl run --whole -- sleep 1000";
    start_in_session(&machine, ALICE, "1", &format!("script -qfec \"tty; {run}\" /srv/shown/alice"));
    let lease = id(&active(&machine, 1)[0]);
    machine.await_that("the command runs", |machine| machine.run("pgrep -xf \"sleep 1000\"").status.success());
    let other = start_screen_of_bob(&machine);
    let file = machine.sh("tr '\\0' '\\n' < /proc/$(pgrep -xf 'sleep 1000')/environ | sed -n 's/^GPUSH_NOTICE=//p'");
    assert_eq!(file.trim(), format!("/run/gpush/notices/{lease}"));
    machine.sh(&format!("gpushctl lease end {lease} --reason 'exam starts' --kill --notice 1h"));
    let shown = |file: &str| machine.run(&format!("cat /srv/shown/{file}"));
    machine.await_that("the notice is shown", |machine| {
        machine
            .run(&format!("grep -q 'gpush: lease {lease} ends in 1h: exam starts (root)' /srv/shown/alice"))
            .status
            .success()
    });
    assert!(!String::from_utf8_lossy(&shown(&other).stdout).contains("gpush:"), "on the terminal of another user");
    // Only the holder reads the file.
    let notice = machine.sh(&in_session(ALICE, "2", &format!("cat /run/gpush/notices/{lease}")));
    assert!(notice.contains("\"notice_kind\":\"revoked\""), "{notice}");
    let refused = machine.run(&in_session(BOB, "3", &format!("cat /run/gpush/notices/{lease}")));
    assert!(!refused.status.success(), "{refused:?}");
    let refused = machine.run(&in_session(BOB, "4", "touch /run/gpush/notices/L99"));
    assert!(!refused.status.success(), "{refused:?}");
    machine.sh("pkill -KILL -xf 'sleep 1000'");
    none_left(&machine);
    hook_runs_without_privileges(&machine);
}

/// The hook prints who it is and what it reads. gpushd logs this.
fn hook_runs_without_privileges(machine: &Machine) {
    machine.write("/usr/local/bin/notice-hook", "#!/bin/sh\necho uid $(id -u); touch /srv/touched; cat\n");
    machine.sh("chmod 755 /usr/local/bin/notice-hook; printf '\\n[notify]\\ncommand = \"/usr/local/bin/notice-hook\"\\n' >> /etc/gpush/config.toml; gpushctl config reload");
    machine.sh(&in_session(ALICE, "5", "gpushctl lease request --whole --for 1h -o name"));
    let lease = id(&active(machine, 1)[0]);
    machine.sh(&format!("gpushctl lease end {lease} --reason 'exam starts'"));
    let log = machine.journal_until("-u gpushd.service", "the hook /usr/local/bin/notice-hook has run");
    let line = log.lines().rev().find(|line| line.contains("/usr/local/bin/notice-hook has run")).unwrap_or_default();
    assert!(line.contains("\"notice_kind\":\"revoked\"") && line.contains("exam starts"), "{line}");
    assert!(line.contains("uid ") && !line.contains("uid 0 "), "it must not run as root: {line}");
    assert!(!machine.run("test -e /srv/touched").status.success(), "it writes nothing on the host");
    none_left(machine);
}

/// Starts a terminal of another user. Returns the name of the file with what it shows.
fn start_screen_of_bob(machine: &Machine) -> String {
    start_in_session(machine, BOB, "9", "script -qfec \"tty; sleep 999\" /srv/shown/bob");
    machine.await_that("the other terminal", |machine| machine.run("grep -q pts /srv/shown/bob").status.success());
    "bob".to_owned()
}
