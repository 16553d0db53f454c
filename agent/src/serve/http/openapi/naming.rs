//! Tests that a name in the description means the same everywhere in the API.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

/// Names that may have different types, each with the reason.
const EXCEPTIONS: [&str; 1] = [
    // `do` contains the kind of a step. In each schema of a step, it is a different constant.
    "do",
];

/// Fields in the details of audit records, with the type of each field. The details have no schema.
const AUDIT_DETAILS: [(&str, &str); 29] = [
    ("attempt", "string"),
    ("author", "Actor"),
    ("cause", "string"),
    ("cluster", "string"),
    ("command", "string"),
    ("config_changed", "boolean"),
    ("desired", "string"),
    ("device", "string"),
    ("end", "boolean"),
    ("expires_at", "string"),
    ("gpu", "integer"),
    ("gpu_uuid", "string"),
    ("gpus", "[object]"),
    ("kept", "string"),
    ("layout", "[string]"),
    ("once", "boolean"),
    ("operation_id", "string"),
    ("overrides_ended", "[string]"),
    ("path", "string"),
    ("pid", "integer"),
    ("processes_end_at", "string"),
    ("reason", "string"),
    ("reload", "string"),
    ("request_spec", "string"),
    ("rule", "string"),
    ("targets", "[string]"),
    ("uid", "integer"),
    ("user", "string"),
    ("why", "string"),
];

/// Returns the type of a property. All strings count as one type.
fn type_of(schema: &Value) -> String {
    if let Some(reference) = schema["$ref"].as_str() {
        return reference.rsplit('/').next().unwrap_or(reference).to_owned();
    }
    for key in ["oneOf", "anyOf", "allOf"] {
        if let Some(parts) = schema[key].as_array() {
            let types: BTreeSet<String> = parts.iter().filter(|part| part["type"] != "null").map(type_of).collect();
            return types.into_iter().collect::<Vec<_>>().join(" or ");
        }
    }
    let name = match &schema["type"] {
        Value::Array(types) => types.iter().find(|one| **one != "null").and_then(Value::as_str),
        other => other.as_str(),
    };
    match name {
        Some("array") => format!("[{}]", type_of(&schema["items"])),
        Some(name) => name.to_owned(),
        None => "any".to_owned(),
    }
}

/// Collects the properties of a schema and of its nested schemas.
fn properties(owner: &str, schema: &Value, into: &mut BTreeMap<String, BTreeMap<String, Vec<String>>>) {
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        into.entry(name.clone()).or_default().entry(type_of(property)).or_default().push(owner.to_owned());
        properties(owner, property, into);
    }
    for key in ["oneOf", "anyOf", "allOf"] {
        for part in schema[key].as_array().into_iter().flatten() {
            properties(owner, part, into);
        }
    }
    if schema["items"].is_object() {
        properties(owner, &schema["items"], into);
    }
}

/// Returns the violations of the naming rules, one line each.
fn faults(description: &Value) -> Vec<String> {
    let schemas = description["components"]["schemas"].as_object().unwrap();
    let is_text = |name: &String| {
        let kinds = schemas.get(name).map(|schema| {
            let parts = schema["oneOf"].as_array().cloned().unwrap_or_else(|| vec![schema.clone()]);
            parts.iter().all(|part| part["type"] == "string")
        });
        kinds == Some(true)
    };
    let mut found = BTreeMap::new();
    for (owner, schema) in schemas {
        properties(owner, schema, &mut found);
    }
    for (name, kind) in AUDIT_DETAILS {
        let types: &mut BTreeMap<String, Vec<String>> = found.entry(name.to_owned()).or_default();
        types.entry(kind.to_owned()).or_default().push("details of audit records".to_owned());
    }
    let mut faults = Vec::new();
    for (name, types) in &found {
        // In JSON, the value of every enum without fields is a string.
        let kinds: BTreeSet<&str> =
            types.keys().map(|one| if is_text(one) { "string" } else { one.as_str() }).collect();
        if kinds.len() > 1 && !EXCEPTIONS.contains(&name.as_str()) {
            faults.push(format!("`{name}` has several types: {types:?}"));
        }
        for (what, plural) in [("uuids", "gpu_uuids"), ("in_force", "effective"), ("wanted", "desired")] {
            if name == what {
                faults.push(format!("`{name}` in {types:?}: write `{plural}`"));
            }
        }
    }
    // `uuid` is the UUID of the described object itself. If the object belongs to a GPU, `gpu` and `gpu_uuid` name that
    // GPU.
    for (owner, schema) in schemas {
        let has = |name: &str| schema["properties"][name].is_object();
        if has("gpu") && has("uuid") && !has("gi") && !["MpsDaemon", "MpsChange"].contains(&owner.as_str()) {
            faults.push(format!("{owner} has `gpu` and `uuid`: its GPU is `gpu_uuid`"));
        }
    }
    faults
}

#[test]
fn same_name_has_same_type_in_all_schemas() {
    let description: Value = serde_json::from_str(super::TEXT).unwrap();
    assert_eq!(faults(&description), Vec::<String>::new());
}

#[test]
fn name_with_two_types_is_found() {
    let of = |schemas: Value| faults(&json!({ "components": { "schemas": schemas } }));
    let text = json!({ "type": "string" });
    let same = json!({
        "State": { "type": "string", "enum": ["a"] },
        "A": { "properties": { "state": { "$ref": "#/components/schemas/State" }, "gpu": { "type": "integer" } } },
        "B": { "properties": { "state": { "oneOf": [{ "type": "null" }, text] }, "gpu": { "type": ["integer", "null"] } } },
    });
    assert_eq!(of(same), Vec::<String>::new());
    let several = json!({
        "Mig": { "type": "object" },
        "A": { "properties": { "mig": { "$ref": "#/components/schemas/Mig" }, "uuids": { "type": "array", "items": text } } },
        "B": { "oneOf": [{ "properties": { "mig": { "type": "boolean" } } }] },
        "C": { "properties": { "gpu": { "type": "integer" }, "uuid": text } },
    });
    let found = of(several).join("\n");
    assert_eq!(found.lines().count(), 3, "{found}");
    for part in ["`mig` has several types", "write `gpu_uuids`", "C has `gpu` and `uuid`"] {
        assert!(found.contains(part), "{found}");
    }
}

/// Returns the name and the expression of each field in the `json!({ … })` calls of a source file.
fn fields(source: &str) -> Vec<(String, String)> {
    let objects = source.split("json!({").skip(1).filter_map(|rest| rest.split_once("})").map(|(object, _)| object));
    let parts = objects.flat_map(|object| object.split(", \"").flat_map(|part| part.split(",\n")));
    let field = |part: &str| {
        let (name, value) = part.split_once("\":")?;
        Some((name.trim().trim_start_matches('"').to_owned(), value.trim().to_owned()))
    };
    parts.filter_map(field).collect()
}

fn sources(folder: &std::path::Path, found: &mut Vec<String>) {
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "openapi" && name != "in_process") {
                sources(&path, found);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") && !path.ends_with("tests.rs") {
            let text = std::fs::read_to_string(&path).unwrap();
            found.push(text.split("#[cfg(test)]").next().unwrap_or_default().to_owned());
        }
    }
}

/// In gpushd, only audit records are made with `json!`, so the compiler does not check the types of their fields. This
/// test checks that each field has a known type, and that each time has whole seconds.
#[test]
fn fields_of_audit_records_have_known_types_and_whole_seconds() {
    let mut texts = Vec::new();
    sources(&std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut texts);
    let all: Vec<(String, String)> = texts.iter().flat_map(|text| fields(text)).collect();
    let known: BTreeSet<&str> = AUDIT_DETAILS.iter().map(|(name, _)| *name).collect();
    let used: BTreeSet<&str> = all.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(used, known);
    let times = all.iter().filter(|(name, _)| name.ends_with("_at"));
    let fractions: Vec<_> = times.filter(|(_, value)| !value.contains("whole_second")).collect();
    assert!(fractions.is_empty(), "{fractions:?}");
}

#[test]
fn fields_of_a_json_object_are_found() {
    let source = "json!({ \"uid\": job.uid, \"expires_at\": at })";
    let found = fields(source);
    assert_eq!(found, [("uid".to_owned(), "job.uid".to_owned()), ("expires_at".to_owned(), "at".to_owned())]);
}
