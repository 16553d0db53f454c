//! Reads `[mode_change]`.

use toml::de::{DeTable, DeValue};

use super::{
    ModeChange, fix,
    reader::{HOUR, Reader, SECOND, Text, get},
};
use crate::{diagnostic::Problem, quote::Quoted, selector::Selector};

pub(super) fn read(reader: &mut Reader<'_>, table: &DeTable<'_>) -> ModeChange {
    let default = ModeChange::default();
    let services = reader.words(table, "services", "[\"nvidia-dcgm\"]").unwrap_or_default();
    let groups = reset_together(reader, table).unwrap_or_default();
    ModeChange {
        services: services.into_iter().filter_map(|text| service(reader, text)).collect(),
        before: reader.absolute(table, "before", "/etc/gpush/hooks/before"),
        after: reader.absolute(table, "after", "/etc/gpush/hooks/after"),
        timeout: reader.duration(table, "timeout", SECOND..=HOUR, default.timeout),
        nvidia_smi: reader.absolute(table, "nvidia_smi", &default.nvidia_smi).unwrap_or(default.nvidia_smi),
        reset_together: groups.into_iter().filter_map(|text| group(reader, &text)).collect(),
    }
}

/// Reads the groups of GPUs. Each group is one selector, but people write lists of indexes.
fn reset_together(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Option<Vec<Text>> {
    let key = "reset_together";
    let value = get(table, key)?;
    if let DeValue::Array(lists) = value.get_ref()
        && let Some(ranges) = fix::ranges(lists)
    {
        let message = format!("`{key}` takes a list of GPU selectors, not of lists");
        reader.report(Problem::new(reader.clip(value.span()), message, format!("write {key} = {ranges}")));
        return None;
    }
    reader.words(table, key, "[\"0-3\", \"4-7\"]")
}

/// Reads the name of a service. Refuses a name that `systemctl` would not accept as the name of a
/// unit.
fn service(reader: &mut Reader<'_>, text: Text) -> Option<String> {
    let name = text.value.strip_suffix(".service").unwrap_or(&text.value).to_owned();
    let fit = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '@' | ':');
    if name.is_empty() || name.starts_with('-') || name.len() > 200 || !name.chars().all(fit) {
        let problem = format!("{} is not the name of a service", Quoted(&text.value));
        let hint = "write a name that `systemctl` accepts, such as \"nvidia-dcgm\"";
        reader.report(Problem::new(text.span, problem, hint));
        return None;
    }
    if name == "gpushd" {
        let hint = "leave gpushd out of `services`: gpushd closes its own driver handles before a reset";
        reader.report(Problem::new(text.span, "`services` contains gpushd, which can't stop itself", hint));
        return None;
    }
    Some(name)
}

fn group(reader: &mut Reader<'_>, text: &Text) -> Option<Selector> {
    match text.value.parse::<Selector>() {
        Ok(selector) => Some(selector),
        Err(error) => {
            reader.report(Problem::new(text.span.clone(), error.message, error.hint));
            None
        }
    }
}
