//! Forged cgroups, processes that change their user, and processes that fork continuously.

use gpush_tests::machine::Machine;

use super::{
    ALICE, BOB, CGROUPS, active, id, in_session, leases, machine, none_left, on_gpu_0, pid_of, scopes,
    start_in_session, text,
};

/// A Perl client that first connects and then sends its request. With `other`, it requests a lease for another process.
/// With `passed`, it uses a connection of a process that has ended. With `user`, it changes its uid before it sends the
/// request.
const CLIENT: &str = r#"
use strict; use IO::Socket::UNIX; use POSIX ();
sub connection { IO::Socket::UNIX->new(Peer => "/run/gpush/gpushd.sock") or die "connect: $!" }
sub ask {
    my ($to, $more) = @_;
    my $body = "{\"share\":{\"kind\":\"timeslice\"},\"bind_to\":\"scope\"$more}";
    print $to "POST /v1/leases HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        . "content-length: " . length($body) . "\r\n\r\n$body";
    $to->flush; local $/; my $answer = <$to>; print "$answer\n";
}
sub cgroup { open my $file, "<", "/proc/$_[0]/cgroup" or return; print grep /^0::/, <$file> }
$| = 1;
if ($ARGV[0] eq "other") {
    my $child = fork // die; if (!$child) { exec "sleep", "1003" }
    ask(connection(), ",\"process\":$child"); cgroup($child); kill 9, $child;
} elsif ($ARGV[0] eq "passed") {
    my $to = connection(); pipe(my $end, my $alive) or die;
    my $child = fork // die;
    if ($child) { POSIX::_exit(0) }
    # The end of the pipe tells that the process which connected has ended.
    close $alive; <$end>; select undef, undef, undef, 0.2;
    ask($to, ""); cgroup("self"); open my $done, ">", "/srv/passed.done";
} elsif ($ARGV[0] eq "user") {
    my $to = connection();
    # gpushd identifies the peer when it accepts: an answered request of another connection comes after that.
    ask(connection(), ",\"count\":65");
    POSIX::setgid($ARGV[1]); POSIX::setuid($ARGV[1]);
    ask($to, ""); cgroup("self");
}
"#;

#[test]
fn processes_cannot_escape_the_binding_of_their_lease() {
    let Some(machine) = machine("attacks on the bindings of leases") else { return };
    forged_cgroups_below_a_delegated_one_bind_nothing_else(&machine);
    only_the_calling_process_is_moved(&machine);
    process_outside_of_the_scope_is_unattributed_or_unleased(&machine);
    process_that_forks_continuously_ends_with_its_lease(&machine);
}

fn forged_cgroups_below_a_delegated_one_bind_nothing_else(machine: &Machine) {
    let root = machine.sh(&format!("echo {CGROUPS}"));
    for forged in
        ["gpulease.slice/gpulease-0.slice/gpulease-0a1b2c3d-1.scope", "slurmstepd.scope/job_1", "docker-0.scope"]
    {
        // The user creates a cgroup below the cgroup that systemd has delegated to the user, and enters it.
        let script = format!(
            "#!/bin/sh\nset -e\nown={root}$(sed -n s/^0:://p /proc/self/cgroup)\nmkdir -p $own/{forged}\necho $$ > $own/{forged}/cgroup.procs\nexec gpushctl run --timeslice -- sleep 1000\n"
        );
        machine.write("/srv/forge", script);
        machine.sh(&format!(
            "chmod 755 /srv/forge; systemd-run --quiet --unit=forger --property=Delegate=yes --uid={ALICE} /srv/forge"
        ));
        let all = active(machine, 1);
        assert_eq!(text(&all[0]["binding"], "cgroup"), "/system.slice/forger.service", "{forged}");
        machine.sh("systemctl stop forger.service");
        none_left(machine);
    }
    // A user cannot move a process into the scope of another lease, even if the lease belongs to the same user.
    start_in_session(machine, BOB, "1", "exec gpushctl run --timeslice -- sleep 1000");
    let path = text(&active(machine, 1)[0]["binding"], "cgroup").to_owned();
    let members = || machine.sh(&format!("cat {root}{path}/cgroup.procs"));
    let before = members();
    assert_eq!(before.lines().count(), 1, "the scope has the command: {before}");
    for (session, uid) in [("2", BOB), ("3", ALICE)] {
        let enter = format!("echo $$ > {root}{path}/cgroup.procs; echo status $?; cat /proc/$$/cgroup");
        let entered = machine.run(&in_session(uid, session, &enter));
        let (printed, error) = (String::from_utf8_lossy(&entered.stdout), String::from_utf8_lossy(&entered.stderr));
        assert!(error.contains("Permission denied") && !printed.contains("status 0"), "{entered:?}");
        assert!(printed.contains(&format!("/session-{session}.scope")) && !printed.contains(&path), "{entered:?}");
        assert_eq!(members(), before);
    }
    machine.sh("pkill -KILL -x sleep");
    none_left(machine);
}

fn only_the_calling_process_is_moved(machine: &Machine) {
    machine.write("/srv/client.pl", CLIENT);
    // The caller requests the lease for another process of the same user.
    let printed = machine.sh(&in_session(ALICE, "1", "perl /srv/client.pl other"));
    assert!(
        printed.contains("it is not the process that sent the request") && printed.contains("session-1.scope"),
        "{printed}"
    );
    // The process that opened the connection has ended. Another process may now have its pid.
    machine.sh("chmod 1777 /srv");
    start_in_session(machine, ALICE, "2", "perl /srv/client.pl passed");
    machine.await_that("the request was answered", |machine| machine.run("test -e /srv/passed.done").status.success());
    let printed = machine.sh("cat /srv/2");
    assert!(
        printed.contains("has ended, so no lease can be bound to it") && printed.contains("session-2.scope"),
        "{printed}"
    );
    // A process connects as root, changes to another user, and sends the request. The lease belongs to root, so gpushd
    // does not bind it to this process and does not move the process.
    let printed = machine.sh(&in_session(0, "3", &format!("perl /srv/client.pl user {BOB}")));
    assert!(
        printed.contains("has changed its user since it connected") && printed.contains("session-3.scope"),
        "{printed}"
    );
    assert_eq!(leases(machine), [] as [serde_json::Value; 0]);
    assert_eq!(scopes(machine), [] as [&str; 0]);
}

fn process_outside_of_the_scope_is_unattributed_or_unleased(machine: &Machine) {
    start_in_session(machine, ALICE, "1", "exec gpushctl run --whole -- sleep 1000");
    let lease = id(&active(machine, 1)[0]);
    let inside = pid_of(machine, "sleep 1000");
    machine.sh(&format!("systemd-run --quiet --unit=same --uid={ALICE} sleep 1001; systemd-run --quiet --unit=other --uid={BOB} sleep 1002"));
    let (same, other) = (machine.main_pid("same.service").to_string(), machine.main_pid("other.service").to_string());
    for pid in [&inside, &same, &other] {
        on_gpu_0(machine, pid);
    }
    let one = |pid: &str| {
        let pid: u64 = pid.parse().expect("a pid");
        let all: serde_json::Value = serde_json::from_str(&machine.sh("gpushctl ps --json")).expect("processes");
        let all = all["gpu_processes"].as_array().expect("processes").clone();
        all.into_iter().find(|one| one["pid"] == pid).unwrap_or_default()
    };
    machine.await_that("all are listed", |_| !one(&other).is_null() && !one(&same).is_null());
    let (inside, same, other) = (one(&inside), one(&same), one(&other));
    assert_eq!(
        (&inside["lease_id"], &inside["unattributed"], &inside["unleased"]),
        (&lease.as_str().into(), &().into(), &().into())
    );
    assert_eq!(
        (&same["lease_id"], &same["unattributed"], &same["unleased"]),
        (&lease.as_str().into(), &true.into(), &().into())
    );
    assert_eq!((&other["lease_id"], &other["unleased"]), (&().into(), &"its user holds no lease".into()));
    // The lease waits for both processes of its user. gpushd never ends the process that is unattributed.
    machine.sh(&format!("gpushctl lease end {lease} --reason test --kill --notice 0s --grace 0s"));
    machine.await_that("the scope is empty", |machine| scopes(machine).is_empty());
    let left = leases(machine);
    assert!(left[0]["state"] == "releasing" && left[0]["waits_for"].to_string().contains("(sleep)"), "{left:?}");
    assert!(machine.run("systemctl is-active same.service").status.success());
    machine.sh("systemctl stop same.service other.service");
    none_left(machine);
}

/// A process that continuously starts its successor and ends may survive signals to single processes. gpushd asks
/// systemd to kill all processes of the scope, also those of other users.
fn process_that_forks_continuously_ends_with_its_lease(machine: &Machine) {
    machine.sh("install -m 4755 $(command -v sleep) /srv/rootsleep");
    machine.write("/srv/fork.sh", "/srv/rootsleep 1001 &\nexec perl -e \"while (1) { exit if fork }\"\n");
    start_in_session(machine, BOB, "1", "exec gpushctl run --timeslice -- sh /srv/fork.sh");
    let all = active(machine, 1);
    let (lease, unit) = (id(&all[0]), text(&all[0]["binding"], "unit"));
    machine.await_that("the programs run", |machine| {
        machine.run("pgrep -x perl").status.success() && machine.run("pgrep -x rootsleep").status.success()
    });
    machine.sh(&format!("gpushctl lease end {lease} --reason test --kill --notice 0s --grace 0s"));
    none_left(machine);
    assert!(!machine.run("pgrep -x perl").status.success() && !machine.run("pgrep -x rootsleep").status.success());
    let log = machine.sh("journalctl -u gpushd.service --no-pager");
    assert!(log.contains(&format!("sent SIGKILL to all processes of {unit}")), "{log}");
}
