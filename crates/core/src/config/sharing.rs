//! Reads and formats the key `mps` of a rule.
//!
//! In mode `mps`, the key `mps` applies to the whole GPU. In mode `mig`, it applies to the MIG
//! devices whose layout entry ends in `:mps`, both in the rule's layout and in the layout of an
//! override.

use gpush_api::{Mode, MpsComputeMode, MpsPolicy, MpsSettings, MpsUsers, Percentage, Priority};
use toml::de::{DeTable, DeValue};

use super::{
    reader::{Reader, get},
    schema::RULE_MPS,
};

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
        memory_limit_mib: reader
            .word(table, "memory", "\"8G\"")
            .and_then(|text| reader.valued(&text.value, text.span.clone())),
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
    let total_percentage = reader.number(table, "total_percentage", 1..=10_000, default.total_percentage);
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
        users: reader.choice(table, "users", "valid value of `users`", &USERS).unwrap_or(default.users),
        compute_mode: compute_mode.unwrap_or(default.compute_mode),
    })
}

/// Returns the defaults for missing keys. In mode `mig`, gpushd sets no compute mode, because a MIG
/// device has none.
pub(super) fn default_of(mode: Mode) -> MpsPolicy {
    let whole = MpsPolicy::default();
    if mode == Mode::Mig { MpsPolicy { compute_mode: MpsComputeMode::Keep, ..whole } } else { whole }
}

/// Reads a percentage: a number, or a text with or without the percent sign.
fn percentage(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Option<Percentage> {
    let value = get(table, "percentage")?;
    let written = match value.get_ref() {
        DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
            .map_or_else(|_| number.as_str().to_owned(), |number| number.to_string()),
        DeValue::Float(number) => number.as_str().to_owned(),
        DeValue::String(_) => {
            return reader
                .word(table, "percentage", "25")
                .and_then(|text| reader.valued(&text.value, text.span.clone()));
        }
        DeValue::Boolean(_) | DeValue::Datetime(_) | DeValue::Array(_) | DeValue::Table(_) => {
            reader.expected("percentage", value, "a number", "25");
            return None;
        }
    };
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
