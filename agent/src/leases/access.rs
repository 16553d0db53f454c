//! The GPUs that the rules of the config close to a user: a rule with `users` or `groups` permits only these users.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use gpush_api::{ApiError, Code, GpuIndex, LeaseAccess, LeaseKind};
use gpush_core::{
    lease::quota::{self, Subject, UnknownQuota},
    quote::Quoted,
};

use super::{alternatives::Alternatives, holder_facts::HolderFacts};
use crate::state::{GpuSnapshot, HostState};

/// Maximum number of rules in one error.
const MOST_NAMED: usize = 8;

/// Why a user may not lease a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClosedGpu {
    /// The rule, for messages: `rule 2`, or the name in backticks.
    rule: String,
    /// The users that the rule permits.
    access: LeaseAccess,
    /// The user or group about which the name service did not answer; `None` if the rule certainly excludes the user.
    unknown: Option<Subject>,
}

/// The GPUs that a user may not lease, by index.
pub(super) type ClosedGpus = BTreeMap<GpuIndex, ClosedGpu>;

/// Returns the GPUs whose rules do not permit the holder. Contains also those of which this is unknown, because the name
/// service did not answer.
pub(super) fn closed(host: &HostState, facts: &HolderFacts) -> ClosedGpus {
    if matches!(facts.user(), quota::User::Root) {
        return ClosedGpus::new();
    }
    let of_gpu = |gpu: &Arc<GpuSnapshot>| {
        let position = gpu.rule?;
        let rule = host.config.rules.get(position)?;
        let access = rule.access.as_ref()?;
        let mut unknown = None;
        for subject in Subject::permitted(access) {
            match quota::applies(&subject, facts.user(), facts.id_of(&subject)) {
                Ok(true) => return None,
                Ok(false) => {}
                Err(UnknownQuota(subject)) => unknown = unknown.or(Some(subject)),
            }
        }
        let name = rule.name.as_ref().map(|name| format!("rule {}", Quoted(name)));
        let rule = name.unwrap_or_else(|| rule.label(position));
        Some((gpu.gpu.index, ClosedGpu { rule, access: access.clone(), unknown }))
    };
    host.gpus.iter().filter_map(of_gpu).collect()
}

/// Excludes closed GPUs. Returns the other GPUs, and the selected GPUs that are excluded.
///
/// # Errors
/// If all selected GPUs are closed. The hint names what the user may lease instead of the requested kind.
pub(super) fn without_closed(
    host: &HostState,
    selected: Option<BTreeSet<GpuIndex>>,
    closed: &ClosedGpus,
    instead: (&Alternatives<'_>, Option<LeaseKind>),
) -> Result<(Option<BTreeSet<GpuIndex>>, ClosedGpus), ApiError> {
    if closed.is_empty() {
        return Ok((selected, ClosedGpus::new()));
    }
    let selected = selected.unwrap_or_else(|| host.gpus.iter().map(|gpu| gpu.gpu.index).collect());
    let (excluded, open): (BTreeSet<GpuIndex>, BTreeSet<GpuIndex>) =
        selected.iter().partition(|index| closed.contains_key(*index));
    let excluded = closed.iter().filter(|(index, _)| excluded.contains(*index));
    let excluded: ClosedGpus = excluded.map(|(index, why)| (*index, why.clone())).collect();
    if open.is_empty() && !selected.is_empty() {
        return Err(closed_error(&excluded, Some(instead)));
    }
    Ok((Some(open), excluded))
}

/// Returns the error about closed GPUs. The hint names what the user may lease `instead` of the requested kind.
pub(super) fn closed_error(closed: &ClosedGpus, instead: Option<(&Alternatives<'_>, Option<LeaseKind>)>) -> ApiError {
    let gpus = named(closed.keys());
    let mut rules: BTreeMap<&str, (Vec<&GpuIndex>, &LeaseAccess)> = BTreeMap::new();
    for (index, why) in closed {
        rules.entry(&why.rule).or_insert_with(|| (Vec::new(), &why.access)).0.push(index);
    }
    let causes = rules.iter().take(MOST_NAMED).map(|(rule, (indexes, access))| {
        let keys: Vec<&str> = [("`users`", access.users.is_empty()), ("`groups`", access.groups.is_empty())]
            .into_iter()
            .filter_map(|(key, is_empty)| (!is_empty).then_some(key))
            .collect();
        let (gpus, verb) = (named(indexes.iter().copied()), if keys.len() == 1 { "permits" } else { "permit" });
        format!("{} of {rule} {verb} only {access} on {gpus}", keys.join(" and "))
    });
    let error = match closed.values().find_map(|why| why.unknown.as_ref()) {
        Some(subject) => {
            let database = if matches!(subject, Subject::Group(_)) { "group" } else { "passwd" };
            let name = match subject {
                Subject::User(name) | Subject::Group(name) => name.as_str(),
                Subject::Everybody => "",
            };
            let message =
                format!("cannot determine who may lease {gpus}: the name service of the host does not answer");
            let hint = format!("try again; if the error remains, check the name service: `getent {database} {name}`");
            ApiError::new(Code::Unavailable, message).hint(hint).retryable()
        }
        None => {
            let (whose, rules) = if closed.len() == 1 { ("its", "rule permits") } else { ("their", "rules permit") };
            let message = format!("cannot lease {gpus}: {whose} {rules} only other users");
            let ask = "ask an administrator for access: the rules of the config say who may lease the GPUs";
            let hint = instead.and_then(|(alternatives, kind)| alternatives.hint(kind));
            ApiError::new(Code::Denied, message).hint(hint.unwrap_or_else(|| ask.to_owned()))
        }
    };
    causes.fold(error, ApiError::cause)
}

/// Formats GPU indexes: `GPU 3`, or `GPUs 0, 2`.
fn named<'a>(indexes: impl Iterator<Item = &'a GpuIndex>) -> String {
    let names: Vec<String> = indexes.map(GpuIndex::to_string).collect();
    format!("GPU{} {}", if names.len() == 1 { "" } else { "s" }, names.join(", "))
}
