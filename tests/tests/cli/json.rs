//! Runs commands with `--json`, and compares the documents with the table in `docs/exit-codes.md` and with the types in
//! `docs/openapi.json`.

use std::collections::{BTreeMap, BTreeSet};

use gpush_tests::{
    agent::{Agent, Setup},
    host::Host,
    page::document,
};
use serde_json::Value;

use crate::transcript;

const CONFIG: &str = "[[gpu]]\nmatch = \"0\"\nmode = \"mig\"\nlayout = [\"3g.40gb\"]\n\
                      [[gpu]]\nmatch = \"1\"\nmode = \"timeslice\"\ntimeslice = { replicas = 4 }\n\
                      [[quota]]\neverybody = true\nleases = 4\n";

/// The commands in the order of execution. Each entry has the name in the table, the command, and the expected `changed`.
/// `LEASE` is the id of the last lease. `OPERATION` is the id of the last `mig apply` that changed a layout.
const COMMANDS: &[(&str, &str, Option<bool>)] = &[
    ("apply", "apply --yes", Some(true)),
    ("apply", "apply --yes", Some(false)),
    ("status", "status", None),
    ("top", "top --once", None),
    ("version", "version", None),
    ("doctor", "doctor --only system", None),
    ("explain", "explain mig", None),
    ("advise mechanism", "advise --tenants 8 --isolation hard --workload inference", None),
    ("advise queue", "advise queue --tenants 2 --hostile", None),
    ("advise from-use", "advise --from-use", None),
    ("advise from-use", "advise --from-use host", None),
    ("gpu list", "gpu list", None),
    ("gpu show", "gpu show 0", None),
    ("gpu holders", "gpu holders 0", None),
    ("gpu cordon", "gpu cordon 2", Some(true)),
    ("gpu cordon", "gpu cordon 2", Some(false)),
    ("gpu drain", "gpu drain 2", Some(false)),
    ("gpu uncordon", "gpu uncordon 2", Some(true)),
    ("gpu uncordon", "gpu uncordon 2", Some(false)),
    ("mig list", "mig list", None),
    ("mig profiles", "mig profiles 0", None),
    ("mig apply", "mig apply 3g.40gb*2 -g 0 --yes", Some(true)),
    ("mig apply", "mig apply 3g.40gb*2 -g 0 --yes", Some(false)),
    ("mig apply", "mig apply 7g.80gb -g 0 --dry-run", None),
    ("mig remove", "mig remove 3g.40gb@4 -g 0 --yes", Some(true)),
    ("mig add", "mig add 1g.10gb -g 0 --yes", Some(true)),
    ("mig export", "mig export", None),
    ("config overrides list", "config overrides", None),
    ("config overrides clear", "config overrides clear 0", Some(true)),
    ("config check", "config check", None),
    ("config show", "config show", None),
    ("config diff", "config diff", None),
    ("config reload", "config reload", Some(false)),
    ("lease request", "lease request --timeslice --for 1h -g 1", Some(true)),
    ("lease list", "lease list", None),
    ("lease show", "lease show LEASE", None),
    ("lease renew", "lease renew LEASE --for 2h", Some(true)),
    ("lease keep", "lease keep LEASE --for 2h --reason demo", Some(true)),
    ("lease idle", "lease idle --since 1h", None),
    ("lease end", "lease end LEASE", Some(true)),
    ("lease end", "lease end --all", Some(false)),
    ("quota", "quota", None),
    ("usage", "usage", None),
    ("bill", "bill", None),
    ("ps", "ps", None),
    ("operation list", "operation list", None),
    ("operation show", "operation show OPERATION", None),
    ("operation wait", "operation wait OPERATION", Some(false)),
    ("events", "events --since 1h", None),
    ("audit", "audit", None),
    ("enforce status", "enforce status", None),
    ("enforce plan", "enforce plan", None),
    ("maintenance enter", "maintenance enter", Some(true)),
    ("maintenance leave", "maintenance leave", Some(true)),
    ("maintenance leave", "maintenance leave", Some(false)),
];

/// Returns the document of each command, as the table in the page describes it.
fn table() -> BTreeMap<String, String> {
    let page = document("exit-codes.md");
    let rows = page.lines().skip_while(|line| !line.starts_with("<!-- documents"));
    let rows = rows.filter_map(|row| row.strip_prefix("| `")?.strip_suffix(" |")?.split_once("` | "));
    rows.map(|(command, document)| (command.to_owned(), document.to_owned())).collect()
}

/// The schemas of the API.
struct Schemas(Value);

impl Schemas {
    /// Returns why a value is not an object of this type; `None` if it is.
    fn difference(&self, name: &str, value: &Value, is_change: bool) -> Option<String> {
        let schema = &self.0["components"]["schemas"][name];
        let known: BTreeSet<&str> = schema["properties"].as_object()?.keys().map(String::as_str).collect();
        let required: BTreeSet<&str> = schema["required"].as_array()?.iter().filter_map(Value::as_str).collect();
        let Some(object) = value.as_object() else { return Some(format!("{name} is not an object: {value}")) };
        let printed: BTreeSet<&str> =
            object.keys().map(String::as_str).filter(|key| !is_change || *key != "changed").collect();
        let unknown: Vec<_> = printed.difference(&known).collect();
        let missing: Vec<_> = required.difference(&printed).collect();
        (!unknown.is_empty() || !missing.is_empty())
            .then(|| format!("{name}: unknown {unknown:?}, missing {missing:?}"))
    }

    /// Returns why a value is not a list of objects of this type; `None` if it is.
    fn difference_in_list(&self, name: &str, value: &Value) -> Option<String> {
        let Some(all) = value.as_array() else { return Some(format!("not a list of {name}: {value}")) };
        all.iter().find_map(|one| self.difference(name, one, false))
    }

    /// Returns how a document differs from its description in the table; `None` if it does not.
    fn difference_from_cell(&self, cell: &str, value: &Value) -> Option<String> {
        let name = |text: &str| text.trim_matches('`').to_owned();
        if let Some(listed) = cell.strip_prefix("list of ") {
            return self.difference_in_list(&name(listed), value);
        }
        if let Some((changed, listed)) = cell.split_once(": list of ") {
            let (_, field) = changed.split_once(", ").expect("a field");
            return self.difference_in_list(&name(listed), &value[name(field)]);
        }
        if cell.contains("`Plans`") && value.get("plans").is_some() && value.get("id").is_none() {
            return self.difference("Plans", value, true);
        }
        if let Some((one, _)) = cell.split_once("; a list") {
            return self.difference(&name(one), value, false);
        }
        if let Some((one, _)) = cell.split_once(" with `changed`") {
            return self.difference(&name(one), value, true);
        }
        if !cell.contains(", ") && self.0["components"]["schemas"].get(name(cell)).is_some() {
            return self.difference(&name(cell), value, false);
        }
        let known: BTreeSet<String> = cell.split(", ").map(name).collect();
        let unknown: Vec<&String> = value.as_object()?.keys().filter(|key| !known.contains(*key)).collect();
        (!unknown.is_empty()).then(|| format!("unknown {unknown:?}"))
    }
}

/// Runs gpushctl with `--json`. Returns its exit status and its document.
fn run(agent: &Agent, command: &str) -> (Option<i32>, Value) {
    let words: Vec<&str> = command.split(' ').chain(["--json"]).collect();
    let output = transcript::gpushctl(agent, &words, 80).output().expect("gpushctl can be started");
    assert!(output.stderr.is_empty(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
    let value = serde_json::from_slice(&output.stdout);
    let value = value.unwrap_or_else(|error| panic!("{command}: {error}: {}", String::from_utf8_lossy(&output.stdout)));
    (output.status.code(), value)
}

/// Fault: five documents were not as the page described them.
#[test]
fn json_output_matches_the_page_and_the_types_of_the_api() {
    let host = Host::up("dgx-a100");
    let agent = Setup::on(&host).config("").start();
    agent.write_config(CONFIG);
    let (schemas, table) = (Schemas(serde_json::from_str(&document("openapi.json")).expect("JSON")), table());
    assert!(table.len() > 50, "{}", table.len());
    let (mut wrong, mut lease, mut operation) = (Vec::new(), String::new(), String::new());
    for (name, command, changed) in COMMANDS {
        let command = command.replace("LEASE", &lease).replace("OPERATION", &operation);
        if *name == "maintenance enter" {
            // A process of another test can have the name of the lease in its environment.
            let is_empty = |list: &Value| list.as_array().is_some_and(Vec::is_empty);
            agent.await_that("no lease", || is_empty(&run(&agent, "lease list").1));
        }
        let (status, value) = run(&agent, &command);
        // These report what they find with other statuses.
        if status != Some(0) && !["doctor", "config diff"].contains(name) {
            wrong.push(format!("{command}: {status:?}: {value}"));
        }
        let cell = table.get(*name).unwrap_or_else(|| panic!("the table has no {name}"));
        wrong.extend(schemas.difference_from_cell(cell, &value).map(|why| format!("{command}: {why}")));
        if value.get("changed").and_then(Value::as_bool) != *changed {
            wrong.push(format!("{command}: changed is {}, not {changed:?}", value["changed"]));
        }
        if let Some(id) = value["lease"]["id"].as_str() {
            id.clone_into(&mut lease);
        }
        if let (Some(id), Some(true), "mig apply") = (value["id"].as_str(), changed, *name) {
            id.clone_into(&mut operation);
        }
    }
    println!("{} commands", COMMANDS.len());
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
