//! Accounts: the users and services for which gpushd counts connections.
//!
//! A user with a range of subordinate uids (`/etc/subuid`) can connect with any of these uids, through user namespaces.
//! gpushd counts all these connections for that user. Members of the admin groups have reserved connections.
//!
//! gpushd must look up the ranges of subordinate uids and the members of the admin groups. With a directory service,
//! this may take seconds. So the lookups run in the background, and the accept loop uses the last result.

use std::{
    fs,
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use nix::unistd::{Group, User};
use tokio_util::sync::CancellationToken;

/// Ranges of subordinate uids, see subuid(5).
const SUBUID: &str = "/etc/subuid";

/// Interval at which gpushd looks up the users and groups again.
const PERIOD: Duration = Duration::from_secs(60);

/// Maximum number of lines that gpushd reads from `/etc/subuid`. A uid in a range on a later line counts as a separate
/// user.
const MOST: usize = 100_000;

/// The user or the range of uids for which a connection is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Account {
    /// The user with this uid, including subordinate uids.
    User(u32),
    /// A range of subordinate uids whose owner is unknown or root. The number is the first uid of the range.
    Range(u32),
}

/// A range of subordinate uids.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    first: u32,
    count: u32,
    owner: Option<u32>,
}

#[derive(Debug, Default)]
struct AccountLookup {
    /// Sorted by first uid.
    ranges: Vec<Range>,
    /// Ids of the groups whose members are administrators.
    admin_groups: Vec<u32>,
}

/// The result of the last lookup of users and groups.
#[derive(Debug, Clone, Default)]
pub(crate) struct Accounts(Arc<RwLock<AccountLookup>>);

impl Accounts {
    /// Returns the account for which connections of this uid are counted.
    pub(crate) fn of(&self, uid: u32) -> Account {
        let found = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let after = found.ranges.partition_point(|range| range.first <= uid);
        let range = after.checked_sub(1).and_then(|at| found.ranges.get(at));
        match range.filter(|range| uid - range.first < range.count) {
            // Containers that root starts also use subordinate uids. These uids must not count for root.
            Some(Range { owner: Some(owner), .. }) if *owner != 0 => Account::User(*owner),
            Some(range) => Account::Range(range.first),
            None => Account::User(uid),
        }
    }

    /// Returns whether one of these groups is an admin group.
    pub(crate) fn is_admin(&self, groups: &[u32]) -> bool {
        let found = self.0.read().unwrap_or_else(PoisonError::into_inner);
        groups.iter().any(|group| found.admin_groups.contains(group))
    }

    fn set(&self, found: AccountLookup) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = found;
    }
}

/// Looks up users and groups periodically, until `stopping` is cancelled. `admin_groups` returns the groups in the
/// active config.
pub(crate) async fn refresh_periodically(
    accounts: Accounts,
    admin_groups: impl Fn() -> Vec<String>,
    stopping: CancellationToken,
) {
    loop {
        let groups = admin_groups();
        let looked_up = tokio::task::spawn_blocking(move || {
            let text = fs::read_to_string(SUBUID).unwrap_or_default();
            let uid = |name: &str| User::from_name(name).ok().flatten().map(|user| user.uid.as_raw());
            let gid = |name: &String| Group::from_name(name).ok().flatten().map(|group| group.gid.as_raw());
            AccountLookup { ranges: ranges(&text, uid), admin_groups: groups.iter().filter_map(gid).collect() }
        });
        tokio::select! {
            found = looked_up => match found {
                Ok(found) => accounts.set(found),
                Err(error) => tracing::warn!("cannot look up subordinate uids and admin groups: {error}"),
            },
            () = stopping.cancelled() => return,
        }
        tokio::select! {
            () = tokio::time::sleep(PERIOD) => {}
            () = stopping.cancelled() => return,
        }
    }
}

/// Parses `/etc/subuid`: lines in the form `owner:first:count`, where `owner` is a name or a uid.
fn ranges(text: &str, uid_of: impl Fn(&str) -> Option<u32>) -> Vec<Range> {
    let mut ranges: Vec<Range> = text
        .lines()
        .take(MOST)
        .filter_map(|line| {
            let mut fields = line.trim().split(':');
            let owner = fields.next().filter(|owner| !owner.is_empty() && !owner.starts_with('#'))?;
            let first = fields.next()?.parse().ok()?;
            let count = fields.next()?.parse().ok()?;
            Some(Range { first, count, owner: owner.parse().ok().or_else(|| uid_of(owner)) })
        })
        .collect();
    ranges.sort_by_key(|range| range.first);
    ranges
}

#[cfg(test)]
impl Accounts {
    /// Returns the result of a lookup without subordinate uids, and with these admin groups.
    pub(super) fn with_admin_groups(admin_groups: Vec<u32>) -> Self {
        let accounts = Self::default();
        accounts.set(AccountLookup { ranges: Vec::new(), admin_groups });
        accounts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accounts(text: &str) -> Accounts {
        let accounts = Accounts::default();
        let uid = |name: &str| (name == "alice").then_some(1000);
        accounts.set(AccountLookup { ranges: ranges(text, uid), admin_groups: vec![27] });
        accounts
    }

    #[test]
    fn subordinate_uid_counts_for_its_owner() {
        let accounts =
            accounts("# comment\nalice:165536:65536\n1001:100000:65536\nroot:300000:10\ngone:400000:10\nbad\n");
        for (uid, account) in [
            (1000, Account::User(1000)),
            (99_999, Account::User(99_999)),
            (100_000, Account::User(1001)),
            (165_535, Account::User(1001)),
            (165_536, Account::User(1000)),
            (231_071, Account::User(1000)),
            (231_072, Account::User(231_072)),
            (300_005, Account::Range(300_000)),
            (400_009, Account::Range(400_000)),
            (400_010, Account::User(400_010)),
            (0, Account::User(0)),
            (u32::MAX, Account::User(u32::MAX)),
        ] {
            assert_eq!(accounts.of(uid), account, "{uid}");
        }
        assert!(accounts.is_admin(&[5, 27]) && !accounts.is_admin(&[5]));
    }
}
