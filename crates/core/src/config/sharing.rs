//! Reads and formats the key `mps` of a rule.
//!
//! In mode `mps`, the key `mps` applies to the whole GPU. In mode `mig`, it applies to the MIG
//! devices whose layout entry ends in `:mps`, both in the rule's layout and in the layout of an
//! override.

use gpush_api::{BadValue, MemoryLimit, Mode, MpsComputeMode, MpsPolicy, MpsSettings, MpsUsers, Percentage, Priority};
use toml::de::{DeTable, DeValue};

use super::{
    fix,
    reader::{Reader, get},
    schema::RULE_MPS,
};
use crate::{diagnostic::Problem, quote::Quoted};

/// Maximum number of clients of any daemon. CUDA 13.1 introduced this maximum.
const MOST_CLIENTS: u32 = 60;

pub(super) const USERS: [(&str, MpsUsers); 2] = [("one", MpsUsers::One), ("many", MpsUsers::Many)];

const MPS_COMPUTE_MODES: [(&str, MpsComputeMode); 2] =
    [("exclusive_process", MpsComputeMode::ExclusiveProcess), ("keep", MpsComputeMode::Keep)];

/// Returns the policy of a rule. A rule with mode `mps` always has a policy. A rule with mode `mig`
/// has a policy only if it has the key `mps`.
pub(super) fn mps(reader: &mut Reader<'_>, rule: &DeTable<'_>, mode: Option<Mode>) -> Option<MpsPolicy> {
    if get(rule, "mps").is_none() {
        return (mode == Some(Mode::Mps)).then(MpsPolicy::default);
    }
    let mode = match mode {
        Some(mode @ (Mode::Mig | Mode::Mps)) => mode,
        // If the mode is wrong, that error is already reported. Check the rest of the rule as if
        // the mode were `mps`.
        None => Mode::Mps,
        Some(other) => {
            let problem = format!("`mps` has no effect in mode `{}`", other.name());
            let hint = "write mode = \"mps\", or mode = \"mig\" with entries such as \"2g.20gb:mps\", or leave `mps` \
                out";
            reader.report_at(rule, "mps", problem, hint);
            return None;
        }
    };
    let table = reader.table(rule, RULE_MPS)?;
    reader.report_unknown_keys(table, RULE_MPS, &[]);
    let default = default_of(mode);
    let settings = MpsSettings {
        percentage: percentage(reader, table).unwrap_or(default.settings.percentage),
        memory_limit_mib: memory(reader, table),
        priority: reader
            .word(table, "priority", "\"normal\"")
            .and_then(|text| reader.valued::<Priority>(&text.value, text.span.clone()))
            .unwrap_or(default.settings.priority),
    };
    if mode == Mode::Mig && get(table, "compute_mode").is_some() {
        let problem = "`compute_mode` has no effect in mode `mig`";
        reader.report_at(table, "compute_mode", problem, "leave `compute_mode` out");
        return None;
    }
    let compute_mode = reader.choice(table, "compute_mode", "compute mode", &MPS_COMPUTE_MODES);
    let total_percentage = total_percentage(reader, table, default.total_percentage);
    if u32::from(settings.percentage.tenths()) > total_percentage.saturating_mul(10) {
        let problem = format!(
            "`total_percentage` is {total_percentage}, less than the {} % of one lease, so no lease without a \
             percentage is ever granted",
            settings.percentage
        );
        reader.report_at(table, "total_percentage", problem, format!("write percentage = {total_percentage}, or less"));
        return None;
    }
    Some(MpsPolicy {
        settings,
        max_clients: reader.number(table, "max_clients", 1..=MOST_CLIENTS, default.max_clients),
        total_percentage,
        users: users(reader, table).unwrap_or(default.users),
        compute_mode: compute_mode.unwrap_or(default.compute_mode),
    })
}

/// Returns the defaults for missing keys. In mode `mig`, gpushd sets no compute mode, because a MIG
/// device has none.
pub(super) fn default_of(mode: Mode) -> MpsPolicy {
    let whole = MpsPolicy::default();
    if mode == Mode::Mig { MpsPolicy { compute_mode: MpsComputeMode::Keep, ..whole } } else { whole }
}

/// Reads whether a daemon serves one or several users. A number is not a number of users, because a daemon has a maximum
/// number of clients only.
fn users(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Option<MpsUsers> {
    let value = get(table, "users")?;
    if let Some(number) = fix::number(value.get_ref(), &(0..=u32::MAX)) {
        let hint = match number {
            0 => "write users = \"one\" or users = \"many\"".to_owned(),
            1 => "write users = \"one\"".to_owned(),
            number => {
                format!("write users = \"many\"; to limit the clients of the daemon, write max_clients = {number}")
            }
        };
        reader.wrong_type("users", value, "\"one\" or \"many\"", hint);
        return None;
    }
    reader.choice(table, "users", "valid value of `users`", &USERS)
}

/// Reads the memory limit of a client.
fn memory(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Option<MemoryLimit> {
    let value = get(table, "memory")?;
    let hint = |value: &DeValue<'_>| fix::memory_hint("memory", value);
    let text = reader.word_or(table, "memory", "\"8G\"", hint)?;
    match text.value.parse() {
        Ok(limit) => Some(limit),
        Err(BadValue { text: written, what, why }) => {
            let hint = hint(value.get_ref()).unwrap_or_else(|| why.to_owned());
            reader.report(Problem::new(text.span, format!("{} is not a valid {what}", Quoted(&written)), hint));
            None
        }
    }
}

/// Reads the maximum sum of the percentages. A float is probably a fraction: 1.5 for 150 %.
fn total_percentage(reader: &mut Reader<'_>, table: &DeTable<'_>, default: u32) -> u32 {
    let key = "total_percentage";
    if let Some(value) = get(table, key)
        && let DeValue::Float(number) = value.get_ref()
        && let Some(percentage) = fix::percentage(number.as_str())
        && number.as_str().len() < 5
    {
        reader.wrong_type(key, value, "a whole number of percent", format!("write {key} = {percentage}"));
        return default;
    }
    reader.number(table, key, 1..=10_000, default)
}

/// Reads a percentage: a number, or a text with or without the percent sign.
fn percentage(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Option<Percentage> {
    let value = get(table, "percentage")?;
    let written = match value.get_ref() {
        DeValue::Integer(_) | DeValue::Float(_) => fix::figure(value.get_ref())?,
        DeValue::String(_) => reader.word(table, "percentage", "25")?.value,
        DeValue::Boolean(_) | DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => {
            reader.expected("percentage", value, "a number", "25");
            return None;
        }
    };
    // No GPU has a thousand multiprocessors, so a share of less than 1 % is a fraction of 1: 0.25 for 25 %.
    if let Some(meant) = fix::percentage(written.trim()).filter(|_| written.trim().starts_with("0.")) {
        let message = format!("`percentage = {}` is less than 1 %", written.trim());
        let hint = format!("write percentage = {meant} for {meant} % of the GPU");
        reader.report(Problem::new(value.span(), message, hint));
        return None;
    }
    reader.valued(&written, value.span())
}

/// Formats the policy on one line, as the value of the rule's key `mps`.
pub(super) fn written(policy: &MpsPolicy, mode: Mode) -> String {
    let MpsPolicy { settings, max_clients, total_percentage, users, compute_mode } = policy;
    let MpsSettings { percentage, memory_limit_mib, priority } = settings;
    let mut pairs = vec![format!("percentage = {percentage}")];
    pairs.extend(memory_limit_mib.map(|limit| format!("memory = \"{limit}\"")));
    pairs.push(format!("priority = \"{priority}\""));
    pairs.push(format!("max_clients = {max_clients}"));
    pairs.push(format!("total_percentage = {total_percentage}"));
    let users = match users {
        MpsUsers::One => "one",
        MpsUsers::Many => "many",
    };
    pairs.push(format!("users = \"{users}\""));
    if mode != Mode::Mig {
        let compute_mode = match compute_mode {
            MpsComputeMode::ExclusiveProcess => "exclusive_process",
            MpsComputeMode::Keep => "keep",
        };
        pairs.push(format!("compute_mode = \"{compute_mode}\""));
    }
    format!("{{ {} }}", pairs.join(", "))
}
