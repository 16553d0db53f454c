//! Checks of the dashboards and alerts without Prometheus.

use std::collections::BTreeSet;

use gpush_core::config::CORDON_XIDS;

use crate::files::{
    DASHBOARDS, RULES, alerts, command_words, commands, dashboard, documented, panel_expressions, panels, series, text,
};

#[test]
fn ids_of_panels_and_dashboards_are_unique() {
    let mut uids = BTreeSet::new();
    for name in DASHBOARDS {
        let dashboard = dashboard(name);
        assert!(uids.insert(dashboard["uid"].as_str().expect("a uid").to_owned()), "{name}");
        let all = dashboard["panels"].as_array().expect("panels");
        let ids: BTreeSet<u64> = all.iter().map(|panel| panel["id"].as_u64().expect("an id")).collect();
        assert_eq!(ids.len(), all.len(), "{name}");
        let titles: BTreeSet<&str> = all.iter().filter_map(|panel| panel["title"].as_str()).collect();
        assert_eq!(titles.len(), all.len(), "{name}");
    }
}

#[test]
fn panel_has_unit_description_and_datasource_variable() {
    for name in DASHBOARDS {
        let dashboard = dashboard(name);
        let variables = dashboard["templating"]["list"].as_array().expect("variables");
        assert!(variables.iter().any(|one| one["name"] == "datasource" && one["type"] == "datasource"), "{name}");
        let of_variables = variables.iter().filter(|one| one["type"] == "query").map(|one| &one["datasource"]);
        let panels = panels(&dashboard);
        let of_panels = panels.iter().flat_map(|panel| {
            let targets = panel["targets"].as_array().expect("targets");
            targets.iter().map(|target| &target["datasource"]).chain([&panel["datasource"]])
        });
        for datasource in of_variables.chain(of_panels) {
            assert_eq!(datasource["uid"], "${datasource}", "{name}");
        }
        for panel in panels {
            let is_text = |value: &serde_json::Value| value.as_str().is_some_and(|text| !text.is_empty());
            assert!(is_text(&panel["description"]), "{name}: {} has no description", panel["title"]);
            assert!(is_text(&panel["fieldConfig"]["defaults"]["unit"]), "{name}: {} has no unit", panel["title"]);
        }
    }
}

/// A host without internet must show the dashboards, and must not tell another host about them.
#[test]
fn dashboards_and_alerts_name_no_address() {
    let dashboards = DASHBOARDS.map(|name| format!("packaging/grafana/{name}.json"));
    for file in dashboards.iter().map(String::as_str).chain([RULES]) {
        let text = text(file);
        assert!(!text.contains("http") && !text.contains("://"), "{file}");
    }
}

#[test]
fn expressions_name_only_documented_series() {
    let documented = documented();
    assert!(documented.len() > 40, "{documented:?}");
    let of_panels = panel_expressions().into_iter().map(|one| (one.panel, one.expr));
    let of_alerts = alerts().into_iter().map(|alert| (alert.name, alert.expr));
    for (name, expr) in of_panels.chain(of_alerts) {
        let unknown: Vec<String> = series(&expr).difference(&documented).cloned().collect();
        assert!(unknown.is_empty(), "{name}: docs/metrics.md does not describe {unknown:?}");
    }
    for name in DASHBOARDS {
        let unknown: Vec<String> =
            series(&dashboard(name)["templating"].to_string()).difference(&documented).cloned().collect();
        assert!(unknown.is_empty(), "{name}: docs/metrics.md does not describe {unknown:?}");
    }
}

/// Prometheus sets the labels `job` and `instance` to those of the scrape, and renames labels of gpushd with these names.
#[test]
fn labels_differ_from_those_of_a_scrape() {
    let text = text("docs/metrics.md");
    let columns = text.lines().filter(|line| line.starts_with("| `gpush_")).filter_map(|row| row.split('|').nth(2));
    let labels: BTreeSet<&str> = columns.flat_map(|column| column.split([' ', '`', ','])).collect();
    assert!(labels.contains("uuid") && labels.contains("slurm_job"), "{labels:?}");
    assert!(labels.is_disjoint(&BTreeSet::from(["job", "instance", "le", "quantile"])), "{labels:?}");
}

/// The reader of an alert must learn the object, the cause and the next command.
#[test]
fn alert_has_severity_and_a_command_that_exists() {
    let commands = commands();
    for alert in alerts() {
        assert!(["critical", "warning", "info"].contains(&&*alert.labels["severity"]), "{}", alert.name);
        assert!(alert.annotations["summary"].contains("{{ $labels.instance }}"), "{}: no host", alert.name);
        let description = &alert.annotations["description"];
        let named = description.split('`').skip(1).step_by(2).filter_map(|code| code.strip_prefix("gpushctl "));
        let named: Vec<Vec<String>> = named.map(command_words).collect();
        // The word after `explain` is a topic.
        let exists = |words: &Vec<String>| (1..=words.len()).any(|length| commands.contains(&words[..length]));
        assert!(!named.is_empty() && named.iter().all(exists), "{}: {description}", alert.name);
    }
}

#[test]
fn alerts_and_docs_name_the_same_alerts() {
    let text = text("docs/dashboards.md");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `Gpush")?.split('`').next());
    let documented: Vec<String> = rows.map(|row| format!("Gpush{row}")).collect();
    assert_eq!(documented, alerts().into_iter().map(|alert| alert.name).collect::<Vec<_>>());
}

#[test]
fn xid_alerts_list_the_xids_that_cordon_a_gpu() {
    let listed = |name: &str, operator: &str| -> Vec<u32> {
        let alert = alerts().into_iter().find(|alert| alert.name == name).expect("an alert");
        let list = alert.expr.split(operator).nth(1).and_then(|rest| rest.split('"').nth(1)).expect("a list");
        list.split('|').map(|xid| xid.parse().expect("a number")).collect()
    };
    assert_eq!(listed("GpushXidFault", "xid=~"), CORDON_XIDS);
    // The other alert leaves out these Xid errors, and those that programs cause.
    assert!(listed("GpushXid", "xid!~").starts_with(&CORDON_XIDS));
}
