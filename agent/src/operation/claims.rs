//! Which GPU is whose: an operation claims all its GPUs at once, and nobody else changes them until
//! it lets go. In memory only: after a restart the journal says which operations had begun, and
//! those claim their GPUs again before anybody is served.
//!
//! ```text
//! claim ───────────► all free, and nobody in line for them? ── yes ─► Claim ── dropped ─► free again
//!                         │ no: refused, the holder is named
//! claim_in_turn ────► the same, but it stands in line until they are
//!
//! close ────────────► nobody has any? ── yes ─► nobody gets any, until open; those in line wait
//!                         │ no: refused, the holder is named
//! ```

use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use gpush_api::{ApiError, Code};
use tokio::sync::Notify;

/// Who has which GPU. A handle, cheap to clone.
#[derive(Debug, Clone, Default)]
pub(crate) struct Claims(Arc<Inner>);

#[derive(Debug, Default)]
struct Inner {
    state: Mutex<State>,
    /// Something was let go, or somebody left the line.
    moved: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Holder by UUID, as a sentence names it.
    held: BTreeMap<String, String>,
    /// Those in line, first come first.
    line: VecDeque<Place>,
    last_ticket: u64,
    /// Why nobody gets any.
    closed: Option<ApiError>,
}

#[derive(Debug)]
struct Place {
    ticket: u64,
    who: String,
    uuids: Vec<String>,
}

/// What somebody is called whose operation has no id yet.
const PREPARING: &str = "an operation that is being planned";

/// Why a GPU is not to be had.
fn taken(index: u32, uuid: &str, holder: &str) -> ApiError {
    let in_line = "`gpushctl mig apply --wait` stands in line for it";
    let hint = match holder.strip_prefix("operation ") {
        Some(id) => format!("`gpushctl operation wait {id}` waits until it has ended; {in_line}"),
        None => format!("ask again in a moment, or {in_line}"),
    };
    ApiError::new(Code::Conflict, format!("GPU {index} ({uuid}) is being changed by {holder}")).hint(hint).retryable()
}

/// GPUs kept for one operation; free again when dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    claims: Claims,
    uuids: Vec<String>,
}

impl Claims {
    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims GPUs, given as (index, UUID).
    ///
    /// # Errors
    /// When one of them is another's, who is named.
    pub(crate) fn claim(&self, gpus: &[(u32, String)]) -> Result<Claim, ApiError> {
        let mut state = self.state();
        if let Some(closed) = &state.closed {
            return Err(closed.clone());
        }
        for (index, uuid) in gpus {
            let Some(holder) = state.obstacle(uuid, None) else { continue };
            return Err(taken(*index, uuid, &holder));
        }
        let uuids: Vec<String> = gpus.iter().map(|(_, uuid)| uuid.clone()).collect();
        state.take(&uuids, PREPARING);
        drop(state);
        Ok(Claim { claims: self.clone(), uuids })
    }

    /// Claims GPUs by UUID once it is their turn: those who came first go first.
    pub(crate) async fn claim_in_turn(&self, uuids: &[String], who: &str) -> Claim {
        let place = Standing::at_the_end(self, uuids, who);
        loop {
            let moved = self.0.moved.notified();
            tokio::pin!(moved);
            // Armed before the look, so that what moves in between is not missed.
            moved.as_mut().enable();
            {
                let mut state = self.state();
                let open = state.closed.is_none();
                if open && uuids.iter().all(|uuid| state.obstacle(uuid, Some(place.ticket)).is_none()) {
                    state.take(uuids, who);
                    return Claim { claims: self.clone(), uuids: uuids.to_vec() };
                }
            }
            moved.await;
        }
    }

    /// Lets nobody have a GPU from now on, because of `why`. Those in line stay there.
    ///
    /// # Errors
    /// Who has which GPU, when one is somebody's.
    pub(crate) fn close(&self, why: ApiError) -> Result<(), (String, String)> {
        let mut state = self.state();
        match state.held.first_key_value() {
            Some((uuid, holder)) => Err((uuid.clone(), holder.clone())),
            None => {
                state.closed = Some(why);
                Ok(())
            }
        }
    }

    /// Takes that back.
    pub(crate) fn open(&self) {
        self.state().closed = None;
        self.0.moved.notify_waiters();
    }

    /// Why nobody gets a GPU.
    pub(crate) fn closed(&self) -> Option<ApiError> {
        self.state().closed.clone()
    }

    /// Refuses a GPU that somebody is changing, or stands ready to: what is read of it now is soon
    /// untrue. One that is only being planned may be read.
    ///
    /// # Errors
    /// Who has it.
    pub(crate) fn at_rest(&self, index: u32, uuid: &str) -> Result<(), ApiError> {
        match self.holder(uuid) {
            Some(holder) if holder != PREPARING => Err(taken(index, uuid, &holder)),
            Some(_) | None => Ok(()),
        }
    }

    /// Who has the GPU, if somebody has.
    pub(crate) fn holder(&self, uuid: &str) -> Option<String> {
        self.state().held.get(uuid).cloned()
    }
}

impl State {
    /// Who is in the way of claiming `uuid`: its holder, or somebody earlier in line.
    fn obstacle(&self, uuid: &str, ticket: Option<u64>) -> Option<String> {
        let earlier = || {
            let before = |place: &&Place| ticket.is_none_or(|mine| place.ticket < mine);
            self.line.iter().filter(before).find(|place| place.uuids.iter().any(|other| other == uuid))
        };
        self.held.get(uuid).cloned().or_else(|| earlier().map(|place| place.who.clone()))
    }

    fn take(&mut self, uuids: &[String], who: &str) {
        for uuid in uuids {
            self.held.insert(uuid.clone(), who.to_owned());
        }
    }
}

impl Claim {
    /// Says who has the GPUs.
    pub(crate) fn name(&self, who: &str) {
        self.claims.state().take(&self.uuids, who);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = self.claims.state();
        for uuid in &self.uuids {
            state.held.remove(uuid);
        }
        drop(state);
        self.claims.0.moved.notify_waiters();
    }
}

/// A place in line; left when dropped.
struct Standing<'a> {
    claims: &'a Claims,
    ticket: u64,
}

impl<'a> Standing<'a> {
    fn at_the_end(claims: &'a Claims, uuids: &[String], who: &str) -> Self {
        let mut state = claims.state();
        state.last_ticket += 1;
        let ticket = state.last_ticket;
        state.line.push_back(Place { ticket, who: who.to_owned(), uuids: uuids.to_vec() });
        Self { claims, ticket }
    }
}

impl Drop for Standing<'_> {
    fn drop(&mut self) {
        self.claims.state().line.retain(|place| place.ticket != self.ticket);
        self.claims.0.moved.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn gpu(index: u32) -> (u32, String) {
        (index, format!("GPU-{index}"))
    }

    fn uuids(indexes: &[u32]) -> Vec<String> {
        indexes.iter().map(|index| format!("GPU-{index}")).collect()
    }

    #[test]
    fn a_gpu_is_one_operations_at_a_time_and_the_refusal_names_it() {
        let claims = Claims::default();
        let first = claims.claim(&[gpu(0), gpu(1)]).unwrap();
        let error = claims.claim(&[gpu(2), gpu(1)]).unwrap_err();
        assert_eq!(error.message, "GPU 1 (GPU-1) is being changed by an operation that is being planned");
        assert_eq!((error.code, error.retryable), (Code::Conflict, true));
        assert_eq!(claims.at_rest(1, "GPU-1"), Ok(()), "what is only being planned may be planned by others too");
        first.name("operation op-1");
        let error = claims.claim(&[gpu(1)]).unwrap_err();
        assert_eq!(error.message, "GPU 1 (GPU-1) is being changed by operation op-1");
        assert!(error.hint.as_ref().is_some_and(|hint| hint.contains("`gpushctl operation wait op-1`")), "{error:?}");
        assert_eq!(claims.at_rest(1, "GPU-1"), Err(error));
        // The refused one kept nothing.
        let _other = claims.claim(&[gpu(2)]).unwrap();
        drop(first);
        claims.claim(&[gpu(0), gpu(1)]).unwrap();
        assert_eq!(claims.holder("GPU-0"), None);
    }

    #[tokio::test]
    async fn nobody_gets_a_gpu_while_it_is_closed_and_those_in_line_wait() {
        let claims = Claims::default();
        let holder = claims.claim(&[gpu(0)]).unwrap();
        holder.name("operation op-1");
        let why = || ApiError::new(Code::Conflict, "in maintenance");
        assert_eq!(claims.close(why()), Err(("GPU-0".to_owned(), "operation op-1".to_owned())));
        assert_eq!(claims.closed(), None);
        drop(holder);
        claims.close(why()).unwrap();
        assert_eq!(claims.claim(&[gpu(0)]).unwrap_err(), why());
        let waiting = tokio::spawn({
            let claims = claims.clone();
            async move { claims.claim_in_turn(&uuids(&[0]), "operation op-2").await }
        });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        claims.open();
        drop(waiting.await.unwrap());
        drop(claims.claim(&[gpu(0)]).unwrap());
    }

    #[tokio::test]
    async fn those_in_line_go_in_turn_and_nobody_overtakes_them() {
        let claims = Claims::default();
        let holder = claims.claim(&[gpu(0)]).unwrap();
        let stand = |who: &'static str, wanted: Vec<String>| {
            let claims = claims.clone();
            tokio::spawn(async move { claims.claim_in_turn(&wanted, who).await })
        };
        let first = stand("operation op-2", uuids(&[0, 1]));
        tokio::task::yield_now().await;
        let second = stand("operation op-3", uuids(&[1]));
        tokio::task::yield_now().await;
        // GPU 1 is free, but promised.
        assert!(!first.is_finished() && !second.is_finished());
        assert!(claims.claim(&[gpu(1)]).unwrap_err().message.contains("operation op-2"));
        // Whoever wants nothing of theirs is not held up.
        drop(claims.claim(&[gpu(2)]).unwrap());
        drop(holder);
        let first = first.await.unwrap();
        assert_eq!(claims.holder("GPU-1").as_deref(), Some("operation op-2"));
        drop(first);
        drop(second.await.unwrap());
        // Who gives up waiting is in nobody's way.
        let holder = claims.claim(&[gpu(0)]).unwrap();
        let gone = stand("operation op-4", uuids(&[0, 1]));
        tokio::task::yield_now().await;
        gone.abort();
        let _ = gone.await;
        drop(claims.claim(&[gpu(1)]).unwrap());
        drop(holder);
    }
}
