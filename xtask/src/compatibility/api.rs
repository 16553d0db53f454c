//! Compares two OpenAPI documents: paths, methods, parameters, bodies and responses.

use serde_json::{Map, Value};

use super::{
    Difference,
    schema::{Comparison, Direction},
};

/// Returns the differences that prevent a client of the old API from using the new API.
pub(super) fn differences(old: &Value, new: &Value) -> Vec<Difference> {
    let mut comparison = Comparison::new(old, new);
    for (path, methods) in fields(old, "paths") {
        let Some(now) = new["paths"].get(path) else {
            comparison.differs(path, "the path was removed", "restore it");
            continue;
        };
        for (method, operation) in methods.as_object().into_iter().flatten() {
            let place = format!("{} {path}", method.to_uppercase());
            match now.get(method) {
                Some(now) => of_operation(&mut comparison, operation, now, &place),
                None => comparison.differs(&place, "the method was removed", "restore it"),
            }
        }
    }
    comparison.found
}

fn of_operation<'d>(comparison: &mut Comparison<'d>, old: &'d Value, new: &'d Value, place: &str) {
    let key = |parameter: &'d Value| (parameter["in"].as_str(), parameter["name"].as_str());
    let list = |operation: &'d Value| operation["parameters"].as_array().into_iter().flatten();
    let is_required = |value: &Value| value["required"] == true;
    for before in list(old) {
        let place = format!("{place}, parameter {}", before["name"].as_str().unwrap_or_default());
        match list(new).find(|now| key(now) == key(before)) {
            None => comparison.differs(&place, "it was removed", "restore it"),
            Some(now) => {
                if is_required(now) && !is_required(before) {
                    comparison.differs(&place, "it is required now", "make it optional again");
                }
                comparison.schemas(&before["schema"], &now["schema"], &place, Direction::Request);
            }
        }
    }
    for now in list(new).filter(|now| is_required(now) && !list(old).any(|before| key(before) == key(now))) {
        let place = format!("{place}, parameter {}", now["name"].as_str().unwrap_or_default());
        comparison.differs(&place, "it is new and required", "make it optional, with the old meaning without it");
    }

    let at = format!("{place}, request");
    let (before, now) = (&old["requestBody"], &new["requestBody"]);
    if is_required(now) && !is_required(before) {
        comparison.differs(&at, "a body is required now", "make it optional again");
    }
    contents(comparison, before, now, &at, Direction::Request);

    for (status, before) in fields(old, "responses") {
        let at = format!("{place}, answer {status}");
        match new["responses"].get(status) {
            Some(now) => contents(comparison, before, now, &at, Direction::Answer),
            None => comparison.differs(&at, "it was removed", "restore it"),
        }
    }
}

/// Compares the schemas of each media type.
fn contents<'d>(comparison: &mut Comparison<'d>, old: &'d Value, new: &'d Value, place: &str, direction: Direction) {
    for (media, before) in fields(old, "content") {
        match new["content"].get(media) {
            Some(now) => comparison.schemas(&before["schema"], &now["schema"], place, direction),
            None => comparison.differs(&format!("{place}, {media}"), "it was removed", "restore it"),
        }
    }
}

fn fields<'d>(value: &'d Value, key: &str) -> impl Iterator<Item = (&'d String, &'d Value)> {
    value.get(key).and_then(Value::as_object).into_iter().flat_map(Map::iter)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn document() -> Value {
        json!({
            "paths": {
                "/v1/gpus": { "get": {
                    "parameters": [{ "in": "query", "name": "profiles", "schema": { "type": "boolean" } }],
                    "responses": { "200": { "content": { "application/json": {
                        "schema": { "type": "array", "items": { "$ref": "#/components/schemas/Gpu" } } } } } },
                } },
                "/v1/leases": { "post": {
                    "requestBody": { "required": true, "content": { "application/json": {
                        "schema": { "$ref": "#/components/schemas/LeaseRequest" } } } },
                    "responses": { "200": { "content": {} } },
                } },
            },
            "components": { "schemas": {
                "Gpu": { "type": "object", "required": ["index", "mode"], "properties": {
                    "index": { "type": "integer", "format": "int32" },
                    "mode": { "$ref": "#/components/schemas/Mode" },
                    "parent": { "oneOf": [{ "type": "null" }, { "$ref": "#/components/schemas/Gpu" }] },
                } },
                "Mode": { "type": "string", "enum": ["mig", "mps"] },
                "LeaseRequest": { "type": "object", "required": ["share"], "properties": {
                    "count": { "type": "integer" },
                    "share": { "oneOf": [
                        { "type": "object", "required": ["kind"], "properties": {
                            "kind": { "type": "string", "enum": ["mig"] }, "profile": { "type": "string" } } },
                        { "type": "object", "required": ["kind"], "properties": {
                            "kind": { "type": "string", "enum": ["whole"] } } },
                    ] },
                    "source": { "oneOf": [{ "type": "string", "enum": ["config"] },
                        { "type": "string", "enum": ["wanted"] },
                        { "type": "object", "required": ["named"], "properties": { "named": { "type": "string" } } }] },
                } },
            } },
        })
    }

    /// Applies a change to the new document. Returns the differences from the old document, one
    /// line each.
    fn after(change: impl FnOnce(&mut Value)) -> String {
        let (old, mut new) = (document(), document());
        change(&mut new);
        differences(&old, &new).iter().map(|one| format!("{one}\n")).collect()
    }

    fn remove(value: &mut Value, pointer: &str) {
        let (parent, key) = pointer.rsplit_once('/').unwrap();
        let parent = value.pointer_mut(parent).unwrap();
        match key.parse::<usize>() {
            Ok(at) if parent.is_array() => drop(parent.as_array_mut().unwrap().remove(at)),
            _ => drop(parent.as_object_mut().unwrap().remove(key).unwrap()),
        }
    }

    const GPU: &str = "/components/schemas/Gpu";
    const REQUEST: &str = "/components/schemas/LeaseRequest";

    #[test]
    fn same_document_has_no_difference() {
        assert_eq!(after(|_| {}), "");
    }

    #[test]
    fn removals_are_errors_that_name_the_object() {
        for (pointer, expected) in [
            (
                format!("{GPU}/properties/index"),
                "GET /v1/gpus, answer 200[].index: the field was removed; restore it\n",
            ),
            (
                "/components/schemas/Mode/enum/1".to_owned(),
                "GET /v1/gpus, answer 200[].mode: the value `mps` was removed; restore it\n",
            ),
            (
                format!("{REQUEST}/properties/count"),
                "POST /v1/leases, request.count: the field was removed; restore it\n",
            ),
            (
                format!("{REQUEST}/properties/share/oneOf/1"),
                "POST /v1/leases, request.share (kind=whole): this alternative was removed; restore it\n",
            ),
            (
                format!("{REQUEST}/properties/source/oneOf/1"),
                "POST /v1/leases, request.source (string): the value `wanted` was removed; restore it\n",
            ),
            (
                format!("{REQUEST}/properties/share/oneOf/0/properties/profile"),
                "POST /v1/leases, request.share (kind=mig).profile: the field was removed; restore it\n",
            ),
        ] {
            assert_eq!(after(|new| remove(new, &pointer)), expected, "{pointer}");
        }
        let without = |path: &str| after(|new| drop(new["paths"].as_object_mut().unwrap().remove(path)));
        assert_eq!(without("/v1/gpus"), "/v1/gpus: the path was removed; restore it\n");
        let text = after(|new| drop(new["paths"]["/v1/gpus"]["get"]["parameters"].as_array_mut().unwrap().pop()));
        assert_eq!(text, "GET /v1/gpus, parameter profiles: it was removed; restore it\n");
        let text = after(|new| drop(new["paths"]["/v1/gpus"].as_object_mut().unwrap().remove("get")));
        assert_eq!(text, "GET /v1/gpus: the method was removed; restore it\n");
    }

    #[test]
    fn changed_types_are_errors_in_both_directions() {
        let text = after(|new| new["components"]["schemas"]["Gpu"]["properties"]["index"] = json!({"type": "string"}));
        assert!(
            text.starts_with("GET /v1/gpus, answer 200[].index: its type changed from integer (int32) to string;"),
            "{text}"
        );
        let text = after(|new| {
            new["components"]["schemas"]["Gpu"]["properties"]["index"]["type"] = json!(["integer", "null"]);
        });
        assert!(text.contains("index: its type changed"), "{text}");
        let text =
            after(|new| new["components"]["schemas"]["LeaseRequest"]["properties"]["count"]["type"] = json!("string"));
        assert!(text.contains("request.count: its type changed from integer to string"), "{text}");
        let text = after(|new| {
            new["components"]["schemas"]["Gpu"]["properties"]["mode"] =
                json!({ "oneOf": [{ "type": "null" }, { "$ref": "#/components/schemas/Mode" }] });
        });
        assert!(text.contains("mode: it can be null now"), "{text}");
    }

    #[test]
    fn new_requirements_of_requests_are_errors() {
        let text = after(|new| {
            let request = &mut new["components"]["schemas"]["LeaseRequest"];
            request["properties"]["reason"] = json!({ "type": "string" });
            request["required"] = json!(["share", "reason", "count"]);
        });
        for field in ["reason", "count"] {
            let line = format!("POST /v1/leases, request.{field}: requests must have this field now; make it optional");
            assert!(text.contains(&line), "{text}");
        }
        let text = after(|new| {
            new["paths"]["/v1/gpus"]["get"]["parameters"]
                .as_array_mut()
                .unwrap()
                .push(json!({ "in": "query", "name": "why", "required": true, "schema": { "type": "string" } }));
        });
        assert!(text.contains("GET /v1/gpus, parameter why: it is new and required; make it optional"), "{text}");
        let text = after(|new| new["components"]["schemas"]["Gpu"]["required"] = json!(["index"]));
        assert!(text.contains("mode: answers can lack this field now; write it"), "{text}");
    }

    #[test]
    fn additions_are_no_difference() {
        let text = after(|new| {
            new["paths"]["/v1/new"] = json!({ "get": {} });
            new["paths"]["/v1/gpus"]["get"]["parameters"]
                .as_array_mut()
                .unwrap()
                .push(json!({ "in": "query", "name": "more", "schema": { "type": "string" } }));
            let schemas = &mut new["components"]["schemas"];
            schemas["Gpu"]["properties"]["serial"] = json!({ "type": "string" });
            schemas["Gpu"]["required"] = json!(["index", "mode", "serial"]);
            schemas["Mode"]["enum"] = json!(["mig", "mps", "timeslice"]);
            schemas["LeaseRequest"]["properties"]["reason"] = json!({ "type": "string" });
            schemas["LeaseRequest"]["properties"]["count"]["type"] = json!(["integer", "null"]);
            schemas["LeaseRequest"]["required"] = json!([]);
            schemas["LeaseRequest"]["properties"]["share"]["oneOf"].as_array_mut().unwrap().push(json!(
                { "type": "object", "required": ["kind"], "properties": { "kind": { "type": "string", "enum": ["new"] } } }
            ));
        });
        assert_eq!(text, "");
    }
}
