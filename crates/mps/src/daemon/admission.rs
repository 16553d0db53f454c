//! Whose a daemon is: its user is let into the pipe directory, nobody else is, and another user gets
//! another directory and another daemon.

use std::{collections::BTreeSet, sync::Arc};

use gpush_api::{ApiError, Code, MpsUsers};
use gpush_core::supervisor::Event;
use tokio::time::Instant;

use super::task::{DEADLINE, SupervisorTask};

/// Who may be let in by what is on record: nobody to one that was stopped.
pub type RecordedUsers = Arc<dyn Fn() -> BTreeSet<u32> + Send + Sync>;

impl SupervisorTask {
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
        self.see_to_the_door();
        if self.door.is_some() || self.spec.is_none() {
            return Ok(());
        }
        let message = format!("the pipe directory of {} can't be opened to its user", self.target);
        Err(ApiError::new(Code::Internal, message).hint("see the log of gpushd: `journalctl -u gpushd`"))
    }

    /// Ends the daemon of a user who has gone and starts one for another.
    async fn hand_over(&mut self, uid: u32) -> Result<(), ApiError> {
        // Both ends of it are quick: nobody computes there.
        let until = Instant::now() + DEADLINE + DEADLINE;
        if !self.is_empty().await {
            self.reopen();
            let message = match self.machine.clients() {
                Some(1) => format!("{} still has 1 client of another user", self.target),
                Some(clients @ 2..) => format!("{} still has {clients} clients of another user", self.target),
                Some(0) | None => format!("whether {} still has clients of another user can't be told", self.target),
            };
            return Err(ApiError::new(Code::Conflict, message)
                .hint(format!("`gpushctl mps clients {}` shows them; ask again when they have ended", self.target))
                .retryable());
        }
        // From its start on, and not before: until then it is the other's directory that is shut.
        self.next_user = Some(uid);
        self.users.clear();
        self.step(Event::Restart).await;
        self.reopen();
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

    /// Shuts the door where nobody is inside; it stays shut until [`Self::reopen`].
    ///
    /// # Errors
    /// Where somebody is inside, or nobody can tell. It is open then as before.
    pub(super) async fn shut_unless_used(&mut self) -> Result<(), ApiError> {
        if self.is_empty().await {
            return Ok(());
        }
        self.reopen();
        let message = format!("{} has clients, or nobody can tell", self.target);
        Err(ApiError::new(Code::Blocked, message).retryable())
    }

    /// Shuts the door, and looks who is inside: whether it is seen that nobody is. It stays shut until
    /// [`Self::reopen`], so that nobody comes in between this and what is done by it.
    pub(super) async fn is_empty(&mut self) -> bool {
        self.shut = true;
        self.see_to_the_door();
        let before = self.machine.pid();
        if before.is_some() {
            // What was seen before the door was shut is not known any more, and a look that goes on may have seen
            // that. One that takes too long tells nothing either.
            self.step(Event::Clients(None)).await;
            self.give_up_look();
            self.look_for(None);
            self.until(Instant::now() + DEADLINE + DEADLINE, |life| life.looking.is_none()).await;
            if self.machine.pid() == before {
                return self.machine.clients() == Some(0);
            }
        }
        // It starts, or ends: nobody was let in, or nobody is any more. Whoever is left of the one before may be
        // served by a server that outlived it.
        self.process.is_some() || !self.left().await
    }

    /// What was to be done behind a shut door is done: it is open again, if the daemon serves.
    pub(super) fn reopen(&mut self) {
        self.shut = false;
        self.see_to_the_door();
    }

    /// ServerSettings the pipe directory open to its users while its daemon serves, or was found open to those on record and
    /// nobody has said yet whether it is wanted, and shut to all otherwise. By what
    /// is, not by what has changed: it may have been left open by an agent before, or by a daemon that is dead.
    pub(super) fn see_to_the_door(&mut self) {
        let Some(spec) = &self.spec else { return };
        let open = self.machine.admits() || self.as_found && self.machine.may_go_on();
        let wanted = (spec.tenure, if open && !self.shut { self.users.clone() } else { BTreeSet::new() });
        if self.door.as_ref() == Some(&wanted) {
            return;
        }
        match self.place.admit(wanted.0, &wanted.1) {
            Ok(()) => self.door = Some(wanted),
            // Nobody gets into what is not there.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => self.door = Some(wanted),
            Err(error) => {
                let message = format!("the pipe directory of {} can't be opened and shut", self.target);
                tracing::error!(mps = self.target, "{message}: {error}");
                (self.door, self.trouble) = (None, vec![message]);
            }
        }
    }
}
