//! The cost of scopes: D-Bus calls of a grant, and many scopes.

use std::time::Instant;

use gpush_tests::{machine::Machine, random::number};

use super::{ALICE, in_session, machine, monitor, none_left};

/// Number of processes at the same time in the test of many scopes.
const MANY: usize = 32;

/// A Perl program that starts COUNT processes, at most MANY at the same time. Each process requests a lease with a
/// scope. When it has the lease, it is killed.
const SCOPES: &str = r#"
use strict; use IO::Socket::UNIX; $| = 1;
my ($count, $most) = @ARGV; my $running = 0;
for (1 .. $count) {
    if ($running == $most) { wait; $running-- }
    my $child = fork // die; $running++;
    next if $child;
    my $to = IO::Socket::UNIX->new(Peer => "/run/gpush/gpushd.sock") or die "connect: $!";
    my $body = "{\"share\":{\"kind\":\"timeslice\"},\"wait\":\"60s\",\"bind_to\":\"scope\",\"process\":$$}";
    print $to "POST /v1/leases HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        . "content-length: " . length($body) . "\r\n\r\n$body";
    $to->flush; local $/; my $answer = <$to>;
    print $answer =~ /"kind":"scope"/ ? "granted\n" : $answer;
    kill 9, $$;
}
1 while wait > 0;
"#;

/// The default is 150 scopes. `GPUSH_TEST_SCOPES` sets another number.
#[test]
fn scopes_take_few_calls_and_leave_nothing() {
    let Some(machine) = machine("many scopes") else { return };
    grant_with_a_scope_takes_few_round_trips(&machine);
    many_scopes_are_created_and_all_end(&machine);
}

/// A grant makes two D-Bus calls for its scope: one to the bus, which adds a match rule, and one to systemd. systemd
/// reports the end of its job with a signal. Before that, gpushd reads the limits of four slices at the same time, which also
/// shows whether the connection is alive.
fn grant_with_a_scope_takes_few_round_trips(machine: &Machine) {
    const GRANTS: usize = 5;
    // The first grant also makes the calls that set up the D-Bus connection.
    let run = in_session(ALICE, "1", "for i in 1 2 3 4 5; do gpushctl run --whole -- true; done");
    machine.sh(&in_session(ALICE, "0", "gpushctl run --whole -- true"));
    none_left(machine);
    monitor(machine);
    machine.sh(&run);
    none_left(machine);
    // systemd and the monitor also use the bus. So count only the calls of gpushd.
    let calls_of_gpushd = |machine: &Machine| {
        machine.sh(
            "sender=$(grep -m1 '\"member\":\"StartTransientUnit\"' /srv/monitor | grep -o '\"sender\":\"[^\"]*\"'); \
             [ -z \"$sender\" ] || grep '\"type\":\"method_call\"' /srv/monitor | grep -F \"$sender\" | \
             grep -o '\"member\":\"[A-Za-z]*\"' | cut -d'\"' -f4",
        )
    };
    machine.await_that("the calls are seen", |machine| {
        calls_of_gpushd(machine).lines().filter(|line| *line == "StartTransientUnit").count() == GRANTS
    });
    let all = calls_of_gpushd(machine);
    let calls = |member: &str| all.lines().filter(|line| *line == member).count();
    println!("{all}");
    assert_eq!(calls("AddMatch"), GRANTS, "{all}");
    // No grant waits for a RemoveMatch call, so the last ones may be missing. Do not count them.
    assert_eq!(calls("GetAll"), 4 * GRANTS, "{all}");
    assert_eq!(all.lines().count() - calls("RemoveMatch") - calls("GetAll"), 2 * GRANTS, "{all}");
    machine.sh("systemctl stop monitor.service");
}

fn many_scopes_are_created_and_all_end(machine: &Machine) {
    let count = usize::try_from(number("GPUSH_TEST_SCOPES", 150)).expect("a number");
    machine.write("/srv/scopes.pl", SCOPES);
    let descriptors = || {
        let count = machine.sh(&format!("ls /proc/{}/fd | wc -l", machine.main_pid("gpushd.service")));
        count.parse::<usize>().expect("a number")
    };
    // Root has no quota, so new requests wait until earlier leases have ended.
    let run = |count: usize| {
        let printed =
            machine.sh(&in_session(0, &format!("of-{count}"), &format!("perl /srv/scopes.pl {count} {MANY}")));
        let granted = printed.lines().filter(|line| *line == "granted").count();
        assert_eq!(granted, count, "{}", printed.replace("granted\n", ""));
        none_left(machine);
    };
    // Each lease then also has a list of devices, for which systemd writes files.
    machine.sh("gpushctl enforce on");
    run(MANY);
    let (before, files_before, begun) = (descriptors(), files_of_systemd(machine), Instant::now());
    run(count);
    println!("{count} scopes, {MANY} at a time, in {:.1} s", begun.elapsed().as_secs_f64());
    assert_eq!(machine.sh("systemctl list-units --all --no-legend 'gpulease-*.scope'"), "");
    // Before, a connection may still have been open.
    machine.await_that("no descriptor is left", |_| descriptors() <= before);
    machine.await_that("no file of systemd is left", |machine| files_of_systemd(machine) == files_before);
}

/// Returns the files of systemd about units. The journal has files of its own.
fn files_of_systemd(machine: &Machine) -> String {
    machine.sh("find /run/systemd -path /run/systemd/journal -prune -o -print | sort")
}
