//! The dashboards and alerts of `packaging/`, the metrics of `docs/metrics.md`, and the commands of `docs/cli.md`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use serde::Deserialize;
use serde_json::Value;

/// Names of the dashboards.
pub(crate) const DASHBOARDS: [&str; 3] = ["host", "lease", "month"];

/// Path of the alerts, in the repository.
pub(crate) const RULES: &str = "packaging/prometheus/gpush.rules.yml";

/// Path of the test series of the alerts, in the repository.
pub(crate) const CASES: &str = "tests/tests/metrics/alerts.test.yml";

/// Returns the path of a file of the repository.
pub(crate) fn path(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file)
}

/// Returns a file of the repository.
pub(crate) fn text(file: &str) -> String {
    fs::read_to_string(path(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// An alert.
#[derive(Debug, Deserialize)]
pub(crate) struct Alert {
    #[serde(rename = "alert")]
    pub(crate) name: String,
    pub(crate) expr: String,
    pub(crate) labels: BTreeMap<String, String>,
    pub(crate) annotations: BTreeMap<String, String>,
}

#[derive(Debug, Deserialize)]
struct Rules {
    groups: Vec<Group>,
}

#[derive(Debug, Deserialize)]
struct Group {
    rules: Vec<Alert>,
}

/// Returns all alerts.
pub(crate) fn alerts() -> Vec<Alert> {
    let rules: Rules = serde_saphyr::from_str(&text(RULES)).expect("rules");
    rules.groups.into_iter().flat_map(|group| group.rules).collect()
}

/// Returns the names of the alerts that have test series.
pub(crate) fn cases() -> BTreeSet<String> {
    #[derive(Deserialize)]
    struct Cases {
        tests: Vec<Case>,
    }
    #[derive(Deserialize)]
    struct Case {
        name: String,
    }
    let cases: Cases = serde_saphyr::from_str(&text(CASES)).expect("test series");
    cases.tests.into_iter().map(|case| case.name).collect()
}

/// Returns a dashboard.
pub(crate) fn dashboard(name: &str) -> Value {
    let file = format!("packaging/grafana/{name}.json");
    serde_json::from_str(&text(&file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// Returns the panels of a dashboard that show data.
pub(crate) fn panels(dashboard: &Value) -> Vec<&Value> {
    let panels = dashboard["panels"].as_array().expect("panels");
    panels.iter().filter(|panel| panel["type"] != "row").collect()
}

/// An expression of a panel.
#[derive(Debug, Clone)]
pub(crate) struct PanelExpression {
    /// Name of the dashboard and title of the panel.
    pub(crate) panel: String,
    pub(crate) expr: String,
}

/// Returns the expressions of all panels.
pub(crate) fn panel_expressions() -> Vec<PanelExpression> {
    let mut expressions = Vec::new();
    for name in DASHBOARDS {
        let dashboard = dashboard(name);
        for panel in panels(&dashboard) {
            for target in panel["targets"].as_array().expect("targets") {
                let title = panel["title"].as_str().expect("a title");
                let expr = target["expr"].as_str().expect("an expression").to_owned();
                expressions.push(PanelExpression { panel: format!("{name}: {title}"), expr });
            }
        }
    }
    expressions
}

/// Returns the names of gpush's series in a text.
pub(crate) fn series(text: &str) -> BTreeSet<String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words = text.split(|c| !is_part(c));
    words.filter(|word| word.starts_with("gpush_")).map(str::to_owned).collect()
}

/// Returns the series that `docs/metrics.md` describes.
pub(crate) fn documented() -> BTreeSet<String> {
    let text = text("docs/metrics.md");
    let rows = text.lines().filter(|line| line.starts_with("| `gpush_"));
    rows.flat_map(|row| series(row.split('|').nth(1).expect("a first column"))).collect()
}

/// Returns the words of each command of gpushctl, without arguments.
pub(crate) fn commands() -> BTreeSet<Vec<String>> {
    let text = text("docs/cli.md");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    rows.map(command_words).collect()
}

/// Returns the first words of a command, up to the first argument or option.
pub(crate) fn command_words(command: &str) -> Vec<String> {
    let is_word = |word: &&str| word.chars().all(|c| c.is_ascii_lowercase() || c == '-') && !word.starts_with('-');
    command.split_whitespace().take_while(is_word).map(str::to_owned).collect()
}
