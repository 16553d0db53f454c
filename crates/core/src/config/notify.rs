//! `[notify]`: when gpushd tells the holder of a lease that the lease expires.

use std::time::Duration;

use toml::de::DeTable;

use super::{
    reader::Reader,
    toml_text::{list, span},
};
use crate::{diagnostic::Problem, duration, quote::Quoted};

/// Maximum number of warnings before the end of a lease.
const MOST_WARNINGS: usize = 8;

/// The longest time between a warning and the end of a lease: 30 days.
const LONGEST: Duration = Duration::from_secs(30 * 86_400);

/// `[notify]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Notify {
    /// How long before the end of a lease gpushd warns its holder, longest first.
    pub before: Vec<Duration>,
}

impl Default for Notify {
    fn default() -> Self {
        Self { before: vec![Duration::from_secs(15 * 60), Duration::from_secs(2 * 60)] }
    }
}

impl Notify {
    /// Returns the keys and their values as TOML.
    pub(super) fn written(&self) -> impl Iterator<Item = (&'static str, String)> {
        let before: Vec<String> = self.before.iter().map(|before| duration::format(*before)).collect();
        std::iter::once(("before", list(&before)))
    }
}

pub(super) fn read(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Notify {
    let Some(texts) = reader.one_or_more(table, "before", "[\"15m\", \"2m\"]") else { return Notify::default() };
    let mut before = Vec::new();
    for text in &texts {
        let why = match duration::parse_positive(&text.value) {
            Ok(time) if time > LONGEST => format!("is longer than {}", span(LONGEST)),
            Ok(time) => {
                before.push(time);
                continue;
            }
            Err(error) => format!("is not a duration: {error}"),
        };
        let message = format!("{} in `before` {why}", Quoted(&text.value));
        reader.report(Problem::new(text.span.clone(), message, "write for example before = [\"15m\", \"2m\"]"));
    }
    if let Some(text) = texts.get(MOST_WARNINGS) {
        let message = format!("`before` has more than {MOST_WARNINGS} times");
        reader.report(Problem::new(text.span.clone(), message, "remove some of them"));
    }
    before.sort_unstable_by(|a, b| b.cmp(a));
    before.dedup();
    Notify { before }
}

#[cfg(test)]
mod tests {
    use crate::config::Config;

    #[test]
    fn warnings_are_sorted_and_may_be_one_or_none() {
        let before = |value: &str| {
            let text = format!("[notify]\nbefore = {value}\n");
            let config = Config::parse(&text, "config.toml").map_err(|error| error.to_string())?;
            Ok::<_, String>(config.notify.before.iter().map(std::time::Duration::as_secs).collect::<Vec<_>>())
        };
        assert_eq!(before("[\"2m\", \"1h\", \"2m\"]"), Ok(vec![3600, 120]));
        assert_eq!(before("\"10m\""), Ok(vec![600]));
        assert_eq!(before("[]"), Ok(Vec::new()));
        for (value, part) in [
            ("[\"0s\"]", "must be longer than 0"),
            ("[\"60d\"]", "is longer than"),
            ("[\"soon\"]", "is not a duration"),
            ("[\"1m\",\"2m\",\"3m\",\"4m\",\"5m\",\"6m\",\"7m\",\"8m\",\"9m\"]", "more than 8 times"),
        ] {
            let error = before(value).unwrap_err();
            assert!(error.contains(part), "{value}: {error}");
        }
    }
}
