//! The audit trail as a table.

use gpush_api::{AuditRecord, Gpu};
use serde_json::Value;

use super::{
    Appearance,
    appearance::{QUIET, pad, paint},
    listing::{Listing, widened},
    names::user_name,
    table::{Align, Narrow},
};

const COLUMNS: [(&str, Align); 6] = [
    ("TIME", Align::Left),
    ("BY", Align::Left),
    ("ACTION", Align::Left),
    ("OBJECT", Align::Left),
    ("RESULT", Align::Left),
    ("DETAIL", Align::Left),
];

/// Lists the records of `gpushctl audit`.
pub(crate) fn records(records: &[AuditRecord], gpus: &[Gpu], look: &Appearance) -> Listing {
    let rows = records.iter().map(|record| row(record, gpus, look));
    let uid = |record: &AuditRecord| record.by.as_ref().map_or_else(|| "-".to_owned(), |by| by.uid.to_string());
    let (columns, rows) = widened(
        &COLUMNS,
        rows.collect(),
        records,
        &[("SEQUENCE", &|one| one.sequence.to_string()), ("UID", &uid)],
        look,
    );
    Listing::new(&columns, rows, Narrow::default().prose(), look)
        .names(records.iter().map(|record| record.sequence.to_string()))
}

fn row(record: &AuditRecord, gpus: &[Gpu], look: &Appearance) -> Vec<String> {
    vec![
        look.clock(record.at),
        record.by.as_ref().map_or_else(
            || "gpushd".to_owned(),
            |by| look.clean(&user_name(by.user.as_deref(), by.uid, record.account.as_deref())),
        ),
        look.clean(&record.action),
        object(&record.object, gpus, look),
        look.clean(&record.result.replace('_', " ")),
        detail(&record.detail, gpus, look),
    ]
}

/// Widths of the columns with `--follow`: the widths of later records are not known.
const WIDTHS: [usize; 5] = ["2026-01-02 03:04:05 CEST".len(), 10, "maintenance.enter".len(), 10, "rolled back".len()];

/// Draws a record as one line, for `--follow`.
pub(crate) fn line(record: &AuditRecord, gpus: &[Gpu], look: &Appearance) -> String {
    aligned(&row(record, gpus, look))
}

/// Draws the heading above the lines of `--follow`.
pub(crate) fn heading() -> String {
    paint(QUIET, aligned(&COLUMNS.map(|(name, _)| name.to_owned())).trim_end()) + "\n"
}

fn aligned(cells: &[String]) -> String {
    let padded = cells.iter().enumerate().map(|(at, cell)| pad(cell, WIDTHS.get(at).copied().unwrap_or(0)));
    padded.collect::<Vec<_>>().join("  ").trim_end().to_owned() + "\n"
}

/// Returns the name of an object. For a GPU, this is its index; if the driver does not list the
/// GPU, the beginning of its UUID. `--json` prints the complete UUID.
pub(crate) fn object(object: &str, gpus: &[Gpu], look: &Appearance) -> String {
    if let Some(gpu) = gpus.iter().find(|gpu| gpu.uuid == object) {
        return format!("GPU {}", gpu.index);
    }
    let object = look.clean(object);
    if look.wraps && object.starts_with("GPU-") { short(&object) } else { object }
}

fn short(uuid: &str) -> String {
    uuid.chars().take("GPU-00000000".len()).collect()
}

/// Describes the details of a record: each field with its value, including nested fields.
fn detail(detail: &Value, gpus: &[Gpu], look: &Appearance) -> String {
    let Value::Object(fields) = detail else {
        return if detail.is_null() { String::new() } else { look.clean(&detail.to_string()) };
    };
    let has = |name: &str| fields.get(name).is_some_and(|value| !is_empty(value));
    let parts = fields.iter().filter(|(_, value)| !is_empty(value)).filter_map(|(name, value)| {
        Some(match (name.as_str(), value) {
            ("gpus", Value::Array(all)) => all.iter().map(|one| one_gpu(one, gpus)).collect::<Vec<_>>().join("; "),
            ("why" | "gpu_uuid" | "gpu_uuids", value) => value_text(value, gpus),
            // Leave out the uid, because the record also has the user name.
            ("uid", _) if has("user") => return None,
            ("uid", value) => format!("user: uid {value}"),
            // Leave out the UUID of the target: the target is the object of the record, and is
            // already shown.
            ("uuid", _) if has("gpu_uuid") => return None,
            (name, value) => format!("{}: {}", name.replace('_', " "), value_text(value, gpus)),
        })
    });
    look.clean(&parts.collect::<Vec<_>>().join("; "))
}

/// Returns the name of a user, or the uid if there is no name. `None` if the fields do not describe
/// a user.
fn user(fields: &serde_json::Map<String, Value>) -> Option<String> {
    let uid = fields.get("uid")?;
    Some(fields.get("user").and_then(Value::as_str).map_or_else(|| format!("uid {uid}"), str::to_owned))
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(all) => all.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// Returns a JSON value without quotes and brackets.
fn value_text(value: &Value, gpus: &[Gpu]) -> String {
    let all = |parts: Vec<String>| parts.join(", ");
    match value {
        Value::Null => "none".to_owned(),
        Value::Bool(yes) => if *yes { "yes" } else { "no" }.to_owned(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => gpus
            .iter()
            .find(|gpu| gpu.uuid == *text.as_str())
            .map_or_else(|| text.clone(), |gpu| format!("GPU {}", gpu.index)),
        Value::Array(values) => all(values.iter().map(|value| value_text(value, gpus)).collect()),
        Value::Object(fields) => {
            if let Some(user) = user(fields) {
                return user;
            }
            let field = |(name, value): (&String, &Value)| match name.as_str() {
                "gpu_uuid" | "gpu_uuids" => value_text(value, gpus),
                name => format!("{} {}", name.replace('_', " "), value_text(value, gpus)),
            };
            all(fields.iter().filter(|(_, value)| !is_empty(value)).map(field).collect())
        }
    }
}

/// Describes a GPU and its layout in the record of an apply.
fn one_gpu(one: &Value, gpus: &[Gpu]) -> String {
    match (one["gpu_uuid"].as_str(), one["desired"].as_str()) {
        (Some(uuid), Some(wanted)) => {
            let known = gpus.iter().find(|gpu| gpu.uuid == uuid);
            format!("{} {wanted}", known.map_or_else(|| short(uuid), |gpu| format!("GPU {}", gpu.index)))
        }
        _ => value_text(one, gpus),
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::Actor;
    use serde_json::json;

    use super::*;
    use crate::render::{Charset, fixtures};

    #[test]
    fn each_record_is_a_line() {
        let at = fixtures::look(80, Charset::Ascii).now;
        let alice = Actor { uid: 1000, user: Some("alice\u{1b}[2J".into()), pid: Some(4123) };
        let record = |by, action: &str, result: &str, detail| AuditRecord {
            sequence: 1,
            at,
            by,
            account: None,
            action: action.into(),
            object: "op-3".into(),
            result: result.into(),
            detail,
        };
        let gpus = json!([{"gpu_uuid": "GPU-5e8c07a4-0000-0000", "layout": ["3g.40gb", "1g.10gb*2"], "desired": "3g.40gb, 1g.10gb*2"}]);
        let all = [
            record(Some(alice), "mig.apply", "accepted", json!({"gpus": gpus, "reason": "for the\nworkshop"})),
            record(Some(Actor { uid: 7, user: None, pid: None }), "operation.cancel", "accepted", Value::Null),
            record(None, "mig.apply", "rolled_back", json!({"why": "operation op-3 was cancelled"})),
            record(None, "lease.end", "expired", json!({"uid": 0, "user": "root"})),
            record(None, "lease.end", "expired", json!({"uid": 1000, "user": null})),
            record(
                None,
                "override.clear",
                "done",
                json!({"author": {"uid": 0, "user": "root", "pid": 7}, "reason": ""}),
            ),
            record(None, "maintenance.enter", "done", json!({"gpu_uuids": ["GPU-5e8c07a4-0000-0000"]})),
        ];
        let look = Appearance { wraps: false, ..fixtures::look(80, Charset::Ascii) };
        let text =
            fixtures::plain(records(&all, &[], &look).text()).replace(&look.clock(at), "TTTT-TT-TT TT:TT:TT ZZZ");
        insta::assert_snapshot!(text);
        // Fault: with `--follow`, the columns had no heading and were not aligned.
        let lines = heading() + &all[1..4].iter().map(|one| line(one, &[], &look)).collect::<String>();
        let text = fixtures::plain(&lines).replace(&look.clock(at), "TTTT-TT-TT TT:TT:TT ZZZ");
        insta::assert_snapshot!("audit-follow", text);
        let look = fixtures::look(60, Charset::Ascii);
        let text = fixtures::plain(records(&all, &[], &look).text());
        assert!(text.lines().all(|line| line.len() <= 60), "{text}");
        for word in ["operation.cancel", "GPU-5e8c07a4 3g.40gb, 1g.10gb*2", "rolled"] {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
}
