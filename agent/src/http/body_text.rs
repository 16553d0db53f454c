//! Limits the length of every text in the body of a request.
//!
//! gpushd stores and logs texts of requests. The limit applies to the JSON text before it is parsed, so it holds for each
//! string of each request, also in fields that a later version adds.

/// Maximum length of a string in bytes, as it is written in the JSON text. The longest allowed text is a reason of 500
/// characters.
pub(super) const LONGEST: usize = 4096;

/// Returns whether all strings of a JSON text, including the names of fields, are short enough. Bytes that are not JSON
/// do not matter: the parser refuses them.
pub(super) fn has_short_strings(json: &[u8]) -> bool {
    let (mut length, mut is_escaped) = (None, false);
    for byte in json {
        length = match (length, byte) {
            (None, b'"') => Some(0),
            (None, _) => None,
            (Some(_), b'"') if !is_escaped => None,
            (Some(LONGEST), _) => return false,
            (Some(length), _) => Some(length + 1),
        };
        is_escaped = length.is_some() && *byte == b'\\' && !is_escaped;
    }
    true
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    /// JSON bodies with a long text in a field, a list, a nested object or a field name.
    #[test]
    fn long_string_in_any_field_is_refused() {
        let long = "x".repeat(64 << 10);
        let fields = ["reason", "target", "profile", "selectors", "entries", "expires", "name"];
        for field in fields {
            for body in [
                json!({ field: long }),
                json!({ field: [long] }),
                json!({ "share": { "kind": "mig_profile", field: long } }),
                json!({ "a": [{ "b": { field: ["short", long] } }] }),
                json!({ (long.clone()): field }),
            ] {
                assert!(!has_short_strings(&serde_json::to_vec(&body).unwrap()), "{field}");
            }
            assert!(has_short_strings(&serde_json::to_vec(&json!({ field: "x".repeat(LONGEST) })).unwrap()));
        }
    }

    #[test]
    fn long_string_with_escapes_is_refused() {
        let body = |inner: &str| format!("[\"{}{inner}\"]", "x".repeat(LONGEST)).into_bytes();
        assert!(has_short_strings(&body("")));
        for inner in ["\\\"", "\\\\", "\\u0041", "\\n"] {
            assert!(!has_short_strings(&body(inner)), "{inner}");
        }
        assert!(has_short_strings(b"[\"\\\\\", \"\\\"\"]"));
    }

    proptest! {
        #[test]
        fn short_texts_of_any_form_are_accepted(texts in prop::collection::vec(".{0,200}", 0..200)) {
            prop_assert!(has_short_strings(&serde_json::to_vec(&texts).unwrap()));
        }
    }
}
