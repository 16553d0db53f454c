//! The leases of each account, in the form in which quotas count them.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{LeaseBinding, LeaseId, LeaseState};
use gpush_core::lease::quota::{HeldLease, Size};
use gpush_host::accounts::{Account, Accounts};

use super::demand::LeaseDemand;
use crate::state::LeaseTable;

/// The leases of each account.
#[derive(Debug, Default)]
pub(crate) struct HeldLeases {
    of: BTreeMap<Account, Vec<HolderLease>>,
    /// Leases of uids whose account is not known. They count for every account, so that an unknown account never gets
    /// more than its limits.
    unknown: Vec<HolderLease>,
}

/// A lease with the facts that decide who may release it.
#[derive(Debug, Clone, Copy)]
struct HolderLease {
    lease: HeldLease,
    holder: u32,
    /// Whether the lease belongs to a Slurm job. Such a lease ends only with its job.
    is_of_job: bool,
    /// Whether the lease is releasing already: another release changes nothing.
    is_releasing: bool,
}

impl HeldLeases {
    /// Counts the open leases, the reservations, and the requests that are being recorded as queued.
    pub(crate) fn of(accounts: &Accounts, table: &LeaseTable) -> Self {
        let mut held = Self::default();
        let mut known = BTreeMap::new();
        let mut account = |uid: u32| *known.entry(uid).or_insert_with(|| accounts.last(uid));
        // A reservation has no lease id yet. Use the probable ids, for the error message.
        let first = table.open.keys().next_back().map_or(1, |id| id.0 + 1);
        let of_reserved = (first..).map(LeaseId);
        let of_entering = of_reserved.clone().skip(table.reserved.len());
        let lease = |id, queued, size| HeldLease { id, queued, size, releasable: false };
        let reserved = table.reserved.values().zip(of_reserved).map(|(one, id)| HolderLease {
            lease: lease(id, false, Size::of(&one.members)),
            holder: one.holder,
            is_of_job: false,
            is_releasing: false,
        });
        let open = table.open.values().map(|one| {
            let queued = !one.state.name().holds_capacity();
            HolderLease {
                lease: lease(one.id(), queued, Size::of(&one.record.members)),
                holder: one.record.holder.uid,
                is_of_job: matches!(one.record.binding, LeaseBinding::Job { .. }),
                is_releasing: one.state.name() == LeaseState::Releasing,
            }
        });
        let entering = table.entering.values().zip(of_entering).map(|(holder, id)| HolderLease {
            lease: lease(id, true, Size::default()),
            holder: *holder,
            is_of_job: false,
            is_releasing: false,
        });
        for one in open.chain(reserved).chain(entering) {
            match account(one.holder) {
                Ok(account) => held.of.entry(account).or_default().push(one),
                Err(_) => held.unknown.push(one),
            }
        }
        held
    }

    /// Returns the leases that count for an account. For root's containers, also those of root: a lease of root in a
    /// container has uid 0 as its holder, so gpushd cannot distinguish it from a lease of the host's root.
    pub(crate) fn by(&self, account: Account) -> Vec<HeldLease> {
        self.entries(account).map(|one| one.lease).collect()
    }

    /// Returns the leases that certainly belong to an account.
    pub(crate) fn ids_of(&self, account: Account) -> BTreeSet<LeaseId> {
        self.of.get(&account).into_iter().flatten().map(|one| one.lease.id).collect()
    }

    /// Returns the leases that count for the account of a request, with those that its caller may release.
    pub(crate) fn of_requester(&self, demand: &LeaseDemand) -> Vec<HeldLease> {
        self.of_caller(demand.account, demand.new.holder.uid, demand.new.asked_by.uid)
    }

    /// Returns the leases that count for the account of `holder`, with those that the uid `caller` may release.
    pub(crate) fn of_caller(&self, account: Account, holder: u32, caller: u32) -> Vec<HeldLease> {
        // Only administrators request leases for other users.
        let is_admin = holder != caller;
        let of_account = self.of.get(&account).map_or([].as_slice(), Vec::as_slice);
        let owned = of_account.iter().filter(|_| account == Account::User(caller));
        let owned: BTreeSet<LeaseId> = owned.map(|one| one.lease.id).collect();
        let is_releasable = |one: &HolderLease| {
            let is_own = one.holder == caller && caller != 0;
            !one.is_releasing && (is_admin || !one.is_of_job && (is_own || owned.contains(&one.lease.id)))
        };
        let entries = self.entries(account);
        entries.map(|one| HeldLease { releasable: is_releasable(one), ..one.lease }).collect()
    }

    fn entries(&self, account: Account) -> impl Iterator<Item = &HolderLease> {
        let also = (account == Account::RootContainers).then_some(Account::User(0));
        let accounts = std::iter::once(account).chain(also);
        accounts.filter_map(|one| self.of.get(&one)).flatten().chain(&self.unknown)
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use gpush_host::users::{Lookups, NameService};

    use super::*;
    use crate::state::Reservation;

    /// Fault: with `leases = 1`, a user got eight GPUs by requesting seven of them with subordinate uids.
    #[test]
    fn leases_of_unresolved_uids_count_for_every_account() {
        let user = |uid: &u32| match uid {
            1000 | 1001 => Some(Some(uid.to_string())),
            3000 => None,
            _ => Some(None),
        };
        let names = NameService::with(Lookups { user: Box::new(user), ..Lookups::empty() }).unwrap();
        let accounts = Accounts::new(names, 990, Path::new("/nowhere"));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut table = LeaseTable::default();
        for holder in [1000, 4_000_000_000, 4_000_000_001, 4_000_000_002, 1001] {
            runtime.block_on(accounts.of(holder)).unwrap();
            table.reserve(Reservation { holder, members: Vec::new(), lease: None, end: None });
        }
        let counts = |table: &LeaseTable| {
            let held = HeldLeases::of(&accounts, table);
            [Account::User(1000), Account::User(1001), Account::Unknown, Account::User(7)].map(|one| held.by(one).len())
        };
        assert_eq!(counts(&table), [1, 1, 3, 0]);
        table.reserve(Reservation { holder: 3000, members: Vec::new(), lease: None, end: None });
        assert_eq!(counts(&table), [2, 2, 4, 1], "fails closed");
        let mut table = LeaseTable::default();
        table.reserve(Reservation { holder: 0, members: Vec::new(), lease: None, end: None });
        let held = HeldLeases::of(&accounts, &table);
        assert_eq!((held.by(Account::RootContainers).len(), held.by(Account::User(1000)).len()), (1, 0));
    }
}
