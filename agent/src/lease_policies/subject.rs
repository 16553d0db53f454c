//! The policy of a lease, and whether the config exempts the lease.

use gpush_api::LeaseBinding;
use gpush_core::config::IdleExempt;
use gpush_store::LeaseRecord;
use gpush_usage::{
    idle::{ExemptSubject, IdleExemptions, IdlePolicy, LeaseTerms},
    moment::Moment,
};

use super::LeasePolicies;
use crate::{leases, state::HostState};

/// A lease as the policy sees it.
#[derive(Debug, Clone)]
pub(super) struct PolicySubject {
    pub(super) policy: IdlePolicy,
    pub(super) terms: LeaseTerms,
}

impl LeasePolicies {
    /// Returns the policy and the terms of a lease that was granted at a moment.
    pub(super) async fn subject(&self, host: &HostState, record: &LeaseRecord, granted: Moment) -> PolicySubject {
        PolicySubject {
            policy: leases::idle_policy(host, record),
            terms: LeaseTerms {
                granted,
                is_slurm_job: leases::is_of_job(record),
                is_exempt: self.is_exempt(host, record).await,
            },
        }
    }

    /// Returns whether the config exempts a lease. While the name service does not answer whether the holder is in one of
    /// the groups, the lease counts as exempt, so that it does not end by mistake.
    async fn is_exempt(&self, host: &HostState, record: &LeaseRecord) -> bool {
        let IdleExempt { users, groups, jobs, rules } = &host.config.idle.exempt;
        if [users, groups, jobs, rules].iter().all(|names| names.is_empty()) {
            return false;
        }
        let uid = record.holder.uid;
        let account = match &record.holder.user {
            Some(user) => user.clone(),
            // The holder may be a subordinate uid.
            None => self.0.context.users.owners([uid].into()).await.remove(&uid).unwrap_or_default(),
        };
        let job = match &record.binding {
            LeaseBinding::Job { job, .. } => Some(job.to_string()),
            LeaseBinding::None
            | LeaseBinding::Time
            | LeaseBinding::Process { .. }
            | LeaseBinding::Cgroup { .. }
            | LeaseBinding::Scope { .. } => None,
        };
        let exemptions =
            IdleExemptions { users: users.clone(), groups: Vec::new(), jobs: jobs.clone(), rules: rules.clone() };
        let subject = ExemptSubject { user: &account, job_id: job.as_deref(), ..ExemptSubject::default() };
        let names = leases::rule_names(host, record);
        let is_of_rule = names.iter().any(|name| rules.contains(name));
        exemptions.exempt(subject) || is_of_rule || self.is_in_group(&account, uid, groups).await
    }

    async fn is_in_group(&self, account: &str, uid: u32, groups: &[String]) -> bool {
        if groups.is_empty() {
            return false;
        }
        let users = &self.0.context.users;
        // The groups of a subordinate uid are those of its owner.
        let uid = match users.names().uid(account).await {
            Ok(Some(owner)) => owner,
            Ok(None) => uid,
            Err(_) => return true,
        };
        match users.names().groups_of(uid).await {
            Ok(gids) => users.is_in_one_of(&gids.unwrap_or_default(), groups).await.unwrap_or(true),
            Err(_) => true,
        }
    }
}
