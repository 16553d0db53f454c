//! Authorization of administrators: identifies callers, and records refused attempts in the audit trail.
//!
//! Any user with access to the socket can cause refused attempts. So gpushd records at most [`MOST`] attempts of each
//! account per [`WINDOW`], and the store limits the number of stored records per account.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
    time::{Duration, Instant},
};

use gpush_api::{Actor, ApiError, Code};
use gpush_host::{accounts::Account, identity::Users, peer::Peer};
use gpush_locked::Locked;
use gpush_store::{AuditEvent, Store};

use crate::{requests::caller::Caller, state::State};

/// Maximum number of refused attempts of one account that gpushd records in one [`WINDOW`].
const MOST: u32 = 10;

/// Time after which gpushd counts the refused attempts of an account from zero again.
const WINDOW: Duration = Duration::from_secs(60);

/// Decides which callers are administrators. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Authorization {
    state: State,
    users: Users,
    store: Store,
    /// The uid that gpushd runs as.
    own_uid: u32,
    refused: Arc<Locked<Refused>>,
}

impl Authorization {
    /// Creates a handle. It applies the access rules of the config in `state`, and records refused attempts in `store`.
    pub(crate) fn new(state: State, users: Users, store: Store, own_uid: u32) -> Self {
        Self { state, users, store, own_uid, refused: Arc::default() }
    }

    /// Identifies the caller of a connection according to the active config.
    pub(crate) async fn identify(&self, peer: Peer) -> Caller {
        Caller::of(peer, &self.state.config().access, &self.users, self.own_uid).await
    }

    /// Returns the caller as it is stored in records.
    pub(crate) async fn actor(&self, caller: &Caller) -> Actor {
        caller.actor(self.users.user(caller.uid()).await)
    }

    /// Returns the names of the users who own these uids as subordinate uids. See [`Users::owners`].
    pub(crate) async fn owners(&self, uids: BTreeSet<u32>) -> HashMap<u32, String> {
        self.users.owners(uids).await
    }

    /// Describes an account in the log, with the name of its user.
    pub(crate) async fn describe(&self, account: Account) -> String {
        match account.user() {
            Some(uid) => match self.users.user(uid).await {
                Some(user) => format!("user {user} (uid {uid})"),
                None => account.to_string(),
            },
            None => account.to_string(),
        }
    }

    /// Checks that the caller is an administrator, and returns the caller as it is stored in records. `attempt`
    /// completes the sentence "USER may not …".
    ///
    /// # Errors
    /// `denied` if the caller is not an administrator. gpushd records the attempt, unless the account has reached the limit
    /// [`MOST`]. `unavailable` if the name service does not answer about an admin group; gpushd does not record this.
    pub(crate) async fn admin(&self, caller: &Caller, attempt: &'static str) -> Result<Actor, ApiError> {
        let actor = self.actor(caller).await;
        if caller.viewer.is_admin() {
            return Ok(actor);
        }
        let denied = caller.denied(attempt, actor.user.as_deref(), &self.state.config().access);
        if denied.code == Code::Denied {
            self.record(caller.counted_account(), actor, attempt);
        }
        Err(denied)
    }

    /// Records a refused attempt. Does not wait for the store, because the answer to the caller does not depend on the
    /// record.
    fn record(&self, account: Account, actor: Actor, attempt: &'static str) {
        let mut refused = self.refused.lock();
        if !refused.counts(account, Instant::now()) {
            return;
        }
        let audit = AuditEvent::AccessDenied { attempt }.record(Some(actor), "host", "refused");
        drop(self.store.write(move |tx| tx.audit(audit.clone()).map(|_| ())));
    }
}

/// Recent refused attempts, by account: when gpushd began to count, and the number of attempts since.
#[derive(Debug, Default)]
struct Refused(HashMap<Account, (Instant, u32)>);

impl Refused {
    /// Counts a refused attempt. Returns whether gpushd must record it.
    fn counts(&mut self, account: Account, now: Instant) -> bool {
        self.0.retain(|_, (since, _)| now.duration_since(*since) < WINDOW);
        let (_, count) = self.0.entry(account).or_insert((now, 0));
        *count = count.saturating_add(1);
        *count <= MOST
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_attempts_are_limited_per_account_and_window() {
        let (mut refused, now) = (Refused::default(), Instant::now());
        let mut recorded = |uid, now| (0..100).filter(|_| refused.counts(Account::User(uid), now)).count();
        assert_eq!(recorded(1000, now), 10);
        assert_eq!(recorded(1001, now + WINDOW / 2), 10, "each account has its own");
        assert_eq!(recorded(1000, now + WINDOW / 2), 0);
        assert_eq!(recorded(1000, now + WINDOW), 10);
        assert_eq!(refused.0.len(), 2);
        refused.counts(Account::Unknown, now + 3 * WINDOW);
        assert_eq!(refused.0.len(), 1, "past windows are forgotten");
    }
}
