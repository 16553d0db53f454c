//! Checks of the alerts with promtool: their syntax, and test series that make each alert fire and resolve.

use std::{
    collections::BTreeSet,
    io::{Seek, Write},
    process::Command,
};

use gpush_tests::{agent::Agent, tools::prometheus_program};

use crate::files::{CASES, RULES, alerts, cases, path};

/// Runs promtool. Does nothing if promtool is not installed.
fn promtool(arguments: &[&str], file: &str) {
    let Some(promtool) = prometheus_program("promtool") else { return };
    let output = Command::new(promtool).args(arguments).arg(path(file)).output().expect("promtool can be started");
    let printed = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success(), "{printed}");
}

#[test]
fn promtool_accepts_the_alerts() {
    promtool(&["check", "rules", "--lint-fatal"], RULES);
}

#[test]
fn every_alert_fires_and_resolves_on_its_test_series() {
    let names = alerts().into_iter().map(|alert| alert.name);
    assert_eq!(names.collect::<BTreeSet<_>>(), cases());
    promtool(&["test", "rules"], CASES);
}

/// Checks the names, types and help texts of the metrics of gpushd with the linter of Prometheus.
pub(crate) fn check_metrics(agent: &Agent) {
    let Some(promtool) = prometheus_program("promtool") else { return };
    let metrics = agent.request("GET", "/metrics", "accept: text/plain\r\n", b"");
    let mut input = tempfile::tempfile().expect("a file");
    input.write_all(&metrics.body).and_then(|()| input.rewind()).expect("a file");
    let output = Command::new(promtool).args(["check", "metrics"]).stdin(input).output().expect("promtool");
    let printed = [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
    assert!(output.status.success() && printed.trim().is_empty(), "{printed}");
}
