//! Tells the ledger which leases begin, change and end, and the unusable units of each GPU.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use gpush_api::{GpuUuid, LeaseId, TargetUuid};
use gpush_usage::{input::Hold, moment::Moment};

use super::{Accounts, holds};
use crate::state::{HostState, LeaseTable};

/// The last snapshot, as far as the ledger has it.
#[derive(Debug, Default)]
pub(super) struct Follower {
    /// Identifies the snapshot: its table of leases, and its number of GPU changes.
    followed: Option<(Arc<LeaseTable>, u64)>,
    holds: BTreeMap<LeaseId, Vec<Hold>>,
    gpus: BTreeMap<GpuUuid, u32>,
}

impl Follower {
    fn is_known(&self, host: &HostState) -> bool {
        let is_same =
            |(leases, changes): &(Arc<LeaseTable>, u64)| Arc::ptr_eq(leases, &host.leases) && *changes == host.changes;
        self.followed.as_ref().is_some_and(is_same)
    }

    /// Returns the hold of a lease on a target in the last snapshot.
    fn held(&self, lease: LeaseId, target: &TargetUuid) -> Option<Hold> {
        self.holds.get(&lease)?.iter().find(|hold| hold.target == *target).cloned()
    }

    /// Returns the GPUs on which a lease begins, changes or ends with this snapshot.
    pub(super) fn changed_gpus(&self, host: &HostState) -> BTreeSet<GpuUuid> {
        if self.is_known(host) {
            return BTreeSet::new();
        }
        let holds = holds::of_leases(host, |id, target| self.held(id, target));
        let begun = holds.iter().filter(|(id, held)| self.holds.get(id) != Some(held));
        let ended = self.holds.iter().filter(|(id, _)| !holds.contains_key(id));
        begun.chain(ended).flat_map(|(_, held)| held).map(|hold| hold.gpu.clone()).collect()
    }

    /// Tells the ledger the changes since the last snapshot.
    pub(super) fn follow(&mut self, host: &HostState, accounts: &mut Accounts, now: Moment) {
        if self.is_known(host) {
            return;
        }
        let before = self.followed.replace((Arc::clone(&host.leases), host.changes));
        let gpus: BTreeMap<GpuUuid, u32> =
            host.gpus.iter().map(|one| (one.gpu.uuid.clone(), holds::unusable(&one.gpu))).collect();
        for (uuid, unusable) in &gpus {
            match self.gpus.get(uuid) {
                Some(before) if before == unusable => continue,
                Some(_) => {}
                None => accounts.ledger.add_gpu(uuid, now),
            }
            accounts.ledger.set_unusable(uuid, *unusable, now);
        }
        let ledger = &accounts.ledger;
        let holds =
            holds::of_leases(host, |id, target| self.held(id, target).or_else(|| ledger.hold(id, target).cloned()));
        for (id, held) in holds.iter().filter(|(id, held)| self.holds.get(id) != Some(held)) {
            if !accounts.ledger.leases().any(|known| known == *id) {
                accounts.begun.push(*id);
            }
            accounts.ledger.set_lease(*id, held.clone(), now);
            accounts.is_changed = true;
        }
        // The ledger may know leases that ended before this task was started again.
        let ended: Vec<LeaseId> = accounts.ledger.leases().filter(|id| !holds.contains_key(id)).collect();
        for id in ended {
            let Some(totals) = accounts.ledger.end_lease(id, now) else { continue };
            if let Some(lease) = before.as_ref().and_then(|(leases, _)| leases.open.get(&id)) {
                accounts.recent.note(Arc::clone(lease), totals.clone());
            }
            accounts.ended.push(totals);
            accounts.is_changed = true;
        }
        for removed in self.gpus.keys().filter(|uuid| !gpus.contains_key(*uuid)) {
            accounts.ledger.remove_gpu(removed, now);
            accounts.last.remove(removed);
        }
        (self.holds, self.gpus) = (holds, gpus);
    }
}
