//! Which GPU is whose: an operation claims all its GPUs at once, and nobody else changes them until
//! it lets go. In memory only: after a restart the journal says which operations had begun, and
//! those claim their GPUs again before anybody is served.
//!
//! ```text
//! claim ───────────► all free? ───── yes ─► Claim ── dropped ─► free again
//!                         │ no: refused, the holder is named
//!
//! close ────────────► nobody has any? ── yes ─► nobody gets any, until open
//!                         │ no: refused, the holder is named
//! ```

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use gpush_api::ApiError;
use tokio::sync::Notify;

use crate::state::{self, Holder, words};

/// Who has which GPU. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Claims(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// Shows who changes a GPU.
    host: state::State,
    state: Mutex<State>,
    /// Something was let go.
    let_go: Arc<Notify>,
}

#[derive(Debug, Default)]
struct State {
    /// Holder by UUID.
    held: BTreeMap<String, Holder>,
    /// Why nobody gets any.
    closed: Option<ApiError>,
}

/// What somebody is called whose operation has no id yet.
const PREPARING: &str = "an operation that is being planned";

/// GPUs kept for one operation; free again when dropped.
#[derive(Debug)]
pub(crate) struct Claim {
    claims: Claims,
    uuids: Vec<String>,
}

impl Claims {
    /// No GPU is claimed yet.
    pub(crate) fn new(host: state::State) -> Self {
        Self(Arc::new(Inner { host, state: Mutex::default(), let_go: Arc::default() }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Claims GPUs, given as (index, UUID).
    ///
    /// # Errors
    /// When one of them is another's, who is named.
    pub(crate) fn claim(&self, gpus: &[(u32, String)]) -> Result<Claim, ApiError> {
        let state = self.state();
        match &state.closed {
            Some(closed) => Err(closed.clone()),
            None => self.hold(state, gpus),
        }
    }

    /// Claims GPUs for an operation that an agent before this one had begun: they are its own also
    /// while nobody gets any.
    ///
    /// # Errors
    /// When one of them is another's, who is named.
    pub(crate) fn claim_again(&self, gpus: &[(u32, String)]) -> Result<Claim, ApiError> {
        self.hold(self.state(), gpus)
    }

    fn hold(&self, mut state: MutexGuard<'_, State>, gpus: &[(u32, String)]) -> Result<Claim, ApiError> {
        for (index, uuid) in gpus {
            let Some(Holder { who: holder, .. }) = state.held.get(uuid) else { continue };
            return Err(words::changed_by(*index, uuid, holder));
        }
        let uuids: Vec<String> = gpus.iter().map(|(_, uuid)| uuid.clone()).collect();
        state.take(&self.0.host, &uuids, PREPARING, false);
        drop(state);
        Ok(Claim { claims: self.clone(), uuids })
    }

    /// Rung whenever something is let go.
    pub(crate) fn let_go(&self) -> Arc<Notify> {
        Arc::clone(&self.0.let_go)
    }

    /// Lets nobody have a GPU from now on, because of `why`.
    ///
    /// # Errors
    /// Who has which GPU, when one is somebody's.
    pub(crate) fn close(&self, why: ApiError) -> Result<(), (String, String)> {
        let mut state = self.state();
        match state.held.first_key_value() {
            Some((uuid, holder)) => Err((uuid.clone(), holder.who.clone())),
            None => {
                state.closed = Some(why);
                Ok(())
            }
        }
    }

    /// Takes that back.
    pub(crate) fn open(&self) {
        self.state().closed = None;
        self.0.let_go.notify_one();
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
            Some(holder) if holder != PREPARING => Err(words::changed_by(index, uuid, &holder)),
            Some(_) | None => Ok(()),
        }
    }

    /// Who has the GPU, if somebody has.
    pub(crate) fn holder(&self, uuid: &str) -> Option<String> {
        self.state().held.get(uuid).map(|holder| holder.who.clone())
    }
}

impl State {
    fn take(&mut self, host: &state::State, uuids: &[String], who: &str, begun: bool) {
        let holder = Holder { who: who.to_owned(), begun };
        for uuid in uuids {
            self.held.insert(uuid.clone(), holder.clone());
        }
        host.lane(uuids, Some(&holder));
    }
}

impl Claim {
    /// Says who begins to change the GPUs.
    pub(crate) fn name(&self, who: &str) {
        self.claims.state().take(&self.claims.0.host, &self.uuids, who, true);
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = self.claims.state();
        for uuid in &self.uuids {
            state.held.remove(uuid);
        }
        self.claims.0.host.lane(&self.uuids, None);
        drop(state);
        self.claims.0.let_go.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use gpush_api::Code;

    use super::*;

    impl Claims {
        /// Which operation changes a GPU, if one has begun to.
        fn changing(&self, uuid: &str) -> Option<String> {
            self.state().held.get(uuid).filter(|holder| holder.begun).map(|holder| holder.who.clone())
        }
    }

    fn gpu(index: u32) -> (u32, String) {
        (index, format!("GPU-{index}"))
    }

    #[test]
    fn a_gpu_is_one_operations_at_a_time_and_the_refusal_names_it() {
        let claims = Claims::new(state::State::empty());
        let first = claims.claim(&[gpu(0), gpu(1)]).unwrap();
        let error = claims.claim(&[gpu(2), gpu(1)]).unwrap_err();
        assert_eq!(error.message, "GPU 1 (GPU-1) is being changed by an operation that is being planned");
        assert_eq!((error.code, error.retryable), (Code::Conflict, true));
        assert_eq!(claims.changing("GPU-1"), None, "it is only planned");
        assert_eq!(claims.at_rest(1, "GPU-1"), Ok(()), "what is only being planned may be planned by others too");
        first.name("operation op-1");
        assert_eq!(claims.changing("GPU-1").as_deref(), Some("operation op-1"));
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

    #[test]
    fn nobody_gets_a_gpu_while_it_is_closed() {
        let claims = Claims::new(state::State::empty());
        let holder = claims.claim(&[gpu(0)]).unwrap();
        holder.name("operation op-1");
        let why = || ApiError::new(Code::Conflict, "in maintenance");
        assert_eq!(claims.close(why()), Err(("GPU-0".to_owned(), "operation op-1".to_owned())));
        assert_eq!(claims.closed(), None);
        drop(holder);
        claims.close(why()).unwrap();
        assert_eq!(claims.claim(&[gpu(0)]).unwrap_err(), why());
        // What was begun before is not begun anew.
        drop(claims.claim_again(&[gpu(0)]).unwrap());
        claims.open();
        drop(claims.claim(&[gpu(0)]).unwrap());
    }
}
