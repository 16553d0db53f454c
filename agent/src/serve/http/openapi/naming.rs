//! Tests that a name in the description means the same everywhere in the API.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::{Value, json};

/// Names that may have different types, each with the reason.
const EXCEPTIONS: [&str; 1] = [
    // `do` contains the kind of a step. In each schema of a step, it is a different constant.
    "do",
];

/// Fields of [`gpush_store::AuditEvent`], which are the details of audit records, with the type of each field. The details
/// have no schema.
const AUDIT_DETAILS: [(&str, &str); 35] = [
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
    ("from_rule", "boolean"),
    ("gpu", "integer"),
    ("gpu_uuid", "string"),
    ("gpu_uuids", "[string]"),
    ("gpus", "[object]"),
    ("kept", "string"),
    ("layout", "[string]"),
    ("memory_limit_mib", "integer"),
    ("once", "boolean"),
    ("operation_id", "string"),
    ("overrides_ended", "[string]"),
    ("path", "string"),
    ("percentage", "number"),
    ("pid", "integer"),
    ("priority", "Priority"),
    ("processes_end_at", "string"),
    ("reason", "string"),
    ("reload", "string"),
    ("request_spec", "string"),
    ("rule", "string"),
    ("targets", "[string]"),
    ("uid", "integer"),
    ("user", "string"),
    ("uuid", "string"),
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
