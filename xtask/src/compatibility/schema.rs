//! Compares two JSON schemas of an OpenAPI document. Every value that was valid before must still
//! be valid.
//!
//! What may change depends on the direction. The new schema of a request may allow more, but must not require more. The
//! new schema of a response may contain more, but must still contain everything that the old schema contains. A field
//! or a value must not be removed in either direction, because a client may write or read it.
//!
//! A schema is expanded into its alternatives: `$ref` is followed, `allOf` is merged, and each
//! entry of `oneOf` is an alternative. An alternative of the old schema is compared with the
//! alternative of the new schema that has the same tag (`kind=mig`), type, or required fields.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use serde_json::Value;

use super::Difference;

/// The side that writes a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Direction {
    /// The client.
    Request,
    /// gpushd.
    Answer,
}

/// Compares the schemas of two documents, and collects the differences.
#[derive(Debug)]
pub(super) struct Comparison<'d> {
    old: &'d Value,
    new: &'d Value,
    /// Pairs of objects that were already compared; [`Shape::sources`] identifies an object. So if many operations
    /// use a schema, a difference in it is reported once.
    seen: HashSet<(Vec<usize>, Vec<usize>, Direction)>,
    pub(super) found: Vec<Difference>,
}

/// One alternative of a schema.
#[derive(Debug, Clone, Default)]
struct Shape<'d> {
    /// Addresses of the schemas that define the fields of this alternative.
    sources: Vec<usize>,
    /// Permitted types. If any type is permitted, the set is empty.
    types: BTreeSet<&'d str>,
    format: Option<&'d str>,
    /// Permitted strings, or `None` if any string is permitted.
    values: Option<BTreeSet<&'d str>>,
    properties: BTreeMap<&'d str, &'d Value>,
    required: BTreeSet<&'d str>,
    /// The schemas of array items: one for all items, or one for each position.
    items: Vec<&'d Value>,
    /// The schema of all fields that are not listed by name.
    other_fields: Option<&'d Value>,
}

impl<'d> Comparison<'d> {
    pub(super) fn new(old: &'d Value, new: &'d Value) -> Self {
        Self { old, new, seen: HashSet::new(), found: Vec::new() }
    }

    /// Records a difference.
    pub(super) fn differs(&mut self, object: &str, problem: impl Into<String>, remedy: &'static str) {
        self.found.push(Difference { object: object.to_owned(), problem: problem.into(), remedy });
    }

    /// Compares two schemas. `place` names the value, such as `POST /v1/leases, request`.
    pub(super) fn schemas(&mut self, old: &'d Value, new: &'d Value, place: &str, direction: Direction) {
        let (before, now) = (alternatives(self.old, old), alternatives(self.new, new));
        if let ([before], [now]) = (&before[..], &now[..]) {
            return self.shapes(before, now, place, direction);
        }
        for one in &before {
            let place = if one.name().is_empty() { place.to_owned() } else { format!("{place} ({})", one.name()) };
            match one.counterpart(&before, &now) {
                Some(other) => self.shapes(one, other, &place, direction),
                None => self.differs(&place, "this alternative was removed", "restore it"),
            }
        }
        if direction == Direction::Answer && now.iter().any(Shape::is_null) && !before.iter().any(Shape::can_be_null) {
            self.differs(place, "it can be null now", "leave the value out instead, or add another field");
        }
    }

    fn shapes(&mut self, old: &Shape<'d>, new: &Shape<'d>, place: &str, direction: Direction) {
        let is_object = !old.sources.is_empty();
        if is_object && !self.seen.insert((old.sources.clone(), new.sources.clone(), direction)) {
            return;
        }
        let fits = match direction {
            Direction::Request => new.types.is_empty() || (new.types.is_superset(&old.types) && !old.types.is_empty()),
            Direction::Answer => old.types.is_empty() || (old.types.is_superset(&new.types) && !new.types.is_empty()),
        };
        if !fits || old.format != new.format {
            let problem = format!("its type changed from {} to {}", old.type_name(), new.type_name());
            return self.differs(place, problem, "restore the type, and add another field for the new one");
        }
        match (&old.values, &new.values) {
            (Some(old), Some(new)) => {
                for value in old.difference(new) {
                    self.differs(place, format!("the value `{value}` was removed"), "restore it");
                }
            }
            (None, Some(_)) if direction == Direction::Request => {
                self.differs(place, "it takes only some values now", "take all values again");
            }
            (None, Some(_)) | (Some(_) | None, None) => {}
        }
        for (name, schema) in &old.properties {
            let place = format!("{place}.{name}");
            match new.properties.get(name) {
                Some(now) => self.schemas(schema, now, &place, direction),
                None => self.differs(&place, "the field was removed", "restore it"),
            }
        }
        match direction {
            Direction::Request => {
                for name in new.required.difference(&old.required) {
                    let problem = "requests must have this field now";
                    self.differs(
                        &format!("{place}.{name}"),
                        problem,
                        "make it optional, with the old meaning without it",
                    );
                }
            }
            Direction::Answer => {
                for name in old.required.difference(&new.required).filter(|name| new.properties.contains_key(*name)) {
                    let problem = "answers can lack this field now";
                    self.differs(&format!("{place}.{name}"), problem, "write it in every answer");
                }
            }
        }
        if old.items.len() != new.items.len() {
            self.differs(place, "the number of its elements changed", "restore it, and add another field");
        }
        for (at, (old, new)) in old.items.iter().zip(&new.items).enumerate() {
            let place = if at == 0 { format!("{place}[]") } else { format!("{place}[{at}]") };
            self.schemas(old, new, &place, direction);
        }
        if let (Some(old), Some(new)) = (old.other_fields, new.other_fields) {
            self.schemas(old, new, &format!("{place}.*"), direction);
        }
    }
}

impl<'d> Shape<'d> {
    /// Reads the keywords of a schema, except `$ref`, `oneOf` and `allOf`.
    fn of(schema: &'d Value) -> Self {
        let texts = |key: &str| -> Option<BTreeSet<&'d str>> {
            match schema.get(key)? {
                Value::String(one) => Some(BTreeSet::from([one.as_str()])),
                Value::Array(several) => Some(several.iter().filter_map(Value::as_str).collect()),
                _ => None,
            }
        };
        let properties = schema.get("properties").and_then(Value::as_object);
        let positions = schema.get("prefixItems").and_then(Value::as_array);
        Self {
            sources: properties.map(|_| std::ptr::from_ref(schema).addr()).into_iter().collect(),
            types: texts("type").unwrap_or_default(),
            format: schema.get("format").and_then(Value::as_str),
            values: texts("enum").or_else(|| texts("const")),
            properties: properties.into_iter().flatten().map(|(name, schema)| (name.as_str(), schema)).collect(),
            required: texts("required").unwrap_or_default(),
            items: positions.map_or_else(|| schema.get("items").into_iter().collect(), |all| all.iter().collect()),
            other_fields: schema.get("additionalProperties").filter(|schema| schema.is_object()),
        }
    }

    /// Merges two shapes as `allOf` does: the result has the requirements of both.
    fn merged(mut self, other: Self) -> Self {
        self.sources.extend(other.sources);
        self.types.extend(other.types);
        self.format = self.format.or(other.format);
        self.values = self.values.or(other.values);
        self.properties.extend(other.properties);
        self.required.extend(other.required);
        self.items.extend(other.items);
        self.other_fields = self.other_fields.or(other.other_fields);
        self
    }

    /// Returns the alternative in `now` that corresponds to this alternative of `before`.
    fn counterpart<'s>(&self, before: &[Self], now: &'s [Self]) -> Option<&'s Self> {
        let named = |shapes: &'s [Self]| shapes.iter().find(|other| other.name() == self.name());
        if !self.name().is_empty() {
            return named(now);
        }
        // The alternative is an object, and none of its fields is a tag.
        let is_unnamed = |shape: &&Self| shape.name().is_empty();
        let unnamed: Vec<&Self> = now.iter().filter(is_unnamed).collect();
        let has_all = |other: &&&Self| self.required.iter().all(|name| other.properties.contains_key(name));
        match (before.iter().filter(is_unnamed).count(), unnamed.as_slice()) {
            (1, [only]) => Some(*only),
            _ => unnamed.iter().find(has_all).copied(),
        }
    }

    /// Returns a name that distinguishes an alternative from the others: its tag, or its type if it
    /// is not an object.
    fn name(&self) -> String {
        if self.properties.is_empty() {
            return self.type_name();
        }
        let tag = |(name, schema): (&&str, &&Value)| {
            let values = Shape::of(schema).values.filter(|values| values.len() == 1)?;
            Some(format!("{name}={}", values.first()?))
        };
        let tags: Vec<String> = self.properties.iter().filter_map(tag).collect();
        if tags.is_empty() && self.properties.len() == 1 && self.required.len() == 1 {
            // In serde's default form of an enum, an alternative has one field, and the name of
            // this field is the tag.
            return self.required.iter().copied().collect();
        }
        tags.join(", ")
    }

    fn type_name(&self) -> String {
        let types = self.types.iter().copied().collect::<Vec<_>>().join(" or ");
        match (types.is_empty(), self.format) {
            (true, _) => "any type".to_owned(),
            (false, None) => types,
            (false, Some(format)) => format!("{types} ({format})"),
        }
    }

    fn is_null(&self) -> bool {
        self.types.len() == 1 && self.can_be_null()
    }

    fn can_be_null(&self) -> bool {
        self.types.contains("null")
    }
}

/// Follows `$ref` to the schema that it names.
fn resolved<'d>(document: &'d Value, schema: &'d Value) -> &'d Value {
    let target = schema.get("$ref").and_then(Value::as_str).and_then(|path| path.strip_prefix('#'));
    match target.and_then(|pointer| document.pointer(pointer)) {
        Some(target) => resolved(document, target),
        None => schema,
    }
}

/// Returns the alternatives of a schema. If a schema lists fixed strings, it is a single
/// alternative.
fn alternatives<'d>(document: &'d Value, schema: &'d Value) -> Vec<Shape<'d>> {
    let schema = resolved(document, schema);
    let list = |key: &str| schema.get(key).and_then(Value::as_array).into_iter().flatten();
    let mut shapes = vec![Shape::of(schema)];
    for part in list("allOf") {
        let others = alternatives(document, part);
        shapes = shapes.iter().flat_map(|one| others.iter().map(|other| one.clone().merged(other.clone()))).collect();
    }
    let chosen: Vec<Shape<'d>> =
        list("oneOf").chain(list("anyOf")).flat_map(|part| alternatives(document, part)).collect();
    if !chosen.is_empty() {
        shapes = shapes.iter().flat_map(|one| chosen.iter().map(|other| one.clone().merged(other.clone()))).collect();
    }
    let mut joined: Vec<Shape<'d>> = Vec::new();
    for shape in shapes {
        let strings = shape.values.as_ref().and_then(|_| joined.iter_mut().find(|one| one.values.is_some()));
        match (strings.and_then(|one| one.values.as_mut()), &shape.values) {
            (Some(known), Some(values)) => known.extend(values),
            (Some(_) | None, _) => joined.push(shape),
        }
    }
    joined
}
