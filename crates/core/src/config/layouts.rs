//! Layouts in the config.

use toml::de::DeValue;

use super::{
    fix,
    reader::{Reader, Text, Value},
};
use crate::{diagnostic::Problem, layout::Layout, quote::Quoted};

/// Returns the texts of a layout, which is a list of strings or a single string.
pub(super) fn layout_texts(reader: &mut Reader<'_>, key: &str, value: Value<'_, '_>) -> Option<Vec<Text>> {
    let example = "[\"3g.40gb\", \"1g.10gb*2\"]";
    let items = match value.get_ref() {
        DeValue::String(_) => return Some(reader.text_of(value).into_iter().collect()),
        DeValue::Array(items) => items,
        DeValue::Integer(_) | DeValue::Float(_) | DeValue::Boolean(_) | DeValue::Datetime(_) | DeValue::Table(_) => {
            let span = reader.clip(value.span());
            let counted = fix::counted(value.get_ref());
            let example = counted.as_deref().unwrap_or(example);
            reader.report(Problem::new(
                span,
                format!("{} takes a layout: a list of strings", Quoted(key)),
                format!("write {key} = {example}"),
            ));
            return None;
        }
    };
    let mut texts = Vec::new();
    for item in items {
        match reader.text_of(item) {
            Some(text) => texts.push(text),
            None => {
                let span = reader.clip(item.span());
                let written = reader.text.get(span.clone()).unwrap_or_default().to_owned();
                reader.report(Problem::new(
                    span,
                    format!("a layout entry must be a string, but {} is not", Quoted(&written)),
                    format!("write {key} = {example}"),
                ));
            }
        }
    }
    (texts.len() == items.len()).then_some(texts)
}

/// Parses the texts of a layout. The spans of errors are positions in the file.
pub(super) fn entries(reader: &mut Reader<'_>, texts: &[Text], value: Value<'_, '_>) -> Option<Layout> {
    let plain: Vec<&str> = texts.iter().map(|text| text.value.as_str()).collect();
    match Layout::parse_all(&plain) {
        Ok(layout) => Some(layout),
        Err(errors) => {
            for error in errors {
                let span = texts.get(error.item).map_or(value.span(), |text| text.part(&error.span));
                let hint = error.hint.unwrap_or_else(|| "see docs/config.md".to_owned());
                reader.report(Problem::new(reader.clip(span), error.message, hint));
            }
            None
        }
    }
}
