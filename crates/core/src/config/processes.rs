//! `[processes]`: what gpushd does about unleased processes, which use a GPU without a lease.

use std::{ops::Range, time::Duration};

use gpush_api::UnleasedPolicy;
use toml::de::{DeTable, DeValue};

use super::{
    reader::{HOUR, Reader, Value, get},
    schema::ALLOW,
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

const EXAMPLE: &str = "[{ exe = \"/usr/bin/nvtop\" }, { uid = 1000 }]";

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
        reader.expected("allow", value, "a list of tables", EXAMPLE);
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
        let hint = format!("write allow = {EXAMPLE}");
        reader.report(Problem::new(span, "an entry of `allow` must be a table", hint));
        return None;
    };
    let before = reader.problems.len();
    reader.report_unknown_keys(table, ALLOW, &[]);
    let exe = reader.absolute(table, "exe", "/usr/bin/nvtop");
    // 4294967295 is not a user id: the kernel uses this number for "no user".
    let uid = get(table, "uid").map(|_| reader.number(table, "uid", 0..=u32::MAX - 1, 1000));
    if reader.problems.len() > before {
        return None;
    }
    if exe.is_none() && uid.is_none() {
        let hint = "add `exe`, `uid` or both: { exe = \"/usr/bin/nvtop\", uid = 1000 }";
        reader.report(Problem::new(span, "this entry has neither `exe` nor `uid`, so it allows no process", hint));
        return None;
    }
    Some(Allowed { exe, uid })
}
