//! What happens to leases because of the policies, for answers.

use gpush_api::{Lease, LeaseIdle, LeaseState, UnusedLease};
use gpush_usage::idle::{IdleOutlook, IdlePolicy};

use super::{LeasePolicies, over_limit::WatchedMemory};
use crate::usage::{ObservedLeases, Usage};

impl LeasePolicies {
    /// Adds to these leases what happens to them because they are unused, or use too much memory. Only leases whose use the viewer may see have
    /// their use already.
    pub(crate) fn add_to(&self, leases: &mut [Lease]) {
        let now = self.0.usage.now();
        let watched = self.0.watched.lock();
        for lease in leases.iter_mut().filter(|lease| lease.state == LeaseState::Active) {
            // The machine learns of a new keep with the next sample.
            let is_kept = lease.keep.as_ref().is_some_and(|keep| keep.until > Usage::timestamp(now));
            let Some(one) = watched.get(&lease.id).filter(|_| lease.usage.is_some()) else { continue };
            lease.over_limit = one.memory.as_ref().and_then(WatchedMemory::shown);
            if !is_kept {
                lease.idle = one.usage.outlook(now).map(|(outlook, _)| shown(&outlook, &one.usage.policy));
            }
        }
    }

    /// Returns the open leases that are unused now and that `is_visible` permits.
    pub(super) fn unused_now(&self, is_visible: impl Fn(&gpush_store::LeaseRecord) -> bool) -> Vec<UnusedLease> {
        let ObservedLeases { now, leases, .. } = self.0.usage.observed_leases();
        let watched = self.0.watched.lock();
        let visible = leases.iter().filter(|(lease, _)| is_visible(&lease.record));
        visible
            .filter_map(|(lease, _)| {
                let (outlook, warnings) = watched.get(&lease.id())?.usage.outlook(now)?;
                let IdleOutlook { action, unused_since, due, .. } = outlook;
                let (unused_since, due_at) = (Usage::timestamp(unused_since), Usage::timestamp(due));
                Some(UnusedLease {
                    lease_id: lease.id(),
                    holder: lease.record.holder.clone(),
                    state: outlook.state,
                    unused_since,
                    action,
                    due_at,
                    warning_count: warnings,
                    is_open: true,
                })
            })
            .collect()
    }
}

fn shown(outlook: &IdleOutlook, policy: &IdlePolicy) -> LeaseIdle {
    LeaseIdle {
        action: outlook.action,
        unused_since: Usage::timestamp(outlook.unused_since),
        due_at: Usage::timestamp(outlook.due),
        warned: outlook.is_warned,
        longest_keep_s: policy.max_keep_ms / 1000,
    }
}
