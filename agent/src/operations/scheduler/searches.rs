//! Where searches for placements run, and the last snapshots with their results.
//!
//! A search can take milliseconds. So it runs on a blocking thread, and without a lock. Searches of one account run one after the other. Administrators, such as root and the hooks of Slurm, have permits
//! that no other caller can use, so they never wait for the searches of users.

use std::{collections::VecDeque, sync::Arc, thread::available_parallelism};

use gpush_api::ApiError;
use gpush_host::subtask;
use gpush_locked::Locked;

use super::placement_snapshot::PlacementSnapshot;
use crate::{requests::caller::Caller, system::account_permits::AccountPermits};

/// Maximum number of users' searches at the same time, and of administrators' searches.
const MOST_SEARCHES: usize = 4;

/// Number of snapshots that gpushd keeps. A pass of the queue that leaves out some requests needs a separate snapshot.
const KEPT: usize = 4;

/// The searches of all callers.
#[derive(Debug)]
pub(crate) struct Searches {
    users: AccountPermits,
    /// Permits for administrators.
    privileged: AccountPermits,
    /// The last snapshots, the latest first.
    snapshots: Locked<VecDeque<Arc<PlacementSnapshot>>>,
}

impl Searches {
    /// Creates the limits: users have one permit for every two processors.
    pub(crate) fn new() -> Self {
        let users = (available_parallelism().map_or(1, usize::from) / 2).clamp(1, MOST_SEARCHES);
        Self {
            users: AccountPermits::new(users, 1),
            privileged: AccountPermits::new(MOST_SEARCHES, MOST_SEARCHES),
            snapshots: Locked::default(),
        }
    }

    /// Runs `search` on a blocking thread, when the caller may search.
    ///
    /// # Errors
    /// If gpushd is stopping.
    ///
    /// # Panics
    /// If `search` panics.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        caller: &Caller,
        search: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, ApiError> {
        let pool = if caller.viewer.is_admin() { &self.privileged } else { &self.users };
        let share = pool.share(caller.counted_account());
        let permit = share.permit().await;
        let found = subtask::blocking(move || {
            let found = search();
            drop(permit);
            found
        });
        found.await.ok_or_else(|| ApiError::stopping("gpushd is stopping"))
    }

    /// Returns the kept snapshot that equals `now`, with the results of its searches. If there is none, keeps `now`.
    pub(crate) fn known(&self, now: PlacementSnapshot) -> Arc<PlacementSnapshot> {
        let mut snapshots = self.snapshots.lock();
        let at = snapshots.iter().position(|kept| kept.is_same(&now));
        let snapshot = at.and_then(|at| snapshots.remove(at)).unwrap_or_else(|| Arc::new(now));
        snapshots.push_front(Arc::clone(&snapshot));
        snapshots.truncate(KEPT);
        snapshot
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Mutex, mpsc};

    use gpush_host::accounts::Account;

    use super::*;
    use crate::requests::caller::tests::caller_of;

    /// Fault: searches ran on the threads that also serve `GET /v1/version` and Slurm's hooks.
    #[tokio::test]
    async fn searches_of_one_account_run_one_after_the_other() {
        let searches = Arc::new(Searches::new());
        let (gate, gates) = mpsc::channel::<()>();
        let gates = Arc::new(Mutex::new(gates));
        let (started, mut start) = tokio::sync::mpsc::unbounded_channel();
        let mut running = Vec::new();
        for _ in 0..3 {
            let (searches, gates, started) = (Arc::clone(&searches), Arc::clone(&gates), started.clone());
            running.push(tokio::spawn(async move {
                let search = move || {
                    started.send(()).unwrap();
                    gates.lock().unwrap().recv().unwrap();
                };
                searches.run(&caller_of(1000), search).await.unwrap();
            }));
        }
        start.recv().await.unwrap();
        // The test has one async thread. It answers, although a search of the user runs.
        assert_eq!(searches.run(&caller_of(0), || 1).await, Ok(1));
        assert_eq!(searches.users.left(Account::User(1000)), Some(0));
        assert!(start.try_recv().is_err(), "the other searches of the account wait");
        for _ in 0..3 {
            gate.send(()).unwrap();
        }
        for one in running {
            one.await.unwrap();
        }
    }

    #[tokio::test]
    async fn search_that_panics_returns_its_permit() {
        let searches = Arc::new(Searches::new());
        let failing = Arc::clone(&searches);
        let failed = tokio::spawn(async move { failing.run::<()>(&caller_of(1000), || panic!("on purpose")).await });
        assert!(failed.await.unwrap_err().is_panic(), "the request fails");
        assert_eq!(searches.run(&caller_of(1000), || 2).await, Ok(2));
    }
}
