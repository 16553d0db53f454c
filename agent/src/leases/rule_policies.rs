//! The policies of a lease: the settings of the rules of its GPUs.

use std::{collections::BTreeSet, time::Duration};

use gpush_api::LeaseBinding;
use gpush_core::config::{Config, IdleJobs, IdleTerms, OverLimitTerms};
use gpush_store::LeaseRecord;
use gpush_usage::{idle::IdlePolicy, over_limit::OverLimitPolicy};

use crate::state::HostState;

/// Returns the policy of a lease. If the rules of its GPUs differ, the mildest action and the longest times count.
pub(crate) fn idle_policy(host: &HostState, record: &LeaseRecord) -> IdlePolicy {
    policy_of_rules(&host.config, &rules(host, record))
}

/// Returns what happens to a lease above its memory limit. If the rules of its GPUs differ, the mildest action and the
/// longest grace period count.
pub(crate) fn over_limit_policy(host: &HostState, record: &LeaseRecord) -> OverLimitPolicy {
    let terms = rules(host, record).into_iter().map(|rule| host.config.over_limit_terms(rule));
    let milder = |one: OverLimitTerms, other: OverLimitTerms| OverLimitTerms {
        action: one.action.min(other.action),
        grace: one.grace.max(other.grace),
    };
    let OverLimitTerms { action, grace } = terms.reduce(milder).unwrap_or_default();
    OverLimitPolicy {
        action,
        grace_ms: ms(grace),
        is_slurm_job: is_of_job(record),
        ends_slurm_jobs: host.config.idle.slurm_jobs == IdleJobs::Cancel,
    }
}

/// Returns whether all rules of a lease's GPUs have `by_memory`. If the device does not report activity, the lease then
/// counts as idle while its processes and their memory stay the same.
pub(crate) fn is_judged_by_memory(host: &HostState, record: &LeaseRecord) -> bool {
    let rules = rules(host, record);
    !rules.is_empty() && rules.into_iter().all(|rule| host.config.idle_terms(rule).by_memory)
}

/// Returns the positions of the rules of a lease's GPUs; `None` for GPUs without a rule.
fn rules(host: &HostState, record: &LeaseRecord) -> BTreeSet<Option<usize>> {
    record.members.iter().map(|member| host.gpu(&member.gpu_uuid).and_then(|gpu| gpu.rule)).collect()
}

/// Returns the names of the rules of a lease's GPUs.
pub(crate) fn rule_names(host: &HostState, record: &LeaseRecord) -> BTreeSet<String> {
    rules(host, record).into_iter().filter_map(|rule| host.config.rules.get(rule?)?.name.clone()).collect()
}

/// Returns whether a lease belongs to a Slurm job.
pub(crate) fn is_of_job(record: &LeaseRecord) -> bool {
    matches!(record.binding, LeaseBinding::Job { .. })
}

fn policy_of_rules(config: &Config, rules: &BTreeSet<Option<usize>>) -> IdlePolicy {
    let terms = rules.iter().map(|rule| config.idle_terms(*rule)).reduce(milder);
    let IdleTerms { action, start_grace, after, empty_after, warn_before, max_keep, by_memory: _ } =
        terms.unwrap_or_else(|| config.idle_terms(None));
    IdlePolicy {
        action,
        start_grace_ms: ms(start_grace),
        after_ms: ms(after),
        empty_after_ms: ms(empty_after),
        warn_before_ms: warn_before.into_iter().map(ms).collect(),
        max_keep_ms: ms(max_keep),
        ends_slurm_jobs: config.idle.slurm_jobs == IdleJobs::Cancel,
    }
}

/// Returns the mildest action and the longest times of two policies, and the warnings of both.
fn milder(one: IdleTerms, other: IdleTerms) -> IdleTerms {
    let warn_before = one.warn_before.into_iter().chain(other.warn_before).collect::<BTreeSet<_>>();
    IdleTerms {
        action: one.action.min(other.action),
        start_grace: one.start_grace.max(other.start_grace),
        after: one.after.max(other.after),
        empty_after: one.empty_after.max(other.empty_after),
        warn_before: warn_before.into_iter().rev().collect(),
        max_keep: one.max_keep.max(other.max_keep),
        by_memory: one.by_memory && other.by_memory,
    }
}

fn ms(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use gpush_api::IdleAction;

    use super::*;

    #[test]
    fn mildest_rule_of_a_lease_counts() {
        let rule = |gpu: u32, idle: &str| format!("[[gpu]]\nmatch = \"{gpu}\"\nmode = \"exclusive\"\nidle = {idle}\n");
        let text = "[idle]\nslurm_jobs = \"scancel\"\n".to_owned()
            + &rule(0, "{ action = \"end\", after = \"1h\", warn_before = \"5m\" }")
            + &rule(1, "{ action = \"release\", after = \"2h\", warn_before = \"10m\" }");
        let config = Config::parse(&text, "config.toml").unwrap();
        let policy = |rules: &[Option<usize>]| policy_of_rules(&config, &rules.iter().copied().collect());
        let both = policy(&[Some(0), Some(1)]);
        assert_eq!((both.action, both.after_ms), (IdleAction::Release, 7_200_000));
        assert_eq!((both.warn_before_ms, both.ends_slurm_jobs), (vec![600_000, 300_000], true));
        assert_eq!(policy(&[Some(0)]).action, IdleAction::End);
        assert_eq!((policy(&[None]).action, policy(&[]).after_ms), (IdleAction::Report, 4 * 3_600_000));
    }
}
