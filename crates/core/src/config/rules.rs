//! The `[[gpu]]` rules: checks each rule separately, then all of them together.
//!
//! The first rule that matches a GPU claims it. If an earlier selector covers a later one, the
//! later selector can never match. That is an error, because the author expects the later selector
//! to have an effect.

use std::ops::Range;

use gpush_api::Mode;
use toml::de::{DeTable, DeValue};

use super::{
    Rule, RuleDefaults, RuleLayout, idle, job_default,
    layouts::{entries, layout_texts},
    leasing, over_limit,
    reader::{Reader, Text, Value, get, key_span, unknown},
    requirements,
    schema::{RULE, RULE_IDLE, RULE_MPS, RULE_TIMESLICE},
    sharing, timeslice, toml_text,
};
use crate::{
    diagnostic::Problem,
    layout::{self, NONE, is_name},
    nearest::nearest,
    quote::Quoted,
    selector::Selector,
};

/// Names of the modes in the config. `None` marks a mode that is not supported yet.
const MODES: [(&str, Option<Mode>); 6] = [
    ("unmanaged", Some(Mode::Unmanaged)),
    ("exclusive", Some(Mode::Exclusive)),
    ("mig", Some(Mode::Mig)),
    ("mps", Some(Mode::Mps)),
    ("timeslice", Some(Mode::Timeslice)),
    ("hami", None),
];

/// Example of a selector.
const SELECTOR: &str = "\"0-3\"";

/// A selector, with the position of the selector in the file and the rule that contains it.
struct Claim {
    rule: usize,
    selector: Selector,
    span: Range<usize>,
}

pub(super) fn read(
    reader: &mut Reader<'_>,
    top: &DeTable<'_>,
    layouts: &[String],
    defaults: &RuleDefaults,
) -> Vec<Rule> {
    let Some(value) = get(top, "gpu") else { return Vec::new() };
    let DeValue::Array(items) = value.get_ref() else {
        let span = key_span(top, "gpu").unwrap_or_else(|| reader.clip(value.span()));
        reader.report(Problem::new(span, "`gpu` must be a list of rules", list_hint(value.get_ref())));
        return Vec::new();
    };
    let mut rules = Vec::new();
    let mut claims = Vec::new();
    let mut names: Vec<(String, Range<usize>)> = Vec::new();
    for (position, item) in items.iter().enumerate() {
        let DeValue::Table(table) = item.get_ref() else {
            reader.report(Problem::new(
                reader.clip(item.span()),
                "a rule must be a table",
                "write [[gpu]] above each rule",
            ));
            continue;
        };
        let header = reader.clip(item.span());
        // A misspelt key is already reported with the known key that the author probably meant. Do
        // not also report that this known key is missing.
        let meant = reader.report_unknown_keys(table, RULE, &[RULE_MPS.key(), RULE_TIMESLICE.key(), RULE_IDLE.key()]);
        let name = name(reader, table, &mut names);
        let matches = matches(reader, table, &header, &meant, position, &mut claims);
        let mode = mode(reader, table, &header, &meant);
        let layout = layout(reader, table, &header, &meant, mode, layouts);
        let mps = sharing::mps(reader, table, mode);
        let timeslice = timeslice::read(reader, table, mode);
        let lease = leasing::read(reader, table, mode, defaults);
        let job_default = job_default::read(reader, table, mode, lease);
        let access = leasing::access(reader, table, mode, lease);
        let isolation = requirements::isolation(reader, table);
        let workload = requirements::workload(reader, table);
        let idle = idle::of_rule(reader, table, mode);
        let over_limit = over_limit::read(reader, table, mode);
        if let (Some(matches), Some(mode)) = (matches, mode) {
            rules.push(Rule {
                name,
                matches,
                mode,
                layout,
                mps,
                timeslice,
                lease,
                job_default,
                access,
                isolation,
                workload,
                idle,
                over_limit,
            });
        }
    }
    never_matching(reader, &claims);
    rules
}

/// Returns how to write the rules if `gpu` is a table: `[gpu]`, `[gpu.0]`, or `[gpu.mps]` without a rule above it.
fn list_hint(gpu: &DeValue<'_>) -> String {
    let keys: Vec<&str> = match gpu {
        DeValue::Table(table) => table.iter().map(|(key, _)| key.get_ref().as_ref()).collect(),
        _ => Vec::new(),
    };
    let is_index = |key: &&str| key.bytes().all(|digit| digit.is_ascii_digit());
    let parts = [RULE_MPS, RULE_TIMESLICE, RULE_IDLE];
    match keys.iter().find(|key| is_index(key)) {
        Some(index) if keys.iter().all(is_index) => {
            format!("write [[gpu]] in place of [gpu.{index}], and match = \"{index}\" below it")
        }
        _ if !keys.is_empty() && keys.iter().all(|key| parts.iter().any(|part| part.key() == *key)) => {
            format!("put [gpu.{}] below the [[gpu]] rule that it belongs to", keys.concat())
        }
        _ => "write [[gpu]] with two brackets above each rule".to_owned(),
    }
}

fn name(reader: &mut Reader<'_>, table: &DeTable<'_>, names: &mut Vec<(String, Range<usize>)>) -> Option<String> {
    let text = reader.word(table, "name", "\"training\"")?;
    if let Some((_, first)) = names.iter().find(|(name, _)| *name == text.value) {
        let problem = Problem::new(
            text.span.clone(),
            format!("two rules are named {}", Quoted(&text.value)),
            "give each rule its own name, or put the GPUs of the two rules into one `match`",
        );
        reader.report(problem.also(first.clone(), "the first is"));
        return None;
    }
    names.push((text.value.clone(), text.span));
    Some(text.value)
}

fn matches(
    reader: &mut Reader<'_>,
    table: &DeTable<'_>,
    header: &Range<usize>,
    meant: &[String],
    rule: usize,
    claims: &mut Vec<Claim>,
) -> Option<Vec<Selector>> {
    if get(table, "match").is_none() {
        if meant.iter().any(|key| key == "match") {
            return None;
        }
        reader.report(Problem::new(
            header.clone(),
            "this rule has no `match`",
            "write match = \"all\", or select GPUs: match = \"0-3\", match = [\"0\", \"*A100*\"]",
        ));
        return None;
    }
    let texts = reader.one_or_more(table, "match", SELECTOR)?;
    if texts.is_empty() {
        let span = get(table, "match").map_or_else(|| header.clone(), toml::Spanned::span);
        reader.report(Problem::new(
            span,
            "`match` is empty, so the rule claims no GPU",
            format!("write match = {SELECTOR}"),
        ));
        return None;
    }
    let selectors = parse_selectors(reader, &texts)?;
    for (selector, text) in selectors.iter().zip(&texts) {
        claims.push(Claim { rule, selector: selector.clone(), span: text.span.clone() });
    }
    Some(selectors)
}

/// Reads a key with GPU selectors. The key may be missing, but an empty list is an error.
pub(super) fn selectors(reader: &mut Reader<'_>, table: &DeTable<'_>, key: &str) -> Option<Vec<Selector>> {
    let texts = reader.one_or_more(table, key, SELECTOR)?;
    if texts.is_empty() {
        reader.report_at(
            table,
            key,
            format!("`{key}` is empty"),
            format!("write {key} = {SELECTOR}, or leave `{key}` out"),
        );
        return None;
    }
    parse_selectors(reader, &texts)
}

/// Parses selectors; `None` if any selector has an error.
fn parse_selectors(reader: &mut Reader<'_>, texts: &[Text]) -> Option<Vec<Selector>> {
    let mut selectors = Vec::new();
    for text in texts {
        match text.value.parse::<Selector>() {
            Ok(selector) => selectors.push(selector),
            Err(error) => {
                let hint = if text.value.contains(',') {
                    let each: Vec<String> = text.value.split(',').map(|one| one.trim().to_owned()).collect();
                    format!("write a list with each GPU selector in its own quotes: {}", toml_text::list(&each))
                } else {
                    error.hint
                };
                reader.report(Problem::new(text.span.clone(), error.message, hint));
            }
        }
    }
    (selectors.len() == texts.len()).then_some(selectors)
}

fn mode(reader: &mut Reader<'_>, table: &DeTable<'_>, header: &Range<usize>, meant: &[String]) -> Option<Mode> {
    let built: Vec<&str> = MODES.iter().filter(|(_, mode)| mode.is_some()).map(|(name, _)| *name).collect();
    if get(table, "mode").is_none() {
        if meant.iter().any(|key| key == "mode") {
            return None;
        }
        reader.report(Problem::new(
            header.clone(),
            "this rule has no `mode`",
            format!("write mode = \"mig\", or one of: {}", built.join(", ")),
        ));
        return None;
    }
    let text = reader.one_of(table, "mode", &built)?;
    match MODES.iter().find(|(name, _)| *name == text.value) {
        Some((_, Some(mode))) => Some(*mode),
        Some((name, None)) => {
            reader.report(Problem::new(
                text.span,
                format!("mode `{name}` is not supported yet"),
                format!("use one of: {}; mode \"unmanaged\" leaves the GPUs unchanged", built.join(", ")),
            ));
            None
        }
        None => {
            reader.report(unknown(&text, "mode", &built));
            None
        }
    }
}

fn layout(
    reader: &mut Reader<'_>,
    table: &DeTable<'_>,
    header: &Range<usize>,
    meant: &[String],
    mode: Option<Mode>,
    known: &[String],
) -> Option<RuleLayout> {
    let Some(value) = get(table, "layout") else {
        if mode == Some(Mode::Mig) && !meant.iter().any(|key| key == "layout") {
            reader.report(Problem::new(
                header.clone(),
                "this rule has mode `mig` and no `layout`",
                "write layout = \"dynamic\", which fits every model with MIG, or a list of profiles that `gpushctl mig \
                 profiles` shows, such as layout = [\"1g.10gb*7\"], or \"none\"",
            ));
        }
        return None;
    };
    if let Some(other) = mode.filter(|mode| *mode != Mode::Mig) {
        let span = key_span(table, "layout").unwrap_or_else(|| value.span());
        reader.report(Problem::new(
            span,
            format!("`layout` has no effect in mode `{}`", other.name()),
            "write mode = \"mig\", or leave `layout` out",
        ));
    }
    let texts = layout_texts(reader, "layout", value)?;
    let named = matches!(value.get_ref(), DeValue::String(_)).then(|| texts.first()).flatten();
    match named.filter(|text| is_name(text.value.trim())) {
        Some(text) => reference(reader, text.value.trim(), value, known),
        None => match texts.as_slice() {
            // A list that contains only one name probably means the layout with that name.
            [only] if is_name(&only.value) && reserved(&only.value).is_none() => {
                let hint = format!(
                    "to use the layout of this name under [layouts], write layout = \"{}\" without brackets",
                    only.value
                );
                let what = format!(
                    "{} is the name of a layout, but a list can contain only entries such as 3g.40gb",
                    Quoted(&only.value)
                );
                reader.report(Problem::new(only.span.clone(), what, hint));
                None
            }
            _ => entries(reader, &texts, value).map(|layout| {
                if layout.is_none() { RuleLayout::Named(NONE.to_owned()) } else { RuleLayout::Inline(layout) }
            }),
        },
    }
}

fn reserved(name: &str) -> Option<&'static str> {
    [NONE, layout::DYNAMIC].into_iter().find(|word| name.eq_ignore_ascii_case(word))
}

fn reference(reader: &mut Reader<'_>, name: &str, value: Value<'_, '_>, known: &[String]) -> Option<RuleLayout> {
    match reserved(name) {
        Some(NONE) => return Some(RuleLayout::Named(NONE.to_owned())),
        Some(_) => return Some(RuleLayout::Dynamic),
        None => {}
    }
    if known.iter().any(|other| other == name) {
        return Some(RuleLayout::Named(name.to_owned()));
    }
    let names: Vec<&str> = known.iter().map(String::as_str).chain([NONE, layout::DYNAMIC]).collect();
    // `none` is never suggested, because it destroys all idle instances.
    let hint = match nearest(name, known.iter().map(String::as_str)) {
        Some(meant) => format!("did you mean \"{meant}\"? Write one of: {}", names.join(", ")),
        None if known.is_empty() => {
            format!("add {name} = [\"3g.40gb\"] under [layouts], or write the entries here as a list")
        }
        None => format!("write one of: {}", names.join(", ")),
    };
    reader.report(Problem::new(value.span(), format!("there is no layout {}", Quoted(name)), hint));
    None
}

/// Reports selectors that cannot match on any host.
fn never_matching(reader: &mut Reader<'_>, claims: &[Claim]) {
    let mut reported = None;
    for (at, claim) in claims.iter().enumerate() {
        let Some(earlier) = covering(&claims[..at], &claim.selector) else { continue };
        let everything = claims_everything(&earlier.selector);
        // If an earlier selector claims every GPU, report that problem once for each rule, not once
        // for each selector.
        if everything && reported == Some(claim.rule) {
            continue;
        }
        let which =
            if earlier.rule == claim.rule { "this rule".to_owned() } else { format!("rule {}", earlier.rule + 1) };
        let problem = if everything && earlier.rule != claim.rule {
            reported = Some(claim.rule);
            let message = format!("rule {} can never match: {which} claims every GPU", claim.rule + 1);
            Problem::new(claim.span.clone(), message, "the first match wins: put the rule for all GPUs last")
        } else if earlier.selector == claim.selector {
            let message = format!("`{}` is claimed twice: {which} already claims it", claim.selector);
            Problem::new(claim.span.clone(), message, "the first match wins: keep one of the two")
        } else {
            let message = format!("`{}` can never match: {which} already claims all its GPUs", claim.selector);
            Problem::new(
                claim.span.clone(),
                message,
                "the first match wins: put the more specific selector first, or leave it out",
            )
        };
        reader.report(problem.also(earlier.span.clone(), format!("claimed by `{}`", earlier.selector)));
    }
}

fn claims_everything(selector: &Selector) -> bool {
    match selector {
        Selector::All => true,
        Selector::Model(glob) => glob.chars().all(|c| c == '*'),
        Selector::Indexes(..) | Selector::Uuid(_) | Selector::Pci { .. } | Selector::DeviceId(_) => false,
    }
}

/// Returns the earlier claim that covers a selector. If no single claim covers the selector, but
/// several claims together do, returns the last of these claims.
fn covering<'a>(earlier: &'a [Claim], selector: &Selector) -> Option<&'a Claim> {
    if let Some(claim) = earlier.iter().find(|claim| claims_everything(&claim.selector) || claim.selector == *selector)
    {
        return Some(claim);
    }
    match selector {
        Selector::Indexes(first, last) => {
            let mut next = *first;
            loop {
                let covers = earlier.iter().find_map(|claim| match claim.selector {
                    Selector::Indexes(from, to) if (from..=to).contains(&next) => Some((claim, to)),
                    Selector::Indexes(..)
                    | Selector::All
                    | Selector::Uuid(_)
                    | Selector::Pci { .. }
                    | Selector::DeviceId(_)
                    | Selector::Model(_) => None,
                });
                let (claim, to) = covers?;
                if to >= *last {
                    return Some(claim);
                }
                next = to + 1;
            }
        }
        // A selector without a subsystem id covers all boards of the model.
        Selector::DeviceId(id) => earlier.iter().find(|claim| match claim.selector {
            Selector::DeviceId(other) => other.covers(*id),
            Selector::All | Selector::Indexes(..) | Selector::Uuid(_) | Selector::Pci { .. } | Selector::Model(_) => {
                false
            }
        }),
        // A longer prefix of a UUID does not count as covered by a shorter prefix: if the shorter
        // prefix is ambiguous on the host, it claims nothing, and the longer prefix may still
        // match.
        Selector::All | Selector::Uuid(_) | Selector::Pci { .. } | Selector::Model(_) => None,
    }
}
