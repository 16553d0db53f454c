//! The owner that each lease is charged to. Names can change later, so the accounts keep them.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{LeaseBinding, LeaseId};
use gpush_host::identity::Users;
use gpush_store::LeaseRecord;
use gpush_usage::account::LeaseOwner;

/// The owners of leases that are known so far.
#[derive(Debug, Default)]
pub(super) struct LeaseOwners(BTreeMap<LeaseId, LeaseOwner>);

impl LeaseOwners {
    /// Returns those of these leases whose owner is not known.
    pub(super) fn unknown(&self, leases: impl IntoIterator<Item = LeaseId>) -> BTreeSet<LeaseId> {
        leases.into_iter().filter(|lease| !self.0.contains_key(lease)).collect()
    }

    /// Finds the owners of leases.
    pub(super) async fn find<'a>(&mut self, records: impl IntoIterator<Item = &'a LeaseRecord>, users: &Users) {
        let records: Vec<&LeaseRecord> = records.into_iter().collect();
        let accounts = users.owners(records.iter().map(|record| record.holder.uid).collect()).await;
        for record in records {
            let uid = record.holder.uid;
            let group = users.names().primary_group(uid).await.ok().flatten();
            self.0.insert(record.id, owner(record, accounts.get(&uid).cloned(), group));
        }
    }

    /// Returns the owner of a lease. A lease without a record has an owner without a name.
    pub(super) fn of(&self, lease: LeaseId) -> LeaseOwner {
        self.0.get(&lease).cloned().unwrap_or_default()
    }

    /// Forgets a lease that has ended.
    pub(super) fn forget(&mut self, lease: LeaseId) {
        self.0.remove(&lease);
    }
}

/// Returns the owner of a lease. `account` is the user who owns the holder's uid as a subordinate uid.
fn owner(record: &LeaseRecord, account: Option<String>, group: Option<String>) -> LeaseOwner {
    let holder = &record.holder;
    let user = account.or_else(|| holder.user.clone()).unwrap_or_else(|| holder.uid.to_string());
    let (job, account) = match &record.binding {
        LeaseBinding::Job { cluster, job, account, .. } => (Some(format!("{cluster}/{job}")), account.clone()),
        LeaseBinding::None
        | LeaseBinding::Scope { .. }
        | LeaseBinding::Cgroup { .. }
        | LeaseBinding::Process { .. }
        | LeaseBinding::Time => (None, None),
    };
    LeaseOwner { user, group, account, job }
}
