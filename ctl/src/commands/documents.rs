//! Tests that a name has the same type in the JSON output of gpushctl and in the API.
//!
//! gpushd's unit tests already compare the schemas of the API with each other. This module compares
//! the documents of gpushctl with these schemas and with each other.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
};

use gpush_api::{ApiError, Code, Plans};
use gpush_core::{config::Config, desired::LintFinding, lint::Lint};
use gpush_doctor::{Area, Finding, Severity};
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    advise, config_check, config_init, doctor, explain, metrics, mig_history, mps, parted, ready, top, version,
};
use crate::{
    output::ErrorDocument,
    render::{
        fixtures,
        support_bundle::{BundleFile, Contents, MissingPart},
    },
};

/// Files of gpushctl that define JSON output. [`samples`] returns at least one sample of the JSON
/// that each of these files defines.
const WITH_DOCUMENTS: [&str; 18] = [
    "commands/config_check.rs",
    "commands/config_init.rs",
    "commands/doctor.rs",
    "commands/explain.rs",
    "commands/metrics/mod.rs",
    "commands/metrics/relay/mod.rs",
    "commands/metrics/write.rs",
    "commands/mps/mod.rs",
    "commands/parted.rs",
    "commands/ready.rs",
    "commands/top/answers.rs",
    "commands/version.rs",
    "output.rs",
    "render/advise/queueing.rs",
    "render/advise/recorded_use.rs",
    "render/mig_history.rs",
    "render/status.rs",
    "render/support_bundle.rs",
];

/// For each name, its types; for each type, the places where the name has this type.
type Types = BTreeMap<String, BTreeMap<String, BTreeSet<String>>>;

/// Returns the JSON type of a schema; `None` if the schema permits every type.
fn type_of_schema(schema: &Value, schemas: &Value) -> Option<String> {
    if let Some(reference) = schema["$ref"].as_str() {
        return type_of_schema(&schemas[reference.rsplit('/').next()?], schemas);
    }
    for key in ["oneOf", "anyOf", "allOf"] {
        if let Some(parts) = schema[key].as_array() {
            let types: BTreeSet<String> = parts
                .iter()
                .filter(|part| part["type"] != "null")
                .filter_map(|part| type_of_schema(part, schemas))
                .collect();
            return types.into_iter().reduce(|all, one| format!("{all} or {one}"));
        }
    }
    let name = match &schema["type"] {
        Value::Array(types) => types.iter().filter_map(Value::as_str).find(|one| *one != "null"),
        other => other.as_str(),
    };
    match name? {
        "array" => Some(format!("[{}]", type_of_schema(&schema["items"], schemas).unwrap_or_default())),
        "integer" => Some("number".to_owned()),
        name => Some(name.to_owned()),
    }
}

fn of_schema(place: &str, schema: &Value, schemas: &Value, into: &mut Types) {
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        if let Some(kind) = type_of_schema(property, schemas) {
            into.entry(name.clone()).or_default().entry(kind).or_default().insert(place.to_owned());
        }
        of_schema(place, property, schemas, into);
    }
    for key in ["oneOf", "anyOf", "allOf"] {
        schema[key].as_array().into_iter().flatten().for_each(|part| of_schema(place, part, schemas, into));
    }
    if schema["items"].is_object() {
        of_schema(place, &schema["items"], schemas, into);
    }
}

/// Returns the JSON type of a value; `None` if the value does not show the type, as with `null` or
/// an empty array.
fn type_of_value(value: &Value) -> Option<String> {
    Some(match value {
        Value::Null => return None,
        Value::Bool(_) => "boolean".to_owned(),
        Value::Number(_) => "number".to_owned(),
        Value::String(_) => "string".to_owned(),
        Value::Array(all) => format!("[{}]", type_of_value(all.first()?)?),
        Value::Object(_) => "object".to_owned(),
    })
}

fn of_value(place: &str, value: &Value, into: &mut Types) {
    match value {
        Value::Array(all) => all.iter().for_each(|one| of_value(place, one, into)),
        Value::Object(fields) => {
            for (name, field) in fields {
                if let Some(kind) = type_of_value(field) {
                    into.entry(name.clone()).or_default().entry(kind).or_default().insert(place.to_owned());
                }
                of_value(place, field, into);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

fn value(document: &impl Serialize) -> Value {
    serde_json::to_value(document).unwrap()
}

/// Returns a sample of each document that gpushctl composes, with the name of the document.
pub(super) fn samples() -> Vec<(&'static str, Value)> {
    let error = ApiError::new(Code::BadRequest, "wrong").cause("so").hint("write it right");
    let status = fixtures::status(fixtures::mixed(), false);
    let rule = "[[gpu]]\nmatch = [\"0\"]\nmode = \"mig\"\nlayout = [\"3g.40gb\"]\n";
    let view = Config::parse(rule, "config.toml").unwrap().view(Some("config.toml"), &[]);
    let wrong = Config::parse("[[gpu]]\nmatch = 7\n", "config.toml").unwrap_err();
    let finding = Finding {
        area: Area::ALL[0],
        severity: Severity::Problem,
        lint: Some(Lint::OtherManager),
        message: "no driver".to_owned(),
        causes: vec!["it is not loaded".to_owned()],
        hint: Some("`modprobe nvidia`".to_owned()),
    };
    let bundle = Contents {
        file: Some("bundle.tar.gz".into()),
        gpushctl: "0.1.0",
        collected_at: fixtures::look(80, crate::render::Charset::Ascii).now,
        files: vec![BundleFile { name: "a.json", bytes: 1, why: "one", data: Vec::new() }],
        missing: vec![MissingPart { name: "b.json", why: "two", reason: "gpushd does not answer".to_owned() }],
    };
    let clients = fixtures::mps::all();
    let clients: Vec<Value> = clients.iter().flat_map(mps::ListedClient::of).map(|client| value(&client)).collect();
    assert!(!clients.is_empty());
    let remarks = ["a remark".to_owned()];
    vec![
        ("an error", value(&ErrorDocument { error: &error })),
        (
            "version",
            value(&version::Versions {
                ctl: "0.1.0",
                api: "v1",
                agent: Some(&status.version),
                error: Some(error.clone()),
            }),
        ),
        ("status", value(&status)),
        ("top", value(&top::samples::host())),
        (
            "config check",
            value(&config_check::Checked {
                config: view,
                findings: remarks.to_vec(),
                lints: vec![LintFinding {
                    lint: Lint::SharedFaults,
                    message: "one".to_owned(),
                    hint: "another".to_owned(),
                }],
                plans: Some(Plans { plans: vec![fixtures::plan()] }),
            }),
        ),
        (
            "config check of a wrong file",
            value(&config_check::Wrong { error: error.clone(), problems: wrong.located() }),
        ),
        ("mig export", value(&parted::Written { text: "", remarks: &remarks, error: Some(&error) })),
        ("config init", value(&config_init::Initialized { file: Some(Path::new("config.toml")), text: "[[gpu]]" })),
        ("doctor", value(&doctor::Examination { findings: &[finding] })),
        ("explain", value(&explain::Explanation { topic: "mig", text: "MIG divides a GPU" })),
        ("explain isolation", value(&explain::Isolation::ALL)),
        ("explain of a MIG device", value(&mig_history::tests::destroyed())),
        ("advise mechanism", value(&advise::tests::advice())),
        ("advise queue", value(&advise::tests::estimate())),
        ("advise from-use", value(&advise::tests::from_use())),
        ("support-bundle", value(&bundle)),
        ("ready", value(&ready::Ready { ready: true, maintenance: None })),
        ("mps clients", Value::Array(clients)),
        ("metrics show", value(&metrics::ShownMetrics { content_type: "text/plain", text: "gpush_maintenance 0" })),
        ("metrics serve", value(&metrics::ServedMetrics { url: "http://127.0.0.1:9945/metrics", has_password: false })),
        ("metrics write", value(&metrics::WrittenMetrics { file: Path::new("gpush.prom"), bytes: 20 })),
        ("slurm gres-conf", json!({ "gres_conf": "Name=gpu", "node": "node1", "gres": "gpu:1" })),
    ]
}

#[test]
fn same_name_has_same_type_in_all_documents() {
    let description: Value = serde_json::from_str(include_str!("../../../docs/openapi.json")).unwrap();
    let schemas = &description["components"]["schemas"];
    let mut types = Types::new();
    for (name, schema) in schemas.as_object().unwrap() {
        of_schema(name, schema, schemas, &mut types);
    }
    assert!(types.len() > 200, "{}", types.len());
    for (name, document) in samples() {
        of_value(name, &document, &mut types);
    }
    let faults: Vec<String> =
        types.iter().filter(|(_, types)| types.len() > 1).map(|(name, types)| format!("`{name}`: {types:?}")).collect();
    assert!(faults.is_empty(), "a name has several types:\n{}", faults.join("\n"));
}

#[test]
fn name_with_two_types_is_found() {
    let mut types = Types::new();
    of_value("version", &json!({ "agent": { "agent": "0.1.0" }, "gpus": [{ "gpu": 1 }] }), &mut types);
    assert_eq!(types["agent"].keys().collect::<Vec<_>>(), ["object", "string"]);
    assert_eq!(types["gpus"].keys().collect::<Vec<_>>(), ["[object]"]);
}

/// If this test fails, add a sample of the new document.
#[test]
fn every_file_with_documents_has_a_sample() {
    fn files(folder: &Path, found: &mut Vec<std::path::PathBuf>) {
        for entry in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
            if entry.is_dir() { files(&entry, found) } else { found.push(entry) }
        }
    }
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut all = Vec::new();
    files(&root, &mut all);
    let derives = |path: &Path| {
        let text = std::fs::read_to_string(path).unwrap();
        text.lines().any(|line| line.starts_with("#[derive(") && line.contains("Serialize"))
    };
    let mut with_types: Vec<String> = all
        .iter()
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs") && derives(path))
        .map(|path| path.strip_prefix(&root).unwrap().display().to_string())
        .collect();
    with_types.sort();
    let mut known: Vec<&str> = WITH_DOCUMENTS.to_vec();
    known.sort_unstable();
    assert_eq!(with_types, known);
}
