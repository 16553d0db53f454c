//! Serialization of times: RFC 3339 in UTC with whole seconds, `2026-01-02T03:04:05Z`.
//!
//! Serialization truncates a time to whole seconds, so that `fromdate` of jq can read every time of
//! the API. Any RFC 3339 time is accepted as input.

use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Returns the time truncated to whole seconds, for JSON that is not made from a type of this crate.
#[must_use]
pub fn whole_second(at: Timestamp) -> Timestamp {
    Timestamp::from_second(at.as_second()).unwrap_or(at)
}

/// Writes a time with whole seconds.
///
/// # Errors
///
/// Returns the serializer's error.
pub(crate) fn serialize<S: Serializer>(at: &Timestamp, to: S) -> Result<S::Ok, S::Error> {
    whole_second(*at).serialize(to)
}

/// Reads a time.
///
/// # Errors
///
/// Returns the deserializer's error when the text is not an RFC 3339 time.
pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Timestamp, D::Error> {
    Timestamp::deserialize(from)
}

/// Writes and reads a time that may be absent.
pub(crate) mod optional {
    use super::{Deserialize, Deserializer, Serialize, Serializer, Timestamp, whole_second};

    /// Writes a time with whole seconds.
    ///
    /// # Errors
    ///
    /// Returns the serializer's error.
    #[expect(clippy::ref_option, reason = "serde's signature")]
    pub(crate) fn serialize<S: Serializer>(at: &Option<Timestamp>, to: S) -> Result<S::Ok, S::Error> {
        at.map(whole_second).serialize(to)
    }

    /// Reads a time.
    ///
    /// # Errors
    ///
    /// Returns the deserializer's error when the text is not an RFC 3339 time.
    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<Timestamp>, D::Error> {
        Option::deserialize(from)
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    #[derive(Serialize, Deserialize, PartialEq, Debug)]
    struct Times {
        #[serde(with = "super")]
        at: Timestamp,
        #[serde(default, with = "super::optional")]
        until: Option<Timestamp>,
    }

    #[test]
    fn time_is_written_in_whole_seconds_of_utc() {
        let at: Timestamp = "2026-01-02T03:04:05.987654321Z".parse().unwrap();
        let json = serde_json::to_string(&Times { at, until: Some(at) }).unwrap();
        assert_eq!(json, r#"{"at":"2026-01-02T03:04:05Z","until":"2026-01-02T03:04:05Z"}"#);
        let read: Times = serde_json::from_str(r#"{"at":"2026-01-02T04:04:05.5+01:00"}"#).unwrap();
        assert_eq!(read, Times { at: "2026-01-02T03:04:05.5Z".parse().unwrap(), until: None });
    }

    /// jq's `fromdate` fails on a fraction of a second, so every time field of the API must use
    /// this module.
    #[test]
    fn every_time_of_the_api_is_written_in_whole_seconds() {
        let mut pending = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
        let mut fields = 0;
        while let Some(path) = pending.pop() {
            if path.is_dir() {
                pending.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
                continue;
            }
            if path.ends_with("timestamp.rs") {
                continue;
            }
            let text = fs::read_to_string(&path).unwrap();
            let mut attributes = String::new();
            for line in text.lines().map(str::trim) {
                let field = line.strip_prefix("pub ").and_then(|field| field.split_once(": "));
                match field {
                    Some((name, "Timestamp,")) => {
                        assert!(attributes.contains("with = \"crate::timestamp\""), "{}: {name}", path.display());
                        fields += 1;
                    }
                    Some((name, "Option<Timestamp>,")) => {
                        let optional = attributes.contains("with = \"crate::timestamp::optional\"");
                        assert!(optional && attributes.contains("default"), "{}: {name}", path.display());
                        fields += 1;
                    }
                    _ if line.starts_with("#[serde") => attributes.push_str(line),
                    _ => {}
                }
                if !line.starts_with("#[") {
                    attributes.clear();
                }
            }
        }
        assert!(fields > 20, "{fields}");
    }
}
