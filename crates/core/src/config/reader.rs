//! Reads typed values from parsed TOML, and reports values that have the wrong type.
//!
//! Does not use serde, because serde stops at the first error and does not keep the positions of
//! values.

use std::{
    ops::{Range, RangeInclusive},
    str::FromStr,
    time::Duration,
};

use gpush_api::BadValue;
use toml::{
    Spanned,
    de::{DeTable, DeValue},
};

use super::{
    fix,
    schema::{RULE_MPS, RULE_TIMESLICE, Section},
};
use crate::{
    diagnostic::Problem,
    duration::{self, DurationError},
    nearest::nearest,
    quote::Quoted,
};

/// A value with its position in the file.
pub(super) type Value<'a, 'i> = &'a Spanned<DeValue<'i>>;

/// Shortest time limit of a setting.
pub(super) const SECOND: Duration = Duration::from_secs(1);

/// Longest time limit of a setting.
pub(super) const HOUR: Duration = Duration::from_secs(3600);

/// The text of the file, and the problems that the reader has found so far.
pub(super) struct Reader<'t> {
    pub(super) text: &'t str,
    pub(super) problems: Vec<Problem>,
}

/// A string of the file, with its position.
#[derive(Debug, Clone)]
pub(super) struct Text {
    pub(super) value: String,
    /// Span of the string, including its quotes.
    pub(super) span: Range<usize>,
    /// Position of the first character between the quotes; `None` if the string contains escapes.
    inner: Option<usize>,
}

impl Text {
    /// Converts a span in this string to a span in the file.
    pub(super) fn part(&self, of: &Range<usize>) -> Range<usize> {
        match self.inner {
            Some(from) if !self.value.trim().is_empty() => from + of.start..from + of.end,
            Some(_) | None => self.span.clone(),
        }
    }
}

/// Returns the type of a value, with an article.
fn kind(value: &DeValue<'_>) -> &'static str {
    match value {
        DeValue::String(_) => "a string",
        DeValue::Integer(_) => "an integer",
        DeValue::Float(_) => "a float",
        DeValue::Boolean(_) => "a boolean",
        DeValue::Datetime(_) => "a date",
        DeValue::Array(_) => "a list",
        DeValue::Table(_) => "a table",
    }
}

impl<'t> Reader<'t> {
    pub(super) fn new(text: &'t str) -> Self {
        Self { text, problems: Vec::new() }
    }

    pub(super) fn report(&mut self, problem: Problem) {
        self.problems.push(problem);
    }

    /// Reports a problem with an existing key.
    pub(super) fn report_at(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        message: impl Into<String>,
        hint: impl Into<String>,
    ) {
        let span = key_span(table, key).unwrap_or_default();
        self.report(Problem::new(span, message, hint));
    }

    pub(super) fn expected(&mut self, key: &str, value: Value<'_, '_>, what: &str, example: &str) {
        self.wrong_type(key, value, what, format!("write {key} = {example}"));
    }

    /// Reports a value that has the wrong type.
    pub(super) fn wrong_type(&mut self, key: &str, value: Value<'_, '_>, what: &str, hint: impl Into<String>) {
        let found = kind(value.get_ref());
        let span = self.clip(value.span());
        self.report(Problem::new(span, format!("`{key}` takes {what}, not {found}"), hint));
    }

    /// Shortens a span to its first line. The first line of a table is the header of the table.
    pub(super) fn clip(&self, span: Range<usize>) -> Range<usize> {
        let end = self.text.get(span.clone()).and_then(|text| text.find('\n')).map_or(span.end, |n| span.start + n);
        span.start..end
    }

    /// Returns a table of the file by name; `None` if the table is missing.
    pub(super) fn table<'a, 'i>(&mut self, of: &'a DeTable<'i>, section: Section) -> Option<&'a DeTable<'i>> {
        let name = section.key();
        let value = get(of, name)?;
        if let DeValue::Table(table) = value.get_ref() {
            return Some(table);
        }
        let found = kind(value.get_ref());
        // A number is the value of the key that people set most.
        let main = [(RULE_TIMESLICE, "replicas"), (RULE_MPS, "percentage")];
        let main = main.iter().find(|(inner, _)| inner.header == section.header);
        let hint = match (main, fix::figure(value.get_ref())) {
            (Some((_, key)), Some(number)) => format!("write {name} = {{ {key} = {number} }}"),
            _ => format!("write {} on a separate line, and its keys on the lines below", section.header),
        };
        self.report(Problem::new(self.clip(value.span()), format!("`{name}` must be a table, not {found}"), hint));
        None
    }

    pub(super) fn flag(&mut self, table: &DeTable<'_>, key: &str) -> Option<bool> {
        let value = get(table, key)?;
        if let DeValue::Boolean(flag) = value.get_ref() {
            return Some(*flag);
        }
        let hint = match fix::flag(value.get_ref()) {
            Some(flag) => format!("write {key} = {flag}"),
            None => format!("write {key} = true or {key} = false"),
        };
        self.wrong_type(key, value, "true or false", hint);
        None
    }

    /// Reads a whole number within bounds. Returns `default` if the key is missing or its value is
    /// wrong.
    pub(super) fn number(&mut self, table: &DeTable<'_>, key: &str, bounds: RangeInclusive<u32>, default: u32) -> u32 {
        let Some(value) = get(table, key) else { return default };
        if !matches!(value.get_ref(), DeValue::Integer(_)) {
            let hint = match fix::number(value.get_ref(), &bounds) {
                Some(number) => format!("write {key} = {number}"),
                None => format!("write a whole number from {} to {}", bounds.start(), bounds.end()),
            };
            self.wrong_type(key, value, "a whole number", hint);
            return default;
        }
        self.bounded(key, value, &bounds).unwrap_or(default)
    }

    /// Reads a duration of whole seconds within bounds, such as `"30s"`. Returns `default` if the key is missing or its
    /// value is wrong.
    pub(super) fn duration(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        bounds: RangeInclusive<Duration>,
        default: Duration,
    ) -> Duration {
        let Some(value) = get(table, key) else { return default };
        let Some(text) = self.text_of(value) else {
            let example = match value.get_ref() {
                DeValue::Integer(seconds) if seconds.radix() == 10 && seconds.as_str().parse::<u32>().is_ok() => {
                    format!("{}s", seconds.as_str())
                }
                _ => duration::format(default),
            };
            self.expected(key, value, "a duration in quotes", &format!("\"{example}\""));
            return default;
        };
        let hint = match duration::parse(&text.value) {
            Ok(found) if found.subsec_nanos() == 0 && bounds.contains(&found) => return found,
            Ok(_) => {
                let [least, most] = [bounds.start(), bounds.end()].map(|bound| duration::format(*bound));
                format!("write whole seconds from \"{least}\" to \"{most}\"")
            }
            Err(error) => match (fix::duration(&text.value), error) {
                (Some(meant), _) => format!("write {key} = \"{meant}\""),
                (None, DurationError::NoUnit(number)) => fix::with_unit_of_time(key, &number, &bounds),
                (None, error) => error.to_string(),
            },
        };
        self.report(Problem::new(text.span, format!("`{key}` can't be {}", Quoted(&text.value)), hint));
        default
    }

    /// Reads a list of whole numbers within bounds.
    pub(super) fn numbers(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        bounds: RangeInclusive<u32>,
        example: &str,
    ) -> Option<Vec<u32>> {
        let value = get(table, key)?;
        let what = "a list of whole numbers";
        let meant = fix::numbers(value.get_ref(), &bounds);
        let meant = meant.as_deref().unwrap_or(example);
        let DeValue::Array(items) = value.get_ref() else {
            self.expected(key, value, what, meant);
            return None;
        };
        let mut numbers = Vec::new();
        for item in items {
            if matches!(item.get_ref(), DeValue::Integer(_)) {
                numbers.extend(self.bounded(key, item, &bounds));
            } else {
                self.expected(key, item, what, meant);
            }
        }
        (numbers.len() == items.len()).then_some(numbers)
    }

    /// Converts an integer. Reports an integer that is out of bounds.
    fn bounded(&mut self, key: &str, value: Value<'_, '_>, bounds: &RangeInclusive<u32>) -> Option<u32> {
        let DeValue::Integer(integer) = value.get_ref() else { return None };
        match i64::from_str_radix(integer.as_str(), integer.radix()).ok().and_then(|n| u32::try_from(n).ok()) {
            Some(number) if bounds.contains(&number) => Some(number),
            Some(_) | None => {
                self.report(Problem::new(
                    value.span(),
                    format!("`{key}` can't be {}", shortened(integer.as_str())),
                    format!("write a number from {} to {}", bounds.start(), bounds.end()),
                ));
                None
            }
        }
    }

    /// Reads a string that is not blank. The hint for a number is this number in quotes.
    pub(super) fn word(&mut self, table: &DeTable<'_>, key: &str, example: &str) -> Option<Text> {
        self.word_or(table, key, example, |value| fix::quoted(value).map(|own| format!("write {key} = {own}")))
    }

    /// Reads a string that is not blank. `hint` returns the correction of a value that is not a string, if there is one
    /// other than the example.
    pub(super) fn word_or(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        example: &str,
        hint: impl FnOnce(&DeValue<'_>) -> Option<String>,
    ) -> Option<Text> {
        let value = get(table, key)?;
        let Some(text) = self.text_of(value) else {
            let hint = hint(value.get_ref()).unwrap_or_else(|| format!("write {key} = {example}"));
            self.wrong_type(key, value, "a string", hint);
            return None;
        };
        self.filled(text, key, example)
    }

    fn filled(&mut self, text: Text, key: &str, example: &str) -> Option<Text> {
        if text.value.trim().is_empty() {
            self.report(Problem::new(
                text.span,
                format!("`{key}` is empty"),
                format!("write {key} = {example}, or leave the line out"),
            ));
            return None;
        }
        if text.value.chars().any(char::is_control) {
            self.report(Problem::new(
                text.span,
                format!("`{key}` contains a control character"),
                format!("write {key} = {example}"),
            ));
            return None;
        }
        Some(text)
    }

    /// Reads an absolute path.
    pub(super) fn absolute(&mut self, table: &DeTable<'_>, key: &str, example: &str) -> Option<String> {
        self.absolute_text(table, key, example).map(|text| text.value)
    }

    /// Reads an absolute path like [`Reader::absolute`], and returns the path with its position.
    pub(super) fn absolute_text(&mut self, table: &DeTable<'_>, key: &str, example: &str) -> Option<Text> {
        let example = format!("\"{example}\"");
        let text = self.word_or(table, key, &example, |_| None)?;
        if text.value.starts_with('/') {
            return Some(text);
        }
        let problem = format!("`{key}` is not an absolute path: {}", Quoted(&text.value));
        self.report(Problem::new(text.span, problem, format!("write an absolute path, such as {example}")));
        None
    }

    /// Reads one of several words, and returns the value of that word.
    pub(super) fn choice<T: Copy>(
        &mut self,
        table: &DeTable<'_>,
        key: &str,
        what: &str,
        known: &[(&'static str, T)],
    ) -> Option<T> {
        let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
        let text = self.one_of(table, key, &names)?;
        let found = known.iter().find(|(name, _)| *name == text.value).map(|(_, value)| *value);
        if found.is_none() {
            self.report(unknown(&text, what, &names));
        }
        found
    }

    /// Reads a string that must be one of several words, but does not check the word. No other value says which word the
    /// author means, so the hint for a value that is not a string lists all words.
    pub(super) fn one_of(&mut self, table: &DeTable<'_>, key: &str, names: &[&str]) -> Option<Text> {
        let quoted: Vec<String> = names.iter().map(|name| format!("\"{name}\"")).collect();
        let words = match quoted.as_slice() {
            [others @ .., last] if !others.is_empty() => format!("{} or {last}", others.join(", ")),
            _ => quoted.concat(),
        };
        self.word_or(table, key, &words, |_| None)
    }

    /// Parses a value whose type belongs to the API. The error has the same text as in the API.
    pub(super) fn valued<T: FromStr<Err = BadValue>>(&mut self, text: &str, span: Range<usize>) -> Option<T> {
        match text.parse() {
            Ok(value) => Some(value),
            Err(error) => {
                let message = format!("{} is not a valid {}", Quoted(&error.text), error.what);
                self.report(Problem::new(self.clip(span), message, error.why));
                None
            }
        }
    }

    /// Reads one string, or a list of strings. The strings are not blank.
    pub(super) fn one_or_more(&mut self, table: &DeTable<'_>, key: &str, example: &str) -> Option<Vec<Text>> {
        match get(table, key)?.get_ref() {
            DeValue::String(_) => Some(vec![self.word(table, key, example)?]),
            DeValue::Integer(_) => {
                let value = get(table, key)?;
                let own = fix::quoted(value.get_ref());
                self.expected(key, value, "a string or a list of strings", own.as_deref().unwrap_or(example));
                None
            }
            _ => self.words(table, key, example),
        }
    }

    /// Reads a list of strings that are not blank.
    pub(super) fn words(&mut self, table: &DeTable<'_>, key: &str, example: &str) -> Option<Vec<Text>> {
        let value = get(table, key)?;
        let what = "a list of strings";
        let DeValue::Array(array) = value.get_ref() else {
            let own = match value.get_ref() {
                DeValue::String(_) => Some(self.text.get(value.span()).unwrap_or_default().to_owned()),
                other => fix::quoted(other),
            };
            let own = own.map(|own| format!("[{own}]"));
            self.expected(key, value, what, own.as_deref().unwrap_or(example));
            return None;
        };
        let meant = fix::strings(array);
        let meant = meant.as_deref().unwrap_or(example);
        let is_integer = |item: &toml::Spanned<DeValue<'_>>| matches!(item.get_ref(), DeValue::Integer(_));
        if !array.is_empty() && array.iter().all(is_integer) {
            self.report(Problem::new(
                self.clip(value.span()),
                format!("`{key}` takes {what}, not of numbers"),
                format!("write {key} = {meant}"),
            ));
            return None;
        }
        let mut texts = Vec::new();
        for item in array {
            match self.text_of(item) {
                Some(text) => texts.extend(self.filled(text, key, example)),
                None => self.expected(key, item, what, meant),
            }
        }
        // If a text of the list is wrong, return no list. The error is already reported, and a
        // shortened list would cause misleading errors.
        (texts.len() == array.len()).then_some(texts)
    }

    /// Returns the text of a value; `None` if the value is not a string.
    pub(super) fn text_of(&self, value: Value<'_, '_>) -> Option<Text> {
        let DeValue::String(text) = value.get_ref() else { return None };
        let span = value.span();
        let raw = self.text.get(span.clone()).unwrap_or_default();
        let inner = ["\"", "'"].iter().find_map(|quote| {
            let between = raw.strip_prefix(quote)?.strip_suffix(quote)?;
            (between == text.as_ref()).then_some(span.start + 1)
        });
        Some(Text { value: text.to_string(), span, inner })
    }
}

/// Returns the problem for a word that is not one of the known words.
pub(super) fn unknown(text: &Text, what: &str, known: &[&str]) -> Problem {
    let hint = match nearest(&text.value, known.iter().copied()) {
        Some(meant) => format!("did you mean \"{meant}\"? Write one of: {}", known.join(", ")),
        None => format!("write one of: {}", known.join(", ")),
    };
    Problem::new(text.span.clone(), format!("{} is not a {what}", Quoted(&text.value)), hint)
}

fn shortened(figure: &str) -> String {
    if figure.len() > 20 { format!("{}…", &figure[..20]) } else { figure.to_owned() }
}

pub(super) fn get<'a, 'i>(table: &'a DeTable<'i>, key: &str) -> Option<Value<'a, 'i>> {
    table.iter().find(|(name, _)| name.get_ref().as_ref() == key).map(|(_, value)| value)
}

/// Returns the position of a key.
pub(super) fn key_span(table: &DeTable<'_>, key: &str) -> Option<Range<usize>> {
    table.iter().find(|(name, _)| name.get_ref().as_ref() == key).map(|(name, _)| name.span())
}
