//! Users can request changes of conditions, such as a cordon. Commits these changes to the store, and then applies them
//! to the state in the order of the commits.

use std::sync::Arc;

use gpush_api::{ApiError, EventPayload};
use gpush_store::{Store, StoreError, Tx};
use tokio::sync::Mutex;

use super::{Change, State};

/// Commits changes to the store and applies them to the state. A handle, cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Commits {
    store: Store,
    state: State,
    /// Held from the commit of a change until the change is applied. So changes have the same order in the store and in
    /// the state.
    order: Arc<Mutex<()>>,
}

impl Commits {
    /// Creates the handle that commits to `store` and applies to `state`.
    pub(crate) fn new(store: Store, state: State) -> Self {
        Self { store, state, order: Arc::default() }
    }

    /// Commits a change, and writes `also` in the same transaction. Then applies the change and publishes `event`. If
    /// the change ends a condition, the commit uses the reserved space of the store, so the commit succeeds even on a
    /// full disk.
    ///
    /// # Errors
    /// If the commit fails. After an error, nothing has changed.
    pub(crate) async fn change(
        &self,
        change: Change,
        event: gpush_api::Change,
        mut also: impl FnMut(&mut Tx<'_>) -> Result<(), StoreError> + Send + 'static,
    ) -> Result<(), ApiError> {
        let _order = self.order.lock().await;
        let recorded = change.clone();
        match &change {
            Change::Set(_) | Change::Degrade(..) => {
                let write = move |tx: &mut Tx<'_>| {
                    recorded.record(tx)?;
                    also(tx)
                };
                self.store.write(write).await?;
                self.state.apply(std::slice::from_ref(&change));
            }
            Change::Clear(scope, kind, cause) => {
                let (of, kind, cause) = (scope.clone(), *kind, cause.clone());
                let write = move |tx: &mut Tx<'_>| {
                    let cleared = tx.clear_conditions(&of, kind, cause.as_deref())?;
                    also(tx)?;
                    Ok(cleared)
                };
                // During this commit, gpushd may set a new condition of this kind. The record of the new condition is
                // written after this commit. So `cleared` does not contain the new condition, and the new condition
                // stays.
                let cleared = self.store.write_ending(write).await?;
                let ended = cleared.into_iter().map(|one| Change::Clear(scope.clone(), kind, Some(one.cause)));
                self.state.apply(&ended.collect::<Vec<_>>());
            }
        }
        self.state.events().publish(EventPayload::Change(event));
        Ok(())
    }
}
