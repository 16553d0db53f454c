//! The keys of a rule about leases: `lease`, `enforce_missing`, `at_end`, `owner`, `users` and `groups`. The table
//! `[defaults]` has the first four keys too.

use gpush_api::{AtLeaseEnd, EnforceMissing, LeaseAccess, LeaseOwner, LeaseRequirement, LeaseTerms, Mode};
use toml::de::{DeTable, DeValue};

use super::{
    RuleDefaults,
    account_name::account,
    fix,
    reader::{Reader, get},
    sharing::USERS,
};
use crate::diagnostic::Problem;

/// Values of the key `lease`.
const REQUIREMENTS: [(&str, LeaseRequirement); 3] = [
    ("optional", LeaseRequirement::Optional),
    ("required", LeaseRequirement::Required),
    ("enforced", LeaseRequirement::Enforced),
];

const MISSING: [(&str, EnforceMissing); 2] = [("refuse", EnforceMissing::Refuse), ("grant", EnforceMissing::Grant)];

const AT_END: [(&str, AtLeaseEnd); 2] = [("report", AtLeaseEnd::Report), ("end", AtLeaseEnd::End)];

const OWNERS: [(&str, LeaseOwner); 2] = [("users", LeaseOwner::Users), ("slurm", LeaseOwner::Slurm)];

/// Reads the lease keys of a rule; a key that is missing has the value of `defaults`. Reports these keys in mode
/// `unmanaged`, because gpushd grants no leases on the GPUs of such a rule. The defaults do not concern such a rule.
pub(super) fn read(
    reader: &mut Reader<'_>,
    rule: &DeTable<'_>,
    mode: Option<Mode>,
    defaults: &RuleDefaults,
) -> Option<LeaseTerms> {
    if mode == Some(Mode::Unmanaged) {
        for key in ["lease", "enforce_missing", "at_end", "owner", "users", "groups"] {
            if get(rule, key).is_some() {
                let problem = format!(
                    "`{key}` has no effect in mode `unmanaged`: gpushd grants no leases on the GPUs of this rule"
                );
                reader.report_at(rule, key, problem, format!("write another mode, or leave `{key}` out"));
            }
        }
        return None;
    }
    let own = keys(reader, rule);
    let owner = own.owner.or(defaults.owner).unwrap_or_default();
    let requirement = own.lease.or(defaults.lease).or_else(|| default_requirement(mode, owner));
    let is_enforced = requirement == Some(LeaseRequirement::Enforced);
    // A wrong value of `lease` is already reported.
    let is_lease_wrong = get(rule, "lease").is_some() && own.lease.is_none();
    if own.enforce_missing.is_some() && !is_enforced && !is_lease_wrong {
        let problem = "`enforce_missing` has no effect, because `lease` of the rule is not \"enforced\"";
        reader.report_at(
            rule,
            "enforce_missing",
            problem,
            "write lease = \"enforced\", or leave `enforce_missing` out",
        );
    }
    let missing = own.enforce_missing.or(defaults.enforce_missing).filter(|_| is_enforced);
    Some(LeaseTerms {
        requirement,
        at_end: own.at_end.or(defaults.at_end).unwrap_or_default(),
        owner,
        enforce_missing: missing.unwrap_or_default(),
    })
}

/// Reads the lease keys of a rule or of `[defaults]`.
pub(super) fn keys(reader: &mut Reader<'_>, table: &DeTable<'_>) -> RuleDefaults {
    let flag = get(table, "lease").and_then(|value| Some((value, fix::flag(value.get_ref())?)));
    let requirement = match flag {
        Some((value, requires)) => {
            let word = if requires { LeaseRequirement::Required } else { LeaseRequirement::Optional };
            let hint = format!("write lease = \"{}\"", word.name());
            let problem = "`lease` takes \"optional\", \"required\" or \"enforced\"";
            reader.report(Problem::new(value.span(), problem, hint));
            None
        }
        None => reader.choice(table, "lease", "valid value of `lease`", &REQUIREMENTS),
    };
    RuleDefaults {
        lease: requirement,
        enforce_missing: reader.choice(table, "enforce_missing", "valid value of `enforce_missing`", &MISSING),
        at_end: reader.choice(table, "at_end", "valid value of `at_end`", &AT_END),
        owner: reader.choice(table, "owner", "valid value of `owner`", &OWNERS),
    }
}

/// Returns whether a rule without the key `lease` requires leases. GPUs of Slurm do: only jobs use them, and each job has
/// a lease. For other GPUs, returns `None` in mode `mig`, because this then depends on the MIG device: only devices that
/// are shared through MPS require a lease.
fn default_requirement(mode: Option<Mode>, owner: LeaseOwner) -> Option<LeaseRequirement> {
    match mode? {
        Mode::Exclusive | Mode::Timeslice | Mode::Mig if owner == LeaseOwner::Slurm => Some(LeaseRequirement::Required),
        Mode::Mps => Some(LeaseRequirement::Required),
        Mode::Timeslice | Mode::Exclusive => Some(LeaseRequirement::Optional),
        Mode::Mig | Mode::NoRule | Mode::Unmanaged => None,
    }
}

/// Reads the keys `users` and `groups` of a rule. `lease` has the other lease keys of the rule.
pub(super) fn access(
    reader: &mut Reader<'_>,
    rule: &DeTable<'_>,
    mode: Option<Mode>,
    lease: Option<LeaseTerms>,
) -> Option<LeaseAccess> {
    let keys: Vec<&str> = ["users", "groups"].into_iter().filter(|key| get(rule, key).is_some()).collect();
    // In mode `unmanaged`, these keys are already reported.
    if keys.is_empty() || mode == Some(Mode::Unmanaged) {
        return None;
    }
    if lease.is_some_and(|lease| lease.owner == LeaseOwner::Slurm) {
        for key in keys {
            let problem =
                format!("`{key}` contradicts `owner = \"slurm\"`: Slurm decides who uses the GPUs of this rule");
            let hint = format!(
                "leave `{key}` out, and limit the users of the partition in slurm.conf: AllowGroups=, AllowAccounts="
            );
            reader.report_at(rule, key, problem, hint);
        }
        return None;
    }
    // People write `mps.users`, which is `one` or `many`, as `users` of the rule.
    if let Some(DeValue::String(word)) = get(rule, "users").map(toml::Spanned::get_ref)
        && let Some((word, _)) = USERS.iter().find(|(name, _)| *name == word.as_ref())
    {
        let problem = format!("`users` of a rule takes a list of user names, not \"{word}\"");
        let hint = format!("for the number of users of an MPS daemon, write mps = {{ users = \"{word}\" }}");
        reader.report_at(rule, "users", problem, hint);
        return None;
    }
    let before = reader.problems.len();
    let mut names = |key: &str, example: &str| -> Vec<String> {
        let texts = reader.words(rule, key, example).unwrap_or_default();
        let all = format!("leave `{key}` out");
        texts.into_iter().filter_map(|text| account(reader, text, key, &all)).collect()
    };
    let access = LeaseAccess { users: names("users", "[\"anna\"]"), groups: names("groups", "[\"ml\"]") };
    if access.users.is_empty() && access.groups.is_empty() && reader.problems.len() == before {
        for key in keys {
            let hint = format!("write {key} = [\"NAME\"]; to permit all users, leave `{key}` out");
            reader.report_at(rule, key, format!("`{key}` is empty, so the rule permits no user"), hint);
        }
        return None;
    }
    Some(access)
}

/// Returns the keys `users` and `groups` of a rule, with their values.
pub(super) fn written_access(access: &LeaseAccess) -> Vec<(&'static str, &[String])> {
    let LeaseAccess { users, groups } = access;
    let all = [("users", users.as_slice()), ("groups", groups.as_slice())];
    all.into_iter().filter(|(_, names)| !names.is_empty()).collect()
}

/// Returns the lease keys of a rule, with their values.
pub(super) fn written(terms: &LeaseTerms) -> Vec<(&'static str, &'static str)> {
    let LeaseTerms { requirement, at_end, owner, enforce_missing } = terms;
    let requirement = requirement.map(|requirement| ("lease", requirement.name()));
    let missing = terms.is_enforced().then(|| ("enforce_missing", enforce_missing.name()));
    requirement.into_iter().chain(missing).chain([("at_end", at_end.name()), ("owner", owner.name())]).collect()
}
