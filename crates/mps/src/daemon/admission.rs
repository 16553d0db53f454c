//! Admission to a daemon. Only the users of a daemon have access to its pipe directory. For another
//! user, gpushd creates another directory and starts another daemon, unless the daemon serves
//! several users.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{ApiError, Code, MpsUsers};
use gpush_core::supervisor::SupervisorEvent;
use tokio::time::Instant;

use super::{
    request_error::RequestError,
    task::{DEADLINE, SupervisorTask},
};

/// A function that returns the users that the store records for a target. The set is empty if an
/// administrator has stopped the daemon.
pub type RecordedUsers = Arc<dyn Fn() -> BTreeSet<u32> + Send + Sync>;

impl SupervisorTask {
    /// Sets the users with access. If a user other than the owner of the pipe directory is added, the directory and the
    /// daemon are replaced.
    ///
    /// # Errors
    /// Clients of the previous user are connected, or access cannot be set.
    pub(super) async fn set_users(&mut self, users: BTreeSet<u32>) -> Result<(), RequestError> {
        let newcomer = users.iter().copied().find(|uid| !self.users.contains(uid));
        let served = self.spec.as_ref().and_then(|spec| spec.user);
        if let Some(uid) = newcomer.filter(|_| !self.is_multi_user()) {
            match served {
                Some(other) if other != uid => self.switch_user(uid).await?,
                Some(_) => {}
                None => self.record_user(uid)?,
            }
        }
        self.users = users;
        self.check_leases().await;
        self.update_access();
        if self.access.is_some() || self.spec.is_none() {
            return Ok(());
        }
        let message = format!("cannot grant access to the pipe directory of {}", self.target);
        Err(RequestError::Failed(ApiError::internal(message)))
    }

    /// Tells the supervisor whether users hold leases. A draining daemon waits until no user holds
    /// a lease.
    pub(super) async fn check_leases(&mut self) {
        let leased = !(self.sources.recorded_users)().is_empty();
        let drains_for_them = self.supervisor.serves_leases();
        if drains_for_them && !leased {
            // The program of a lease may have connected since the last probe, so the clients are
            // unknown until the next probe.
            self.step(SupervisorEvent::Clients(None)).await;
        }
        // Revoke the access of users whose leases have ended.
        self.step(SupervisorEvent::Leased(leased)).await;
        if drains_for_them && !leased {
            self.abort_probe();
            self.probe_now(None);
        }
    }

    /// Ends the daemon of the previous user, and starts a daemon for user `uid`.
    async fn switch_user(&mut self, uid: u32) -> Result<(), RequestError> {
        // The daemon has no clients, so it ends quickly, and the next daemon starts quickly. Two command deadlines
        // suffice for both.
        let until = Instant::now() + DEADLINE + DEADLINE;
        if !self.close_and_check_empty().await {
            self.reopen_admission();
            let message = match self.supervisor.clients() {
                Some(1) => format!("the MPS daemon of {} still has 1 client of another user", self.target),
                Some(clients @ 2..) => {
                    format!("the MPS daemon of {} still has {clients} clients of another user", self.target)
                }
                Some(0) | None => format!(
                    "it is not known whether the MPS daemon of {} still has clients of another user",
                    self.target
                ),
            };
            let error = ApiError::new(Code::Conflict, message).hint(format!(
                "run `gpushctl mps clients {}` to see the clients; try again when they have ended",
                self.target
            ));
            return Err(RequestError::NotYet(error.retryable()));
        }
        // `start` uses this user for the new directory. Until then, the current directory belongs
        // to the previous user.
        self.next_user = Some(uid);
        self.users.clear();
        self.step(SupervisorEvent::Restart).await;
        self.reopen_admission();
        let is_theirs =
            |task: &Self| task.supervisor.admits() && task.spec.as_ref().is_some_and(|spec| spec.user == Some(uid));
        if self.run_until(until, is_theirs).await {
            return Ok(());
        }
        let message = format!("the MPS daemon of {} did not restart in time", self.target);
        let error = ApiError::new(Code::Unavailable, message)
            .hint(format!("run `gpushctl mps show {}` to see the state of the daemon", self.target));
        Err(RequestError::NotYet(error.retryable()))
    }

    /// Returns whether the running daemon serves several users. If no daemon runs, returns whether the next daemon will
    /// serve several users.
    pub(super) fn is_multi_user(&self) -> bool {
        match (&self.process, &self.spec) {
            (Some(_), Some(spec)) => spec.multi_user,
            (None, _) | (_, None) => self.desires_multi_user(),
        }
    }

    /// Returns whether the rule requires a daemon for several users.
    pub(super) fn desires_multi_user(&self) -> bool {
        self.desired.as_ref().is_some_and(|wanted| wanted.policy.users == MpsUsers::Many)
    }

    /// Restarts a daemon that serves one user but must serve several, or that serves several but
    /// must serve one. Restarts the daemon only while no user has access and no client is
    /// connected. Otherwise the next reconciliation tries again.
    pub(super) async fn change_users_if_idle(&mut self) {
        let is_idle = self.supervisor.admits() && !self.admission_closed && self.users.is_empty();
        if is_idle && self.is_multi_user() != self.desires_multi_user() {
            if self.close_and_check_empty().await {
                tracing::info!(
                    mps = self.target,
                    multi_user = self.desires_multi_user(),
                    "restarting the MPS daemon: the value of `users` in the rule has changed"
                );
                self.step(SupervisorEvent::Restart).await;
            }
            self.reopen_admission();
        }
    }

    fn record_user(&mut self, uid: u32) -> Result<(), RequestError> {
        let Some(spec) = &mut self.spec else { return Ok(()) };
        spec.user = Some(uid);
        self.dir.write_spec(spec).map_err(|error| {
            let message = format!("cannot record which user owns the MPS daemon of {}", self.target);
            RequestError::Failed(ApiError::new(Code::Internal, message).cause(error.to_string()))
        })
    }

    /// Closes admission if no client is connected. [`Self::reopen_admission`] opens admission again.
    ///
    /// # Errors
    /// [`RequestError::InUse`] if a client is connected, or if gpushd does not know whether a client is connected.
    /// Admission is then unchanged.
    pub(super) async fn close_unless_used(&mut self) -> Result<(), RequestError> {
        if self.close_and_check_empty().await {
            return Ok(());
        }
        self.reopen_admission();
        let message = format!("the MPS daemon of {} has clients, or its clients cannot be listed", self.target);
        Err(RequestError::InUse(ApiError::new(Code::Blocked, message).retryable()))
    }

    /// Closes admission and returns whether the daemon is known to have no clients. Admission stays closed until
    /// [`Self::reopen_admission`], so no client can connect between this check and the caller's next action.
    pub(super) async fn close_and_check_empty(&mut self) -> bool {
        self.admission_closed = true;
        self.update_access();
        let before = self.supervisor.pid();
        if before.is_some() {
            // Forget the number of clients, and replace a probe in progress by a new probe. The old
            // probe may have missed a client that connected just before admission was closed. If
            // the new probe takes too long, the number of clients remains unknown.
            self.step(SupervisorEvent::Clients(None)).await;
            self.abort_probe();
            self.probe_now(None);
            self.run_until(Instant::now() + DEADLINE + DEADLINE, |task| task.probe.is_none()).await;
            if self.supervisor.pid() == before {
                return self.supervisor.clients() == Some(0);
            }
        }
        // The daemon is starting or has ended, so it has no clients. But a server of the previous
        // daemon may still run and have clients.
        self.process.is_some() || !self.check_leftovers().await
    }

    /// Reopens admission. If the daemon is serving, users get access again.
    pub(super) fn reopen_admission(&mut self) {
        self.admission_closed = false;
        self.update_access();
    }

    /// Grants the users access to the pipe directory in three cases: the daemon serves, it drains until leases have
    /// ended, or it was adopted and waits for its desired state. Otherwise revokes the access. Does nothing if this
    /// task has already set the same access. Access that a previous gpushd has set, or that was set for a daemon that
    /// has ended, does not count as set.
    pub(super) fn update_access(&mut self) {
        let Some(spec) = &self.spec else { return };
        let open = self.supervisor.admits()
            || self.supervisor.serves_leases()
            || self.keeps_found_access && self.supervisor.keeps_access();
        let access = (spec.tenure, if open && !self.admission_closed { self.users.clone() } else { BTreeSet::new() });
        if self.access.as_ref() == Some(&access) {
            return;
        }
        match self.dir.set_access(access.0, &access.1) {
            Ok(()) => self.access = Some(access),
            // The directory does not exist, so no user can reach it, and the access counts as set.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => self.access = Some(access),
            Err(error) => {
                let message = format!("cannot change the access to the pipe directory of {}", self.target);
                tracing::error!(mps = self.target, "{message}: {error}");
                (self.access, self.problems) = (None, vec![message]);
            }
        }
    }
}
