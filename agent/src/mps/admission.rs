//! Whose a daemon is: its user is let into the pipe directory, nobody else is, and another user gets
//! another directory and another daemon.

use std::collections::BTreeSet;

use gpush_api::{ApiError, Code, MpsUsers};
use gpush_core::supervisor::Event;
use tokio::time::Instant;

use super::life::{DEADLINE, Life};

impl Life {
    /// Lets these users in. A user that is not the one whom the pipe directory was made for gets another,
    /// and so another daemon.
    pub(super) async fn have_users(&mut self, users: BTreeSet<u32>) -> Result<(), ApiError> {
        let many = self.wanted.as_ref().is_some_and(|wanted| wanted.policy.users == MpsUsers::Many);
        let newcomer = users.iter().copied().find(|uid| !self.users.contains(uid));
        let served = self.spec.as_ref().and_then(|spec| spec.user);
        if let Some(uid) = newcomer.filter(|_| !many) {
            match served {
                Some(other) if other != uid => self.hand_over(uid).await?,
                Some(_) => {}
                None => self.note_user(uid)?,
            }
        }
        self.users = users;
        if self.machine.admits() { self.admit(true) } else { Ok(()) }
    }

    /// Ends the daemon of a user who has gone and starts one for another.
    async fn hand_over(&mut self, uid: u32) -> Result<(), ApiError> {
        // Both ends of it are quick: nobody computes there.
        let until = Instant::now() + DEADLINE + DEADLINE;
        self.look_for(None);
        self.until(until, |life| life.looking.is_none()).await;
        let clients = self.health.clients.len();
        if clients > 0 {
            let message = format!("{} still has {clients} clients of another user", self.target);
            return Err(ApiError::new(Code::Conflict, message)
                .hint(format!("`gpushctl mps clients {}` shows them; ask again when they have ended", self.target))
                .retryable());
        }
        // From its start on, and not before: until then it is the other's directory that is shut.
        self.next_user = Some(uid);
        self.users.clear();
        self.step(Event::Restart).await;
        let is_theirs =
            |life: &Self| life.machine.admits() && life.spec.as_ref().is_some_and(|spec| spec.user == Some(uid));
        if self.until(until, is_theirs).await {
            return Ok(());
        }
        let message = format!("the MPS daemon of {} does not start anew", self.target);
        Err(ApiError::new(Code::Unavailable, message)
            .hint(format!("`gpushctl mps show {}` says how it is", self.target))
            .retryable())
    }

    fn note_user(&mut self, uid: u32) -> Result<(), ApiError> {
        let Some(spec) = &mut self.spec else { return Ok(()) };
        spec.user = Some(uid);
        self.place.note(spec).map_err(|error| {
            ApiError::new(Code::Internal, format!("whose {} is can't be noted", self.target)).cause(error.to_string())
        })
    }

    /// Opens the pipe directory to its users, or shuts it to all.
    pub(super) fn admit(&mut self, open: bool) -> Result<(), ApiError> {
        let Some(spec) = &self.spec else { return Ok(()) };
        let users = if open { self.users.clone() } else { BTreeSet::new() };
        self.place.admit(spec.tenure, &users).map_err(|error| {
            let message = format!("the pipe directory of {} can't be opened to its user", self.target);
            tracing::error!(mps = self.target, "{message}: {error}");
            ApiError::new(Code::Internal, message).cause(error.to_string())
        })
    }
}
