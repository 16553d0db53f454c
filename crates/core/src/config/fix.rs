//! Corrections of wrong values, built from what the author wrote.
//!
//! A hint with a fixed example would give the author another value than the one that the file contains.

use std::{ops::RangeInclusive, time::Duration};

use gpush_api::MemoryLimit;
use toml::{
    Spanned,
    de::{DeArray, DeString, DeValue},
};

use super::toml_text;
use crate::{duration, lease::request::parse_default, selector};

/// Maximum number of equal instances in a correction of a layout.
const MOST_INSTANCES: u32 = 99;

/// Returns a number that the author wrote, in base 10 if it is an integer; `None` for any other value.
pub(super) fn figure(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::Integer(number) => Some(
            i64::from_str_radix(number.as_str(), number.radix())
                .map_or_else(|_| number.as_str().to_owned(), |number| number.to_string()),
        ),
        DeValue::Float(number) => Some(number.as_str().to_owned()),
        DeValue::String(_) | DeValue::Boolean(_) | DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => None,
    }
}

/// Returns the text of a string or number.
fn plain(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(text) => Some(text.trim().to_owned()),
        other => figure(other),
    }
}

/// Returns a number as a string of TOML.
pub(super) fn quoted(value: &DeValue<'_>) -> Option<String> {
    figure(value).map(|number| toml_text::text(&number))
}

/// Returns the whole number that a string or float contains: 8 for `"8"` and `8.0`, and 70 for `"70%"`.
pub(super) fn number(value: &DeValue<'_>, bounds: &RangeInclusive<u32>) -> Option<u32> {
    let text = plain(value)?;
    let text = text.strip_suffix('%').map_or(text.as_str(), str::trim_end);
    let whole = match text.split_once('.') {
        Some((whole, fraction)) if fraction.bytes().all(|digit| digit == b'0') => whole,
        Some(_) | None => text,
    };
    whole.parse().ok().filter(|number| bounds.contains(number))
}

/// Returns the list of whole numbers that a value contains, as TOML: `[79]` for `"79"`.
pub(super) fn numbers(value: &DeValue<'_>, bounds: &RangeInclusive<u32>) -> Option<String> {
    let found: Option<Vec<String>> = match value {
        DeValue::Array(items) => {
            items.iter().map(|item| number(item.get_ref(), bounds).map(|number| number.to_string())).collect()
        }
        DeValue::String(text) => text
            .split(',')
            .map(|part| part.trim().parse().ok().filter(|number: &u32| bounds.contains(number)))
            .map(|number| number.map(|number| number.to_string()))
            .collect(),
        other => number(other, bounds).map(|number| vec![number.to_string()]),
    };
    found.filter(|found| !found.is_empty()).map(|found| format!("[{}]", found.join(", ")))
}

/// Returns the boolean that a value means: `true`, `"yes"`, `"off"`, `1`.
pub(super) fn flag(value: &DeValue<'_>) -> Option<bool> {
    if let DeValue::Boolean(flag) = value {
        return Some(*flag);
    }
    match plain(value)?.to_ascii_lowercase().as_str() {
        "true" | "yes" | "on" | "1" => Some(true),
        "false" | "no" | "off" | "0" => Some(false),
        _ => None,
    }
}

/// Returns the items of a list as a list of strings, as TOML; `None` if an item is neither a string nor a number.
pub(super) fn strings(items: &DeArray<'_>) -> Option<String> {
    let texts: Option<Vec<String>> = items.iter().map(|item| plain(item.get_ref())).collect();
    texts.filter(|texts| !texts.is_empty()).map(|texts| toml_text::list(&texts))
}

/// Returns lists of GPU indexes as a list of ranges, as TOML: `["0-1", "2-3"]` for `[["0", "1"], ["2", "3"]]`. Returns
/// `None` if a list has anything but adjacent indexes.
pub(super) fn ranges(lists: &DeArray<'_>) -> Option<String> {
    let range = |list: &DeValue<'_>| {
        let DeValue::Array(items) = list else { return None };
        let indexes: Option<Vec<u32>> = items.iter().map(|item| number(item.get_ref(), &(0..=u32::MAX))).collect();
        match selector::ranges(indexes?.into_iter().map(gpush_api::GpuIndex)).as_slice() {
            [one] => Some(one.clone()),
            _ => None,
        }
    };
    let ranges: Option<Vec<String>> = lists.iter().map(|list| range(list.get_ref())).collect();
    ranges.filter(|ranges| !ranges.is_empty()).map(|ranges| toml_text::list(&ranges))
}

/// Returns a table of profiles and numbers as a layout, as TOML: `["1g.10gb*7"]` for `{ "1g.10gb" = 7 }`.
pub(super) fn counted(value: &DeValue<'_>) -> Option<String> {
    let DeValue::Table(table) = value else { return None };
    let entry = |(profile, count): (&Spanned<DeString<'_>>, &Spanned<DeValue<'_>>)| {
        let profile = profile.get_ref();
        Some(match number(count.get_ref(), &(1..=MOST_INSTANCES))? {
            1 => profile.to_string(),
            several => format!("{profile}*{several}"),
        })
    };
    let entries: Option<Vec<String>> = table.iter().map(entry).collect();
    entries.filter(|entries| !entries.is_empty()).map(|entries| toml_text::list(&entries))
}

/// Returns the percentage for a fraction: `25` for `0.25`, and `12.5` for `0.125`.
pub(super) fn percentage(fraction: &str) -> Option<String> {
    let (whole, fraction) = fraction.split_once('.')?;
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|digit| digit.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) || fraction.len() > 3 || whole.len() > 3 {
        return None;
    }
    let tenths: u32 = format!("{whole}{fraction:0<3}").parse().ok()?;
    Some(if tenths.is_multiple_of(10) { (tenths / 10).to_string() } else { format!("{}.{}", tenths / 10, tenths % 10) })
}

/// A number without a unit is an amount of bytes from here on.
const FEWEST_BYTES: u64 = 1 << 27;

/// Returns the amount of memory that a text means: `512M` for `0.5G`. A number without a unit is in GiB if it is less than
/// 1024, else in MiB or bytes.
fn memory(text: &str) -> Option<String> {
    let upper = text.trim().to_ascii_uppercase();
    if let Ok(bare) = upper.parse::<u64>() {
        return Some(match bare {
            0 => return None,
            1..1024 => format!("{bare}G"),
            1024..FEWEST_BYTES => format!("{bare}M"),
            FEWEST_BYTES.. => format!("{}M", bare >> 20),
        });
    }
    let split = upper.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(upper.len());
    let (figure, unit) = upper.split_at(split);
    let (whole, fraction) = figure.split_once('.').unwrap_or((figure, "0"));
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|digit| digit.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) || fraction.len() > 3 {
        return None;
    }
    let thousandths: u64 = format!("{whole}{fraction:0<3}").parse().ok()?;
    let mib = match unit.trim() {
        "" | "G" | "GB" | "GI" | "GIB" => thousandths.checked_mul(1024)? / 1000,
        "M" | "MB" | "MI" | "MIB" => thousandths / 1000,
        "T" | "TB" | "TI" | "TIB" => thousandths.checked_mul(1 << 20)? / 1000,
        _ => return None,
    };
    (mib > 0).then(|| if mib.is_multiple_of(1024) { format!("{}G", mib / 1024) } else { format!("{mib}M") })
}

/// Returns the hint for an amount of memory; `None` if the value contains no amount.
pub(super) fn memory_hint(key: &str, value: &DeValue<'_>) -> Option<String> {
    let text = plain(value)?;
    let meant = memory(&text).filter(|meant| meant.parse::<MemoryLimit>().is_ok())?;
    let is_bare = text.bytes().all(|byte| byte.is_ascii_digit());
    Some(match meant.strip_suffix('G').filter(|_| is_bare) {
        Some(number) => {
            format!("add the unit that you mean: {key} = \"{number}G\" for GiB, or \"{number}M\" for MiB")
        }
        None => format!("write {key} = \"{meant}\""),
    })
}

/// Returns the duration that a text means, in the notation of the config: `4h` for `4H`.
pub(super) fn duration(text: &str) -> Option<String> {
    let lower = text.trim().to_ascii_lowercase();
    duration::parse_positive(&lower).is_ok().then_some(lower)
}

/// Returns the hint for a number without a unit of time: the durations within bounds that it can mean.
pub(super) fn with_unit_of_time(key: &str, number: &str, bounds: &RangeInclusive<Duration>) -> String {
    let durations = ["s", "m", "h", "d"].map(|unit| format!("{number}{unit}")).into_iter();
    let is_within = |text: &String| duration::parse(text).is_ok_and(|one| bounds.contains(&one));
    let within: Vec<String> = durations.filter(is_within).take(3).map(|text| format!("\"{text}\"")).collect();
    match within.split_last() {
        None => {
            let [least, most] = [bounds.start(), bounds.end()].map(|bound| duration::format(*bound));
            format!("write whole seconds from \"{least}\" to \"{most}\"")
        }
        Some((only, [])) => format!("add the unit of time: {key} = {only}"),
        Some((last, others)) => {
            format!("add the unit of time that you mean: {key} = {} or {last}", others.join(", "))
        }
    }
}

/// Returns the default of a quota that a text means: `mig=1g.10gb,for=4h` for `mig=1g.10gb for 4H`.
pub(super) fn default_request(text: &str) -> Option<String> {
    let lower = text.to_ascii_lowercase().replace(" for ", ",for=").replace(",for,", ",for=");
    let terms: Vec<&str> =
        lower.split(|c: char| c == ',' || c.is_whitespace()).filter(|term| !term.is_empty()).collect();
    let joined = terms.join(",");
    (joined != text && parse_default(&joined).is_ok()).then_some(joined)
}

/// Returns the durations that a number without a unit can mean, as TOML: `"4h", "4m" or "4s"`.
pub(super) fn with_units(number: &str) -> String {
    format!("\"{number}h\", \"{number}m\" or \"{number}s\"")
}

/// Returns the number of a value that has no unit of time: an integer, or a string of digits.
pub(super) fn without_unit(value: &DeValue<'_>) -> Option<String> {
    plain(value).filter(|text| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
#[path = "fix/tests.rs"]
mod tests;
