//! Permits for work that occupies a processor. They limit how much of it runs at the same time, in total and for each
//! account.
//!
//! Work gets permits in the order of its arrival, and one account can hold only some of the permits. So a caller with one
//! request waits for at most as many pieces of work of each other account as one account may hold permits.

use std::{collections::HashMap, sync::Arc};

use gpush_host::accounts::Account;
use gpush_locked::Locked;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A set of permits, and the number of them that each account may hold.
#[derive(Debug)]
pub(crate) struct AccountPermits {
    permits: Arc<Semaphore>,
    /// Number of permits that one account may hold at once.
    share: usize,
    /// For each account with unfinished work, the permits that the account may still take.
    accounts: Locked<HashMap<Account, Arc<Semaphore>>>,
}

/// The permits that one account may take. Work keeps this value from its start to its end.
#[derive(Debug)]
pub(crate) struct AccountShare {
    of_account: Arc<Semaphore>,
    of_all: Arc<Semaphore>,
}

/// A permit. It is returned when it is dropped. The field order matters: the permit of the account is returned first.
#[derive(Debug)]
pub(crate) struct Permit {
    _of_account: Option<OwnedSemaphorePermit>,
    _of_all: Option<OwnedSemaphorePermit>,
}

impl AccountPermits {
    /// Creates a set of permits. One account may hold `share` of them at once.
    pub(crate) fn new(permits: usize, share: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(permits)), share, accounts: Locked::default() }
    }

    /// Returns the share of an account.
    pub(crate) fn share(&self, account: Account) -> AccountShare {
        let mut accounts = self.accounts.lock();
        // Remove the accounts that have no unfinished work.
        accounts.retain(|_, share| Arc::strong_count(share) > 1);
        let share = accounts.entry(account).or_insert_with(|| Arc::new(Semaphore::new(self.share)));
        AccountShare { of_account: Arc::clone(share), of_all: Arc::clone(&self.permits) }
    }
}

impl AccountShare {
    /// Waits for a permit.
    pub(crate) async fn permit(&self) -> Permit {
        // Acquire the permit of the account first. So an account never has more entries in the queue for all permits than
        // the number of permits that it may hold. `None` cannot occur, because these semaphores are never closed.
        let of_account = Arc::clone(&self.of_account).acquire_owned().await.ok();
        Permit { _of_account: of_account, _of_all: Arc::clone(&self.of_all).acquire_owned().await.ok() }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    impl AccountPermits {
        /// Returns the number of permits that nothing holds.
        pub(crate) fn free(&self) -> usize {
            self.permits.available_permits()
        }

        /// Returns the number of permits that an account may still take; `None` if the account has no unfinished work.
        pub(crate) fn left(&self, account: Account) -> Option<usize> {
            let accounts = self.accounts.lock();
            accounts.get(&account).map(|share| share.available_permits())
        }
    }

    #[test]
    fn account_waits_only_for_its_own_permit_and_the_pool() {
        let (permits, [alice, bob]) = (AccountPermits::new(2, 1), [1000, 1001].map(Account::User));
        let share = permits.share(alice);
        let first = share.permit().now_or_never().expect("a free permit");
        assert!(share.permit().now_or_never().is_none(), "one at a time for each account");
        let other = permits.share(bob).permit().now_or_never().expect("a free permit of another account");
        assert_eq!(permits.free(), 0);
        drop((first, share));
        assert_eq!((permits.free(), permits.left(alice)), (1, Some(1)));
        drop(other);
        let _third = permits.share(Account::Unknown);
        assert_eq!((permits.left(alice), permits.left(bob)), (None, None), "accounts without work are forgotten");
    }
}
