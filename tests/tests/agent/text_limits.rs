//! Long texts in every field of every request. The requests come from the API description, which comes from the types, so
//! a new field is tested without a change here.

use std::collections::BTreeMap;

use gpush_tests::{
    agent::Answer,
    description::{Request, Text},
};

use crate::described_requests::Scene;

/// Length of a text that a body cannot contain, because the whole body may have 64 KiB.
const LONGER_THAN_BODY: usize = 64 << 10;

/// Length of a text that fits into a body, but is longer than the limit of a text.
const LONGER_THAN_TEXT: usize = 60_000;

/// Length of a text that is shorter than the limit of a text in a body.
const SHORT_ENOUGH: usize = 3_500;

/// Length of a text that just fits into the head of a request.
const FITS_INTO_HEAD: usize = 7_000;

/// Maximum size of an error answer, and of a line of the log, in bytes.
const BOUND: usize = 4 << 10;

/// Maximum length of a stored or logged part that repeats one character. This is the maximum length of a reason.
const LONGEST_RUN: usize = 500;

fn described(request: &Request, text: &Text, answer: &Answer) -> String {
    let body = String::from_utf8_lossy(&answer.body).chars().take(600).collect::<String>();
    format!("{} {} {text:?}: {} {body}", request.method, request.template, answer.status)
}

fn is_clear_refusal(answer: &Answer) -> bool {
    let is_client_error = (400..500).contains(&answer.status);
    is_client_error && answer.body.len() <= BOUND && !answer.error().message.is_empty()
}

#[test]
fn text_of_60_kib_in_any_field_of_any_body_is_refused() {
    let scene = Scene::new();
    let (mut tested, mut fields) = (0, BTreeMap::new());
    for request in scene.requests() {
        for text in request.texts() {
            let (Text::Body(at) | Text::NewKey(at)) = &text else { continue };
            let changes: [fn(&str) -> String; 4] = [
                |_| "x".repeat(LONGER_THAN_BODY),
                |_| "x".repeat(LONGER_THAN_TEXT),
                |valid| format!("{valid}{}", " ".repeat(LONGER_THAN_TEXT)),
                |valid| format!("{}{valid}", " ".repeat(LONGER_THAN_TEXT)),
            ];
            for change in changes {
                let long = request.changed(&text, change);
                let answer = scene.sent(&long);
                assert!(answer.status == 413 && is_clear_refusal(&answer), "{}", described(&request, &text, &answer));
                tested += 1;
            }
            *fields.entry((request.template.clone(), at.clone())).or_insert(0) += 1;
        }
    }
    println!("{tested} requests, {} fields", fields.len());
    // The texts that existed when this test was written.
    assert!(fields.len() >= 40, "{fields:?}");
}

#[test]
fn long_path_query_and_header_are_refused_or_not_stored() {
    let scene = Scene::new();
    let mut tested = 0;
    for request in scene.requests() {
        for text in request.texts() {
            let Text::Parameter(_) = text else { continue };
            let answer = scene.sent(&request.changed(&text, |_| "x".repeat(LONGER_THAN_BODY)));
            assert!([414, 431].contains(&answer.status), "{}", described(&request, &text, &answer));
            for change in [
                |_: &str| "0".repeat(FITS_INTO_HEAD),
                |valid: &str| format!("{valid}{}", " ".repeat(FITS_INTO_HEAD / 3)),
            ] {
                let answer = scene.sent(&request.changed(&text, change));
                let is_answer = (200..300).contains(&answer.status);
                assert!(is_answer || is_clear_refusal(&answer), "{}", described(&request, &text, &answer));
                tested += 1;
            }
        }
    }
    println!("{tested} requests");
    assert!(tested > 100);
    assert_bounded(scene);
}

#[test]
fn text_of_3500_bytes_is_refused_or_stored_without_long_runs() {
    let scene = Scene::new();
    let mut accepted = BTreeMap::new();
    for request in scene.requests() {
        for text in request.texts() {
            let changes: [fn(&str) -> String; 4] = [
                |_| "x".repeat(SHORT_ENOUGH),
                |_| "\u{1}".repeat(SHORT_ENOUGH / 6),
                |valid| format!("{valid}{}", " ".repeat(SHORT_ENOUGH)),
                |valid| format!("{}{valid}", " ".repeat(SHORT_ENOUGH)),
            ];
            let (Text::Body(at) | Text::NewKey(at)) = &text else { continue };
            for change in changes {
                let answer = scene.sent(&request.changed(&text, change));
                let is_accepted = (200..300).contains(&answer.status);
                let is_unavailable = answer.status == 503;
                assert!(
                    is_accepted || is_unavailable || is_clear_refusal(&answer),
                    "{}",
                    described(&request, &text, &answer)
                );
                if is_accepted {
                    *accepted.entry(format!("{} {at}", request.template)).or_insert(0) += 1;
                }
            }
        }
    }
    println!("{accepted:#?}");
    // Otherwise the test would show nothing about what gpushd stores.
    for stored in ["/v1/leases /selectors/0", "/v1/leases /target", "/v1/gpus/{gpu}/cordon /reason"] {
        assert!(accepted.contains_key(stored), "{accepted:?}");
    }
    assert_bounded(scene);
}

/// Stops gpushd, and checks that its log and its database contain no long text of a request. Every long text of these
/// tests repeats one character.
fn assert_bounded(scene: Scene) {
    let (log, state, _host) = scene.stop();
    for line in log.lines() {
        assert!(line.len() <= BOUND && longest_run(line.as_bytes()) <= LONGEST_RUN, "{line}");
    }
    let database = rusqlite::Connection::open(state.join("gpush.db")).expect("the database can be opened");
    let columns = "SELECT t.name, c.name FROM sqlite_schema t, pragma_table_info(t.name) c WHERE t.type = 'table'";
    let mut columns = database.prepare(columns).expect("the columns can be listed");
    let names = columns.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, String>(1)?)));
    for (table, column) in names.expect("columns").map(|names| names.expect("a column")) {
        let values = format!("SELECT CAST(\"{column}\" AS BLOB) FROM \"{table}\" WHERE \"{column}\" IS NOT NULL");
        let mut values = database.prepare(&values).expect("the values can be read");
        let values = values.query_map([], |row| row.get::<_, Vec<u8>>(0));
        for value in values.expect("values").map(|value| value.expect("a value")) {
            let run = longest_run(&value);
            let text = String::from_utf8_lossy(&value);
            assert!(run <= LONGEST_RUN, "{table}.{column}: one character {run} times: {text}");
        }
    }
}

/// Returns the length of the longest part that repeats one byte.
fn longest_run(bytes: &[u8]) -> usize {
    bytes.chunk_by(|one, next| one == next).map(<[u8]>::len).max().unwrap_or(0)
}
