//! The alerts and dashboards with a real Prometheus that scrapes the real gpushd.

use std::collections::{BTreeMap, BTreeSet};

use gpush_tests::tools::prometheus_program;

use crate::{
    alerts::check_metrics,
    files::{PanelExpression, RULES, alerts, documented, panel_expressions, text},
    prometheus::Prometheus,
    relay::relay,
    scenario::Scenario,
};

/// The durations and thresholds of the alerts, and the shorter ones of this test. All other parts stay as they are.
const SHORTER: [(&str, &str); 13] = [
    ("for: 1m\n", "for: 400ms\n"),
    ("for: 2m\n", "for: 400ms\n"),
    ("for: 5m\n", "for: 400ms\n"),
    ("for: 1h\n", "for: 1s\n"),
    ("for: 4h\n", "for: 1s\n"),
    ("[1h]", "[6s]"),
    ("offset 1h", "offset 6s"),
    ("seconds < 120", "seconds < 4"),
    ("} < 900", "} < 5"),
    ("            < 900\n", "            < 5\n"),
    ("> 3600", "> 2"),
    ("> 14400", "> 2"),
    (">= 6", ">= 3"),
];

/// Alerts while gpushd takes a sample only every 15 seconds.
const RARE_SAMPLES: [&str; 2] = ["GpushSamplesStale", "GpushUseUnknown"];

/// Alerts because of [`Scenario::break_it`], and because of the leases.
const FAULTS: [&str; 14] = [
    "GpushGpuNotReady",
    "GpushGpuCordoned",
    "GpushXidFault",
    "GpushXid",
    "GpushRowRemapPending",
    "GpushRowRemapFailed",
    "GpushThrottled",
    "GpushUnleasedProcess",
    "GpushMpsGivenUp",
    "GpushMpsNotReady",
    "GpushQueueOld",
    "GpushLeaseIdle",
    "GpushIdleShare",
    "GpushMemoryGrows",
];

/// The commands in the texts of alerts that only show something.
const SHOWING: [&str; 7] = ["explain", "gpu show", "lease list", "lease show", "mps logs", "mps show", "ps"];

/// The alert that does not resolve: a memory row that could not be replaced stays so.
const FOR_GOOD: [&str; 1] = ["GpushRowRemapFailed"];

/// The parts of the test share one host and one Prometheus, because their start and the windows of the alerts take most of
/// the time.
#[test]
fn alerts_fire_and_resolve_and_panels_have_data() {
    let Some(program) = prometheus_program("prometheus") else { return };
    let mut scenario = Scenario::up();
    let address = relay(scenario.agent.socket());
    let directory = scenario.host.dir().parent().expect("a directory").to_owned();
    let prometheus = Prometheus::start(&program, &directory, address, &shorter(&text(RULES)));
    let mut seen = SeenAlerts { prometheus: &prometheus, fired: BTreeMap::new() };
    seen.fire(&RARE_SAMPLES, || {});

    scenario.break_it();
    seen.fire(&FAULTS, || scenario.work());
    let leases: Vec<String> = scenario.leases.iter().map(|grant| grant.lease.id.to_string()).collect();
    panels_have_data(&prometheus, &leases, || scenario.work());
    scraped_series_are_documented(&prometheus);
    check_metrics(&scenario.agent);
    named_commands_work(&scenario, &seen.fired);
    scenario.mend();
    seen.resolve(|| scenario.watch());

    scenario.maintenance("enter");
    seen.fire(&["GpushMaintenanceLong"], || {});
    scenario.refuse_driver(true);
    scenario.maintenance("leave");
    seen.fire(&["GpushDriverDown", "GpushWorkerRestarts"], || {});
    scenario.refuse_driver(false);
    scenario.break_task();
    seen.fire(&["GpushTaskFails"], || scenario.watch());

    scenario.stop();
    seen.fire(&["GpushScrapeFails"], || {});
    scenario.start_without_database();
    seen.fire(&["GpushGpuHeld"], || scenario.watch());
    scenario.recover();
    seen.resolve(|| scenario.watch());
    let names: BTreeSet<String> = alerts().into_iter().map(|alert| alert.name).collect();
    assert_eq!(seen.fired.into_keys().collect::<BTreeSet<String>>(), names);
}

/// Returns the alerts with the durations and thresholds of this test.
fn shorter(rules: &str) -> String {
    SHORTER.iter().fold(rules.to_owned(), |text, (long, short)| {
        assert!(text.contains(long), "no alert has `{}`", long.trim());
        text.replace(long, short)
    })
}

/// The alerts that Prometheus has fired.
#[derive(Debug)]
struct SeenAlerts<'a> {
    prometheus: &'a Prometheus,
    /// Names, with summary and description.
    fired: BTreeMap<String, Vec<String>>,
}

impl SeenAlerts<'_> {
    /// Waits until each of these alerts has fired. Checks the texts of all alerts that fire.
    fn fire(&mut self, names: &[&str], work: impl Fn()) {
        let mut missing: BTreeSet<&str> = names.iter().copied().collect();
        self.prometheus.until(|| {
            work();
            for (name, texts) in self.prometheus.firing() {
                // A template without a value shows `<no value>`, and a wrong template shows `<error …>`.
                assert!(texts.iter().all(|text| !text.contains('<')), "{name}: {texts:?}");
                missing.remove(name.as_str());
                self.fired.insert(name, texts);
            }
            if missing.is_empty() { Ok(()) } else { Err(format!("these alerts do not fire: {missing:?}")) }
        });
    }

    /// Waits until only the alerts fire that do not resolve.
    fn resolve(&self, work: impl Fn()) {
        self.prometheus.until(|| {
            work();
            let firing: Vec<String> = self.prometheus.firing().into_keys().collect();
            if firing == FOR_GOOD { Ok(()) } else { Err(format!("these alerts fire: {firing:?}")) }
        });
    }
}

/// Waits until the expressions of all panels have data. A panel about a lease must have data for one of the leases.
fn panels_have_data(prometheus: &Prometheus, leases: &[String], work: impl Fn()) {
    let mut missing = panel_expressions();
    prometheus.until(|| {
        work();
        let is_empty =
            |one: &PanelExpression| leases.iter().all(|lease| prometheus.query(&filled(&one.expr, lease)).is_empty());
        missing.retain(is_empty);
        if missing.is_empty() { Ok(()) } else { Err(format!("these panels have no data: {missing:#?}")) }
    });
}

/// Returns an expression with values for Grafana's variables.
fn filled(expr: &str, lease: &str) -> String {
    let values = [
        ("$__rate_interval", "10s"),
        ("$__range", "10s"),
        ("${step}", "1"),
        ("$step", "1"),
        ("$lease", lease),
        ("$instance", ".*"),
        ("$gpu", ".*"),
        ("$slurm_job", ".*"),
        ("$user", ".*"),
    ];
    let text = values.iter().fold(expr.to_owned(), |text, (name, value)| text.replace(name, value));
    // The function `label_replace` uses `$1`.
    assert!(!text.replace("\"$1\"", "").contains('$'), "{text}: a variable without a value");
    text
}

fn scraped_series_are_documented(prometheus: &Prometheus) {
    let names = prometheus.query("count by (__name__) ({__name__=~\"gpush_.*\"})");
    let names = names.iter().map(|one| one["metric"]["__name__"].as_str().expect("a name").to_owned());
    assert_eq!(names.collect::<BTreeSet<String>>(), documented());
}

/// Runs the commands in the texts of the alerts, except those that change something.
fn named_commands_work(scenario: &Scenario, fired: &BTreeMap<String, Vec<String>>) {
    let texts = fired.values().flatten();
    let named = texts.flat_map(|text| text.split('`').skip(1).step_by(2));
    let named = named.filter_map(|code| code.strip_prefix("gpushctl "));
    let only_shows = |command: &&str| SHOWING.iter().any(|start| command.starts_with(start));
    let shown: BTreeSet<&str> = named.filter(only_shows).collect();
    assert!(shown.len() >= SHOWING.len(), "{shown:?}");
    for command in shown {
        // The exit status is not always 0: `ps --unleased` exits with 3 if it finds a process.
        let output = scenario.gpushctl_output(&command.split(' ').collect::<Vec<_>>());
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(!output.stdout.is_empty() && !errors.contains("error:"), "{command}: {errors}");
    }
}
