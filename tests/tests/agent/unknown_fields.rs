//! Unknown fields in every object of every request. A client that misspells a field must not get a change without it.

use std::collections::BTreeSet;

use gpush_tests::{
    agent::Answer,
    description::{Request, Text},
};

use crate::described_requests::Scene;

/// Returns whether the answer says that the body does not match the type of the request.
fn says_invalid_body(answer: &Answer) -> bool {
    answer.status == 400 && answer.error().message.starts_with("the body is not valid for ")
}

/// Returns the forms of the object at `at` in the body: the object without the values of its texts and numbers.
fn form(request: &Request, at: &str) -> String {
    let object = request.body.as_ref().and_then(|body| body.pointer(at)).expect("an object");
    let names = object.as_object().expect("an object").keys().map(String::as_str).collect::<Vec<_>>().join(" ");
    format!("{} {at}: {names} {}", request.template, object["kind"])
}

#[test]
fn unknown_field_in_any_object_of_any_body_is_refused() {
    let scene = Scene::new();
    let mut objects = BTreeSet::new();
    for request in scene.requests() {
        for text in request.texts() {
            let Text::NewKey(at) = &text else { continue };
            if !objects.insert(form(&request, at)) {
                continue;
            }
            let answer = scene.sent(&request);
            assert!(!says_invalid_body(&answer), "{request:?}: {}", String::from_utf8_lossy(&answer.body));
            let answer = scene.sent(&request.changed(&text, |_| "misspelled".to_owned()));
            assert!(says_invalid_body(&answer), "{at} {request:?}: {}", String::from_utf8_lossy(&answer.body));
        }
    }
    println!("{objects:#?}");
    // These objects accepted unknown fields.
    for known in ["kind \"default\"", "kind \"timeslice\"", "kind \"whole\"", "/slurm_devices/0/detected: "] {
        assert!(objects.iter().any(|object| object.contains(known)), "{known}: {objects:?}");
    }
}
