//! Cost of leases with scopes, on a machine with a real systemd: one grant, many scopes, and idle
//! scopes.

use std::time::{Duration, Instant};

use gpush_tests::machine::Machine;

use crate::report::{Report, median};

/// Number of grants of each kind. A separate process requests each lease.
const GRANTS: usize = 200;
/// Number of concurrent leases while gpushd is idle.
const IDLE: usize = 64;
/// Duration of the idle measurement.
const PERIOD: Duration = Duration::from_secs(10);

const HOST: &str = "[[gpu]]\nmodel = \"l4\"\n";
const CONFIG: &str = "[[gpu]]\nmatch = [\"0\"]\nmode = \"timeslice\"\ntimeslice = { replicas = 64 }\n";

/// Starts N processes that request one lease each. Prints the seconds of each request. Each process
/// then runs for S seconds.
const CLIENT: &str = r#"
use strict; use IO::Socket::UNIX; use Time::HiRes "time";
my ($bind, $count, $stay) = @ARGV; $| = 1;
for (1 .. $count) {
    my $child = fork // die;
    if (!$child) {
        my $to = IO::Socket::UNIX->new(Peer => "/run/gpush/gpushd.sock") or die "connect: $!";
        my $body = "{\"share\":{\"kind\":\"timeslice\"},\"wait\":{\"seconds\":60},\"bind_to\":\"$bind\",\"process\":$$}";
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

fn seconds(machine: &Machine, bind: &str) -> Vec<f64> {
    let line = format!(
        "systemd-run --quiet --scope --slice=user-0.slice --unit=session-{bind}.scope perl /srv/client.pl {bind} {GRANTS} 0"
    );
    machine.sh(&line).lines().map(|line| line.parse().expect("seconds")).collect()
}

fn scopes(machine: &Machine) -> usize {
    let listed = machine.sh("systemctl list-units --all --no-legend 'gpulease-*.scope' | wc -l");
    listed.trim().parse().expect("a number")
}

/// Returns the nanoseconds of CPU time that gpushd and its driver worker have used.
fn used(machine: &Machine) -> u64 {
    machine.property("gpushd.service", "CPUUsageNSec").parse().expect("nanoseconds")
}

/// Measures the cost of leases with scopes.
pub(crate) fn run() -> Report {
    let mut report = Report::new(
        "Scopes of leases",
        &format!(
            "On a Debian with systemd in a container. {GRANTS} processes request a lease one after the other, each with a \
             scope and then each bound to itself; medians. Then {IDLE} processes keep leases with scopes for {} s.",
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
    let process = median(seconds(&machine, "process"));
    let begun = Instant::now();
    let scope = median(seconds(&machine, "scope"));
    let all = begun.elapsed();
    // Wait until systemd has reported the ends of the scopes to gpushd. During this time, gpushd
    // grants no lease.
    machine
        .await_that("the leases have ended", |machine| machine.sh("gpushctl lease list -o name | wc -l").trim() == "0");
    let left = scopes(&machine);
    machine.sh(&format!(
        "systemd-run --quiet --unit=idle --slice=user-0.slice sh -c 'exec systemd-run --scope --quiet --slice=user-0.slice --unit=session-idle.scope \
         perl /srv/client.pl scope {IDLE} 1000'"
    ));
    machine.await_that("all leases are granted", |machine| scopes(machine) == IDLE);
    std::thread::sleep(Duration::from_secs(2));
    let before = used(&machine);
    std::thread::sleep(PERIOD);
    #[expect(clippy::cast_precision_loss, reason = "a few seconds")]
    let share = (used(&machine) - before) as f64 / PERIOD.as_secs_f64() / 1e7;

    let ms = |seconds: f64| format!("{:.2}", seconds * 1e3);
    report.rows = vec![
        vec!["grant, bound to the process".to_owned(), ms(process)],
        vec!["grant, with a scope".to_owned(), ms(scope)],
        vec![format!("{GRANTS} scopes created and ended"), ms(all.as_secs_f64())],
    ];
    report.target(&format!("scopes left of {GRANTS}"), "0", &left.to_string(), left == 0);
    let measured = format!("{share:.2} %");
    report.target(&format!("processor with {IDLE} idle leases"), "at most 0.3 % of a core", &measured, share <= 0.3);
    report
}
