//! Keys with the times between a warning and the end of a lease: `notify.before` and `idle.warn_before`.

use std::time::Duration;

use toml::de::{DeTable, DeValue};

use super::{
    fix,
    reader::{Reader, get},
    toml_text::{list, span},
};
use crate::{diagnostic::Problem, duration, quote::Quoted};

/// Maximum number of warnings before the end of a lease.
const MOST_WARNINGS: usize = 8;

/// The longest time between a warning and the end of a lease: 30 days.
const LONGEST: Duration = Duration::from_secs(30 * 86_400);

/// Returns the times as TOML.
pub(super) fn written(times: &[Duration]) -> String {
    let times: Vec<String> = times.iter().map(|time| duration::format(*time)).collect();
    list(&times)
}

/// Reads a key with such times, longest first. The value is one time, or a list, which may be empty.
pub(super) fn read(reader: &mut Reader<'_>, table: &DeTable<'_>, key: &str) -> Option<Vec<Duration>> {
    const EXAMPLE: &str = "[\"15m\", \"2m\"]";
    let value = get(table, key)?;
    let items = match value.get_ref() {
        DeValue::Array(items) => items.iter().collect(),
        _ => vec![value],
    };
    // A number without a unit is an error here: people mean minutes, and the general meaning of such a number is seconds.
    let numbers: Option<Vec<String>> = items.iter().map(|item| fix::without_unit(item.get_ref())).collect();
    if let Some(numbers) = numbers.filter(|numbers| !numbers.is_empty()) {
        let with = |unit: &str| list(&numbers.iter().map(|number| format!("{number}{unit}")).collect::<Vec<_>>());
        let hint = format!("add the unit that you mean: {key} = {} or {}", with("m"), with("s"));
        reader.report(Problem::new(value.span(), format!("`{key}` has no unit of time"), hint));
        return None;
    }
    let texts = reader.one_or_more(table, key, EXAMPLE)?;
    let mut times = Vec::new();
    for one in &texts {
        let why = match duration::parse_positive(&one.value) {
            Ok(time) if time > LONGEST => format!("is longer than {}", span(LONGEST)),
            Ok(time) => {
                times.push(time);
                continue;
            }
            Err(error) => format!("is not a duration: {error}"),
        };
        let message = format!("{} in `{key}` {why}", Quoted(&one.value));
        reader.report(Problem::new(one.span.clone(), message, format!("write for example {key} = {EXAMPLE}")));
    }
    if let Some(one) = texts.get(MOST_WARNINGS) {
        let message = format!("`{key}` has more than {MOST_WARNINGS} times");
        reader.report(Problem::new(one.span.clone(), message, "remove some of them"));
    }
    times.sort_unstable_by(|a, b| b.cmp(a));
    times.dedup();
    Some(times)
}
