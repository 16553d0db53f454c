//! Requests to the API, generated from its description (`/v1/openapi.json`).
//!
//! gpushd generates the description from its types, so these requests have every parameter and every field that the types
//! have, also those that a later version adds.

use serde_json::{Map, Value};

/// A request to the API.
#[derive(Debug, Clone)]
pub struct Request {
    /// Method, such as `POST`.
    pub method: String,
    /// Path with placeholders, such as `/v1/gpus/{gpu}`.
    pub template: String,
    /// Values of the placeholders, query parameters and headers.
    pub parameters: Vec<Parameter>,
    /// Body, if the operation takes one.
    pub body: Option<Value>,
}

/// A parameter of a request.
#[derive(Debug, Clone)]
pub struct Parameter {
    /// Name.
    pub name: String,
    /// Where the request has the parameter: `path`, `query` or `header`.
    pub place: String,
    /// Value, without escapes.
    pub value: String,
}

/// The position of a text in a request.
#[derive(Debug, Clone)]
pub enum Text {
    /// The parameter with this number.
    Parameter(usize),
    /// The string at this JSON pointer in the body.
    Body(String),
    /// The name of a field that the object at this JSON pointer in the body does not have.
    NewKey(String),
}

impl Request {
    /// Returns the positions of all texts.
    #[must_use]
    pub fn texts(&self) -> Vec<Text> {
        let mut texts: Vec<Text> = (0..self.parameters.len()).map(Text::Parameter).collect();
        if let Some(body) = &self.body {
            add_texts(body, "", &mut texts);
        }
        texts
    }

    /// Returns this request with another value at `position`, which `change` makes from the present value.
    ///
    /// # Panics
    /// If the request has no text at `position`.
    #[must_use]
    pub fn changed(&self, position: &Text, change: impl Fn(&str) -> String) -> Self {
        let mut changed = self.clone();
        match position {
            Text::Parameter(number) => changed.parameters[*number].value = change(&self.parameters[*number].value),
            Text::Body(at) => {
                let value = changed.body.as_mut().and_then(|body| body.pointer_mut(at)).expect("a string");
                *value = change(value.as_str().expect("a string")).into();
            }
            Text::NewKey(at) => {
                let value = changed.body.as_mut().and_then(|body| body.pointer_mut(at)).expect("an object");
                value.as_object_mut().expect("an object").insert(change(""), Value::Null);
            }
        }
        changed
    }

    /// Returns the path with the query parameters.
    #[must_use]
    pub fn target(&self) -> String {
        let mut target = self.template.clone();
        for parameter in self.parameters.iter().filter(|parameter| parameter.place == "path") {
            target = target.replace(&format!("{{{}}}", parameter.name), &escaped(&parameter.value));
        }
        for parameter in self.parameters.iter().filter(|parameter| parameter.place == "query") {
            target.push(if target.contains('?') { '&' } else { '?' });
            target.push_str(&format!("{}={}", parameter.name, escaped(&parameter.value)));
        }
        target
    }

    /// Returns the headers, each with its line end.
    #[must_use]
    pub fn headers(&self) -> String {
        let headers = self.parameters.iter().filter(|parameter| parameter.place == "header");
        let mut lines: String = headers.map(|one| format!("{}: {}\r\n", one.name, one.value)).collect();
        if self.body.is_some() {
            lines.push_str("content-type: application/json\r\n");
        }
        lines
    }
}

/// Escapes every character that could end a part of a path or a query.
fn escaped(text: &str) -> String {
    let is_safe = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:".contains(&byte);
    text.bytes().map(|byte| if is_safe(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

fn add_texts(value: &Value, at: &str, texts: &mut Vec<Text>) {
    match value {
        Value::String(_) => texts.push(Text::Body(at.to_owned())),
        Value::Array(items) => {
            for (number, item) in items.iter().enumerate() {
                add_texts(item, &format!("{at}/{number}"), texts);
            }
        }
        Value::Object(fields) => {
            texts.push(Text::NewKey(at.to_owned()));
            for (name, field) in fields {
                add_texts(field, &format!("{at}/{name}"), texts);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Generates requests from a description. `sample` returns a valid text for the field or parameter with a name, or
/// the digits of a number. Each operation gets one request for each parameter and for each field of its body, with the parameters and fields that are
/// required. If a field has several forms, it gets one request for each form.
///
/// # Panics
/// If the description uses a keyword that this function does not know.
#[must_use]
pub fn requests(description: &Value, sample: &dyn Fn(&str) -> String) -> Vec<Request> {
    let schemas = Schemas { description, sample };
    let mut requests = Vec::new();
    for (template, methods) in description["paths"].as_object().expect("paths") {
        for (method, operation) in methods.as_object().expect("methods") {
            let described = operation["parameters"].as_array().map_or(&[][..], Vec::as_slice);
            let parameters: Vec<Parameter> = described.iter().map(|one| schemas.parameter(one)).collect();
            let (paths, others): (Vec<_>, Vec<_>) = parameters.into_iter().partition(|one| one.place == "path");
            let with = |more: Option<&Parameter>, body: Option<Value>| Request {
                method: method.to_uppercase(),
                template: template.clone(),
                parameters: paths.iter().chain(more).cloned().collect(),
                body,
            };
            let body = &operation["requestBody"]["content"]["application/json"]["schema"];
            let bodies = if body.is_null() { vec![None] } else { schemas.some_values("", body) };
            requests.extend(others.iter().map(|one| with(Some(one), bodies[0].clone())));
            requests.extend(bodies.into_iter().map(|body| with(None, body)));
        }
    }
    requests
}

struct Schemas<'a> {
    description: &'a Value,
    sample: &'a dyn Fn(&str) -> String,
}

impl Schemas<'_> {
    fn parameter(&self, described: &Value) -> Parameter {
        let text = |key: &str| described[key].as_str().expect("a text").to_owned();
        let (name, place) = (text("name"), text("in"));
        let value = match self.values(&name, &described["schema"]).swap_remove(0) {
            Value::String(text) => text,
            other => other.to_string(),
        };
        Parameter { name, place, value }
    }

    fn some_values(&self, name: &str, schema: &Value) -> Vec<Option<Value>> {
        self.values(name, schema).into_iter().map(Some).collect()
    }

    /// Returns values that together have every field and every form that `schema` describes.
    fn values(&self, name: &str, schema: &Value) -> Vec<Value> {
        if let Some(reference) = schema["$ref"].as_str() {
            let target = self.description.pointer(reference.trim_start_matches('#')).expect("a known schema");
            return self.values(name, target);
        }
        for keyword in ["oneOf", "anyOf"] {
            if let Some(forms) = schema[keyword].as_array() {
                return forms.iter().flat_map(|form| self.values(name, form)).collect();
            }
        }
        if let Some(values) = schema["enum"].as_array() {
            return values[..1].to_vec();
        }
        let types = match &schema["type"] {
            Value::Array(types) => types.iter().filter_map(Value::as_str).find(|one| *one != "null"),
            one => one.as_str(),
        };
        match types.unwrap_or_else(|| panic!("{name}: a schema without type: {schema}")) {
            "null" => Vec::new(),
            "boolean" => vec![false.into()],
            "integer" => vec![(self.sample)(name).parse().unwrap_or(1_u64).max(1).into()],
            "number" => vec![50.0.into()],
            "string" => vec![(self.sample)(name).into()],
            "array" => self.values(name, &schema["items"]).into_iter().map(|item| vec![item].into()).collect(),
            "object" => self.objects(schema),
            other => panic!("{name}: unknown type {other}"),
        }
    }

    /// Returns the object with only its required fields, and one object for each other field and each form of a field.
    fn objects(&self, schema: &Value) -> Vec<Value> {
        let none = Map::new();
        let fields = schema["properties"].as_object().unwrap_or(&none);
        let forms = |name: &str| self.values(name, &fields[name]);
        let required = schema["required"].as_array().map_or(&[][..], Vec::as_slice);
        let least: Map<String, Value> = required
            .iter()
            .filter_map(Value::as_str)
            .map(|name| (name.to_owned(), forms(name).swap_remove(0)))
            .collect();
        let mut objects = vec![least.clone()];
        for name in fields.keys() {
            for form in forms(name) {
                let mut object = least.clone();
                object.insert(name.clone(), form);
                objects.push(object);
            }
        }
        if schema["additionalProperties"].is_object() {
            for form in self.values("", &schema["additionalProperties"]) {
                objects.push(Map::from_iter([((self.sample)("key"), form)]));
            }
        }
        objects.into_iter().map(Value::Object).collect()
    }
}
