//! The GPUs that a user may not lease: a rule with `users` or `groups` permits only these users, and a rule with
//! `lease = "enforced"` needs a host that enforces it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use gpush_api::{ApiError, BindTo, Code, EnforceMissing, GpuIndex, LeaseAccess, LeaseKind, LeaseRequest};
use gpush_core::{
    config::Rule,
    lease::quota::{self, Subject, UnknownQuota},
    quote::Quoted,
};
use gpush_host::cgroup::CgroupKind;

use super::{Leases, alternatives::Alternatives, holder_facts::HolderFacts};
use crate::{
    requests::caller::Caller,
    state::{GpuSnapshot, HostState},
};

/// Maximum number of rules in one error.
const MOST_NAMED: usize = 8;

/// Why a user may not lease a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ClosedGpu {
    /// The rule, for messages: `rule 2`, or the name in backticks.
    rule: String,
    why: ClosedWhy,
}

/// The reason why a user may not lease a GPU.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ClosedWhy {
    /// The rule permits only these users. `unknown` is the user or group about which the name service did not answer;
    /// `None` if the rule certainly excludes the user.
    Users { access: LeaseAccess, unknown: Option<Subject> },
    /// The rule enforces leases, and the host does not, for this reason.
    NotEnforced(String),
    /// The kernel denies the GPUs to login sessions, in which the processes of the lease would be.
    Session,
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
        let why = ClosedWhy::Users { access: access.clone(), unknown };
        Some((gpu.gpu.index, ClosedGpu { rule: rule_name(rule, position), why }))
    };
    host.gpus.iter().filter_map(of_gpu).collect()
}

fn rule_name(rule: &Rule, position: usize) -> String {
    let name = rule.name.as_ref().map(|name| format!("rule {}", Quoted(name)));
    name.unwrap_or_else(|| rule.label(position))
}

/// Returns the GPUs that the request cannot get because of the device access of the host. `is_session` is whether the
/// processes of the lease would be in a login session, to which the kernel may deny the GPUs.
pub(super) fn closed_by_enforcement(leases: &Leases, host: &HostState, is_session: bool) -> ClosedGpus {
    let enforcement = &leases.handles.enforcement;
    let missing = enforcement.missing();
    let is_denied = is_session && enforcement.is_installed();
    let of_gpu = |gpu: &Arc<GpuSnapshot>| {
        let position = gpu.rule?;
        let rule = host.config.rules.get(position)?;
        let terms = rule.lease?;
        let refuses = terms.is_enforced() && terms.enforce_missing == EnforceMissing::Refuse;
        let why = match &missing {
            Some(reason) if refuses => ClosedWhy::NotEnforced(reason.clone()),
            _ if is_denied => ClosedWhy::Session,
            _ => return None,
        };
        Some((gpu.gpu.index, ClosedGpu { rule: rule_name(rule, position), why }))
    };
    host.gpus.iter().filter_map(of_gpu).collect()
}

/// Returns whether the processes of the requested lease would stay in a login session, or in the scope of another lease.
pub(super) fn stays_in_session(caller: &Caller, request: &LeaseRequest) -> bool {
    match (caller.peer.pid.map(CgroupKind::of), request.bind_to) {
        (Some(CgroupKind::Session { .. } | CgroupKind::UserManager { .. }), BindTo::Scope) => false,
        (Some(CgroupKind::Session { .. } | CgroupKind::UserManager { .. } | CgroupKind::Lease { .. }), _) => true,
        _ => false,
    }
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
    if let Some(error) = enforcement_error(closed) {
        return error;
    }
    let mut rules: BTreeMap<&str, (Vec<&GpuIndex>, &LeaseAccess)> = BTreeMap::new();
    let mut unknown = None;
    for (index, ClosedGpu { rule, why }) in closed {
        if let ClosedWhy::Users { access, unknown: about } = why {
            rules.entry(rule).or_insert_with(|| (Vec::new(), access)).0.push(index);
            unknown = unknown.or(about.as_ref());
        }
    }
    let causes = rules.iter().take(MOST_NAMED).map(|(rule, (indexes, access))| {
        let keys: Vec<&str> = [("`users`", access.users.is_empty()), ("`groups`", access.groups.is_empty())]
            .into_iter()
            .filter_map(|(key, is_empty)| (!is_empty).then_some(key))
            .collect();
        let (gpus, verb) = (named(indexes.iter().copied()), if keys.len() == 1 { "permits" } else { "permit" });
        format!("{} of {rule} {verb} only {access} on {gpus}", keys.join(" and "))
    });
    let error = match unknown {
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

/// Returns the error if the device access of the host closes GPUs.
fn enforcement_error(closed: &ClosedGpus) -> Option<ApiError> {
    let gpus = named(closed.keys());
    if closed.values().any(|one| one.why == ClosedWhy::Session) {
        let message = format!("cannot lease {gpus} for programs in a login session: the kernel denies them the GPUs");
        let hint = "run the program with `gpushctl run -- COMMAND`, which moves it out of the session";
        return Some(ApiError::new(Code::Denied, message).hint(hint));
    }
    let (rule, reason) = closed.values().find_map(|one| match &one.why {
        ClosedWhy::NotEnforced(reason) => Some((&one.rule, reason)),
        ClosedWhy::Users { .. } | ClosedWhy::Session => None,
    })?;
    let message = format!("cannot lease {gpus}: {rule} has lease = \"enforced\", but the host does not enforce it");
    let hint = "ask an administrator to run `gpushctl enforce plan` and `gpushctl enforce on`";
    Some(ApiError::new(Code::Unavailable, message).cause(reason.clone()).hint(hint))
}

/// Formats GPU indexes: `GPU 3`, or `GPUs 0, 2`.
fn named<'a>(indexes: impl Iterator<Item = &'a GpuIndex>) -> String {
    let names: Vec<String> = indexes.map(GpuIndex::to_string).collect();
    format!("GPU{} {}", if names.len() == 1 { "" } else { "s" }, names.join(", "))
}
