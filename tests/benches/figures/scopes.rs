//! Cost of leases with scopes, on a machine with a real systemd: one grant, its D-Bus calls, many
//! scopes, and idle scopes.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use gpush_tests::machine::Machine;

use crate::report::{Report, grouped, median};

/// Number of grants of each kind. A separate process requests each lease.
const GRANTS: usize = 200;
/// Number of rounds with and without device access, and of grants in each round.
const ROUNDS: usize = 5;
const GRANTS_OF_ROUND: usize = 40;
/// Number of scopes in the measurement of many scopes.
const MANY: usize = 1000;
/// Number of grants whose D-Bus calls are counted.
const COUNTED: usize = 10;
/// Number of slices whose limits gpushd reads for a grant.
const SLICES: usize = 4;
/// Number of concurrent leases while gpushd is idle.
const IDLE: usize = 64;
/// Duration of the idle measurement.
const PERIOD: Duration = Duration::from_secs(10);

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const CONFIG: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 64 }\n";

/// A program that starts N processes. Each process requests one lease, prints the duration of the
/// request in seconds, and then runs for S seconds.
const CLIENT: &str = r#"
use strict; use IO::Socket::UNIX; use Time::HiRes "time";
my ($bind, $count, $stay) = @ARGV; $| = 1;
for (1 .. $count) {
    my $child = fork // die;
    if (!$child) {
        my $to = IO::Socket::UNIX->new(Peer => "/run/gpush/gpushd.sock") or die "connect: $!";
        my $body = "{\"share\":{\"kind\":\"timeslice\"},\"wait\":\"60s\",\"bind_to\":\"$bind\",\"process\":$$}";
        my $begun = time;
        print $to "POST /v1/leases HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
            . "content-length: " . length($body) . "\r\n\r\n$body";
        $to->flush; local $/; my $answer = <$to>;
        die $answer unless $answer =~ /"kind":"$bind"/;
        printf "%.6f\n", time - $begun;
        sleep $stay; exit 0;
    }
    waitpid $child, 0 unless $stay;
}
1 while wait > 0;
"#;

/// Requests `count` leases one after the other. Returns the durations of the requests in seconds.
fn seconds(machine: &Machine, bind: &str, count: usize) -> Vec<f64> {
    let line = format!(
        "systemd-run --quiet --scope --slice=user-0.slice --unit=session-{bind}.scope perl /srv/client.pl {bind} {count} 0"
    );
    machine.sh(&line).lines().map(|line| line.parse().expect("seconds")).collect()
}

/// Returns the durations of grants with a scope in seconds: while the scope of a lease may open all devices, and while it
/// may open only those of its lease. The rounds alternate, so that a slow host slows both.
fn without_and_with_device_access(machine: &Machine) -> (Vec<f64>, Vec<f64>) {
    let (mut without, mut with) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        machine.sh("gpushctl enforce off");
        without.extend(seconds(machine, "scope", GRANTS_OF_ROUND));
        machine.sh("gpushctl enforce on");
        with.extend(seconds(machine, "scope", GRANTS_OF_ROUND));
    }
    machine.sh("gpushctl enforce off");
    (without, with)
}

/// Requests `count` leases with scopes, and waits until the leases have ended. Returns the
/// durations of the requests in seconds, the total duration, and how many scopes are left.
fn create_and_end(machine: &Machine, count: usize) -> (Vec<f64>, Duration, usize) {
    let begun = Instant::now();
    let each = seconds(machine, "scope", count);
    let all = begun.elapsed();
    // Wait until systemd has reported to gpushd that the scopes have ended. `all` does not include
    // this wait.
    machine
        .await_that("the leases have ended", |machine| machine.sh("gpushctl lease list -o name | wc -l").trim() == "0");
    (each, all, scopes(machine))
}

/// Returns the number of D-Bus round trips of gpushd during [`COUNTED`] grants. gpushd reads the limits of all slices of a
/// grant in one round trip. Does not count `RemoveMatch`, because no grant waits for that call.
fn calls(machine: &Machine) -> usize {
    machine.sh(
        "systemd-run --quiet --unit=monitor --property=StandardOutput=file:/srv/monitor busctl monitor --json=short",
    );
    let _ = machine.journal_until("-u dbus.service", "became a monitor");
    seconds(machine, "scope", COUNTED);
    let started = r#"'"member":"StartTransientUnit".*gpulease-'"#;
    machine.await_that("the monitor has seen all calls", |machine| {
        machine.sh(&format!("grep -c {started} /srv/monitor || true")) == COUNTED.to_string()
    });
    let counted = |members: &str| -> usize {
        let counted = machine.sh(&format!(
            "sender=$(grep -m1 {started} /srv/monitor | grep -o '\"sender\":\"[^\"]*\"'); \
             grep '\"type\":\"method_call\"' /srv/monitor | grep -F \"$sender\" | grep -c {members} || true"
        ));
        counted.trim().parse().expect("a number")
    };
    let readings = counted(r#"'"member":"GetAll"'"#);
    let others = counted(r#"-v -e '"member":"RemoveMatch"' -e '"member":"GetAll"'"#);
    machine.sh("systemctl stop monitor.service");
    others + readings / SLICES
}

fn scopes(machine: &Machine) -> usize {
    let listed = machine.sh("systemctl list-units --all --no-legend 'gpulease-*.scope' | wc -l");
    listed.trim().parse().expect("a number")
}

/// Returns the nanoseconds of CPU time that gpushd and its driver worker have used.
fn used(machine: &Machine) -> u64 {
    machine.property("gpushd.service", "CPUUsageNSec").parse().expect("nanoseconds")
}

/// Returns how often each thread of gpushd and of its driver worker has waited (voluntary context
/// switches).
fn waits(machine: &Machine) -> BTreeMap<String, u64> {
    let all = "for pid in $(cat /sys/fs/cgroup/system.slice/gpushd.service/cgroup.procs); do cat /proc/$pid/task/*/status; done";
    let each = "awk '/^Pid:/ { pid = $2 } /^voluntary_ctxt_switches/ { print pid, $2 }'";
    let listed = machine.sh(&format!("{all} | {each}"));
    let pair =
        |line: &str| line.split_once(' ').map(|(thread, count)| (thread.to_owned(), count.parse().expect("a number")));
    listed.lines().filter_map(pair).collect()
}

/// Returns the processor time in percent of a core, and the wake-ups per second, while gpushd is
/// idle.
#[expect(clippy::cast_precision_loss, reason = "small numbers")]
fn idle(machine: &Machine) -> (f64, f64) {
    std::thread::sleep(Duration::from_secs(2));
    let (used_before, waits_before) = (used(machine), waits(machine));
    std::thread::sleep(PERIOD);
    let used = used(machine) - used_before;
    // Leave out threads that have ended: these are threads for blocking calls, which end when they
    // have nothing to do.
    let since = |(thread, count): (&String, &u64)| count - waits_before.get(thread).unwrap_or(&0);
    let waits: u64 = waits(machine).iter().map(since).sum();
    (used as f64 / PERIOD.as_secs_f64() / 1e7, waits as f64 / PERIOD.as_secs_f64())
}

/// Measures the cost of leases with scopes.
pub(crate) fn run() -> Report {
    let mut report = Report::new(
        "Scopes of leases",
        &format!(
            "The benchmark runs in a container with Debian and systemd. First, {GRANTS} processes request leases one \
             after the other. The first lease of a process is bound to the process, the second has a scope. The table \
             shows medians. Then {ROUNDS} rounds of {GRANTS_OF_ROUND} grants run with and without `gpushctl enforce on`: \
             the scope of such a lease opens only its devices. Then {} processes request a lease with a scope. A D-Bus monitor counts the calls of gpushd in {COUNTED} grants. \
             Finally, {IDLE} processes keep leases with scopes for {} s, and the benchmark counts wake-ups: how often \
             a thread of gpushd or of its driver worker waits.",
            grouped(MANY),
            PERIOD.as_secs()
        ),
        &["", "ms"],
    );
    let Some(machine) = Machine::boot("figures of scopes") else { return report };
    machine.install();
    machine.simulated_host(HOST);
    machine.write("/etc/gpush/config.toml", CONFIG);
    machine.write("/srv/client.pl", CLIENT);
    machine.sh("systemctl start gpushd.service");
    machine.await_that("the GPU is read", |machine| machine.run("gpushctl run --timeslice -- true").status.success());
    let process = median(seconds(&machine, "process", GRANTS));
    let (each, all, left) = create_and_end(&machine, GRANTS);
    let (without, with) = without_and_with_device_access(&machine);
    let (without, with) = (median(without), median(with));
    let (_, of_many, left_of_many) = create_and_end(&machine, MANY);
    let calls = calls(&machine);
    machine.await_that("no scope is left", |machine| scopes(machine) == 0);
    let (_, waits_without) = idle(&machine);
    machine.sh(&format!(
        "systemd-run --quiet --unit=idle --slice=user-0.slice sh -c 'exec systemd-run --scope --quiet --slice=user-0.slice --unit=session-idle.scope \
         perl /srv/client.pl scope {IDLE} 1000'"
    ));
    machine.await_that("all leases are granted", |machine| scopes(machine) == IDLE);
    let (share, waits_with) = idle(&machine);

    let ms = |seconds: f64| format!("{:.2}", seconds * 1e3);
    report.rows = vec![
        vec!["grant, bound to the process".to_owned(), ms(process)],
        vec!["grant, with a scope".to_owned(), ms(median(each))],
        vec!["grant, with a scope, between rounds with device access".to_owned(), ms(without)],
        vec!["grant, with a scope and device access".to_owned(), ms(with)],
        vec![format!("{GRANTS} scopes created and ended"), ms(all.as_secs_f64())],
        vec![format!("{MANY} scopes created and ended"), ms(of_many.as_secs_f64())],
    ];
    report.target(
        "D-Bus round trips of a grant with a scope, beyond one without",
        "at most 3",
        &format!("{calls} in {COUNTED} grants"),
        calls <= 3 * COUNTED,
    );
    let more = (with - without) * 1e3;
    let what = "a grant with device access, beyond one with a scope";
    report.target(what, "at most 2 ms", &format!("{more:.2} ms"), more <= 2.0);
    report.target(&format!("scopes left of {GRANTS}"), "0", &left.to_string(), left == 0);
    report.target(&format!("scopes left of {MANY}"), "0", &left_of_many.to_string(), left_of_many == 0);
    let measured = format!("{share:.2} %");
    report.target(&format!("processor with {IDLE} idle leases"), "at most 0.3 % of a core", &measured, share <= 0.3);
    // If gpushd polled each lease once a second, there would be 64 more wake-ups per second.
    let measured = format!("{waits_with:.1} per second, without leases {waits_without:.1}");
    let polls = waits_with - waits_without;
    report.target(&format!("wake-ups with {IDLE} idle leases"), "no polling: at most 2 more", &measured, polls <= 2.0);
    report
}
