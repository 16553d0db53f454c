//! Limits of open connections, and of new connections per second, per account and in total.
//!
//! A caller that keeps opening connections must not use up gpushd's file descriptors or lock out other callers. So
//! connections are counted for each [`Account`]: a user with all subordinate uids.
//!
//! | connections of the first socket | for |
//! |---|---|
//! | [`IN_ALL`] − [`ADMINS`] − [`RESERVED`] | all users, each account at most [`PER_ACCOUNT`] |
//! | [`ADMINS`] more | members of the admin groups |
//! | [`RESERVED`] more | root and the user that gpushd runs as |
//!
//! If an account opens connections too fast, gpushd delays them, but does not refuse them. Meanwhile the accept loop
//! serves other connections. A delayed connection counts as open, so the limit of open connections also limits the
//! delayed ones. The second socket has separate limits.

use std::{
    collections::HashMap,
    sync::Arc,
    time::{Duration, Instant},
};

use gpush_host::accounts::Account;
use gpush_locked::Locked;

/// Maximum number of open connections of one unprivileged account.
const PER_ACCOUNT: usize = 32;

/// Connections reserved for root and the uid of gpushd.
const RESERVED: usize = 64;

/// Connections reserved for members of the admin groups.
const ADMINS: usize = 32;

/// Maximum total of connections to the first socket, if the limit of file descriptors permits.
const IN_ALL: usize = 512;

/// Maximum total of connections to the second socket.
const ADMIN_SOCKET: usize = 128;

/// An account may open a burst of connections at once, and then one connection per interval without delay.
const INTERVAL: Duration = Duration::from_millis(10);
const BURST: u32 = 100;

/// Maximum number of accounts in memory. Above this number, gpushd removes accounts without open connections.
const MOST_ACCOUNTS: usize = 1024;

/// The rank of a caller, which determines how many connections the caller may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Rank {
    /// Any user.
    User,
    /// A member of an admin group.
    Admin,
    /// Root or the user that gpushd runs as.
    Privileged,
}

/// Why a connection is refused.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SlotRefusal {
    /// The account has reached its maximum number of connections.
    Account(String),
    /// The socket has reached its maximum number of connections for this rank. A higher rank may still connect.
    Total(String),
}

/// The connections of one account.
#[derive(Debug, Clone, Copy)]
struct Count {
    open: usize,
    /// Time from which the account may open its next connection without delay.
    next: Instant,
}

#[derive(Debug, Clone)]
pub(crate) struct Caps {
    accounts: Arc<Locked<HashMap<Account, Count>>>,
    in_all: usize,
}

/// A slot for one connection. Dropping this value frees the slot.
#[derive(Debug)]
pub(crate) struct ConnectionSlot {
    caps: Caps,
    account: Account,
    /// How long gpushd waits before it serves the connection.
    pub(crate) delay: Duration,
}

impl Caps {
    /// Creates the limits of the first socket. `descriptors` is the maximum number of open files of this process. The
    /// first socket uses at most five eighths of them; the rest is for the second socket and other files.
    pub(crate) fn public(descriptors: u64) -> Self {
        Self::new(eighths(descriptors, 5).clamp(RESERVED / 2, IN_ALL))
    }

    /// Creates the limits of the second socket.
    pub(crate) fn admin(descriptors: u64) -> Self {
        Self::new(eighths(descriptors, 1).clamp(8, ADMIN_SOCKET))
    }

    fn new(in_all: usize) -> Self {
        Self { accounts: Arc::default(), in_all }
    }

    /// Returns how many connections may be open in total after a caller of this rank has connected.
    fn most(&self, rank: Rank) -> usize {
        // If the total is small, the two reserves must not use up more than about half of the total.
        let reserved = RESERVED.min(self.in_all / 3);
        let admins = ADMINS.min(self.in_all / 6);
        match rank {
            Rank::Privileged => self.in_all,
            Rank::Admin => self.in_all - reserved,
            Rank::User => self.in_all - reserved - admins,
        }
    }

    /// Takes a slot for a connection that is opened at `now`.
    ///
    /// # Errors
    /// If the account or the socket has reached its maximum number of connections.
    pub(crate) fn take_slot(&self, account: Account, rank: Rank, now: Instant) -> Result<ConnectionSlot, SlotRefusal> {
        let mut accounts = self.accounts.lock();
        let all: usize = accounts.values().map(|count| count.open).sum();
        if accounts.len() > MOST_ACCOUNTS {
            accounts.retain(|_, count| count.open > 0);
        }
        let mine = accounts.get(&account).map_or(0, |count| count.open);
        if rank != Rank::Privileged && mine >= PER_ACCOUNT {
            let who = match account {
                Account::User(uid) => format!("uid {uid}, together with its subordinate uids,"),
                Account::RootContainers | Account::Unknown => account.to_string(),
            };
            return Err(SlotRefusal::Account(format!("{who} has {mine} connections open and may not have more")));
        }
        if all >= self.most(rank) {
            return Err(SlotRefusal::Total(format!("gpushd has {all} connections open and takes no more for now")));
        }
        let earliest = now.checked_sub(INTERVAL * BURST).unwrap_or(now);
        let count = accounts.entry(account).or_insert(Count { open: 0, next: earliest });
        count.open += 1;
        let delay = if rank == Rank::Privileged {
            Duration::ZERO
        } else {
            let start = count.next.max(earliest);
            count.next = start + INTERVAL;
            start.saturating_duration_since(now)
        };
        Ok(ConnectionSlot { caps: self.clone(), account, delay })
    }
}

fn eighths(descriptors: u64, count: u64) -> usize {
    usize::try_from(descriptors / 8 * count).unwrap_or(usize::MAX)
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        let mut accounts = self.caps.accounts.lock();
        if let Some(count) = accounts.get_mut(&self.account) {
            count.open -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALICE: Account = Account::User(1000);
    const BOB: Account = Account::User(1001);
    const ROOT: Account = Account::User(0);

    fn enter(caps: &Caps, account: Account, rank: Rank) -> Result<ConnectionSlot, SlotRefusal> {
        caps.take_slot(account, rank, Instant::now())
    }

    #[test]
    fn account_cannot_exceed_its_share_or_block_others() {
        let caps = Caps::public(1 << 20);
        let mine: Vec<_> = (0..PER_ACCOUNT).map(|_| enter(&caps, ALICE, Rank::User).unwrap()).collect();
        let refused = enter(&caps, ALICE, Rank::User).unwrap_err();
        assert!(
            matches!(refused, SlotRefusal::Account(why) if why.contains("uid 1000, together with its subordinate uids, has 32"))
        );
        let other = enter(&caps, BOB, Rank::User).unwrap();
        drop(mine);
        enter(&caps, ALICE, Rank::User).unwrap();
        drop(other);
    }

    #[test]
    fn full_socket_leaves_room_for_admins_then_root() {
        let caps = Caps::public(1 << 20);
        let mut places = Vec::new();
        let mut fill = |rank: Rank, from: u32| {
            let mut uid = from;
            let before = places.len();
            loop {
                match enter(&caps, Account::User(uid), rank) {
                    Ok(place) => places.push(place),
                    Err(SlotRefusal::Total(_)) => return places.len() - before,
                    Err(SlotRefusal::Account(_)) => uid += 1,
                }
            }
        };
        assert_eq!(fill(Rank::User, 100_000), IN_ALL - RESERVED - ADMINS);
        assert_eq!(fill(Rank::Admin, 1000), ADMINS);
        assert_eq!(fill(Rank::Privileged, 0), RESERVED);
    }

    #[test]
    fn frequent_reconnects_are_delayed_for_their_account_only() {
        let caps = Caps::public(1 << 20);
        let mut now = Instant::now();
        // Opens and closes a thousand connections within 10 ms.
        let mut delays = Vec::new();
        for _ in 0..1000 {
            now += Duration::from_micros(10);
            delays.push(caps.take_slot(ALICE, Rank::User, now).unwrap().delay);
        }
        assert!(delays[..BURST as usize].iter().all(Duration::is_zero));
        // In this test, the delayed connections do not keep their slots. In practice they do, so the number of
        // connections that are delayed at once is much smaller.
        assert!(delays[999] > INTERVAL * 800, "{:?}", delays[999]);
        assert_eq!(caps.take_slot(BOB, Rank::User, now).unwrap().delay, Duration::ZERO);
        assert_eq!(caps.take_slot(ROOT, Rank::Privileged, now).unwrap().delay, Duration::ZERO);
        // After a pause, the account may again open a burst of connections without delay.
        now += INTERVAL * 2000;
        assert_eq!(caps.take_slot(ALICE, Rank::User, now).unwrap().delay, Duration::ZERO);
    }

    #[test]
    fn accounts_without_connections_are_forgotten() {
        let caps = Caps::public(1 << 20);
        for uid in 0..3 * MOST_ACCOUNTS as u32 {
            drop(enter(&caps, Account::User(1000 + uid), Rank::User).unwrap());
        }
        assert!(caps.accounts.lock().len() <= MOST_ACCOUNTS + 1);
    }

    #[test]
    fn low_descriptor_limit_lowers_caps() {
        let most = |caps: Caps| {
            let places: Vec<_> = std::iter::from_fn(|| enter(&caps, ROOT, Rank::Privileged).ok()).collect();
            places.len()
        };
        assert_eq!((most(Caps::public(100)), most(Caps::admin(100))), (60, 12));
        assert_eq!((most(Caps::public(1 << 20)), most(Caps::admin(1 << 20))), (IN_ALL, ADMIN_SOCKET));
    }
}
