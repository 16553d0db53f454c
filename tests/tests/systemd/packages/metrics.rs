//! The metrics units of the .deb: the relay for Prometheus, and the timer for node_exporter.

use gpush_tests::machine::Machine;

use super::{CONFIG, machine, with_gpu};

/// The relay.
const RELAY: &str = "gpush-metrics.service";

/// The file that the timer writes for node_exporter of Debian.
const TEXTFILE: &str = "/var/lib/prometheus/node-exporter/gpush.prom";

/// The machine has a lease, which the relay without a password must not show, and which the file for the group of
/// node_exporter must show.
#[test]
fn metrics_units_serve_and_write_what_their_readers_may_see() {
    let Some(machine) = machine("the metrics units of the package") else { return };
    with_gpu(&machine);
    machine.write(CONFIG, "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\"]\n");
    machine.sh("gpushctl config reload && gpushctl apply && gpushctl lease request --mig 3g.40gb --for 1h");
    ordinary_client_scrapes_the_relay(&machine);
    timer_writes_the_textfile(&machine);
}

fn ordinary_client_scrapes_the_relay(machine: &Machine) {
    assert_eq!(machine.sh(&format!("systemctl is-enabled {RELAY} || true")), "disabled");
    // The machine shares the ports of the host, so the relay takes a free one.
    let drop_in = format!("/etc/systemd/system/{RELAY}.d/port.conf");
    machine.write(&drop_in, "[Service]\nEnvironment=\"GPUSH_METRICS_OPTIONS=--listen 127.0.0.1:0\"\n");
    machine.sh(&format!("systemctl daemon-reload && systemctl start {RELAY}"));
    let line = machine.journal_until(&format!("_SYSTEMD_UNIT={RELAY}"), "serving metrics at");
    let port = line.trim_end().trim_end_matches("/metrics").rsplit(':').next().unwrap_or_default().to_owned();
    let request = r"GET /metrics HTTP/1.1\r\nHost: relay\r\nConnection: close\r\n\r\n";
    let scrape = format!("exec 3<>/dev/tcp/127.0.0.1/{port} && printf \"{request}\" >&3 && cat <&3");
    let answer = machine.sh(&format!("setpriv --reuid=65534 --regid=65534 --clear-groups bash -c '{scrape}'"));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("gpush_gpu_info{") && !answer.contains("gpush_lease_info{"), "{answer}");
    let pid = machine.main_pid(RELAY);
    assert_eq!(machine.sh(&format!("stat -c %U /proc/{pid}")), "gpush-metrics");
    machine.sh(&format!("systemctl stop {RELAY}"));
    assert_eq!(machine.property(RELAY, "Result"), "success");
}

fn timer_writes_the_textfile(machine: &Machine) {
    // Debian's package prometheus-node-exporter creates both.
    machine.sh("groupadd --system prometheus && install -d -m 755 /var/lib/prometheus/node-exporter");
    machine.sh("systemctl start gpush-metrics-write.timer");
    machine.await_that("the timer writes the file", |machine| {
        machine.run(&format!("test -s {TEXTFILE}")).status.success()
    });
    assert_eq!(machine.sh(&format!("stat -c '%a %U %G' {TEXTFILE}")), "640 root prometheus");
    let text = machine.sh(&format!("cat {TEXTFILE}"));
    assert!(text.contains("gpush_gpu_info{") && text.contains("gpush_lease_info{"), "{text}");
    assert_eq!(machine.property("gpush-metrics-write.service", "Result"), "success");
    machine.sh("systemctl stop gpush-metrics-write.timer");
}
