//! Before systemd moves the caller, the kernel gives the pid of the caller to another process.

use gpush_tests::machine::Machine;
use serde_json::Value;

use super::{ALICE, BOB, cgroup, in_session, monitor, none_left, start_in_session, with_gpush};

/// A Perl program. When `/srv/ask` exists, its child requests a lease with a scope, as one user. When `/srv/recycle`
/// exists, the child is killed, and a process of another user gets its pid.
const RECYCLE: &str = r#"
use strict; use IO::Socket::UNIX; use POSIX ();
my ($caller, $stranger) = @ARGV;
sub become { POSIX::setgid($_[0]); POSIX::setuid($_[0]); }
my $child = fork // die;
if (!$child) {
    become($caller);
    select undef, undef, undef, 0.01 until -e "/srv/ask";
    my $to = IO::Socket::UNIX->new(Peer => "/run/gpush/gpushd.sock") or die "connect: $!";
    my $body = "{\"share\":{\"kind\":\"timeslice\"},\"bind_to\":\"scope\",\"process\":$$}";
    print $to "POST /v1/leases HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
        . "content-length: " . length($body) . "\r\n\r\n$body";
    $to->flush; sleep 1000;
}
open my $ready, ">", "/srv/ready.new"; print $ready $child; close $ready;
rename "/srv/ready.new", "/srv/ready";
select undef, undef, undef, 0.01 until -e "/srv/recycle";
kill 9, $child; waitpid $child, 0;
my $next = 0;
until ($next == $child) {
    waitpid $next, 0 if $next;
    open my $last, ">", "/srv/proc/sys/kernel/ns_last_pid" or die "ns_last_pid: $!";
    print $last $child - 1; close $last or die "ns_last_pid: $!";
    $next = fork // die;
    if (!$next) {
        POSIX::_exit(0) if $$ != $child;
        become($stranger);
        exec "sleep", "1003";
    }
}
open my $done, ">", "/srv/stranger.new"; print $done $next; close $done;
rename "/srv/stranger.new", "/srv/stranger";
sleep 1000;
"#;

/// Returns the messages that the monitor of the bus has written.
fn messages(machine: &Machine) -> Vec<Value> {
    let written = machine.sh("cat /srv/monitor");
    // The last line may be incomplete.
    written.lines().filter_map(|line| serde_json::from_str(line).ok()).collect()
}

/// Returns gpushd's call that starts a scope.
fn call(messages: &[Value]) -> Option<&Value> {
    let is_call = |one: &&Value| one["type"] == "method_call" && one["member"] == "StartTransientUnit";
    let starts_scope =
        |one: &&Value| one["payload"]["data"][0].as_str().is_some_and(|unit| unit.starts_with("gpulease-"));
    messages.iter().filter(is_call).find(starts_scope)
}

/// Returns systemd's answer to that call.
fn answer(messages: &[Value]) -> Option<&Value> {
    let call = call(messages)?;
    messages.iter().find(|one| one["reply_cookie"] == call["cookie"] && one["destination"] == call["sender"])
}

/// While systemd is suspended, gpushd calls it, the caller of gpushd ends, and another process gets the caller's pid.
/// Then systemd handles gpushd's call. Before systemd 255, this call contains only the pid, so the test needs Debian
/// 13, which has a newer systemd. gpushd may give up the lease before systemd answers, so the test waits for the answer
/// of systemd.
#[test]
fn process_that_gets_the_pid_of_the_caller_is_not_moved() {
    let Some(machine) = Machine::boot_with_slurm("a reused pid").map(with_gpush) else { return };
    // /proc/sys of the machine is read-only. So mount another one.
    machine.sh("mkdir /srv/proc; mount -t proc proc /srv/proc");
    machine.write("/srv/recycle.pl", RECYCLE);
    // gpushd must connect to systemd before systemd is suspended.
    machine.sh(&in_session(ALICE, "0", "gpushctl run --timeslice -- true"));
    none_left(&machine);
    monitor(&machine);
    start_in_session(&machine, 0, "1", &format!("exec perl /srv/recycle.pl {ALICE} {BOB}"));
    let exists =
        |file: &str| machine.await_that(file, |machine| machine.run(&format!("test -e {file}")).status.success());
    exists("/srv/ready");
    machine.stop_init();
    machine.sh("touch /srv/ask");
    machine.await_that("gpushd has called systemd", |machine| call(&messages(machine)).is_some());
    machine.sh("touch /srv/recycle");
    exists("/srv/stranger");
    let pid = machine.sh("cat /srv/stranger");
    assert_eq!(pid, machine.sh("cat /srv/ready"), "the other process has the pid of the caller");
    assert!(answer(&messages(&machine)).is_none(), "systemd handles the call after the pid was reused");
    machine.continue_init();
    machine.await_that("systemd has answered", |machine| answer(&messages(machine)).is_some());
    let messages = messages(&machine);
    let process = call(&messages).expect("the call")["payload"]["data"][2].to_string();
    assert!(process.contains("PIDFDs") && !process.contains("\"PIDs\""), "{process}");
    let answer = answer(&messages).expect("the answer");
    assert_eq!(answer["error_name"], "org.freedesktop.DBus.Error.UnixProcessIdUnknown", "{answer}");
    none_left(&machine);
    // The process has written its pid before it becomes `sleep`.
    let command = format!("cat /proc/{pid}/cmdline | tr '\\0' ' '");
    machine.await_that("the other process runs", |machine| machine.sh(&command) == "sleep 1003");
    assert_eq!(cgroup(&machine, &pid), "/user.slice/user-0.slice/session-1.scope");
}
