//! The leases of each account, in the form in which quotas count them.

use std::collections::{BTreeMap, BTreeSet};

use gpush_api::{ApiError, LeaseId};
use gpush_core::lease::quota::{HeldLease, Size};
use gpush_host::accounts::{Account, Accounts};

use super::{Leases, request::unknown_account};
use crate::state::LeaseTable;

/// The leases of each account.
#[derive(Debug, Default)]
pub(super) struct HeldLeases {
    of: BTreeMap<Account, Vec<HeldLease>>,
    /// Leases of uids whose account is not known. They count for every account, so that an unknown account never gets
    /// more than its limits.
    unknown: Vec<HeldLease>,
}

impl HeldLeases {
    /// Counts the open leases, the reservations, and the requests that are being recorded as queued.
    pub(super) fn of(accounts: &Accounts, table: &LeaseTable) -> Self {
        let mut held = Self::default();
        let mut known = BTreeMap::new();
        let mut account = |uid: u32| *known.entry(uid).or_insert_with(|| accounts.last(uid));
        // A reservation has no lease id yet. Use the probable next id, for the error message.
        let next = table.open.keys().next_back().map_or(1, |id| id.0 + 1);
        let reserved = table
            .reserved
            .values()
            .map(|one| (one.holder, HeldLease { id: LeaseId(next), queued: false, size: Size::of(&one.members) }));
        let open = table.open.values().map(|lease| {
            let queued = !lease.state.name().holds_capacity();
            (lease.record.holder.uid, HeldLease { id: lease.id(), queued, size: Size::of(&lease.record.members) })
        });
        let entering = table
            .entering
            .values()
            .map(|uid| (*uid, HeldLease { id: LeaseId(next), queued: true, size: Size::default() }));
        for (uid, lease) in open.chain(reserved).chain(entering) {
            match account(uid) {
                Ok(account) => held.of.entry(account).or_default().push(lease),
                Err(_) => held.unknown.push(lease),
            }
        }
        held
    }

    /// Returns the leases that count for an account. For root's containers, also those of root: a lease of root in a
    /// container has uid 0 as its holder, so gpushd cannot distinguish it from a lease of the host's root.
    pub(super) fn by(&self, account: Account) -> Vec<HeldLease> {
        let also = (account == Account::RootContainers).then_some(Account::User(0));
        let accounts = std::iter::once(account).chain(also);
        accounts.filter_map(|one| self.of.get(&one)).flatten().chain(&self.unknown).copied().collect()
    }
}

/// Looks up the accounts of all holders, so that [`HeldLeases::of`] knows them. Waits only for holders whose account is
/// not known, so that the holder of many leases causes no lookups when another user requests a lease.
///
/// # Errors
/// If the name service does not answer about a holder.
pub(super) async fn know_holders(leases: &Leases) -> Result<(), ApiError> {
    let table = leases.handles.state.leases();
    let open = table.open.values().map(|lease| lease.record.holder.uid);
    let holders: BTreeSet<u32> = open.chain(table.reserved.values().map(|one| one.holder)).collect();
    let accounts = leases.handles.users.accounts();
    for uid in holders.into_iter().filter(|uid| accounts.last(*uid).is_err()) {
        accounts.of(uid).await.map_err(|unanswered| unknown_account(uid, unanswered))?;
    }
    Ok(())
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
            table.reserve(Reservation { holder, members: Vec::new() });
        }
        let counts = |table: &LeaseTable| {
            let held = HeldLeases::of(&accounts, table);
            [Account::User(1000), Account::User(1001), Account::Unknown, Account::User(7)].map(|one| held.by(one).len())
        };
        assert_eq!(counts(&table), [1, 1, 3, 0]);
        table.reserve(Reservation { holder: 3000, members: Vec::new() });
        assert_eq!(counts(&table), [2, 2, 4, 1], "fails closed");
        let mut table = LeaseTable::default();
        table.reserve(Reservation { holder: 0, members: Vec::new() });
        let held = HeldLeases::of(&accounts, &table);
        assert_eq!((held.by(Account::RootContainers).len(), held.by(Account::User(1000)).len()), (1, 0));
    }
}
