//! Limits the length of every string in the body of a request.
//!
//! gpushd stores and logs some strings of a request. The limit applies to the JSON text before it is parsed, so it holds
//! for each string of each request, also in fields that a later version adds.

/// Maximum length of a string in bytes. The longest allowed string is a reason of 500 characters, with up to 4 bytes each.
pub(super) const LONGEST: usize = 4096;

/// Returns whether all strings of a JSON text, including the names of fields, are short enough. Each escape `\\uXXXX`
/// counts as 3 bytes. Bytes that are not JSON do not matter: the parser refuses them.
pub(super) fn has_short_strings(json: &[u8]) -> bool {
    let mut bytes = json.iter();
    while bytes.by_ref().any(|byte| *byte == b'"') {
        let mut length = 0;
        while let Some(byte) = bytes.next() {
            length += match (byte, bytes.as_slice()) {
                (b'"', _) => break,
                (b'\\', [b'u', ..]) => {
                    bytes.nth(4);
                    3
                }
                (b'\\', _) => {
                    bytes.next();
                    1
                }
                _ => 1,
            };
            if length > LONGEST {
                return false;
            }
        }
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

    /// Fault: a reason of 500 characters was refused if the client escaped characters that need no escape.
    #[test]
    fn escaped_characters_count_with_their_length_after_parsing() {
        let body = |number: usize| format!("[\"{}\"]", "\\ud83d\\ude00".repeat(number)).into_bytes();
        assert!(has_short_strings(&body(500)));
        assert!(!has_short_strings(&body(LONGEST / 6 + 1)));
        assert!(has_short_strings(b"\"\\u00"), "the parser reports text that is cut off");
    }

    proptest! {
        #[test]
        fn short_texts_of_any_form_are_accepted(texts in prop::collection::vec(".{0,200}", 0..200)) {
            prop_assert!(has_short_strings(&serde_json::to_vec(&texts).unwrap()));
        }
    }
}
