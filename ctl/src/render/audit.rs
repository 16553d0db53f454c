//! The audit trail as a table.

use gpush_api::AuditRecord;
use serde_json::Value;

use super::{
    Look,
    table::{Align, Narrow, fitted},
};

/// `gpushctl audit`.
pub(crate) fn records(records: &[AuditRecord], look: &Look) -> String {
    let columns = [
        ("TIME", Align::Left),
        ("BY", Align::Left),
        ("ACTION", Align::Left),
        ("OBJECT", Align::Left),
        ("RESULT", Align::Left),
        ("DETAIL", Align::Left),
    ];
    let rows = records.iter().map(|record| {
        vec![
            look.clock(record.at),
            record.by.as_ref().map_or_else(
                || "gpushd".to_owned(),
                |by| by.user.as_ref().map_or_else(|| format!("uid {}", by.uid), |user| look.clean(user)),
            ),
            look.clean(&record.action),
            object(&record.object, look),
            look.clean(&record.result.replace('_', " ")),
            detail(&record.detail, look),
        ]
    });
    fitted(&columns, rows.collect(), Narrow { spare: &[], prose: true }, 0, look)
}

/// On a terminal the beginning of a UUID, by which a GPU is found as well; --json has all of it.
pub(crate) fn object(object: &str, look: &Look) -> String {
    let object = look.clean(object);
    if look.wraps && object.starts_with("GPU-") { short(&object) } else { object }
}

fn short(uuid: &str) -> String {
    uuid.chars().take("GPU-00000000".len()).collect()
}

/// What else is recorded, in words where the shape is known: whatever is not is shown as it is.
fn detail(detail: &Value, look: &Look) -> String {
    let Value::Object(fields) = detail else {
        return if detail.is_null() { String::new() } else { look.clean(&detail.to_string()) };
    };
    let word = |value: &Value| value.as_str().map_or_else(|| value.to_string(), str::to_owned);
    let parts = fields.iter().filter(|(_, value)| !value.is_null()).map(|(name, value)| match (name.as_str(), value) {
        ("gpus", Value::Array(gpus)) => gpus.iter().map(one_gpu).collect::<Vec<_>>().join("; "),
        ("error", value) => word(value),
        (name, value) => format!("{name}: {}", word(value)),
    });
    look.clean(&parts.collect::<Vec<_>>().join("; "))
}

/// A GPU and what was wanted of it, as an apply records them.
fn one_gpu(gpu: &Value) -> String {
    match (gpu["gpu"].as_str(), gpu["wanted"].as_str()) {
        (Some(uuid), Some(wanted)) => format!("{} {wanted}", short(uuid)),
        _ => gpu.to_string(),
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
            action: action.into(),
            object: "op-3".into(),
            result: result.into(),
            detail,
        };
        let gpus = json!([{"gpu": "GPU-5e8c07a4-0000-0000", "layout": ["3g.40gb", "1g.10gb*2"], "wanted": "3g.40gb, 1g.10gb*2"}]);
        let all = [
            record(Some(alice), "mig.apply", "accepted", json!({"gpus": gpus, "reason": "for the\nworkshop"})),
            record(Some(Actor { uid: 7, user: None, pid: None }), "operation.cancel", "accepted", Value::Null),
            record(None, "mig.apply", "rolled_back", json!({"error": "operation op-3 was cancelled"})),
        ];
        let look = Look { wraps: false, ..fixtures::look(80, Charset::Ascii) };
        let text = fixtures::plain(&records(&all, &look)).replace(&look.clock(at), "TTTT-TT-TT TT:TT:TT");
        insta::assert_snapshot!(text);
        let look = fixtures::look(60, Charset::Ascii);
        let text = fixtures::plain(&records(&all, &look));
        assert!(text.lines().all(|line| line.len() <= 60), "{text}");
        for word in ["operation.cancel", "GPU-5e8c07a4 3g.40gb, 1g.10gb*2", "rolled"] {
            assert!(text.contains(word), "{word}: {text}");
        }
    }
}
