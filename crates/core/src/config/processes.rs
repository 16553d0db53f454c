//! `[processes]`: what gpushd does about unleased processes, which use a GPU without a lease.

use std::{
    ops::{Range, RangeInclusive},
    time::Duration,
};

use gpush_api::UnleasedPolicy;
use toml::de::{DeTable, DeValue};

use super::{
    fix,
    reader::{HOUR, Reader, Value, get},
    schema::ALLOW,
    toml_text,
};
use crate::diagnostic::Problem;

/// `[processes]`
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Processes {
    /// What gpushd does about unleased processes.
    pub unleased: UnleasedPolicy,
    /// Time between SIGTERM and SIGKILL.
    pub grace: Duration,
    /// Processes that gpushd never treats as unleased.
    pub allow: Vec<Allowed>,
}

impl Default for Processes {
    fn default() -> Self {
        Self { unleased: UnleasedPolicy::Report, grace: Duration::from_secs(30), allow: Vec::new() }
    }
}

/// Processes that gpushd never treats as unleased. A process matches if it matches every field that
/// is set. At least one field is set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Allowed {
    /// Absolute path of the program. gpushd compares it with the file that the process executes,
    /// never with the name of the process.
    pub exe: Option<String>,
    /// User id.
    pub uid: Option<u32>,
}

/// Names of the policies in the config.
const POLICIES: [(&str, UnleasedPolicy); 3] =
    [("report", UnleasedPolicy::Report), ("warn", UnleasedPolicy::Warn), ("end", UnleasedPolicy::End)];

/// Returns the name of a policy in the config.
pub(super) fn policy_name(policy: UnleasedPolicy) -> &'static str {
    match policy {
        UnleasedPolicy::Report => "report",
        UnleasedPolicy::Warn => "warn",
        UnleasedPolicy::End => "end",
    }
}

/// The form of an entry of `allow`. It has no values of an account, because the author could copy them: each entry exempts
/// processes from the rules.
const FORM: &str = "{ exe = \"/PATH/OF/PROGRAM\" } or { uid = NUMBER }";

/// User ids. 4294967295 is not a user id: the kernel uses this number for "no user".
const UIDS: RangeInclusive<u32> = 0..=u32::MAX - 1;

/// Returns the entry that a path or a user id means.
fn entry_of(value: &DeValue<'_>) -> Option<String> {
    match value {
        DeValue::String(path) if path.starts_with('/') => Some(format!("{{ exe = {} }}", toml_text::text(path))),
        other => fix::number(other, &UIDS).map(|uid| format!("{{ uid = {uid} }}")),
    }
}

pub(super) fn read(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Processes {
    let default = Processes::default();
    Processes {
        unleased: reader.choice(table, "unleased", "valid value of `unleased`", &POLICIES).unwrap_or(default.unleased),
        grace: reader.duration(table, "grace", Duration::ZERO..=HOUR, default.grace),
        allow: allow(reader, table),
    }
}

fn allow(reader: &mut Reader<'_>, table: &DeTable<'_>) -> Vec<Allowed> {
    let Some(value) = get(table, "allow") else { return Vec::new() };
    let DeValue::Array(items) = value.get_ref() else {
        let hint = match entry_of(value.get_ref()) {
            Some(entry) => format!("write allow = [{entry}]"),
            None => format!("write a list of entries: {FORM}"),
        };
        reader.wrong_type("allow", value, "a list of tables", hint);
        return Vec::new();
    };
    let mut allowed: Vec<(Allowed, Range<usize>)> = Vec::new();
    for item in items {
        let span = reader.clip(item.span());
        let Some(one) = entry(reader, item) else { continue };
        match allowed.iter().find(|(other, _)| *other == one) {
            Some((_, first)) => {
                let problem =
                    Problem::new(span, "an earlier entry of `allow` already allows the same processes", "keep one");
                reader.report(problem.also(first.clone(), "the first is"));
            }
            None => allowed.push((one, span)),
        }
    }
    allowed.into_iter().map(|(one, _)| one).collect()
}

fn entry(reader: &mut Reader<'_>, item: Value<'_, '_>) -> Option<Allowed> {
    let span = reader.clip(item.span());
    let DeValue::Table(table) = item.get_ref() else {
        let hint = match entry_of(item.get_ref()) {
            Some(entry) => format!("write {entry} for this entry"),
            None => format!("write {FORM}"),
        };
        reader.report(Problem::new(span, "an entry of `allow` must be a table", hint));
        return None;
    };
    let before = reader.problems.len();
    reader.report_unknown_keys(table, ALLOW, &[]);
    let exe = reader.absolute(table, "exe", "/usr/bin/nvtop");
    let uid = get(table, "uid").map(|value| match value.get_ref() {
        DeValue::String(name) if fix::number(value.get_ref(), &UIDS).is_none() => {
            let is_name = name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '-'));
            let hint = if is_name && !name.is_empty() && !name.starts_with('-') {
                format!("write uid = NUMBER; `id -u {name}` prints the number")
            } else {
                "write uid = NUMBER, the number of one user".to_owned()
            };
            reader.wrong_type("uid", value, "a whole number", hint);
            0
        }
        _ => reader.number(table, "uid", UIDS, 0),
    });
    if reader.problems.len() > before {
        return None;
    }
    if exe.is_none() && uid.is_none() {
        let hint = format!("write {FORM}, or an entry with both keys");
        reader.report(Problem::new(span, "this entry has neither `exe` nor `uid`, so it allows no process", hint));
        return None;
    }
    Some(Allowed { exe, uid })
}
