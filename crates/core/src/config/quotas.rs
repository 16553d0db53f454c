//! `[[quota]]` and `[leases]`: what users may lease.
//!
//! The file selects GPUs with selectors, and may give memory as a part of the host's memory.
//! [`Config::quotas`] resolves the selectors and the memory for the GPUs of a host, and returns
//! [`Quota`]s.

use std::{collections::BTreeSet, ops::Range};

use gpush_api::{Gpu, LeaseKind, MemoryLimit};
use toml::de::{DeTable, DeValue};

use super::{
    Config,
    account_name::account,
    fix,
    quota_default::{self, DefaultBounds},
    reader::{Reader, get, unknown},
    rules::selectors,
    schema::QUOTA,
    toml_text::{list, text},
};
use crate::{
    diagnostic::Problem,
    duration,
    lease::{
        placement::PlacementPolicy,
        quota::{Limits, MemoryAmount, Quota, Subject},
        request::DefaultRequest,
        user_limits::UserLimits,
    },
    quote::Quoted,
    selector::Selector,
};

/// `[leases]`
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Leases {
    /// How gpushd chooses among several possible placements of a lease.
    pub placement: PlacementPolicy,
    /// What gpushd does if a limit of a user's slice cannot be carried over to the slice of the user's leases.
    pub user_limits: UserLimits,
}

/// A `[[quota]]` table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct QuotaRule {
    /// Users that the quota applies to. The limits apply to each user separately.
    pub subjects: Vec<Subject>,
    /// Allowed kinds of leases; `None` for all kinds.
    pub kinds: Option<BTreeSet<LeaseKind>>,
    /// Maximum number of leases that hold capacity.
    pub leases: Option<u32>,
    /// Maximum number of queued requests.
    pub waiting: Option<u32>,
    /// Maximum memory of all leases together.
    pub memory: Option<QuotaMemory>,
    /// Maximum MPS percentage of all leases together.
    pub mps_percentage: Option<u32>,
    /// Maximum duration of a lease in seconds.
    pub longest_s: Option<u64>,
    /// Allowed GPUs; `None` for all GPUs.
    pub gpus: Option<Vec<Selector>>,
    /// What a request without a share means.
    pub default: Option<DefaultRequest>,
}

/// Amount of memory in a quota.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QuotaMemory {
    /// A fixed amount: `"40G"`.
    Limit(MemoryLimit),
    /// The memory of a number of GPUs, in thousandths of a GPU: `"1.5 GPUs"`.
    Gpus(u32),
    /// A part of the memory of all GPUs, in tenths of a percent: `"75%"`.
    Host(u32),
}

const PLACEMENTS: [(&str, PlacementPolicy); 2] = [("pack", PlacementPolicy::Pack), ("spread", PlacementPolicy::Spread)];

/// Returns the name of a placement policy in the config.
pub(super) fn placement_name(policy: PlacementPolicy) -> &'static str {
    match policy {
        PlacementPolicy::Pack => "pack",
        PlacementPolicy::Spread => "spread",
    }
}

const USER_LIMITS: [(&str, UserLimits); 2] = [("carry", UserLimits::Carry), ("require", UserLimits::Require)];

/// Returns the name of a value of `user_limits` in the config.
pub(super) fn user_limits_name(policy: UserLimits) -> &'static str {
    match policy {
        UserLimits::Carry => "carry",
        UserLimits::Require => "require",
    }
}

/// Maximum of `leases` and of `waiting` in a quota.
const MOST_LEASES: u32 = 10_000;

/// Maximum number of GPUs in a memory limit.
const MOST_GPUS: u32 = 1000;

pub(super) fn leases(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Leases {
    let placement = reader.choice(table, "placement", "placement", &PLACEMENTS);
    let user_limits = reader.choice(table, "user_limits", "valid value of `user_limits`", &USER_LIMITS);
    Leases { placement: placement.unwrap_or_default(), user_limits: user_limits.unwrap_or_default() }
}

pub(super) fn read(reader: &mut Reader<'_>, top: &DeTable<'_>) -> Vec<QuotaRule> {
    let Some(value) = get(top, QUOTA.key()) else { return Vec::new() };
    let DeValue::Array(items) = value.get_ref() else {
        let hint = "write [[quota]] with two brackets above each quota";
        reader.report_at(top, QUOTA.key(), "`quota` takes a list of quotas", hint);
        return Vec::new();
    };
    let mut quotas = Vec::new();
    let mut seen: Vec<(Subject, Range<usize>)> = Vec::new();
    for item in items {
        let header = reader.clip(item.span());
        let DeValue::Table(table) = item.get_ref() else {
            reader.report(Problem::new(header, "a quota must be a table", "write [[quota]] above each quota"));
            continue;
        };
        let meant = reader.report_unknown_keys(table, QUOTA, &[]);
        let subjects = subjects(reader, table, &header, &meant, &mut seen);
        quotas.push(quota(reader, table, subjects));
    }
    quotas
}

fn quota(reader: &mut Reader<'_>, table: &DeTable<'_>, subjects: Vec<Subject>) -> QuotaRule {
    let count = |reader: &mut Reader<'_>, key: &str, from: u32, to: u32, example: u32| {
        get(table, key).map(|_| reader.number(table, key, from..=to, example))
    };
    let mut rule = QuotaRule {
        subjects,
        kinds: kinds(reader, table),
        leases: count(reader, "leases", 0, MOST_LEASES, 2),
        waiting: count(reader, "waiting", 0, MOST_LEASES, 4),
        memory: memory(reader, table),
        mps_percentage: count(reader, "mps_percentage", 1, 1_000_000, 50),
        longest_s: longest(reader, table),
        gpus: selectors(reader, table, "gpus"),
        default: None,
    };
    let memory_mib = match rule.memory {
        Some(QuotaMemory::Limit(limit)) => Some(limit.mib()),
        Some(QuotaMemory::Gpus(_) | QuotaMemory::Host(_)) | None => None,
    };
    let bounds = DefaultBounds {
        leases: rule.leases,
        kinds: rule.kinds.as_ref(),
        longest_s: rule.longest_s,
        mps_percentage: rule.mps_percentage,
        memory_mib,
    };
    rule.default = quota_default::read(reader, table, bounds);
    rule
}

/// Reads the users of a quota. Reports an error if an earlier quota is for the same user or for
/// everybody, because only the first quota for a user applies.
fn subjects(
    reader: &mut Reader<'_>,
    table: &DeTable<'_>,
    header: &Range<usize>,
    meant: &[String],
    seen: &mut Vec<(Subject, Range<usize>)>,
) -> Vec<Subject> {
    let before = reader.problems.len();
    let mut found: Vec<(Subject, Range<usize>)> = Vec::new();
    for (key, example) in [("users", "[\"alice\"]"), ("groups", "[\"students\"]")] {
        for text in reader.words(table, key, example).unwrap_or_default() {
            let span = text.span.clone();
            let Some(name) = account(reader, text, key, "write everybody = true") else { continue };
            let subject = if key == "users" { Subject::User(name) } else { Subject::Group(name) };
            found.push((subject, span));
        }
    }
    if reader.flag(table, "everybody") == Some(true) {
        let span = get(table, "everybody").map(toml::Spanned::span).unwrap_or_default();
        found.push((Subject::Everybody, span));
    }
    // If a key that names users has an error or is misspelt, that is already reported. Do not also
    // report that the quota applies to no user.
    let is_wrong = reader.problems.len() > before
        || meant.iter().any(|key| ["users", "groups", "everybody"].contains(&key.as_str()));
    if found.is_empty() && !is_wrong {
        let hint = "write users = [\"alice\"], groups = [\"students\"] or everybody = true";
        reader.report(Problem::new(header.clone(), "this quota applies to no user", hint));
    }
    for (subject, span) in &found {
        let earlier = seen.iter().find(|(other, _)| other == subject || *other == Subject::Everybody);
        if let Some((other, first)) = earlier {
            let problem = if other == subject {
                let message = format!("{} has a quota already", whose(subject));
                Problem::new(span.clone(), message, "only the first quota for a user applies: keep one of the two")
            } else {
                let message =
                    format!("the quota of {} never applies: an earlier quota is for everybody", whose(subject));
                Problem::new(span.clone(), message, "put the quota for everybody last")
            };
            reader.report(problem.also(first.clone(), "the first is"));
        }
        seen.push((subject.clone(), span.clone()));
    }
    found.into_iter().map(|(subject, _)| subject).collect()
}

fn whose(subject: &Subject) -> String {
    match subject {
        Subject::User(name) => format!("user {}", Quoted(name)),
        Subject::Group(name) => format!("group {}", Quoted(name)),
        Subject::Everybody => "everybody".to_owned(),
    }
}

fn kinds(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Option<BTreeSet<LeaseKind>> {
    let names = LeaseKind::ALL.map(LeaseKind::name);
    let texts = reader.words(table, "kinds", "[\"mig\", \"mps\"]")?;
    if texts.is_empty() {
        let hint = format!("write one or more of: {}; to allow no lease, write leases = 0", names.join(", "));
        reader.report_at(table, "kinds", "`kinds` is empty, so the quota allows no kind of lease", hint);
        return None;
    }
    let mut kinds = BTreeSet::new();
    for text in &texts {
        match LeaseKind::ALL.into_iter().find(|kind| kind.name() == text.value) {
            Some(kind) => drop(kinds.insert(kind)),
            None => reader.report(unknown(text, "kind of lease", &names)),
        }
    }
    Some(kinds)
}

/// Reads the maximum duration of a lease. A number without a unit is an error here: people mean hours, and the general
/// meaning of such a number is seconds.
fn longest(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Option<u64> {
    let value = get(table, "longest")?;
    if let Some(number) = fix::without_unit(value.get_ref()) {
        let message = format!("`longest` has no unit of time: {number}");
        let hint = format!("add the unit that you mean: longest = {}", fix::with_units(&number));
        reader.report(Problem::new(value.span(), message, hint));
        return None;
    }
    let text = reader.word(table, "longest", "\"2d\"")?;
    let hint = match duration::parse_positive(&text.value) {
        Ok(duration) if duration.subsec_nanos() == 0 => return Some(duration.as_secs()),
        Ok(duration) => format!("write whole seconds: longest = \"{}s\"", duration.as_secs() + 1),
        Err(error) => match fix::duration(&text.value) {
            Some(meant) => format!("write longest = \"{meant}\""),
            None => error.to_string(),
        },
    };
    reader.report(Problem::new(text.span, format!("`longest` can't be {}", Quoted(&text.value)), hint));
    None
}

fn memory(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Option<QuotaMemory> {
    let value = get(table, "memory")?;
    let hint = |value: &DeValue<'_>| fix::memory_hint("memory", value);
    let text = reader.word_or(table, "memory", "\"40G\"", hint)?;
    let found = parse_memory(&text.value);
    if found.is_none() {
        let message = format!("`memory` can't be {}", Quoted(&text.value));
        let forms =
            "write an amount (\"40G\"), a number of GPUs (\"0.5 GPUs\"), or a part of the host's GPU memory (\"75%\")";
        let hint = hint(value.get_ref()).unwrap_or_else(|| forms.to_owned());
        reader.report(Problem::new(text.span, message, hint));
    }
    found
}

fn parse_memory(text: &str) -> Option<QuotaMemory> {
    let text = text.trim().to_ascii_lowercase();
    if let Some(percent) = text.strip_suffix('%') {
        let tenths = decimal(percent.trim_end(), 1)?;
        return (1..=1000).contains(&tenths).then_some(QuotaMemory::Host(tenths));
    }
    if let Some(gpus) = text.strip_suffix("gpus").or_else(|| text.strip_suffix("gpu")) {
        let thousandths = decimal(gpus.trim_end(), 3)?;
        return (1..=MOST_GPUS * 1000).contains(&thousandths).then_some(QuotaMemory::Gpus(thousandths));
    }
    text.to_ascii_uppercase().parse().ok().map(QuotaMemory::Limit)
}

/// Parses a decimal number with at most `places` digits after the point. Returns the number times
/// 10 to the power of `places`.
fn decimal(text: &str, places: usize) -> Option<u32> {
    let (whole, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    if !is_number(whole) || !is_number(fraction) || fraction.len() > places {
        return None;
    }
    format!("{whole}{fraction:0<places$}").parse().ok()
}

/// Formats a number in the form that [`decimal`] reads.
fn written_decimal(number: u32, places: u32) -> String {
    let unit = 10u32.pow(places);
    let fraction = format!("{:0width$}", number % unit, width = places as usize);
    match fraction.trim_end_matches('0') {
        "" => (number / unit).to_string(),
        fraction => format!("{}.{fraction}", number / unit),
    }
}

impl QuotaMemory {
    /// Returns the amount on a host with this number of GPUs, which are assumed to be equal.
    fn on_host(self, gpus: usize) -> MemoryAmount {
        match self {
            Self::Limit(limit) => MemoryAmount::Mib(limit.mib()),
            Self::Gpus(thousandths) => MemoryAmount::Gpus(thousandths),
            Self::Host(tenths) => {
                let gpus = u32::try_from(gpus).unwrap_or(u32::MAX);
                MemoryAmount::Gpus(gpus.saturating_mul(tenths))
            }
        }
    }

    fn written(self) -> String {
        match self {
            Self::Limit(limit) => limit.to_string(),
            Self::Gpus(thousandths) => format!("{} GPUs", written_decimal(thousandths, 3)),
            Self::Host(tenths) => format!("{}%", written_decimal(tenths, 1)),
        }
    }
}

impl QuotaRule {
    /// Returns the keys of the table, with their values as TOML.
    pub(super) fn written(&self) -> Vec<(&'static str, String)> {
        let names = |names: Vec<&String>| {
            let names: Vec<String> = names.into_iter().cloned().collect();
            (!names.is_empty()).then(|| list(&names))
        };
        let users = self.subjects.iter().filter_map(|subject| match subject {
            Subject::User(name) => Some(name),
            Subject::Group(_) | Subject::Everybody => None,
        });
        let groups = self.subjects.iter().filter_map(|subject| match subject {
            Subject::Group(name) => Some(name),
            Subject::User(_) | Subject::Everybody => None,
        });
        let everybody = self.subjects.contains(&Subject::Everybody).then(|| "true".to_owned());
        let kinds =
            self.kinds.as_ref().map(|kinds| kinds.iter().map(|kind| kind.name().to_owned()).collect::<Vec<_>>());
        let gpus = self.gpus.as_ref().map(|gpus| gpus.iter().map(ToString::to_string).collect::<Vec<_>>());
        let longest = self.longest_s.map(|seconds| text(&duration::format(std::time::Duration::from_secs(seconds))));
        let all = [
            ("users", names(users.collect())),
            ("groups", names(groups.collect())),
            ("everybody", everybody),
            ("kinds", kinds.map(|kinds| list(&kinds))),
            ("leases", self.leases.map(|most| most.to_string())),
            ("waiting", self.waiting.map(|most| most.to_string())),
            ("memory", self.memory.map(|memory| text(&memory.written()))),
            ("mps_percentage", self.mps_percentage.map(|percent| percent.to_string())),
            ("longest", longest),
            ("gpus", gpus.map(|gpus| list(&gpus))),
            ("default", self.default.as_ref().map(|default| text(&default.text()))),
        ];
        all.into_iter().filter_map(|(key, value)| Some((key, value?))).collect()
    }

    /// Returns the limits of the quota on a host with these GPUs.
    pub(crate) fn limits(&self, gpus: &[Gpu]) -> Limits {
        let allowed = |selectors: &Vec<Selector>| {
            let found = selectors.iter().flat_map(|selector| selector.matching(gpus));
            found.map(|at| gpus[at].index).collect()
        };
        Limits {
            kinds: self.kinds.clone(),
            leases: self.leases,
            queued: self.waiting,
            memory: self.memory.map(|memory| memory.on_host(gpus.len())),
            mps_tenths: self.mps_percentage.map(|percent| percent.saturating_mul(10)),
            longest_s: self.longest_s,
            gpus: self.gpus.as_ref().map(allowed),
        }
    }
}

impl Config {
    /// Returns the quotas for a host with these GPUs, in order. Only the first quota that matches a
    /// user applies to that user.
    #[must_use]
    pub fn quotas(&self, gpus: &[Gpu]) -> Vec<Quota> {
        let of = |rule: &QuotaRule| {
            let limits = rule.limits(gpus);
            let quota = |subject: &Subject| {
                let (subject, default) = (subject.clone(), rule.default.clone());
                Quota { subject, limits: limits.clone(), default }
            };
            rule.subjects.iter().map(quota).collect::<Vec<_>>()
        };
        self.quotas.iter().flat_map(of).collect()
    }
}
